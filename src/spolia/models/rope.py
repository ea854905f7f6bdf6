"""Rotary embedding: from base and scaling scheme to the frequencies that a program carries.

A model trained on short contexts is stretched to long ones by lowering some of its frequencies. All schemes supported
here do that once, independent of the prompt's length, so that the KV of a token never depends on what comes after it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from spolia.kernels.program import RopeSpec

__all__ = ["SCALING_KINDS", "RopeScaling", "ScalingKind", "rope_spec"]

ScalingKind = Literal["none", "linear", "llama3", "yarn"]
SCALING_KINDS: tuple[ScalingKind, ...] = ("none", "linear", "llama3", "yarn")
Frequencies = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How frequencies are stretched; each kind reads its own fields.

    Attributes:
        kind: `linear` divides all by `factor`; `llama3` the slow ones; `yarn` ramps from the fast to the slow ones.
        original_context: tokens of the context that the model was trained on (llama3, yarn).
        attention_factor: multiplies cos and sin (yarn); None: the scheme's own, 0.1 ln(factor) + 1.
        low_freq_factor, high_freq_factor: turns within the original context below which a frequency is slow, above
            which it is fast (llama3).
        beta_fast, beta_slow: the same for yarn.
    """

    kind: ScalingKind = "none"
    factor: float = 1.0
    original_context: int = 0
    attention_factor: float | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


def rope_spec(
    num_dims: int, base: float, scaling: RopeScaling, divisors: NDArray[np.floating[Any]] | None = None
) -> RopeSpec:
    """Frequencies of heads whose first `num_dims` dimensions turn.

    Args:
        divisors: `[num_dims / 2]`, divide the frequencies: the `rope_freqs` tensor of a GGUF file, which is
            llama3's scheme worked out.
    """
    frequencies = base ** (-np.arange(0, num_dims, 2, dtype=np.float64) / num_dims)
    if divisors is not None:
        frequencies = frequencies / divisors
    stretched = _STRETCHES[scaling.kind](frequencies, base, scaling)
    factor = scaling.attention_factor
    if factor is None:
        factor = 0.1 * math.log(scaling.factor) + 1.0 if scaling.kind == "yarn" and scaling.factor > 1 else 1.0
    return RopeSpec(tuple(stretched.astype(np.float32).tolist()), factor)


def _linear(frequencies: Frequencies, base: float, scaling: RopeScaling) -> Frequencies:
    return frequencies / scaling.factor


def _llama3(frequencies: Frequencies, base: float, scaling: RopeScaling) -> Frequencies:
    """Source: Llama 3.1's reference code, `apply_scaling`."""
    turns = scaling.original_context * frequencies / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    fast = np.clip((turns - scaling.low_freq_factor) / span, 0, 1)
    kept: Frequencies = fast + (1 - fast) / scaling.factor
    return frequencies * kept


def _yarn(frequencies: Frequencies, base: float, scaling: RopeScaling) -> Frequencies:
    """Source: Peng et al. 2023, YaRN (arXiv:2309.00071), section 3.2, with its code's rounding of the ramp's ends."""

    def dimension_of(turns: float) -> float:
        wavelengths = math.log(scaling.original_context / (turns * 2 * math.pi))
        return num_dims * wavelengths / (2 * math.log(base))

    num_dims = 2 * len(frequencies)
    low, high = dimension_of(scaling.beta_fast), dimension_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, num_dims - 1)
    slow: Frequencies = np.clip((np.arange(len(frequencies)) - low) / max(high - low, 1e-3), 0, 1)
    return frequencies * (1 - slow + slow / scaling.factor)


_STRETCHES: dict[ScalingKind, Callable[[Frequencies, float, RopeScaling], Frequencies]] = {
    "none": lambda frequencies, base, scaling: frequencies,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
