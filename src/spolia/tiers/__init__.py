"""Where KV lives beyond the device's pools: extents, the backends that keep them, and what moves them.

    device pools ──offload──▶ extent (`extent.py`) ──▶ Tier (`tier.py`) ──▶ StorageBackend (`folder.py`, ...)
                 ◀──restore── verified payload     ◀──

`keys.py` says what a block is called. A backend stores opaque bytes by key; a `Tier` seals what goes down, trusts
nothing that comes up, and keeps a backend that fails from being asked. `Mover` does the I/O on threads of its own.
"""

from .backend import Entry, Health, ListableBackend, StorageBackend
from .extent import SEAL_BYTES, Checksum, ExtentError, ExtentHeader, Sealer, extent_bytes, key_of, open_extent
from .folder import FolderBackend
from .keys import BLOCK_SIZE, KeyChain, block_key
from .tier import Tier, TierState, TierStats

__all__ = [
    "BLOCK_SIZE",
    "SEAL_BYTES",
    "Checksum",
    "Entry",
    "ExtentError",
    "ExtentHeader",
    "FolderBackend",
    "Health",
    "KeyChain",
    "ListableBackend",
    "Sealer",
    "StorageBackend",
    "Tier",
    "TierState",
    "TierStats",
    "block_key",
    "extent_bytes",
    "key_of",
    "open_extent",
]
