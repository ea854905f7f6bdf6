"""Where KV lives beyond the device's pools: extents, the backends that keep them, and what moves them.

    device pools ──offload──▶ extent (`extent.py`) ──▶ Tier (`tier.py`) ──▶ StorageBackend (`folder.py`, ...)
                 ◀──restore── verified payload     ◀──

`keys.py` says what a block is called. A backend stores opaque bytes by key; a `Tier` seals what goes down, trusts
nothing that comes up, and keeps a backend that fails from being asked. `Mover` does the I/O on threads of its own.
"""

from .aead import AesGcm, read_key
from .archive import (
    Conversation,
    conversations,
    export_conversation,
    family,
    find_headers,
    headers,
    import_conversation,
    pack_archive,
    read_archive,
    unpack_archive,
    write_archive,
)
from .backend import Entry, EvictingBackend, Health, ListableBackend, StorageBackend
from .compression import Compressed, compress
from .documents import Document, DocumentFolder
from .encoding import Codec, Encoding
from .extent import (
    SEAL_BYTES,
    Checksum,
    ExtentError,
    ExtentHeader,
    Sealer,
    extent_bytes,
    header_bytes,
    key_of,
    layout_of,
    open_extent,
    payload_of,
)
from .folder import FolderBackend
from .handing_down import HandedDown, hand_down, held_alone, still_there
from .host import HostBackend
from .keys import BLOCK_SIZE, KeyChain, block_key
from .mover import BlockRun, Mover, Restore
from .objects import ObjectBackend
from .planner import Planner
from .policy import FetchPolicy, TierUse, WritePolicy
from .reach import FirstNeeded, Reach, reach
from .remote import open_remote
from .tier import Tier, TierState, TierStats
from .valkey import ValkeyBackend
from .verify import VerifyReport, verify_folder

__all__ = [
    "BLOCK_SIZE",
    "SEAL_BYTES",
    "AesGcm",
    "BlockRun",
    "Checksum",
    "Codec",
    "Compressed",
    "Conversation",
    "Document",
    "DocumentFolder",
    "Encoding",
    "Entry",
    "EvictingBackend",
    "ExtentError",
    "ExtentHeader",
    "FetchPolicy",
    "FirstNeeded",
    "FolderBackend",
    "HandedDown",
    "Health",
    "HostBackend",
    "KeyChain",
    "ListableBackend",
    "Mover",
    "ObjectBackend",
    "Planner",
    "Reach",
    "Restore",
    "Sealer",
    "StorageBackend",
    "Tier",
    "TierState",
    "TierStats",
    "TierUse",
    "ValkeyBackend",
    "VerifyReport",
    "WritePolicy",
    "block_key",
    "compress",
    "conversations",
    "export_conversation",
    "extent_bytes",
    "family",
    "find_headers",
    "hand_down",
    "header_bytes",
    "headers",
    "held_alone",
    "import_conversation",
    "key_of",
    "layout_of",
    "open_extent",
    "open_remote",
    "pack_archive",
    "payload_of",
    "reach",
    "read_archive",
    "read_key",
    "still_there",
    "unpack_archive",
    "verify_folder",
    "write_archive",
]
