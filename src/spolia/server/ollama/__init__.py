"""Ollama's API, under `/api`: `generate`, `chat`, `embed`, `embeddings`, `tags`, `show`, `ps`, `pull`, `version`."""

from __future__ import annotations

from spolia.server.ollama.endpoints import OllamaEndpoints
from spolia.server.ollama.library import OllamaLibrary

__all__ = ["OllamaEndpoints", "OllamaLibrary"]
