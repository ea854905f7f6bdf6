"""What operators do to the cache of a running engine: see `CacheAdmin`."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from spolia.engine.core import EngineCore
from spolia.engine.kv_blocks import KVBlocks
from spolia.engine.kv_files import put_in, take_out
from spolia.errors import InvalidRequest, Overloaded, StorageUnavailable
from spolia.kvcache import PrefixHit, RetentionPolicy, make_policy
from spolia.tiers import (
    BLOCK_SIZE,
    Compressed,
    ExtentHeader,
    KeyChain,
    Mover,
    Reach,
    Sealer,
    Tier,
    TierState,
    compress,
    family,
    find_headers,
    key_of,
    pack_archive,
    payload_of,
    unpack_archive,
)

if TYPE_CHECKING:
    from spolia.engine.async_engine import AsyncEngine

__all__ = ["CacheAdmin", "ClearReport", "CompressReport", "Imported", "Lookup"]

logger = logging.getLogger("spolia.engine")

_LOOK_S = 0.01

_LINE_S = 30.0
"""Waiting for a tier to come to what it is to do."""

T = TypeVar("T")

_Found: TypeAlias = dict[bytes, ExtentHeader | None] | None
"""What a tier has, by key; None: it cannot tell."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """What there is of a prompt.

    Attributes:
        hit: what a request would reuse now of what is on the device, and why no more.
        num_tier_tokens: from the first token on, as far as a tier has what the next one looks at, by tier.
        ranges: (start, stop, tier or "device") of what a request could have, in order, without gaps.
    """

    hit: PrefixHit
    num_tier_tokens: dict[str, int]
    ranges: tuple[tuple[int, int, str], ...]


@dataclass(frozen=True, slots=True)
class ClearReport:
    """What was dropped.

    Attributes:
        num_tokens: on the device.
        num_tier_blocks: by tier; blocks that a tier may have had.
        unlisted: tiers that cannot say what they hold, where only blocks that the device had were dropped; and those
            that do not answer now, which drop it, if at all, when what they hang at is over.
        kept_pins: pins because of which something may have stayed, on the device and in tiers.
    """

    num_tokens: int
    num_tier_blocks: dict[str, int]
    unlisted: tuple[str, ...]
    kept_pins: tuple[int, ...] = ()


class Imported(NamedTuple):
    """How many tokens a file had; `exact_kv`: only requests for exact KV find them."""

    num_tokens: int
    exact_kv: bool


@dataclass(frozen=True, slots=True)
class CompressReport:
    """What is in fewer bits now.

    Attributes:
        tiers: by name.
        unlisted: tiers that cannot say what they hold: nothing was done there.
    """

    tiers: dict[str, Compressed]
    unlisted: tuple[str, ...]


class CacheAdmin:
    """For one engine. Nothing here holds up requests for longer than a step.

    Where tiers round KV, that of requests for exact KV is apart: `exact_kv` chooses it. What is cleared goes of both.

    Args:
        sealer: what closes that which leaves memory.
    """

    def __init__(self, engine: AsyncEngine, sealer: Sealer) -> None:
        self._engine = engine
        self._sealer = sealer

    # -- Looking -------------------------------------------------------------------------------------------------------

    async def lookup(self, token_ids: Sequence[int], *, cache_salt: str = "", exact_kv: bool = False) -> Lookup:
        """What a request with these tokens would find, and in which tiers it lies. Changes nothing.

        Tells whether another tenant or salt has more of it: for operators only.
        """
        namespace = self._engine.namespace_for(cache_salt, exact_kv=exact_kv)

        def explain(core: EngineCore) -> PrefixHit:
            core.tiering.blocks.explain_cleared(KeyChain(namespace), np.asarray(token_ids, np.int32))
            return core.cache.explain(namespace, token_ids, other_namespaces=True)

        hit = await self._engine.call(explain)
        blocks, tiers = await self._engine.call(lambda core: (core.tiering.blocks, core.tiering.tiers.mover.tiers))
        digests = _chain(namespace, token_ids)
        reaches = await asyncio.gather(*(_reach(blocks, [tier], digests) for tier in tiers))
        num_tier_tokens = {tier.name: there.stop_block * BLOCK_SIZE for tier, there in zip(tiers, reaches, strict=True)}
        ranges = [(0, hit.num_tokens, "device")] if hit.num_tokens else []
        first = hit.num_tokens // BLOCK_SIZE
        below = await _reach(blocks, tiers, digests[first:], first)
        for _, stop, tier in below.ranges:
            start = ranges[-1][1] if ranges else 0
            if stop * BLOCK_SIZE > start:
                ranges.append((start, stop * BLOCK_SIZE, tier.name))
        return Lookup(hit, num_tier_tokens, tuple(ranges))

    # -- Moving --------------------------------------------------------------------------------------------------------

    async def bring(
        self, token_ids: Sequence[int], *, cache_salt: str = "", exact_kv: bool = False, may_evict: bool = False
    ) -> int:
        """Have what the tiers have of these tokens on the device; how many tokens are there then."""
        namespace = self._engine.namespace_for(cache_salt, exact_kv=exact_kv)
        started = await self._engine.call(
            lambda core: core.tiering.transfers.bring(namespace, token_ids, is_exact=exact_kv, may_evict=may_evict)
        )
        return await asyncio.wrap_future(started)

    async def move(
        self,
        token_ids: Sequence[int],
        to: str,
        *,
        cache_salt: str = "",
        exact_kv: bool = False,
        keep: bool = False,
        timeout_s: float = 60.0,
    ) -> int:
        """Have the KV of these tokens in a tier, or on the device ("device"), and, unless `keep`, not on the device.

        Returns:
            How many tokens are there now.

        Raises:
            InvalidRequest: there is no such tier, or no exact KV.
            StorageUnavailable: the tier has not taken all of it in time; what is on the device stays there.
        """
        if to == "device":
            return await self.bring(token_ids, cache_salt=cache_salt, exact_kv=exact_kv, may_evict=True)
        tier = await self._engine.call(lambda core: core.tiering.tiers.tier(to))
        await self.bring(token_ids, cache_salt=cache_salt, exact_kv=exact_kv, may_evict=True)
        namespace = self._engine.namespace_for(cache_salt, exact_kv=exact_kv)
        num_tokens = await self._engine.call(
            lambda core: core.tiering.transfers.send(namespace, token_ids, to, is_exact=exact_kv)
        )
        deadline_s = time.monotonic() + timeout_s
        while await self._engine.call(lambda core: core.tiering.tiers.num_unwritten(tier)):
            if time.monotonic() >= deadline_s:
                raise StorageUnavailable(f"tier {to} has not taken {num_tokens} tokens within {timeout_s:g} s")
            await asyncio.sleep(_LOOK_S)
        blocks = await self._engine.call(lambda core: core.tiering.blocks)
        there = await _reach(blocks, [tier], _chain(namespace, token_ids[:num_tokens]))
        num_there = there.stop_block * BLOCK_SIZE
        if num_there < num_tokens:
            reason = tier.stats.reason or "it has no room for all"
            raise StorageUnavailable(f"tier {to} has {num_there} of {num_tokens} tokens: {reason}")
        if not keep:
            await self._engine.call(lambda core: core.cache.clear_prefix(namespace, token_ids, is_alone=True))
        return num_there

    async def export(self, token_ids: Sequence[int], *, cache_salt: str = "", exact_kv: bool = False) -> bytes:
        """The KV of these tokens' whole blocks, as a file that `import_file` and `spolia cache import` take.

        Raises:
            InvalidRequest: nothing of it is cached, or there is no exact KV.
        """
        await self.bring(token_ids, cache_salt=cache_salt, exact_kv=exact_kv, may_evict=True)
        namespace = self._engine.namespace_for(cache_salt, exact_kv=exact_kv)
        extents = await self._engine.call(
            lambda core: take_out(core, namespace, token_ids, core.tiering.blocks.encoding(is_exact=exact_kv))
        )
        if not extents:
            raise InvalidRequest("not one block of it is cached; warm it first", param="prompt")
        return await asyncio.to_thread(pack_archive, extents, self._sealer)

    async def import_file(self, data: bytes, *, cache_salt: str = "") -> Imported:
        """Take in a file of `export`. Whether that was of exact KV, the file tells.

        Raises:
            InvalidRequest: it is damaged, of another model, KV type, salt or kind of machine, or sealed otherwise.
            Overloaded: there is no room.
        """
        parts = await asyncio.to_thread(unpack_archive, data, self._sealer)
        blocks = [(header, payload_of(header, extent)) for header, extent in parts]
        namespace = usual = self._engine.namespace(cache_salt)
        exact = self._engine.exact_namespace(cache_salt)
        if all(header.namespace == exact for header, _ in blocks):
            namespace = exact
        is_exact = namespace != usual
        ids, num_cached = await self._engine.call(
            lambda core: put_in(core, namespace, blocks, core.tiering.blocks.encoding(is_exact=is_exact))
        )
        if num_cached < len(ids):
            raise Overloaded(f"there is no room for {len(ids)} tokens; try again when fewer requests run")
        return Imported(num_cached, is_exact)

    async def compress(
        self, salts: Collection[str], token_ids: Sequence[int] | None = None, *, is_alone: bool = False
    ) -> CompressReport:
        """Have tiers keep in fewer bits what they have of exact KV; from then on ordinary requests find it.

        What is on the device stays, and goes down exact again if requests for exact KV go on to use it.

        Args:
            token_ids: only what begins with these (`is_alone`: only they), all blocks that lead there included; of
                these, those that others go on from stay exact as well.

        Raises:
            InvalidRequest: this engine rounds nothing, so it could not read the result.
        """
        exact, rounded = await self._engine.call(lambda core: (core.tiering.blocks.exact, core.tiering.blocks.usual))
        if rounded.codec is None:
            raise InvalidRequest(
                "this server's tiers keep KV as it is, so it could never read KV in fewer bits; compress on one that "
                "was started with --kv-offload-dtype int8 or int4"
            )
        namespaces = {self._engine.exact_namespace(salt): self._engine.namespace(salt) for salt in salts}
        listed = await self._find(namespaces)
        found = {
            tier: [header for header in of_one.values() if header is not None]
            for tier, of_one in listed.items()
            if of_one is not None
        }
        kept: set[bytes] = set()
        if token_ids is not None:
            (namespace,) = namespaces
            chain = _chain(namespace, token_ids)
            headers = [header for of_one in found.values() for header in of_one]
            doomed = family(headers, chain, 0, is_alone=is_alone)
            kept = set(chain) - doomed
            found = {
                tier: [header for header in of_one if header.digest in doomed or header.digest in kept]
                for tier, of_one in found.items()
            }
        reports = await asyncio.to_thread(compress, found, namespaces, exact, rounded, kept)
        return CompressReport(reports, tuple(tier.name for tier, of_one in listed.items() if of_one is None))

    # -- Dropping ------------------------------------------------------------------------------------------------------

    async def clear_prefix(
        self, token_ids: Sequence[int], *, cache_salt: str = "", tiers: bool = True, pinned: bool = False
    ) -> ClearReport:
        """Drop all that begins with these tokens, and these back to where others branch off, but what requests use.

        Tiers know whole blocks only: what differs from the tokens after their last whole block goes there, too.
        """
        return await self._clear_tokens(cache_salt, token_ids, is_alone=False, tiers=tiers, pinned=pinned)

    async def clear_tail(
        self, token_ids: Sequence[int], *, cache_salt: str = "", tiers: bool = True, pinned: bool = False
    ) -> ClearReport:
        """Drop a conversation's tokens, from its end back to where others branch off."""
        return await self._clear_tokens(cache_salt, token_ids, is_alone=True, tiers=tiers, pinned=pinned)

    async def clear(
        self, namespaces: Collection[bytes] | None = None, *, tiers: bool = True, pinned: bool = False
    ) -> ClearReport:
        """Drop all that is cached, of some namespaces or of all, but what running requests use.

        Args:
            pinned: what is pinned, too.
        """

        def drop(core: EngineCore) -> tuple[int, list[int], set[bytes]]:
            cleared: list[bytes | None] = [None] if namespaces is None else [*namespaces]
            dropped = sum(core.cache.clear(namespace, pinned=pinned) for namespace in cleared)
            kept = set() if pinned else _pinned_keys(core)
            if tiers:
                core.tiering.transfers.cancel(namespaces)
                core.tiering.tiers.offloader.forget(
                    lambda tag: (namespaces is None or any(ns in tag for ns in namespaces)) and key_of(tag) not in kept
                )
            pins = () if pinned else core.cache.pins()
            return dropped, [pin.id for pin in pins if namespaces is None or pin.namespace in namespaces], kept

        num_tokens, kept_pins, kept = await self._engine.call(drop)
        if not tiers:
            return ClearReport(num_tokens, {}, (), tuple(kept_pins))
        act = partial(_drop, namespaces=namespaces, kept=kept)
        dropped = await self._each(lambda mover, tier: mover.call(tier, act))
        await self._engine.call(
            lambda core: core.tiering.note_cleared(key for keys in dropped.values() for key in keys or ())
        )
        return ClearReport(
            num_tokens,
            {tier.name: len(keys or ()) for tier, keys in dropped.items()},
            tuple(tier.name for tier, keys in dropped.items() if keys is None),
            tuple(kept_pins),
        )

    async def _clear_tokens(
        self, cache_salt: str, token_ids: Sequence[int], *, is_alone: bool, tiers: bool, pinned: bool
    ) -> ClearReport:
        reports = [
            await self._clear_in(namespace, token_ids, is_alone=is_alone, tiers=tiers, pinned=pinned)
            for namespace in self._engine.namespaces(cache_salt)
        ]
        num_tier_blocks: Counter[str] = Counter()
        for report in reports:
            num_tier_blocks.update(report.num_tier_blocks)
        return ClearReport(
            sum(report.num_tokens for report in reports),
            dict(num_tier_blocks),
            reports[0].unlisted,
            tuple(pin for report in reports for pin in report.kept_pins),
        )

    async def _clear_in(
        self, namespace: bytes, token_ids: Sequence[int], *, is_alone: bool, tiers: bool, pinned: bool
    ) -> ClearReport:
        def drop(core: EngineCore) -> tuple[int, set[bytes], set[bytes], int, tuple[int, ...]]:
            num_tokens, tags = core.cache.clear_prefix(namespace, token_ids, is_alone=is_alone, pinned=pinned)
            kept = set() if pinned else _pinned_keys(core)
            keys = {key_of(tag) for tag in tags} - kept
            if tiers:
                core.tiering.transfers.cancel({namespace})
                core.tiering.tiers.offloader.forget(lambda tag: key_of(tag) in keys)
            num_kept = core.cache.probe(namespace, [*token_ids, 0]) // BLOCK_SIZE
            pins = () if pinned else tuple(pin.id for pin in core.cache.pins(namespace, token_ids))
            return num_tokens, keys, kept, num_kept, pins

        num_tokens, keys, kept, num_kept, pins = await self._engine.call(drop)
        if not tiers:
            return ClearReport(num_tokens, {}, (), pins)
        found = await self._find({namespace})
        listed = [of_one for of_one in found.values() if of_one is not None]
        headers = [header for of_one in listed for header in of_one.values() if header is not None]
        doomed = family(headers, _chain(namespace, token_ids), num_kept, is_alone=is_alone)
        # What is not in one tier any more may be in the next: each drops what any has.
        gone = keys | {key for of_one in listed for key, each in of_one.items() if each and each.digest in doomed}
        gone -= kept
        told = await self._each(lambda mover, tier: mover.discard(tier, list(gone)))
        await self._engine.call(lambda core: core.tiering.note_cleared(gone))
        return ClearReport(
            num_tokens,
            {tier.name: len(keys | (gone & (of_one or {}).keys())) for tier, of_one in found.items()},
            tuple(tier.name for tier, of_one in found.items() if of_one is None or not told.get(tier)),
            pins,
        )

    async def _find(self, namespaces: Collection[bytes] | None) -> dict[Tier, _Found]:
        """What each tier has of some namespaces, or of all, when all that was on its way there is written."""
        act = partial(_list, namespaces=namespaces)
        return await self._each(lambda mover, tier: mover.call(tier, act))

    async def _each(self, begin: Callable[[Mover, Tier], Future[T]]) -> dict[Tier, T | None]:
        """Have something done by each tier's writer, after all that is in its line; None: it was not, or not in time.

        The fastest first, and one after the other: what had to leave a tier by then is in the line of the next.
        """
        results: dict[Tier, T | None] = {}
        for tier in await self._engine.call(lambda core: core.tiering.tiers.mover.written):
            begun = await self._engine.call(
                partial(lambda core, tier: begin(core.tiering.tiers.mover, tier), tier=tier)
            )
            result = await _in_time(begun, [tier])
            results[tier] = result
        return results

    # -- Settings ------------------------------------------------------------------------------------------------------

    async def use_policy(self, wanted: str | type[RetentionPolicy]) -> type[RetentionPolicy]:
        """Give content up in another order from now on; the policy before, which can be used again.

        Raises:
            InvalidRequest: there is no such policy.
        """
        try:
            policy = make_policy(wanted) if isinstance(wanted, str) else wanted()
        except ValueError as error:
            raise InvalidRequest(f"kv_policy: {error}", param="kv_policy") from None

        def swap(core: EngineCore) -> type[RetentionPolicy]:
            before = type(core.cache.policy)
            core.cache.use_policy(policy)
            return before

        return await self._engine.call(swap)


async def _in_time(begun: Future[T], tiers: Collection[Tier]) -> T | None:
    """What comes of something that tiers are asked; None: it failed, one of them hangs, or it takes too long."""
    done = asyncio.wrap_future(begun)
    deadline_s = time.monotonic() + _LINE_S
    while not done.done() and time.monotonic() < deadline_s:
        if any(tier.state is TierState.STALLED for tier in tiers):
            return None
        await asyncio.wait([done], timeout=_LOOK_S)
    return done.result() if done.done() and done.exception() is None else None


async def _reach(blocks: KVBlocks, tiers: Sequence[Tier], digests: Sequence[bytes], first_block: int = 0) -> Reach:
    """How far a prefix goes on in some tiers, as far as they say so in time."""
    asked = [tier for tier in tiers if tier.is_usable]
    found: Future[Reach] = Future()
    found.set_running_or_notify_cancel()

    def ask() -> None:
        try:
            found.set_result(blocks.reach(asked, digests, first_block))
        except Exception as error:
            found.set_exception(error)

    # Of its own, and not of those that others wait for: it may hang with its tier.
    threading.Thread(target=ask, name="spolia-lookup", daemon=True).start()
    there = await _in_time(found, asked)
    return blocks.reach([], digests, first_block) if there is None else there


def _chain(namespace: bytes, token_ids: ArrayLike) -> list[bytes]:
    """The digests of these tokens' whole blocks."""
    chain = KeyChain(namespace)
    chain.extend(np.asarray(token_ids, np.int32))
    return chain.digests


def _list(tier: Tier, namespaces: Collection[bytes] | None) -> _Found:
    try:
        return find_headers(tier.backend, namespaces)
    except Exception:  # a backend may be anybody's: it is told as one that cannot be listed
        logger.warning("tier=%s cannot be listed", tier.name, exc_info=True)
        return None


def _pinned_keys(core: EngineCore) -> set[bytes]:
    """What tiers call the whole blocks of what is pinned."""
    blocks = core.tiering.blocks
    return {key for pin, ids in core.cache.pinned() for key in blocks.keys(_chain(pin.namespace, ids))}


def _drop(tier: Tier, namespaces: Collection[bytes] | None, kept: Collection[bytes]) -> list[bytes] | None:
    """The blocks that it has been told to drop, all but those kept; None: it cannot be listed, or does not answer."""
    found = _list(tier, namespaces)
    if found is None:
        return None
    doomed = [key for key in found if key not in kept]
    return doomed if tier.delete(doomed) else None
