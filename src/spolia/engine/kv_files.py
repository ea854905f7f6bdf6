"""One sequence's KV out of the pools and back, for files that somebody keeps: called between two steps.

What comes back is believed as little as what a tier gives: each block is checked, and bound to its place and owner.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from spolia.engine.core import EngineCore
from spolia.errors import InvalidRequest
from spolia.kernels import BLOCK_SIZE
from spolia.tiers import ExtentError, KeyChain, Sealer, open_extent

__all__ = ["copy_in", "copy_out"]

Ids = NDArray[np.int32]


def copy_out(core: EngineCore, namespace: bytes, token_ids: Ids, sealer: Sealer) -> list[bytearray]:
    """What is cached of these tokens, as sealed extents, block by block; a part of a block is left out.

    Raises:
        InvalidRequest: a model with sliding windows, whose older blocks are gone when newer ones are computed.
    """
    if any(group.window is not None for group in core.cache.groups):
        raise InvalidRequest("a model with sliding windows has no KV of all tokens to be saved; use --kv-disk")
    chain = KeyChain(namespace)
    extents = []
    with core.cache.open_restore(namespace, np.append(token_ids, 0).astype(np.int32)) as lease:
        if core.cache.num_rounded_tokens(lease, lease.num_computed_tokens):
            raise InvalidRequest("a part of this KV was kept in fewer bits, and would come back as if it were exact")
        num_blocks = lease.num_computed_tokens // BLOCK_SIZE
        chain.extend(token_ids[: num_blocks * BLOCK_SIZE])
        for index in range(num_blocks):
            for group in range(len(core.cache.groups)):
                extent = core.tiering.extent(chain, index, group, token_ids, lease.block_table(group)[index].item())
                sealer.seal(memoryview(extent))
                extents.append(extent)
    return extents


def copy_in(core: EngineCore, namespace: bytes, extents: Sequence[memoryview], sealer: Sealer) -> tuple[Ids, int]:
    """Bring back what `copy_out` gave: the tokens, and how many of them are cached now.

    Fewer than all where there is no room.

    Raises:
        InvalidRequest: they are damaged, not in their order, or another model's or owner's.
    """
    num_groups = len(core.cache.groups)
    parts: list[NDArray[np.uint8]] = []
    ids: list[int] = []
    chain = KeyChain(namespace)
    for number, extent in enumerate(extents):
        try:
            header, payload = open_extent(extent, sealer)
        except ExtentError as error:
            raise InvalidRequest(f"block {number} is refused: {error}", param="filename") from None
        if number % num_groups == 0:
            ids += header.ids.tolist()
            chain.extend(np.array(ids, np.int32))
        index, group = divmod(number, num_groups)
        if header.namespace != namespace or header.layout != core.tiering.layout:
            raise InvalidRequest(
                "the file is of another model, KV type, cache salt, API key or instruction set; it is of no use here",
                param="filename",
            )
        if (index >= len(chain.digests) or header.digest != chain.digests[index] or header.group != group) or (
            len(payload) != core.tiering.payload_bytes(group)
        ):
            raise InvalidRequest(f"block {number} is not the one that belongs there", param="filename")
        parts.append(payload)
    token_ids = np.array(ids, np.int32)
    num_blocks = len(parts) // num_groups
    return token_ids, _fill(core, namespace, token_ids[: num_blocks * BLOCK_SIZE], parts)


def _fill(core: EngineCore, namespace: bytes, token_ids: Ids, payloads: Sequence[NDArray[np.uint8]]) -> int:
    """Put whole blocks of KV into the pools; how many of these tokens are cached now."""
    num_groups = len(core.cache.groups)
    stop = len(token_ids)
    with core.cache.open_restore(namespace, np.append(token_ids, 0).astype(np.int32)) as lease:
        start = lease.num_computed_tokens
        if start < stop:
            if core.cache.grow(lease, stop) is None:
                return start
            for index in range(start // BLOCK_SIZE, stop // BLOCK_SIZE):
                for group in range(num_groups):
                    block_id = lease.block_table(group)[index].item()
                    core.tiering.write_block(group, block_id, payloads[index * num_groups + group])
            core.cache.commit(lease, token_ids[start:stop])
    core.note_other_work(0)
    return stop
