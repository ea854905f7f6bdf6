"""Changing a cache while it is used: see `apply_changes`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec

from spolia.engine import AsyncEngine, CacheAdmin
from spolia.errors import InvalidRequest, SpoliaError
from spolia.kvcache import POLICIES
from spolia.server.served import ServedModel
from spolia.tiers import Checksum, FolderBackend, HostBackend, Tier, TierUse, open_remote

__all__ = ["Change", "ConfigChange", "apply_changes", "describe"]

Undo = Callable[[], Awaitable[None]]


class AttachTier(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A tier to be: `disk` (a folder), `host` (bytes of memory) or `remote` (a URL), just one of them."""

    name: str | None = None
    disk: str | None = None
    host: int | None = None
    remote: str | None = None
    size: int | None = None
    write: Literal["write_through", "write_back", "selective"] | None = None


class ConfigChange(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What to change, in this order."""

    model: str | None = None
    kv_policy: str | None = None
    kv_memory: int | None = None
    detach: list[str] = []
    attach: list[AttachTier] = []


class Change(msgspec.Struct):
    """One change and what became of it: "done", "failed", or, for those that were done before one failed, "undone".

    Attributes:
        error: why it failed, or could not be undone.
    """

    change: str
    before: Any
    after: Any
    outcome: Literal["done", "failed", "undone", "not_undone"] = "done"
    error: str | None = None


async def describe(served: ServedModel) -> dict[str, Any]:
    """A cache's settings as they are now."""
    engine = served.engine
    sizes = engine.sizes
    kv_memory, policy, uses = await engine.call(
        lambda core: (sizes.num_bytes(core.cache), core.cache.policy.name, core.tiering.uses)
    )
    tiers = [
        {
            "name": use.tier.name,
            "state": use.tier.state.value,
            "reason": (stats := use.tier.stats).reason,
            "write": use.write,
            "is_exclusive": use.is_exclusive,
            "num_bytes": stats.health.num_bytes,
            "capacity_bytes": stats.health.capacity_bytes,
        }
        for use in uses
    ]
    return {
        "object": "cache.config",
        "model": served.name,
        "kv_policy": policy,
        "kv_memory": kv_memory,
        "kv_memory_max": sizes.capacity_bytes,
        "kv_dtype": engine.config.kv_dtype,
        "kv_fetch": engine.config.kv_fetch,
        "tiers": tiers,
    }


async def apply_changes(served: ServedModel, admin: CacheAdmin, wanted: ConfigChange) -> list[Change]:
    """Make changes one after the other; if one fails, those before it are undone, the last first.

    What was evicted for a smaller cache is not brought back by undoing.
    """
    changes: list[Change] = []
    undos: list[tuple[Change, Undo]] = []
    for change, act in _acts(served, admin, wanted):
        changes.append(change)
        try:
            undos.append((change, await act()))
        except SpoliaError as error:
            change.outcome, change.error = "failed", str(error)
            for done, undo in reversed(undos):
                try:
                    await undo()
                    done.outcome = "undone"
                except SpoliaError as trouble:
                    done.outcome, done.error = "not_undone", str(trouble)
            break
    if not changes:
        raise InvalidRequest("nothing to change; send kv_policy, kv_memory, attach or detach", param="kv_policy")
    return changes


def _acts(
    served: ServedModel, admin: CacheAdmin, wanted: ConfigChange
) -> Iterator[tuple[Change, Callable[[], Awaitable[Undo]]]]:
    """Each change, and what makes it and says how to undo it."""
    engine = served.engine
    if wanted.kv_policy is not None:
        policy = Change("kv_policy", None, wanted.kv_policy)
        yield policy, partial(_use_policy, admin, policy)
    if wanted.kv_memory is not None:
        memory = Change("kv_memory", None, wanted.kv_memory)
        yield memory, partial(_resize, engine, memory)
    for name in wanted.detach:
        yield Change("detach", name, None), partial(_detach, engine, name)
    for spec in wanted.attach:
        yield Change("attach", None, _name(spec)), partial(_attach, engine, spec)


async def _use_policy(admin: CacheAdmin, change: Change) -> Undo:
    if change.after not in POLICIES:  # a path to import is for whoever starts the server
        allowed = ", ".join(POLICIES)
        raise InvalidRequest(f"kv_policy is {change.after!r}; it must be one of {allowed}", param="kv_policy")
    before = change.before = await admin.use_policy(change.after)

    async def undo() -> None:
        await admin.use_policy(before)

    return undo


async def _resize(engine: AsyncEngine, change: Change) -> Undo:
    sizes = engine.sizes
    before = change.before = await engine.call(lambda core: sizes.num_bytes(core.cache))
    await engine.resize(change.after)

    async def undo() -> None:
        await engine.resize(before)

    return undo


async def _detach(engine: AsyncEngine, name: str) -> Undo:
    uses: list[TierUse] = await engine.call(lambda core: list(core.tiering.uses))
    index = next((index for index, use in enumerate(uses) if use.tier.name == name), len(uses))
    await engine.detach_tier(name)

    async def undo() -> None:
        await engine.attach_tier(uses[index], index)

    return undo


async def _attach(engine: AsyncEngine, spec: AttachTier) -> Undo:
    use = await asyncio.to_thread(_open, engine, spec)
    # Memory is the fastest: it comes first.
    await engine.attach_tier(use, 0 if spec.host is not None else None)

    async def undo() -> None:
        await engine.detach_tier(use.tier.name)

    return undo


def _open(engine: AsyncEngine, spec: AttachTier) -> TierUse:
    """
    Raises:
        InvalidRequest: it says nothing that can be opened.
    """
    if sum(way is not None for way in (spec.disk, spec.host, spec.remote)) != 1:
        raise InvalidRequest("a tier to attach has one of disk, host and remote", param="attach")
    if any(size is not None and size < 1 for size in (spec.host, spec.size)):
        raise InvalidRequest("the size of a tier is a number of bytes above 0", param="attach")
    config = engine.config
    if spec.host is not None:
        tier = Tier(_name(spec), HostBackend(spec.host), sealer=Checksum())
        return TierUse(tier, spec.write or "write_back", is_exclusive=True)
    if spec.disk is not None:
        if "\0" in spec.disk or not Path(spec.disk).is_absolute():
            raise InvalidRequest(f"disk is {spec.disk!r}; give an absolute path", param="attach")
        backend = FolderBackend(spec.disk, spec.size, ttl_s=config.kv_ttl_s)
        return TierUse(Tier(_name(spec), backend, sealer=engine.sealer), spec.write or config.kv_write)
    if "://" not in (spec.remote or ""):  # a path to import is for whoever starts the server
        raise InvalidRequest(f"remote is {spec.remote!r}; give a URL", param="attach")
    remote = open_remote(spec.remote or "", ttl_s=config.kv_ttl_s)
    return TierUse(Tier(_name(spec), remote, sealer=engine.sealer), spec.write or config.kv_write)


def _name(spec: AttachTier) -> str:
    return spec.name or ("host" if spec.host is not None else "disk" if spec.disk is not None else "remote")
