"""Phi-3 and Phi-4: Llama's shape with Q, K and V in one matrix, and gate and up in another.

The long-context variants stretch by the length of the prompt (LongRoPE), which is not supported: `load` refuses them.

Source: Abdin et al. 2024, Phi-3 Technical Report (arXiv:2404.14219).
"""

from __future__ import annotations

from spolia.kernels.program import Program, Value
from spolia.models.arch.decoder import Decoder
from spolia.models.architecture import Architecture
from spolia.models.config import ModelConfig
from spolia.models.weights import Weights

__all__ = ["PHI3"]


def build(config: ModelConfig, weights: Weights) -> Program:
    d = Decoder(config, weights)
    x = d.embed()
    for i, layer in enumerate(config.layers):
        q_width, kv_width = layer.num_heads * config.head_dim, layer.num_kv_heads * config.head_dim
        h = d.norm(x, f"blk.{i}.attn_norm")
        q, k, v = _pieces(d, h, f"blk.{i}.attn_qkv", q_width, kv_width, kv_width)
        x = d.add(x, d.attend(q, k, v, i))
        h = d.norm(x, f"blk.{i}.ffn_norm")
        gate, up = _pieces(d, h, f"blk.{i}.ffn_up", layer.ffn_size, layer.ffn_size)
        hidden = d.builder.glu(gate, up, config.activation)
        x = d.add(x, d.linear(hidden, f"blk.{i}.ffn_down", config.hidden_size))
    return d.logits(d.norm(x, "output_norm"))


def _pieces(d: Decoder, x: Value, name: str, *widths: int) -> list[Value]:
    """x times each of the matrices that lie one below the other in `name`."""
    weight = d.weights.matrix(f"{name}.weight", sum(widths), x.width)
    stops = [sum(widths[: n + 1]) for n in range(len(widths))]
    return [d.builder.linear(x, weight.rows(stop - width, stop)) for width, stop in zip(widths, stops, strict=True)]


PHI3 = Architecture(
    name="phi3",
    model_types=("phi3",),
    build=build,
    hf_names={"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"},
)
