"""Gemma 3: five layers with a sliding window to one that sees everything, norms before and after each part.

The windowed layers turn by a rotary base of their own, and long-context scaling leaves them alone. The embedding is
multiplied by sqrt(width). Norm weights are kept as w - 1 in safetensors files and as w in GGUF files.

Source: Gemma Team 2025, Gemma 3 Technical Report (arXiv:2503.19786).
"""

from __future__ import annotations

from dataclasses import replace

from spolia.kernels.program import Program
from spolia.models.arch.decoder import Decoder
from spolia.models.architecture import Architecture
from spolia.models.config import ModelConfig
from spolia.models.weights import Weights

__all__ = ["GEMMA3"]

_LAYERS_OF_27B = 62


def build(config: ModelConfig, weights: Weights) -> Program:
    if config.attention_scale is None and len(config.layers) == _LAYERS_OF_27B:
        # GGUF has no key for it: the largest scales by its width per head, which is not its head size.
        config = replace(config, attention_scale=(config.hidden_size / config.layers[0].num_heads) ** -0.5)
    d = Decoder(config, weights)
    x = d.embed(scale=config.hidden_size**0.5)
    for i in range(len(config.layers)):
        attended = d.attention(d.norm(x, f"blk.{i}.attn_norm"), i, qk_norm=True)
        x = d.add(x, d.norm(attended, f"blk.{i}.post_attention_norm"))
        fed = d.gated_ffn(d.norm(x, f"blk.{i}.ffn_norm"), i)
        x = d.add(x, d.norm(fed, f"blk.{i}.post_ffw_norm"))
    return d.logits(d.norm(x, "output_norm"))


GEMMA3 = Architecture(
    name="gemma3",
    model_types=("gemma3_text", "gemma3"),
    build=build,
    activation="gelu_tanh",
    full_attention_every=6,
    local_rope_base=10_000.0,
    hf_names={
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
    hf_norm_offset=1.0,
)
