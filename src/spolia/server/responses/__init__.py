"""OpenAI's Responses API: `POST /v1/responses`, `GET` and `DELETE /v1/responses/{id}`."""

from __future__ import annotations

from spolia.server.responses.endpoints import ResponsesEndpoints

__all__ = ["ResponsesEndpoints"]
