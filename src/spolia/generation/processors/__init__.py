"""Logits processors: small classes over `[num_rows, vocab_size]` arrays; `pipeline` says which run, and in what order.

A processor of one's own is a class with a method `process(logits, rows)`; see `Processor`.
"""

from __future__ import annotations

from spolia.generation.processors.base import Filter, Logits, Processor
from spolia.generation.processors.dola import Depth
from spolia.generation.processors.green_list import GreenList
from spolia.generation.processors.own import LogitsTap, TransformersProcessor, first_met, import_processor
from spolia.generation.processors.synthid import SynthId, SynthIdDetector, SynthIdResult
from spolia.generation.processors.watermark import Watermark, WatermarkDetector, WatermarkResult

__all__ = [
    "Depth",
    "Filter",
    "GreenList",
    "Logits",
    "LogitsTap",
    "Processor",
    "SynthId",
    "SynthIdDetector",
    "SynthIdResult",
    "TransformersProcessor",
    "Watermark",
    "WatermarkDetector",
    "WatermarkResult",
    "first_met",
    "import_processor",
]
