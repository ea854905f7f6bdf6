"""Qwen2 and Qwen2.5: Llama's shape with biases on Q, K and V.

Source: Yang et al. 2024, Qwen2 (arXiv:2407.10671).
"""

from __future__ import annotations

from spolia.kernels.program import Program
from spolia.models.arch.decoder import Decoder
from spolia.models.architecture import Architecture
from spolia.models.config import ModelConfig
from spolia.models.weights import Weights

__all__ = ["QWEN2"]


def build(config: ModelConfig, weights: Weights) -> Program:
    d = Decoder(config, weights)
    x = d.embed()
    for i, layer in enumerate(config.layers):
        for name, num_heads in ("q", layer.num_heads), ("k", layer.num_kv_heads), ("v", layer.num_kv_heads):
            weights.vector(f"blk.{i}.attn_{name}.bias", num_heads * config.head_dim)  # a file without it is incomplete
        x = d.add(x, d.attention(d.norm(x, f"blk.{i}.attn_norm"), i))
        x = d.add(x, d.gated_ffn(d.norm(x, f"blk.{i}.ffn_norm"), i))
    return d.logits(d.norm(x, "output_norm"))


QWEN2 = Architecture(name="qwen2", model_types=("qwen2",), build=build)
