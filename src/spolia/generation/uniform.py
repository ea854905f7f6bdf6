"""Random numbers as a function, not a stream: the same (seed, position) always draws the same number.

So preemption, batching and retries cannot change a draw, and an answer continued from its own text draws what it
would have drawn.

Source: Steele, Lea and Flood 2014, Fast Splittable Pseudorandom Number Generators (SplitMix64's finaliser).
"""

from __future__ import annotations

__all__ = ["MIX_1", "MIX_2", "mix", "uniform"]

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
MIX_1, MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits, for a seed (taken modulo 2**64) and a position from 0."""
    return (mix((mix(seed & _MASK) + (position + 1) * _GOLDEN) & _MASK) >> 11) / 2**53


def mix(z: int) -> int:
    """A bijection of 64-bit integers that flips each output bit with probability 1/2 for each input bit."""
    z = ((z ^ (z >> 30)) * MIX_1) & _MASK
    z = ((z ^ (z >> 27)) * MIX_2) & _MASK
    return z ^ (z >> 31)
