"""StarCoder2: LayerNorm, a feed-forward part without a gate, biases on everything, a sliding window on all layers.

llama.cpp's converter leaves the window out: a model from a GGUF file attends to everything, as it does there.

Source: Lozhkov et al. 2024, StarCoder 2 and The Stack v2 (arXiv:2402.19173).
"""

from __future__ import annotations

from spolia.kernels.program import Program, Value
from spolia.models.arch.decoder import Decoder
from spolia.models.architecture import Architecture
from spolia.models.config import ModelConfig
from spolia.models.weights import Weights

__all__ = ["STARCODER2"]


def build(config: ModelConfig, weights: Weights) -> Program:
    d = Decoder(config, weights)
    x = d.embed()
    for i in range(len(config.layers)):
        x = d.add(x, d.attention(_norm(d, x, f"blk.{i}.attn_norm"), i))
        x = d.add(x, _ffn(d, _norm(d, x, f"blk.{i}.ffn_norm"), i))
    return d.logits(_norm(d, x, "output_norm"))


def _norm(d: Decoder, x: Value, name: str) -> Value:
    weight, bias = (d.weights.vector(f"{name}.{kind}", x.width) for kind in ("weight", "bias"))
    return d.builder.layer_norm(x, weight, bias, d.config.norm_eps)


def _ffn(d: Decoder, x: Value, index: int) -> Value:
    """down(act(up(x)))."""
    up = d.linear(x, f"blk.{index}.ffn_up", d.config.layers[index].ffn_size)
    hidden = d.builder.activation(up, d.config.activation)
    return d.linear(hidden, f"blk.{index}.ffn_down", d.config.hidden_size)


STARCODER2 = Architecture(
    name="starcoder2",
    model_types=("starcoder2",),
    build=build,
    activation="gelu_tanh",
    layer_norm=True,
    hf_names={"mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"},
)
