"""OpenAI's Responses API: `POST /v1/responses`, and what is kept of the last ones under `/v1/responses/{id}`."""

from __future__ import annotations

from spolia.server.responses.endpoints import ResponsesEndpoints

__all__ = ["ResponsesEndpoints"]
