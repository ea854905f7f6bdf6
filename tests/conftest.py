"""What every test may ask for: the real models, pulled once into the user's cache folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from spolia import models


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2 135M Instruct: llama architecture, byte-level vocabulary, a chat template."""
    return models.pull("smollm2")


@pytest.fixture(scope="session")
def gemma3_path() -> Path:
    """Gemma 3 270M: sliding windows, SentencePiece vocabulary, a base model without a chat template."""
    return models.pull("gemma3:270m")


@pytest.fixture(scope="session")
def qwen_coder_path() -> Path:
    """Qwen2.5 Coder 0.5B Instruct: qwen2 architecture, a chat template with tools."""
    return models.pull("qwen2.5-coder:0.5b")
