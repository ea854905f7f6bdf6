"""Llama, and what is built like it: Mistral, SmolLM2, TinyLlama and many more.

Source: Touvron et al. 2023, LLaMA (arXiv:2302.13971); Jiang et al. 2023, Mistral 7B (arXiv:2310.06825) for the window.
"""

from __future__ import annotations

from spolia.kernels.program import Program
from spolia.models.arch.decoder import Decoder
from spolia.models.architecture import Architecture
from spolia.models.config import ModelConfig
from spolia.models.weights import Weights

__all__ = ["LLAMA"]


def build(config: ModelConfig, weights: Weights) -> Program:
    d = Decoder(config, weights)
    x = d.embed()
    for i in range(len(config.layers)):
        x = d.add(x, d.attention(d.norm(x, f"blk.{i}.attn_norm"), i))
        x = d.add(x, d.gated_ffn(d.norm(x, f"blk.{i}.ffn_norm"), i))
    return d.logits(d.norm(x, "output_norm"))


LLAMA = Architecture(name="llama", model_types=("llama", "mistral"), build=build, gguf_interleaves_rope=True)
