"""What there is to say about an architecture besides its program."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from spolia.kernels.program import ActivationKind, Program
from spolia.models.weights import Weights

if TYPE_CHECKING:
    from spolia.models.config import ModelConfig

__all__ = ["Architecture"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One way to build a decoder, and what its files leave unsaid.

    Attributes:
        name: GGUF's `general.architecture`, the prefix of its metadata keys.
        model_types: config.json's `model_type`s that mean this architecture.
        build: emits the program; asks `weights` for each tensor by its GGUF name.
        activation: of the feed-forward part, where the file does not say.
        full_attention_every: of n layers, the n-th sees everything and the others a window; None: all have the same.
        local_rope_base: rotary base of the layers with a window; None: the same as the others.
        layer_norm: reads LayerNorm's epsilon, which files keep under another name; `build` emits the norm itself.
        gguf_interleaves_rope: GGUF files hold the rows of Q and K reordered, for rotating neighbours (2i, 2i + 1).
        hf_names: module names in safetensors files that mean another tensor than `safetensors.MODULES` says.
        hf_norm_offset: what to add to the norm weights of safetensors files, which may be kept as w - 1.
    """

    name: str
    model_types: tuple[str, ...]
    build: Callable[[ModelConfig, Weights], Program]
    activation: ActivationKind = "silu"
    full_attention_every: int | None = None
    local_rope_base: float | None = None
    layer_norm: bool = False
    gguf_interleaves_rope: bool = False
    hf_names: Mapping[str, str] = field(default_factory=dict)
    hf_norm_offset: float = 0.0
