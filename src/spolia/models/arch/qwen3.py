"""Qwen3: Qwen2 with a norm on each head of Q and K in place of their biases.

Source: Yang et al. 2025, Qwen3 (arXiv:2505.09388).
"""

from __future__ import annotations

from spolia.kernels.program import Program
from spolia.models.arch.decoder import Decoder
from spolia.models.architecture import Architecture
from spolia.models.config import ModelConfig
from spolia.models.weights import Weights

__all__ = ["QWEN3"]


def build(config: ModelConfig, weights: Weights) -> Program:
    d = Decoder(config, weights)
    x = d.embed()
    for i in range(len(config.layers)):
        x = d.add(x, d.attention(d.norm(x, f"blk.{i}.attn_norm"), i, qk_norm=True))
        x = d.add(x, d.gated_ffn(d.norm(x, f"blk.{i}.ffn_norm"), i))
    return d.logits(d.norm(x, "output_norm"))


QWEN3 = Architecture(name="qwen3", model_types=("qwen3",), build=build)
