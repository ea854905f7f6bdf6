"""What would have been hit: recorded traffic through the cache's own tree and policies, without a model.

Recorder      a running engine's requests -> a trace, which holds no text
load_trace    a trace of ours, Mooncake's or of agent sessions -> Trace
replay        a trace, a policy and a size -> the share of prompt tokens that would have been reused
GhostCaches   the same live, at other sizes than the real cache's
belady        what no policy could have passed
hit_rates     all of it for several policies and sizes, as a table
"""

from .belady import belady
from .ghosts import CurvePoint, GhostCaches
from .recorder import Recorder, TraceWriter
from .replay import HitRates, Replayed, default_sizes, hit_rates, replay
from .trace import Trace, TraceRequest, load_trace

__all__ = [
    "CurvePoint",
    "GhostCaches",
    "HitRates",
    "Recorder",
    "Replayed",
    "Trace",
    "TraceRequest",
    "TraceWriter",
    "belady",
    "default_sizes",
    "hit_rates",
    "load_trace",
    "replay",
]
