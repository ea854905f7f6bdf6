"""What happens to logits: parameters, processors, sampling, stop conditions, and tokens back to text.

Everything here works on one row or one stream and depends on nothing else: a row's token is a function of its logits,
its parameters, its seed and its position, to the bit, whoever its neighbours in the batch are. Numpy only.
"""

from __future__ import annotations

from spolia.generation.beams import NOT_WITH_BEAMS, Beam, BeamParams, BeamSearch
from spolia.generation.contrastive import NOT_WITH_CONTRASTIVE, ContrastiveParams, ContrastiveSearch
from spolia.generation.decisions import Choice, Option, Stage
from spolia.generation.drafting import MAX_DRAFTS, NO_GUESS, Acceptance, DraftCount, Guess, Guesser
from spolia.generation.generation_config import from_generation_config
from spolia.generation.healing import Healing
from spolia.generation.history import History
from spolia.generation.params import FILTER_NAMES, MAX_LOGPROBS, SamplingParams
from spolia.generation.pipeline import FILTERS, PROCESSORS, Pipeline, build_pipeline
from spolia.generation.processors import (
    Depth,
    GreenList,
    LogitsTap,
    Processor,
    SynthId,
    SynthIdDetector,
    Watermark,
    WatermarkDetector,
    first_met,
    import_processor,
)
from spolia.generation.processors.candidates import Scratch
from spolia.generation.reasoning import ReasoningPart, ReasoningSplitter
from spolia.generation.sampler import RowSampling, Sampler, Samples, TokenLogprobs, score_token
from spolia.generation.stop_regex import PatternTextStream, StopPattern
from spolia.generation.structured import StructuredOutput, between_slashes, form_rule, json_rule
from spolia.generation.suffixes import SuffixIndex
from spolia.generation.text import TextStream, TextUpdate
from spolia.generation.uniform import uniform
from spolia.generation.vocabulary import Vocabulary

__all__ = [
    "FILTERS",
    "FILTER_NAMES",
    "MAX_DRAFTS",
    "MAX_LOGPROBS",
    "NOT_WITH_BEAMS",
    "NOT_WITH_CONTRASTIVE",
    "NO_GUESS",
    "PROCESSORS",
    "Acceptance",
    "Beam",
    "BeamParams",
    "BeamSearch",
    "Choice",
    "ContrastiveParams",
    "ContrastiveSearch",
    "Depth",
    "DraftCount",
    "GreenList",
    "Guess",
    "Guesser",
    "Healing",
    "History",
    "LogitsTap",
    "Option",
    "PatternTextStream",
    "Pipeline",
    "Processor",
    "ReasoningPart",
    "ReasoningSplitter",
    "RowSampling",
    "Sampler",
    "Samples",
    "SamplingParams",
    "Scratch",
    "Stage",
    "StopPattern",
    "StructuredOutput",
    "SuffixIndex",
    "SynthId",
    "SynthIdDetector",
    "TextStream",
    "TextUpdate",
    "TokenLogprobs",
    "Vocabulary",
    "Watermark",
    "WatermarkDetector",
    "between_slashes",
    "build_pipeline",
    "first_met",
    "form_rule",
    "from_generation_config",
    "import_processor",
    "json_rule",
    "score_token",
    "uniform",
]
