"""The cache core: who has computed the KV of which tokens, in which blocks, who may read it, and what goes first.

Token ids and block ids only: it never touches tensors, files or clocks of its own, and imports numpy and the standard
library. Start with `KVCache` (`cache.py`: the life of a sequence), then `radix_tree.py` (the structure, with a drawing)
and `block_pool.py` (the books); `eviction.py` and `retention.py` say what goes when room is short, `explain.py` and
`events.py` what is told about it.
"""

from .block_pool import BlockPool, Ledger, Tag
from .cache import GroupSpec, KVCache, Snapshot
from .events import Cleared, Event, EventBatch, Removed, Stored
from .explain import Eviction, Explanation, MissReason, PrefixHit
from .lease import BlockCopy, Lease
from .namespace import namespace_key
from .radix_tree import RadixNode
from .retention import Lru, RetentionPolicy
from .stats import CacheStats

__all__ = [
    "BlockCopy",
    "BlockPool",
    "CacheStats",
    "Cleared",
    "Event",
    "EventBatch",
    "Eviction",
    "Explanation",
    "GroupSpec",
    "KVCache",
    "Lease",
    "Ledger",
    "Lru",
    "MissReason",
    "PrefixHit",
    "RadixNode",
    "Removed",
    "RetentionPolicy",
    "Snapshot",
    "Stored",
    "Tag",
    "namespace_key",
]
