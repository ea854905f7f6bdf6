"""From settings to tiers, and from tiers to a cache that uses them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from spolia.engine.config import EngineConfig
from spolia.engine.kv_blocks import KVBlocks
from spolia.engine.offload import Offloader
from spolia.engine.tiering import Tiering
from spolia.engine.tiers_in_use import TiersInUse
from spolia.kvcache import GroupSpec, KVCache, RetentionPolicy
from spolia.tiers import (
    AesGcm,
    Checksum,
    Codec,
    Encoding,
    FetchPolicy,
    FolderBackend,
    HostBackend,
    Mover,
    Sealer,
    Tier,
    TierUse,
    open_remote,
    read_key,
)

__all__ = ["build_cache", "make_sealer", "open_tiers"]


def make_sealer(config: EngineConfig) -> Sealer:
    """What closes all that leaves memory.

    Raises:
        InvalidRequest: there is no such key.
    """
    return Checksum() if config.kv_encrypt is None else AesGcm(read_key(config.kv_encrypt))


def open_tiers(config: EngineConfig) -> tuple[list[TierUse], EngineConfig]:
    """The tiers that the settings name, the fastest first, and the settings with their sizes resolved.

    Raises:
        InvalidRequest: one that cannot be used.
    """
    sealer = make_sealer(config)
    uses = []
    if config.kv_host is not None:
        uses.append(TierUse(Tier("host", HostBackend(config.kv_host)), "write_back", is_exclusive=True))
    if config.kv_disk is not None:
        path, size = config.kv_disk, config.kv_disk_size
        folder = FolderBackend(path, size, ttl_s=config.kv_ttl_s)
        if size is None:
            size = (shutil.disk_usage(path).free + (folder.health().num_bytes or 0)) // 2
            folder = FolderBackend(path, size, ttl_s=config.kv_ttl_s)
            config = replace(config, kv_disk_size=size)
        uses.append(TierUse(Tier("disk", folder, sealer=sealer), config.kv_write, min_uses=config.kv_min_uses))
    if config.kv_remote is not None:
        remote = Tier("remote", open_remote(config.kv_remote, ttl_s=config.kv_ttl_s), sealer=sealer)
        uses.append(TierUse(remote, config.kv_write, min_uses=config.kv_min_uses))
    return uses, config


def build_cache(
    groups: Sequence[GroupSpec],
    pools: Sequence[NDArray[np.uint8]],
    uses: Sequence[TierUse],
    *,
    layout: str,
    codec: Codec | None = None,
    clock: Callable[[], float],
    policy: RetentionPolicy | None = None,
    fetch: FetchPolicy = "planned",
    fetch_timeout_s: float = 1.0,
) -> tuple[KVCache, Tiering]:
    """A cache over `pools`, and what ties it to tiers, the fastest first.

    Args:
        layout: how the bytes of a block are arranged and computed.
        codec: how requests that do not ask for exact KV have theirs written to tiers; None: as it is.
    """
    block_bytes = tuple(pool.shape[1] for pool in pools)
    exact = Encoding(layout, block_bytes)
    usual = exact if codec is None else Encoding(f"{layout}/{codec.name}", block_bytes, codec)
    encodings = (exact, usual)
    mover = Mover([use.tier for use in uses], encodings=encodings)
    offloader = Offloader(pools, mover, uses, encodings)
    cache = KVCache(groups, clock=clock, policy=policy, on_evict=offloader.on_evict)
    tiers = TiersInUse(uses, mover, offloader)
    blocks = KVBlocks(cache, pools, tiers, encodings)
    return cache, Tiering(tiers, blocks, clock=clock, fetch=fetch, timeout_s=fetch_timeout_s)
