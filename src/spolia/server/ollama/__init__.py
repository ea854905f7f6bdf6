"""Ollama's API: `/api/generate`, `/api/chat`, `/api/tags`, `/api/show`, `/api/ps`, `/api/pull`, `/api/version`."""

from __future__ import annotations

from spolia.server.ollama.endpoints import OllamaEndpoints
from spolia.server.ollama.library import OllamaLibrary

__all__ = ["OllamaEndpoints", "OllamaLibrary"]
