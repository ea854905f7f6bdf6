"""One conversation's KV out of the pools and back, for files that somebody keeps: called between two steps.

What comes back is believed as little as what a tier gives: its seals were checked, and here each block is bound to its
place, its tokens and its owner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from spolia.engine.core import EngineCore
from spolia.errors import InvalidRequest
from spolia.kernels import BLOCK_SIZE
from spolia.tiers import SEAL_BYTES, Encoding, ExtentHeader, KeyChain

__all__ = ["put_in", "take_out"]

Ids = NDArray[np.int32]


def take_out(core: EngineCore, namespace: bytes, token_ids: Sequence[int], encoding: Encoding) -> list[bytearray]:
    """What is cached of these tokens, as extents without seals, block by block; a part of a block is left out.

    Of a layer that looks back over a window, memory may no longer have what lies before it: such a block's extent has
    no payload, and the next token needs none.

    Raises:
        InvalidRequest: there is KV that cannot be written so.
    """
    blocks, codec = core.tiering.blocks, encoding.codec
    ids = np.asarray(token_ids, np.int32)
    extents = []
    with blocks.cache.open_restore(namespace, np.append(ids, np.int32(0)), whole_blocks=True) as lease:
        if codec is None and blocks.cache.num_rounded_tokens(lease, lease.num_computed_tokens):
            raise InvalidRequest("a part of this KV was kept in fewer bits, and would come back as if it were exact")
        num_blocks = lease.num_computed_tokens // BLOCK_SIZE
        chain = KeyChain(namespace)
        chain.extend(ids[: num_blocks * BLOCK_SIZE])
        tables = [blocks.cache.stored_table(lease, group).tolist() for group in range(blocks.num_groups)]
        for index in range(num_blocks):
            for group, (pool, table) in enumerate(zip(blocks.pools, tables, strict=True)):
                header, payload = blocks.header(chain, encoding, index, group, ids), b""
                if table[index] < 0:
                    header = replace(header, payload_bytes=0)
                else:
                    block = pool[table[index]]
                    encoded = block if codec is None else codec.encode(group, block)
                    if encoded is None:
                        raise InvalidRequest(f"block {index} cannot be written in so few bits", param="prompt")
                    payload = encoded.tobytes()
                extents.append(bytearray(header.encode() + payload + bytes(SEAL_BYTES)))
    return extents


def put_in(
    core: EngineCore,
    namespace: bytes,
    parts: Sequence[tuple[ExtentHeader, NDArray[np.uint8]]],
    encoding: Encoding,
    *,
    kept: Encoding | None = None,
) -> tuple[Ids, int]:
    """Make the KV of extents, whose seals were checked, part of the cache, and have it written down as if it had been
    computed.

    Args:
        encoding: of the extents.
        kept: how the namespace's blocks are written to tiers; None: as the extents.

    Returns:
        The tokens, and how many of them are cached now: fewer than all where there is no room.

    Raises:
        InvalidRequest: they are not all of one conversation from its beginning on, or another model's or owner's.
    """
    blocks, cache = core.tiering.blocks, core.tiering.blocks.cache
    for header, _ in parts:
        if header.namespace != namespace or header.layout != encoding.layout:
            raise InvalidRequest(
                f"the file is of another model, KV type, cache salt, API key or instruction set ({header.layout}, and "
                f"here {encoding.layout}); it is of no use here",
                param="file",
            )
    # A folder's file has nothing at all of what a window has passed and the folder lacked.
    by_start = {header.start: header for header, _ in parts}
    ids = np.concatenate([by_start[start].ids for start in sorted(by_start)] or [np.empty(0, np.int32)])
    chain = KeyChain(namespace)
    chain.extend(ids)
    num_blocks = len(chain.digests)
    num_tokens = num_blocks * BLOCK_SIZE
    found = {(header.digest, header.group): payload for header, payload in parts}
    digests = {digest for digest, _ in found}
    is_known = digests == set(chain.digests) and len(found) == len(parts)
    if not parts or not is_known or any(not 0 <= group < blocks.num_groups for _, group in found):
        raise InvalidRequest("the file holds no conversation from its beginning on, without gaps", param="file")
    nothing = np.empty(0, np.uint8)
    payloads = [[found.get((digest, group), nothing) for digest in chain.digests] for group in range(blocks.num_groups)]
    first_blocks = []
    for group, of_group in enumerate(payloads):
        first = next((index for index, payload in enumerate(of_group) if payload.nbytes), num_blocks)
        first_blocks.append(min(first, cache.first_needed_block(group, num_tokens)))
        for payload in of_group[first_blocks[-1] :]:
            if payload.nbytes != encoding.payload_bytes[group]:
                raise InvalidRequest(
                    f"the file's blocks are of {payload.nbytes} bytes, and here of {encoding.payload_bytes[group]}",
                    param="file",
                )
    num_cached = num_tokens
    with cache.open_restore(namespace, np.append(ids, np.int32(0)), whole_blocks=True) as lease:
        start = lease.num_computed_tokens
        if start < num_tokens and not cache.grow_sparse(lease, num_tokens, first_blocks):
            num_cached = start
        elif start < num_tokens:
            for group, of_group in enumerate(payloads):
                first = max(start // BLOCK_SIZE, first_blocks[group])
                decoded = (blocks.decoded(encoding, group, payload) for payload in of_group[first:])
                table = lease.block_table(group)[first:num_blocks]
                blocks.fill(group, table, decoded, is_rounded=encoding.codec is not None)
            blocks.commit(lease, chain, kept or encoding, ids, start, num_tokens)
    core.note_other_work(0)
    return ids, num_cached
