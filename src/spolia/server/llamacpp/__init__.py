"""What llama.cpp's server has beside OpenAI's API: `/completion`, `/infill`, `/props`, `/slots`, `/apply-template`."""

from __future__ import annotations

from spolia.server.llamacpp.endpoints import LlamaCppEndpoints

__all__ = ["LlamaCppEndpoints"]
