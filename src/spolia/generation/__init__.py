"""What happens to logits: parameters, sampling, stop conditions, and tokens back to text.

Everything here works on one row or one stream and depends on nothing else: a row's token is a function of its logits,
its parameters, its seed and its position, to the bit, whoever its neighbours in the batch are. Numpy only.
"""

from __future__ import annotations

from spolia.generation.params import MAX_LOGPROBS, SamplingParams
from spolia.generation.sampler import RowSampling, Sampler, Samples, TokenLogprobs
from spolia.generation.text import TextStream, TextUpdate
from spolia.generation.uniform import uniform

__all__ = [
    "MAX_LOGPROBS",
    "RowSampling",
    "Sampler",
    "Samples",
    "SamplingParams",
    "TextStream",
    "TextUpdate",
    "TokenLogprobs",
    "uniform",
]
