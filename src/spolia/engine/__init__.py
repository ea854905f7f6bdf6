"""Requests to tokens: admission, the scheduler, the step loop, and its two faces, `LLM` and `AsyncEngine`.

    Admission        a prompt and its parameters are checked against every limit -> Request
    Scheduler        which tokens the next step computes -> StepPlan
    Runner           a plan as arrays, one native call -> logits
    EngineCore       plan, run, sample, commit: one step
    EngineThread     steps, for ever, on a thread of its own
    LLM, AsyncEngine what programs use

An answer depends on its request alone, to the bit: not on neighbours, chunk sizes, threads, preemption or what was
cached.
"""

from __future__ import annotations

from spolia.engine.admission import Admission
from spolia.engine.assembly import Engine, build_engine
from spolia.engine.async_engine import AsyncEngine, TokenStream
from spolia.engine.beams import BeamRun
from spolia.engine.cache_admin import CacheAdmin, ClearReport, CompressReport, Lookup
from spolia.engine.config import EngineConfig
from spolia.engine.contrastive import ContrastiveRun
from spolia.engine.core import EngineCore, Observer, StepStats
from spolia.engine.embedding import Embedding, Pooling
from spolia.engine.fairness import Tenant
from spolia.engine.inspection import LaneView, lanes
from spolia.engine.llm import LLM
from spolia.engine.memory import KV_SHARE, available_bytes
from spolia.engine.news import CacheNews
from spolia.engine.outputs import (
    BeamOutput,
    Counters,
    Delta,
    EngineStats,
    FinishReason,
    RequestOutput,
    Timings,
)
from spolia.engine.request import Request, Sequence
from spolia.engine.runner import Runner
from spolia.engine.scheduler import Scheduler, StepPlan
from spolia.engine.session_files import SessionConflict
from spolia.engine.sessions import Session, SessionBusy, SessionStore, SessionTurn, UnknownSession
from spolia.generation import (
    BeamParams,
    Choice,
    ContrastiveParams,
    Option,
    SamplingParams,
    Stage,
    StructuredOutput,
    TokenLogprobs,
)
from spolia.kvcache import (
    DEFAULT_PRIORITY,
    BlocksRemoved,
    BlocksStored,
    CacheMirror,
    CacheStats,
    CacheView,
    Cleared,
    Durations,
    Event,
    Explanation,
    History,
    Ledger,
    MissReason,
    Outcome,
    Pin,
    Removed,
    RetentionPolicy,
    Stored,
    TokenRange,
    Wish,
)
from spolia.models import Model, load
from spolia.tiers import TierState, TierStats

__all__ = [
    "DEFAULT_PRIORITY",
    "KV_SHARE",
    "LLM",
    "Admission",
    "AsyncEngine",
    "BeamOutput",
    "BeamParams",
    "BeamRun",
    "BlocksRemoved",
    "BlocksStored",
    "CacheAdmin",
    "CacheMirror",
    "CacheNews",
    "CacheStats",
    "CacheView",
    "Choice",
    "ClearReport",
    "Cleared",
    "CompressReport",
    "ContrastiveParams",
    "ContrastiveRun",
    "Counters",
    "Delta",
    "Durations",
    "Embedding",
    "Engine",
    "EngineConfig",
    "EngineCore",
    "EngineStats",
    "Event",
    "Explanation",
    "FinishReason",
    "History",
    "LaneView",
    "Ledger",
    "Lookup",
    "MissReason",
    "Model",
    "Observer",
    "Option",
    "Outcome",
    "Pin",
    "Pooling",
    "Removed",
    "Request",
    "RequestOutput",
    "RetentionPolicy",
    "Runner",
    "SamplingParams",
    "Scheduler",
    "Sequence",
    "Session",
    "SessionBusy",
    "SessionConflict",
    "SessionStore",
    "SessionTurn",
    "Stage",
    "StepPlan",
    "StepStats",
    "Stored",
    "StructuredOutput",
    "Tenant",
    "TierState",
    "TierStats",
    "Timings",
    "TokenLogprobs",
    "TokenRange",
    "TokenStream",
    "UnknownSession",
    "Wish",
    "available_bytes",
    "build_engine",
    "lanes",
    "load",
]
