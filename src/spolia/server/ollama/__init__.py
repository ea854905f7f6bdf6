"""Ollama's API, under `/api`.

`generate`, `chat`, `embed` and `embeddings` answer; `tags`, `show`, `ps`, `pull` and `version` tell of models;
`create`, `copy`, `delete` and `blobs` make them.
"""

from __future__ import annotations

from spolia.server.ollama.endpoints import OllamaEndpoints
from spolia.server.ollama.library import OllamaLibrary
from spolia.server.ollama.making import OllamaMaking

__all__ = ["OllamaEndpoints", "OllamaLibrary", "OllamaMaking"]
