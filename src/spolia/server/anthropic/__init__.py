"""Anthropic's Messages API: `POST /v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

from spolia.server.anthropic.endpoints import AnthropicEndpoints

__all__ = ["AnthropicEndpoints"]
