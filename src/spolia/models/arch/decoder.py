"""The parts that decoders share, so that an architecture file shows what is its own.

Tensors are named as in GGUF, `blk.{layer}.{part}.weight`; their shapes follow from the config. A bias is used where
the file has one: some models of one architecture have it and some do not.
"""

from __future__ import annotations

from spolia.kernels.program import Program, ProgramBuilder, Value
from spolia.models.config import ModelConfig
from spolia.models.weights import Weights

__all__ = ["Decoder"]


class Decoder:
    """Emits the usual parts through `builder`, which an architecture may use directly for the unusual ones."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        self.weights = weights
        self.builder = ProgramBuilder()
        self._table = weights.matrix("token_embd.weight", config.vocab_size, config.hidden_size)

    def embed(self, *, scale: float = 1.0) -> Value:
        return self.builder.embed(self._table, scale=scale)

    def norm(self, x: Value, name: str, size: int | None = None) -> Value:
        """RMSNorm of the row, or of each `size` columns of it."""
        weight = self.weights.vector(f"{name}.weight", size or x.width)
        return self.builder.rms_norm(x, weight, self.config.norm_eps)

    def linear(self, x: Value, name: str, width: int) -> Value:
        weight = self.weights.matrix(f"{name}.weight", width, x.width)
        return self.builder.linear(x, weight, self.weights.optional_vector(f"{name}.bias", width))

    def add(self, a: Value, b: Value) -> Value:
        return self.builder.add(a, b)

    def attention(self, x: Value, index: int, *, qk_norm: bool = False) -> Value:
        """Grouped-query attention with rotary positions; `qk_norm` normalises each head of Q and K before they turn."""
        config, layer = self.config, self.config.layers[index]
        q = self.linear(x, f"blk.{index}.attn_q", layer.num_heads * config.head_dim)
        k = self.linear(x, f"blk.{index}.attn_k", layer.num_kv_heads * config.head_dim)
        v = self.linear(x, f"blk.{index}.attn_v", layer.num_kv_heads * config.head_dim)
        if qk_norm:
            q = self.norm(q, f"blk.{index}.attn_q_norm", config.head_dim)
            k = self.norm(k, f"blk.{index}.attn_k_norm", config.head_dim)
        return self.attend(q, k, v, index)

    def attend(self, q: Value, k: Value, v: Value, index: int) -> Value:
        """The rest of `attention`, for a layer that has its own way to Q, K and V: turn, attend, project out."""
        b, config, layer = self.builder, self.config, self.config.layers[index]
        attended = b.attend(
            b.rope(q, config.head_dim, layer.rope),
            b.rope(k, config.head_dim, layer.rope),
            v,
            num_heads=layer.num_heads,
            num_kv_heads=layer.num_kv_heads,
            scale=config.attention_scale or config.head_dim**-0.5,
            window=layer.window,
            softcap=config.attention_softcap,
        )
        return self.linear(attended, f"blk.{index}.attn_output", config.hidden_size)

    def gated_ffn(self, x: Value, index: int) -> Value:
        """down(act(gate(x)) * up(x))."""
        size = self.config.layers[index].ffn_size
        gate = self.linear(x, f"blk.{index}.ffn_gate", size)
        up = self.linear(x, f"blk.{index}.ffn_up", size)
        hidden = self.builder.glu(gate, up, self.config.activation)
        return self.linear(hidden, f"blk.{index}.ffn_down", self.config.hidden_size)

    def logits(self, x: Value) -> Program:
        """The head, which is the embedding table where the file has no matrix of its own for it."""
        config, weights = self.config, self.weights
        head = self._table
        if "output.weight" in weights:
            head = weights.matrix("output.weight", config.vocab_size, config.hidden_size)
        bias = weights.optional_vector("output.bias", config.vocab_size)
        return self.builder.logits(x, head, bias=bias, softcap=config.logit_softcap)
