"""What operators do to the cache of a running engine: see `CacheAdmin`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spolia.engine.core import EngineCore
from spolia.errors import InvalidRequest, StorageUnavailable
from spolia.kvcache import PrefixHit, make_policy
from spolia.tiers import BLOCK_SIZE, Sealer, Tier, find_keys, key_of, pack_archive, payload_of, unpack_archive

if TYPE_CHECKING:
    from spolia.engine.async_engine import AsyncEngine

__all__ = ["CacheAdmin", "ClearReport", "Lookup"]

_LOOK_S = 0.01


@dataclass(frozen=True, slots=True)
class Lookup:
    """What there is of a prompt.

    Attributes:
        hit: what a request would reuse now of what is on the device, and why no more.
        num_tier_tokens: from the first token on without a gap, by tier.
    """

    hit: PrefixHit
    num_tier_tokens: dict[str, int]


@dataclass(frozen=True, slots=True)
class ClearReport:
    """What was dropped.

    Attributes:
        num_tokens: on the device.
        num_tier_blocks: by tier; blocks that a tier may have had.
        unlisted: tiers that cannot say what they hold: there, only blocks that the device had were dropped.
    """

    num_tokens: int
    num_tier_blocks: dict[str, int]
    unlisted: tuple[str, ...]


class CacheAdmin:
    """For one engine. Nothing here holds up requests for longer than a step.

    Args:
        sealer: what closes that which leaves memory.
    """

    def __init__(self, engine: AsyncEngine, sealer: Sealer) -> None:
        self._engine = engine
        self._sealer = sealer

    # -- Looking -------------------------------------------------------------------------------------------------------

    async def lookup(self, token_ids: Sequence[int], *, cache_salt: str = "") -> Lookup:
        """What a request with these tokens would find, and in which tiers it lies. Changes nothing."""
        namespace = self._engine.namespace(cache_salt)
        hit = await self._engine.call(lambda core: core.cache.explain(namespace, token_ids))
        tiers, keys, num_groups = await self._engine.call(lambda core: _names(core, namespace, token_ids))
        counts = await asyncio.gather(*(asyncio.to_thread(tier.count, keys) for tier in tiers))
        return Lookup(
            hit,
            {tier.name: count // num_groups * BLOCK_SIZE for tier, count in zip(tiers, counts, strict=True)},
        )

    # -- Moving --------------------------------------------------------------------------------------------------------

    async def bring(self, token_ids: Sequence[int], *, cache_salt: str = "", may_evict: bool = False) -> int:
        """Have what the tiers have of these tokens on the device; how many tokens are there then."""
        namespace = self._engine.namespace(cache_salt)
        started = await self._engine.call(
            lambda core: core.tiering.transfers.bring(namespace, token_ids, may_evict=may_evict)
        )
        return await asyncio.wrap_future(started)

    async def move(
        self,
        token_ids: Sequence[int],
        to: str,
        *,
        cache_salt: str = "",
        keep: bool = False,
        timeout_s: float = 60.0,
    ) -> int:
        """Have the KV of these tokens in a tier, or on the device ("device"), and, unless `keep`, not on the device.

        Returns:
            How many tokens are there now.

        Raises:
            InvalidRequest: there is no such tier.
            StorageUnavailable: the tier has not taken all of it in time; what is on the device stays there.
        """
        if to == "device":
            return await self.bring(token_ids, cache_salt=cache_salt, may_evict=True)
        tier = await self._engine.call(lambda core: core.tiering.transfers.tier(to))
        await self.bring(token_ids, cache_salt=cache_salt, may_evict=True)
        namespace = self._engine.namespace(cache_salt)
        num_tokens = await self._engine.call(lambda core: core.tiering.transfers.send(namespace, token_ids, to))
        deadline_s = time.monotonic() + timeout_s
        while await self._engine.call(lambda core: core.tiering.transfers.num_unsent(to)):
            if time.monotonic() >= deadline_s:
                raise StorageUnavailable(f"tier {to} has not taken {num_tokens} tokens within {timeout_s:g} s")
            await asyncio.sleep(_LOOK_S)
        _, keys, num_groups = await self._engine.call(lambda core: _names(core, namespace, token_ids[:num_tokens]))
        num_there = await asyncio.to_thread(tier.count, keys) // num_groups * BLOCK_SIZE
        if num_there < num_tokens:
            reason = tier.stats.reason or "it has no room for all"
            raise StorageUnavailable(f"tier {to} has {num_there} of {num_tokens} tokens: {reason}")
        if not keep:
            await self._engine.call(lambda core: core.cache.clear_prefix(namespace, token_ids, is_alone=True))
        return num_there

    async def export(self, token_ids: Sequence[int], *, cache_salt: str = "") -> bytes:
        """The KV of these tokens' whole blocks, as a file that `import_file` and `spolia cache import` take.

        Raises:
            InvalidRequest: nothing of it is cached.
        """
        await self.bring(token_ids, cache_salt=cache_salt, may_evict=True)
        namespace = self._engine.namespace(cache_salt)
        extents = await self._engine.call(lambda core: core.tiering.transfers.take_out(namespace, token_ids))
        if not extents:
            raise InvalidRequest("not one block of it is cached; warm it first", param="prompt")
        return await asyncio.to_thread(pack_archive, extents, self._sealer)

    async def import_file(self, data: bytes, *, cache_salt: str = "") -> int:
        """Take in a file of `export`; how many tokens it has.

        Raises:
            InvalidRequest: it is damaged, of another model, KV type, salt or kind of machine, or sealed otherwise.
            Overloaded: there is no room.
        """
        parts = await asyncio.to_thread(lambda: list(unpack_archive(data, self._sealer)))
        mine = self._engine.namespace(cache_salt)
        for header, _ in parts:
            if header.namespace != mine:
                raise InvalidRequest(
                    f"the file is of namespace {header.namespace.hex()[:16]} ({header.layout}), and this one is "
                    f"{mine.hex()[:16]}: another model, KV type, cache salt or instruction set",
                    param="file",
                )
        blocks = [(header, payload_of(header, extent)) for header, extent in parts]
        return await self._engine.call(lambda core: core.tiering.transfers.put_in(blocks))

    # -- Dropping ------------------------------------------------------------------------------------------------------

    async def clear_prefix(self, token_ids: Sequence[int], *, cache_salt: str = "", tiers: bool = True) -> ClearReport:
        """Drop all that begins with these tokens, but what running requests use."""
        namespace = self._engine.namespace(cache_salt)
        return await self._clear_tokens(namespace, token_ids, is_alone=False, tiers=tiers)

    async def clear_tail(self, token_ids: Sequence[int], *, cache_salt: str = "", tiers: bool = True) -> ClearReport:
        """Drop a conversation's tokens, from its end back to where others branch off."""
        namespace = self._engine.namespace(cache_salt)
        return await self._clear_tokens(namespace, token_ids, is_alone=True, tiers=tiers)

    async def clear(self, namespaces: Collection[bytes] | None = None, *, tiers: bool = True) -> ClearReport:
        """Drop all that is cached, of some namespaces or of all, but what running requests use."""

        def drop(core: EngineCore) -> int:
            dropped = core.cache.clear() if namespaces is None else sum(map(core.cache.clear, namespaces))
            if tiers:
                core.tiering.offloader.forget(lambda tag: namespaces is None or any(ns in tag for ns in namespaces))
            return dropped

        num_tokens = await self._engine.call(drop)
        return await self._clear_tiers(num_tokens, [], namespaces, None, tiers=tiers)

    async def _clear_tokens(
        self, namespace: bytes, token_ids: Sequence[int], *, is_alone: bool, tiers: bool
    ) -> ClearReport:
        def drop(core: EngineCore) -> tuple[int, list[bytes]]:
            num_tokens, tags = core.cache.clear_prefix(namespace, token_ids, is_alone=is_alone)
            keys = {key_of(tag) for tag in tags}
            if tiers:
                core.tiering.offloader.forget(lambda tag: key_of(tag) in keys)
            return num_tokens, list(keys)

        num_tokens, keys = await self._engine.call(drop)
        digest = None
        if not is_alone:
            _, names, num_groups = await self._engine.call(lambda core: _names(core, namespace, token_ids))
            keys += names[-num_groups:]
            digest = names[-1][:-1] if names else None
        return await self._clear_tiers(num_tokens, keys, () if digest is None else None, digest, tiers=tiers)

    async def _clear_tiers(
        self,
        num_tokens: int,
        keys: list[bytes],
        namespaces: Collection[bytes] | None,
        digest: bytes | None,
        *,
        tiers: bool,
    ) -> ClearReport:
        """Drop blocks from the tiers: those keys, and what a tier that can be listed has of namespaces, or from a
        digest on."""
        if not tiers:
            return ClearReport(num_tokens, {}, ())
        all_tiers = await self._engine.call(lambda core: core.tiering.mover.tiers)
        dropped, unlisted = {}, []
        for tier in all_tiers:
            found = await asyncio.to_thread(_find, tier, namespaces, digest)
            if found is None:
                unlisted.append(tier.name)
            doomed = list({*keys, *(found or ())})
            dropped[tier.name] = len(doomed)
            await self._engine.call(lambda core, tier=tier, doomed=doomed: core.tiering.mover.discard(tier, doomed))  # type: ignore[misc]
        return ClearReport(num_tokens, dropped, tuple(unlisted))

    # -- Settings ------------------------------------------------------------------------------------------------------

    async def use_policy(self, name: str) -> str:
        """Give content up in another order from now on; the name of the policy before.

        Raises:
            InvalidRequest: there is no such policy.
        """
        try:
            policy = make_policy(name)
        except ValueError as error:
            raise InvalidRequest(f"kv_policy: {error}", param="kv_policy") from None

        def swap(core: EngineCore) -> str:
            before = core.cache.policy.name
            core.cache.use_policy(policy)
            return before

        return await self._engine.call(swap)


def _names(core: EngineCore, namespace: bytes, token_ids: Sequence[int]) -> tuple[tuple[Tier, ...], list[bytes], int]:
    """The tiers, what they call these tokens' whole blocks, and how many names a block has."""
    keys = core.tiering.transfers.keys(namespace, token_ids)
    return core.tiering.mover.tiers, keys, len(core.cache.groups)


def _find(tier: Tier, namespaces: Collection[bytes] | None, digest: bytes | None) -> list[bytes] | None:
    """What a tier has of that; None if it cannot tell."""
    if namespaces is not None and not namespaces:
        return []
    try:
        return find_keys(tier.backend, namespaces, digest)
    except StorageUnavailable:
        return None
