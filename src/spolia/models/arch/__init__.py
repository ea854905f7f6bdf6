"""Architectures: one short file each, which says how a model's tensors become a program.

To add one: write `build` and its `Architecture` in a new file, name it here, and compare it with transformers on random
weights in `tests/models/test_arch.py`.
"""

from __future__ import annotations

from spolia.models.arch.gemma3 import GEMMA3
from spolia.models.arch.llama import LLAMA
from spolia.models.arch.phi3 import PHI3
from spolia.models.arch.qwen2 import QWEN2
from spolia.models.arch.qwen3 import QWEN3
from spolia.models.arch.starcoder2 import STARCODER2
from spolia.models.architecture import Architecture

__all__ = ["ARCHITECTURES", "BY_MODEL_TYPE", "Architecture"]

ARCHITECTURES: dict[str, Architecture] = {
    architecture.name: architecture for architecture in (LLAMA, QWEN2, QWEN3, GEMMA3, STARCODER2, PHI3)
}
"""By GGUF's `general.architecture`."""

BY_MODEL_TYPE: dict[str, Architecture] = {
    model_type: architecture for architecture in ARCHITECTURES.values() for model_type in architecture.model_types
}
"""By config.json's `model_type`."""
