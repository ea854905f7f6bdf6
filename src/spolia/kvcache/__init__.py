"""The cache core: who has computed the KV of which tokens, in which blocks, who may read it, and what goes first.

Token ids and block ids only: it never touches tensors, files or clocks of its own, and imports numpy and the standard
library. Start with `KVCache` (`cache.py`: the life of a sequence), then `radix_tree.py` (the structure, with a drawing)
and `block_pool.py` (the books); `eviction.py`, `retention.py`, `policies.py`, `wishes.py` and `pins.py` say what goes
when room is short, `explain.py`, `events.py` and `mirror.py` what is told about it.
"""

from .block_pool import BlockPool, Ledger, Tag
from .cache import GroupSpec, KVCache, Snapshot
from .events import Cleared, Event, EventBatch, Removed, Stored
from .explain import Beneficiary, Eviction, Explanation, History, MissReason, PrefixHit, TokenRange, attribute
from .lease import BlockCopy, Lease
from .mirror import BlocksRemoved, BlocksStored, CacheMirror
from .namespace import namespace_key
from .pins import Pin
from .policies import POLICIES, RetentionPolicy, make_policy
from .radix_tree import RadixNode
from .stats import CacheStats, Durations
from .view import CacheView, NodeView
from .wishes import DEFAULT_PRIORITY, Outcome, Wish

__all__ = [
    "DEFAULT_PRIORITY",
    "POLICIES",
    "Beneficiary",
    "BlockCopy",
    "BlockPool",
    "BlocksRemoved",
    "BlocksStored",
    "CacheMirror",
    "CacheStats",
    "CacheView",
    "Cleared",
    "Durations",
    "Event",
    "EventBatch",
    "Eviction",
    "Explanation",
    "GroupSpec",
    "History",
    "KVCache",
    "Lease",
    "Ledger",
    "MissReason",
    "NodeView",
    "Outcome",
    "Pin",
    "PrefixHit",
    "RadixNode",
    "Removed",
    "RetentionPolicy",
    "Snapshot",
    "Stored",
    "Tag",
    "TokenRange",
    "Wish",
    "attribute",
    "make_policy",
    "namespace_key",
]
