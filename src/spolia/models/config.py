"""What a model is, said once: a `ModelConfig` from GGUF metadata or from Hugging Face's config.json.

Both dialects say the same things by other names and leave other things out. Here they become one frozen record, layer
by layer, with everything worked out that an architecture file would otherwise have to ask about.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from spolia.errors import ModelError
from spolia.kernels.program import ActivationKind, RopeSpec
from spolia.kernels.quants import dequantize
from spolia.models.architecture import Architecture
from spolia.models.rope import SCALING_KINDS, RopeScaling, ScalingKind, rope_spec
from spolia.models.weights import Weights

__all__ = ["LayerConfig", "ModelConfig", "config_from_gguf", "config_from_json"]

_MAX_LAYERS = 1024
_MAX_SIZE = 1 << 31
_LEAST_FACTOR = 1e-3
_MAX_NUMBER = 1e30  # keeps float32 finite whatever is multiplied
_ACTIVATIONS: dict[str, ActivationKind] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """One decoder layer. `window` None: attends to all before it; `rope` holds every scaling scheme, worked out."""

    num_heads: int
    num_kv_heads: int
    ffn_size: int
    window: int | None
    rope: RopeSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A model's shape and constants; weights come apart from it.

    Attributes:
        architecture: GGUF's name of it.
        context_length: tokens that the model is made for, scaling included.
        attention_scale: multiplies q.k; None: the architecture's usual.
        attention_softcap, logit_softcap: cap * tanh(x / cap); None: none.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    head_dim: int
    context_length: int
    norm_eps: float
    activation: ActivationKind
    attention_scale: float | None
    attention_softcap: float | None
    logit_softcap: float | None
    layers: tuple[LayerConfig, ...]


def config_from_gguf(metadata: Mapping[str, Any], architecture: Architecture, weights: Weights) -> ModelConfig:
    """Read the keys of `architecture` from GGUF metadata, and the tensor `rope_freqs` if there is one.

    Raises:
        ModelError: a key is missing, of the wrong kind, or asks for something that is not supported.
    """
    fields = _Fields(weights.path, metadata, f"{architecture.name}.")
    if fields.integer("expert_count", 0, low=0):
        raise fields.error("expert_count", "mixtures of experts are not supported")
    num_layers = fields.integer("block_count", high=_MAX_LAYERS)
    hidden_size = fields.integer("embedding_length")
    num_heads = fields.per_layer("attention.head_count", num_layers)
    num_kv_heads = fields.per_layer("attention.head_count_kv", num_layers, num_heads)
    head_dim = fields.integer("attention.key_length", hidden_size // num_heads[0])
    if fields.integer("attention.value_length", head_dim) != head_dim:
        raise fields.error("attention.value_length", f"other than the key length of {head_dim} is not supported")

    rope_dims = fields.integer("rope.dimension_count", head_dim, high=head_dim)
    if rope_dims % 2 or (architecture.gguf_interleaves_rope and rope_dims != head_dim):
        raise fields.error("rope.dimension_count", f"not supported for heads of {head_dim}")
    scaling = _gguf_scaling(fields)
    divisors = _rope_divisors(weights, rope_dims)
    base = fields.number("rope.freq_base", 10_000.0, low=1.0)
    ropes = _Ropes(
        rope_spec(rope_dims, base, scaling, divisors),
        rope_spec(
            rope_dims, fields.number("rope.local.freq_base", architecture.local_rope_base, low=1.0), RopeScaling()
        )
        if architecture.local_rope_base
        else None,
    )
    context_length = fields.integer("context_length")
    return ModelConfig(
        architecture=architecture.name,
        vocab_size=weights.num_rows("token_embd.weight"),
        hidden_size=hidden_size,
        head_dim=head_dim,
        context_length=_stretched_context(context_length, scaling),
        norm_eps=fields.number(
            "attention.layer_norm_epsilon" if architecture.layer_norm else "attention.layer_norm_rms_epsilon"
        ),
        activation=architecture.activation,
        attention_scale=fields.optional_number("attention.scale"),
        attention_softcap=fields.optional_number("attn_logit_softcapping"),
        logit_softcap=fields.optional_number("final_logit_softcapping"),
        layers=_layers(
            fields,
            num_heads,
            num_kv_heads,
            fields.per_layer("feed_forward_length", num_layers),
            _gguf_windows(fields, num_layers, architecture),
            ropes,
        ),
    )


def config_from_json(path: Path, config: Mapping[str, Any], architecture: Architecture) -> ModelConfig:
    """Read Hugging Face's config.json, as written by transformers 4 or 5.

    Raises:
        ModelError: a field is missing, of the wrong kind, or asks for something that is not supported.
    """
    fields = _Fields(path, config, "")
    for name in ("num_local_experts", "num_experts"):
        if fields.integer(name, 0, low=0):
            raise fields.error(name, "mixtures of experts are not supported")
    if fields.get("use_bidirectional_attention"):
        raise fields.error("use_bidirectional_attention", "only causal attention is supported")
    num_layers = fields.integer("num_hidden_layers", high=_MAX_LAYERS)
    hidden_size = fields.integer("hidden_size")
    num_heads = fields.per_layer("num_attention_heads", num_layers)
    head_dim = fields.integer("head_dim", hidden_size // num_heads[0])
    ropes, scaling = _json_ropes(fields, head_dim, architecture)
    activation = fields.get("hidden_activation") or fields.get("hidden_act")
    if activation is not None and str(activation) not in _ACTIVATIONS:  # JSON may hold what cannot be hashed
        raise fields.error("hidden_act", f"supported are {', '.join(_ACTIVATIONS)}")
    query_scalar = fields.optional_number("query_pre_attn_scalar")
    return ModelConfig(
        architecture=architecture.name,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        head_dim=head_dim,
        context_length=_stretched_context(fields.integer("max_position_embeddings"), scaling),
        norm_eps=fields.number("norm_epsilon" if architecture.layer_norm else "rms_norm_eps"),
        activation=architecture.activation if activation is None else _ACTIVATIONS[activation],
        attention_scale=None if query_scalar is None else query_scalar**-0.5,
        attention_softcap=fields.optional_number("attn_logit_softcapping"),
        logit_softcap=fields.optional_number("final_logit_softcapping"),
        layers=_layers(
            fields,
            num_heads,
            fields.per_layer("num_key_value_heads", num_layers, num_heads),
            fields.per_layer("intermediate_size", num_layers),
            _json_windows(fields, num_layers, architecture),
            ropes,
        ),
    )


@dataclass(frozen=True, slots=True)
class _Ropes:
    """`local` is for the layers with a window, where the architecture has two."""

    everywhere: RopeSpec
    local: RopeSpec | None

    def of(self, window: int | None) -> RopeSpec:
        return self.everywhere if window is None or self.local is None else self.local


class _Fields:
    """Typed reading of settings from a file, all under one prefix; every complaint names file, field and value."""

    def __init__(self, path: Path, values: Mapping[str, Any], prefix: str) -> None:
        self.path = path
        self._values = values
        self._prefix = prefix

    def error(self, name: str, message: str) -> ModelError:
        return ModelError(f"{self.path}: {self._prefix}{name} is {_shortened(self.get(name))}: {message}")

    def get(self, name: str) -> Any:
        return self._values.get(self._prefix + name)

    def integer(self, name: str, default: int | None = None, *, low: int = 1, high: int = _MAX_SIZE) -> int:
        value = self.get(name)
        if value is None:
            value = default
        if not isinstance(value, int) or not low <= value <= high:
            raise self.error(name, f"expected an integer from {low} to {high}")
        return int(value)

    def number(self, name: str, default: float | None = None, *, low: float = 0.0) -> float:
        """A finite number above `low`."""
        value = self.get(name)
        if value is None:
            value = default
        if not isinstance(value, int | float) or not low < value < _MAX_NUMBER:
            raise self.error(name, f"expected a number above {low:g}")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        """`number`, or None where the field is absent or 0, which both mean: off."""
        return self.number(name) if self.get(name) else None

    def per_layer(self, name: str, num_layers: int, default: Sequence[int] | None = None) -> list[int]:
        """A positive integer for each layer, from a list of them or from one that all share."""
        value = self.get(name)
        if value is None and default is not None:
            return list(default)
        if not isinstance(value, list):
            return [self.integer(name)] * num_layers
        if len(value) != num_layers or not all(isinstance(v, int) and 0 < v < _MAX_SIZE for v in value):
            raise self.error(name, f"expected {num_layers} integers above 0, one a layer")
        return value

    def below(self, name: str) -> _Fields:
        """The fields of the object `name`, none where it is absent."""
        value = self.get(name)
        if not isinstance(value, Mapping | None):
            raise self.error(name, "expected an object")
        return _Fields(self.path, {f"{name}.{key}": v for key, v in (value or {}).items()}, f"{name}.")


def _shortened(value: object) -> str:
    text = repr(value)
    return "missing" if value is None else text if len(text) <= 80 else f"{text[:77]}..."


def _layers(
    fields: _Fields,
    num_heads: Sequence[int],
    num_kv_heads: Sequence[int],
    ffn_sizes: Sequence[int],
    windows: Sequence[int | None],
    ropes: _Ropes,
) -> tuple[LayerConfig, ...]:
    for index, (heads, kv_heads) in enumerate(zip(num_heads, num_kv_heads, strict=True)):
        if heads % kv_heads:
            raise ModelError(f"{fields.path}: layer {index} has {heads} heads on {kv_heads} KV heads: no multiple")
    return tuple(
        LayerConfig(num_heads=heads, num_kv_heads=kv_heads, ffn_size=ffn, window=window, rope=ropes.of(window))
        for heads, kv_heads, ffn, window in zip(num_heads, num_kv_heads, ffn_sizes, windows, strict=True)
    )


def _stretched_context(context_length: int, scaling: RopeScaling) -> int:
    """YaRN's stated context may still be the one before stretching."""
    if scaling.kind != "yarn":
        return context_length
    return max(context_length, int(scaling.original_context * scaling.factor))


def _windows(num_layers: int, window: int | None, full_attention_every: int | None) -> list[int | None]:
    """`window` on all layers, except every n-th."""
    return [
        None if full_attention_every and (index + 1) % full_attention_every == 0 else window
        for index in range(num_layers)
    ]


def _gguf_windows(fields: _Fields, num_layers: int, architecture: Architecture) -> list[int | None]:
    window = fields.integer("attention.sliding_window", 0, low=0) or None
    pattern = fields.get("attention.sliding_window_pattern")
    if not isinstance(pattern, list):
        every = fields.integer("attention.sliding_window_pattern", architecture.full_attention_every or 0, low=0)
        return _windows(num_layers, window, every or None)
    if len(pattern) != num_layers:
        raise fields.error("attention.sliding_window_pattern", f"expected {num_layers} bools, one a layer")
    return [window if is_local else None for is_local in pattern]


def _json_windows(fields: _Fields, num_layers: int, architecture: Architecture) -> list[int | None]:
    if fields.get("use_sliding_window") is False or not fields.get("sliding_window"):
        return [None] * num_layers
    window = fields.integer("sliding_window")
    kinds = fields.get("layer_types")
    if kinds is not None:
        known = {"sliding_attention": window, "full_attention": None}
        if not isinstance(kinds, list) or len(kinds) != num_layers or not all(kind in known for kind in kinds):
            raise fields.error("layer_types", f"expected {num_layers} of {', '.join(known)}")
        return [known[kind] for kind in kinds]
    num_full = fields.integer("max_window_layers", 0, low=0)  # Qwen's: the first so many layers have no window
    every = fields.integer("sliding_window_pattern", architecture.full_attention_every or 0, low=0) or None
    return [None if index < num_full else w for index, w in enumerate(_windows(num_layers, window, every))]


def _rope_divisors(weights: Weights, rope_dims: int) -> NDArray[np.float32] | None:
    """Llama 3's scaling, which GGUF keeps worked out as a tensor."""
    tensor = weights.optional_vector("rope_freqs.weight", rope_dims // 2)
    if tensor is None:
        return None
    divisors = dequantize(tensor)
    if not ((divisors > _LEAST_FACTOR) & (divisors < _MAX_NUMBER)).all():
        raise ModelError(f"{weights.path}: tensor {tensor.name!r} holds values that are no divisors of frequencies")
    return divisors


def _gguf_scaling(fields: _Fields) -> RopeScaling:
    kind = _scaling_kind(fields, "rope.scaling.type", fields.get("rope.scaling.type") or "none")
    if kind == "none":
        return RopeScaling()
    factor = fields.number("rope.scaling.factor", 1.0, low=_LEAST_FACTOR)
    if kind != "yarn":
        return RopeScaling(kind=kind, factor=factor)
    own = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    return RopeScaling(
        kind=kind,
        factor=factor,
        original_context=fields.integer("rope.scaling.original_context_length", fields.integer("context_length")),
        attention_factor=own * fields.number("rope.scaling.attn_factor", 1.0),
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0),
    )


def _scaling_kind(fields: _Fields, name: str, value: object) -> ScalingKind:
    for kind in get_args(ScalingKind):
        if value == kind:
            return kind  # type: ignore[no-any-return]
    raise fields.error(name, f"supported are {', '.join(SCALING_KINDS)}")


def _json_ropes(fields: _Fields, head_dim: int, architecture: Architecture) -> tuple[_Ropes, RopeScaling]:
    """Frequencies from `rope_parameters` (transformers 5), or from `rope_theta` and `rope_scaling` (4)."""
    parameters = fields.get("rope_parameters") or {}
    if isinstance(parameters, Mapping) and "full_attention" in parameters:  # one set for each kind of layer
        by_kind = fields.below("rope_parameters")
        main, local = by_kind.below("full_attention"), by_kind.below("sliding_attention")
    elif parameters:
        main = local = fields.below("rope_parameters")
    else:
        main = local = fields.below("rope_scaling")

    base = main.number("rope_theta", fields.number("rope_theta", 10_000.0, low=1.0), low=1.0)
    num_dims = int(head_dim * main.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0)))
    if num_dims < 2 or num_dims > head_dim or num_dims % 2:
        raise fields.error(
            "partial_rotary_factor", f"turns {num_dims} dimensions of heads of {head_dim}: not supported"
        )
    scaling = _json_scaling(main, fields)
    everywhere = rope_spec(num_dims, base, scaling)
    if architecture.local_rope_base is None:
        return _Ropes(everywhere, None), scaling
    if local is main:
        local_base, local_scaling = (
            fields.number("rope_local_base_freq", architecture.local_rope_base, low=1.0),
            RopeScaling(),
        )
    else:
        local_base = local.number("rope_theta", architecture.local_rope_base, low=1.0)
        local_scaling = _json_scaling(local, fields)
    return _Ropes(everywhere, rope_spec(num_dims, local_base, local_scaling)), scaling


def _json_scaling(rope: _Fields, fields: _Fields) -> RopeScaling:
    name = "rope_type" if rope.get("rope_type") else "type"  # `type` is how it was spelt before
    value = rope.get(name) or "none"
    kind = _scaling_kind(rope, name, "none" if value == "default" else value)
    if kind == "none":
        return RopeScaling()
    factor = rope.number("factor", low=_LEAST_FACTOR)
    if kind == "linear":
        return RopeScaling(kind=kind, factor=factor)
    original = rope.integer("original_max_position_embeddings", fields.integer("max_position_embeddings"))
    if kind == "llama3":
        return RopeScaling(
            kind=kind,
            factor=factor,
            original_context=original,
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor", low=rope.number("low_freq_factor")),
        )
    if rope.get("mscale") or rope.get("mscale_all_dim"):
        raise rope.error("mscale", "not supported")
    return RopeScaling(
        kind=kind,
        factor=factor,
        original_context=original,
        attention_factor=rope.optional_number("attention_factor"),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        truncate=rope.get("truncate") is not False,
    )
