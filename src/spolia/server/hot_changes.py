"""Changing a cache while it is used: see `apply_changes`."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec

from spolia.engine import AsyncEngine, CacheAdmin, EngineConfig
from spolia.errors import InvalidRequest, SpoliaError
from spolia.kvcache import POLICIES
from spolia.server.served import ServedModel
from spolia.sizes import parse_bytes
from spolia.tiers import (
    Checksum,
    FolderBackend,
    HandedDown,
    HostBackend,
    Tier,
    TierUse,
    hand_down,
    held_alone,
    open_remote,
    still_there,
)

__all__ = ["Change", "ConfigChange", "HotChanges", "apply_changes", "describe", "describe_unloaded"]

logger = logging.getLogger("spolia.server")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")

Undo = Callable[[], Awaitable[None]]

Retired: TypeAlias = tuple[TierUse, "Change"]
"""A tier that is to be detached at last, and what is told of it."""

_CARRIED = 64
"""Blocks that go from a host tier to the one that takes its place, at a time."""


class AttachTier(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A tier to be: `disk` (a folder), `host` (bytes of memory) or `remote` (a URL), just one of them.

    Without a `name` it is called after what it is, "disk2" if there is a "disk".
    """

    name: str | None = None
    disk: str | None = None
    host: int | str | None = None
    remote: str | None = None
    size: int | str | None = None
    write: Literal["write_through", "write_back", "selective"] | None = None


class ConfigChange(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What to change, in this order. Sizes are bytes, or text like "2GiB"."""

    model: str | None = None
    kv_policy: str | None = None
    kv_memory: int | str | None = None
    detach: list[str] = []
    attach: list[AttachTier] = []


class HotChanges:
    """Makes changes one request's after the other's, to their end, and again when a model has been away.

    A client that goes does not end what it asked for half-way, and who comes next waits until that is over.
    Event loop only.

    Args:
        free_bytes: so much more KV all models may take now; None: as far as there is memory.
    """

    def __init__(self, free_bytes: Callable[[], int | None]) -> None:
        self._free_bytes = free_bytes
        self._changing = asyncio.Lock()
        self._made: dict[ServedModel, list[ConfigChange]] = {}
        self._tasks: set[asyncio.Task[list[Change]]] = set()  # nobody else may know those whose client has gone

    async def make(self, served: ServedModel, admin: CacheAdmin, wanted: ConfigChange) -> list[Change]:
        """As `apply_changes`, when those before are made; cancelling it does not end them.

        Raises:
            InvalidRequest: nothing is to be changed.
        """
        task = asyncio.ensure_future(self._make(served, admin, wanted))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def make_again(self, served: ServedModel, admin: CacheAdmin) -> None:
        """It has been loaded: what was changed before it was unloaded holds again."""
        async with self._changing:
            for wanted in self._made.get(served, ()):
                for change in await apply_changes(served, admin, wanted, may_grow_bytes=self._free_bytes()):
                    if change.error is not None:
                        told = (served.name, change.change, change.error)
                        logger.warning("model=%s %s is as at the start again: %s", *told)

    async def _make(self, served: ServedModel, admin: CacheAdmin, wanted: ConfigChange) -> list[Change]:
        async with self._changing:
            changes = await apply_changes(served, admin, wanted, may_grow_bytes=self._free_bytes())
            if all(change.error is None for change in changes):
                self._made.setdefault(served, []).append(wanted)
            return changes


class Change(msgspec.Struct):
    """One change and what became of it: "done", "failed", or, for those that were done before one failed, "undone".

    Attributes:
        handed_down: of a tier that was detached, what became of the blocks that it alone had.
        error: why it failed, or could not be undone.
    """

    change: str
    before: Any
    after: Any
    outcome: Literal["done", "failed", "undone", "not_undone"] = "done"
    handed_down: HandedDown | None = None
    error: str | None = None


def describe_unloaded(served: ServedModel) -> dict[str, Any]:
    """The settings that a model will be loaded with; None is for what is measured then."""
    config = EngineConfig() if served.source is None else served.source.config
    tiers = {
        "host": ("write_back", config.kv_host, config.kv_host),
        "disk": (config.kv_write, config.kv_disk, config.kv_disk_size),
        "remote": (config.kv_write, config.kv_remote, None),
    }
    return {
        "object": "cache.config",
        "model": served.name,
        "status": "unloaded",
        "kv_policy": config.kv_policy,
        "kv_memory": config.kv_memory,
        "kv_memory_max": None,
        "max_model_len": config.max_context,
        "kv_dtype": config.kv_dtype,
        "kv_fetch": config.kv_fetch,
        "tiers": [
            {
                "name": name,
                "state": "unloaded",
                "reason": f"it is there when model {served.name} is loaded",
                "write": write,
                "is_exclusive": name == "host",
                "num_bytes": None,
                "capacity_bytes": size,
            }
            for name, (write, place, size) in tiers.items()
            if place is not None
        ],
    }


async def describe(served: ServedModel, engine: AsyncEngine, *, may_grow_bytes: int | None = None) -> dict[str, Any]:
    """A cache's settings as they are now.

    Args:
        may_grow_bytes: as `apply_changes` has it.
    """
    sizes = engine.sizes
    kv_memory, most, policy, uses = await engine.call(
        lambda core: (
            sizes.num_bytes(core.cache),
            sizes.most_bytes(core.cache),
            core.cache.policy.name,
            core.tiering.tiers.uses,
        )
    )
    if may_grow_bytes is not None:
        most = min(most, kv_memory + max(0, may_grow_bytes))
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
        "status": "ready",
        "kv_policy": policy,
        "kv_memory": kv_memory,
        "kv_memory_max": max(kv_memory, most),
        "max_model_len": engine.context_tokens,
        "kv_dtype": engine.config.kv_dtype,
        "kv_fetch": engine.config.kv_fetch,
        "tiers": tiers,
    }


async def apply_changes(
    served: ServedModel, admin: CacheAdmin, wanted: ConfigChange, *, may_grow_bytes: int | None = None
) -> list[Change]:
    """Make changes one after the other; if one fails, for whatever reason, those before it are undone, the last first.

    What was evicted for a smaller cache is not brought back by undoing. Whoever is cancelled meanwhile would leave some
    made and others not: see `HotChanges`.

    Args:
        may_grow_bytes: by so much more KV at most; None: as far as there is memory.
    """
    changes: list[Change] = []
    undos: list[tuple[Change, Undo]] = []
    retired: list[Retired] = []
    for change, act in _acts(served, admin, wanted, may_grow_bytes, retired):
        changes.append(change)
        try:
            undos.append((change, await act()))
        except Exception as error:
            change.outcome, change.error = "failed", _told(error)
            for done, undo in reversed(undos):
                try:
                    await undo()
                    done.outcome = "undone"
                except Exception as trouble:
                    done.outcome, done.error = "not_undone", _told(trouble)
            break
    else:
        for use, _ in retired:  # what a tier has is given up only when no change can fail any more
            await served.engine.call(lambda core, use=use: core.tiering.tiers.detach(use))  # type: ignore[misc]
    if not changes:
        raise InvalidRequest("nothing to change; send kv_policy, kv_memory, attach or detach", param="kv_policy")
    return changes


def _told(error: Exception) -> str:
    """What to say of it; of what nobody foresaw, the log has more."""
    if isinstance(error, SpoliaError):
        return str(error)
    logger.error("a change of the cache failed", exc_info=error)
    return f"{type(error).__name__}: {error}"


def _acts(
    served: ServedModel, admin: CacheAdmin, wanted: ConfigChange, may_grow_bytes: int | None, retired: list[Retired]
) -> Iterator[tuple[Change, Callable[[], Awaitable[Undo]]]]:
    """Each change, and what makes it and says how to undo it.

    Args:
        retired: gets the tiers that are to be detached at last.
    """
    engine = served.engine
    if wanted.kv_policy is not None:
        policy = Change("kv_policy", None, wanted.kv_policy)
        yield policy, partial(_use_policy, admin, policy)
    if wanted.kv_memory is not None:
        memory = Change("kv_memory", None, wanted.kv_memory)
        yield memory, partial(_resize, engine, memory, may_grow_bytes)
    for name in wanted.detach:
        detach = Change("detach", name, None)
        yield detach, partial(_detach, engine, detach, retired)
    for spec in wanted.attach:
        attach = Change("attach", None, spec.name)
        yield attach, partial(_attach, engine, spec, attach, retired)


async def _use_policy(admin: CacheAdmin, change: Change) -> Undo:
    if change.after not in POLICIES:  # a path to import is for whoever starts the server
        allowed = ", ".join(POLICIES)
        raise InvalidRequest(f"kv_policy is {change.after!r}; it must be one of {allowed}", param="kv_policy")
    before = await admin.use_policy(change.after)
    change.before = before.name

    async def undo() -> None:
        await admin.use_policy(before)

    return undo


async def _resize(engine: AsyncEngine, change: Change, may_grow_bytes: int | None) -> Undo:
    sizes = engine.sizes
    before = change.before = await engine.call(lambda core: sizes.num_bytes(core.cache))
    wanted = _bytes(change.after, "kv_memory")
    if may_grow_bytes is not None and wanted - before > max(0, may_grow_bytes):
        raise InvalidRequest(
            f"kv_memory is {wanted}, {wanted - before} more than now, and of the server's --memory "
            f"{max(0, may_grow_bytes)} are free; ask for {before + max(0, may_grow_bytes)} at most, or unload a model",
            param="kv_memory",
        )
    await engine.resize(wanted)
    # Whole blocks.
    change.after = await engine.call(lambda core: sizes.num_bytes(core.cache))

    async def undo() -> None:
        await engine.resize(before)

    return undo


async def _detach(engine: AsyncEngine, change: Change, retired: list[Retired]) -> Undo:
    use, index, change.handed_down = await engine.retire_tier(change.before)
    retired.append((use, change))

    async def undo() -> None:
        await engine.call(lambda core: core.tiering.tiers.reinstate(use, index))

    return undo


async def _attach(engine: AsyncEngine, spec: AttachTier, change: Change, retired: Sequence[Retired]) -> Undo:
    tiers = await engine.call(lambda core: [use.tier for use in core.tiering.tiers.uses])
    there = {tier.name for tier in tiers}
    if spec.disk is not None:
        _check_apart(Path(spec.disk), tiers)
    use = await asyncio.to_thread(_open, engine, spec, there)
    change.after = use.tier.name
    try:
        # Memory is the fastest: it comes first.
        await engine.attach_tier(use, 0 if spec.host is not None else None)
    except Exception:
        await asyncio.to_thread(use.tier.close)
        raise

    async def undo() -> None:
        await engine.detach_tier(use.tier.name)

    if spec.host is not None:
        for before, detach in retired:
            told = detach.handed_down
            is_dropped = told is not None and told.to is None and told.num_dropped_blocks != 0
            if is_dropped and isinstance(before.tier.backend, HostBackend):
                try:
                    detach.handed_down = await _carry_over(engine, before.tier, use.tier)
                except Exception:
                    await undo()
                    raise
    return undo


async def _carry_over(engine: AsyncEngine, source: Tier, target: Tier) -> HandedDown:
    """Memory takes the place of memory: what fits of what it had, the last used, is there again."""
    capacity = target.stats.health.capacity_bytes or 0
    entries = await asyncio.to_thread(held_alone, source) or []
    fitting = [entry for entry in entries if entry.num_bytes <= capacity]
    for start in range(0, len(fitting), _CARRIED):
        act = partial(hand_down, source, fitting[start : start + _CARRIED])
        done = await engine.call(lambda core, act=act: core.tiering.tiers.mover.call(target, act))  # type: ignore[misc]
        await asyncio.wrap_future(done)
    there = await asyncio.to_thread(still_there, target, [entry.key for entry in fitting])
    kept = [entry for entry in fitting if entry.key in there]
    num_bytes, num_kept_bytes = (sum(entry.num_bytes for entry in some) for some in (entries, kept))
    return HandedDown(target.name, len(kept), num_kept_bytes, len(entries) - len(kept), num_bytes - num_kept_bytes)


def _open(engine: AsyncEngine, spec: AttachTier, there: Collection[str]) -> TierUse:
    """
    Args:
        there: names of the tiers that there are.

    Raises:
        InvalidRequest: it says nothing that can be opened.
    """
    if sum(way is not None for way in (spec.disk, spec.host, spec.remote)) != 1:
        raise InvalidRequest("a tier to attach has one of disk, host and remote", param="attach")
    host, size = (None if given is None else _bytes(given, "attach") for given in (spec.host, spec.size))
    if any(number is not None and number < 1 for number in (host, size)):
        raise InvalidRequest("the size of a tier is a number of bytes above 0", param="attach")
    config, name = engine.config, _name(spec, there)
    if host is not None:
        tier = Tier(name, HostBackend(host), sealer=Checksum())
        return TierUse(tier, spec.write or "write_back", is_exclusive=True)
    if spec.disk is not None:
        if "\0" in spec.disk or not Path(spec.disk).is_absolute():
            raise InvalidRequest(f"disk is {spec.disk!r}; give an absolute path", param="attach")
        backend = FolderBackend(spec.disk, size, ttl_s=config.kv_ttl_s)
        return TierUse(Tier(name, backend, sealer=engine.sealer), spec.write or config.kv_write)
    if "://" not in (spec.remote or ""):  # a path to import is for whoever starts the server
        raise InvalidRequest(f"remote is {spec.remote!r}; give a URL", param="attach")
    remote = open_remote(spec.remote or "", ttl_s=config.kv_ttl_s)
    return TierUse(Tier(name, remote, sealer=engine.sealer), spec.write or config.kv_write)


def _check_apart(folder: Path, tiers: Sequence[Tier]) -> None:
    """
    Raises:
        InvalidRequest: a tier is there, above it or below: their sizes would contradict each other.
    """
    place = folder.resolve()
    for tier in tiers:
        if isinstance(tier.backend, FolderBackend):
            other = tier.backend.folder.resolve()
            if place.is_relative_to(other) or other.is_relative_to(place):
                raise InvalidRequest(
                    f"disk is {str(folder)!r}, and tier {tier.name} is in {str(other)!r}; give another folder, or "
                    "detach that tier first",
                    param="attach",
                )


def _name(spec: AttachTier, there: Collection[str]) -> str:
    """
    Raises:
        InvalidRequest: a name that can be none of a tier.
    """
    if spec.name is not None:
        if spec.name == "device" or _NAME.fullmatch(spec.name) is None:
            raise InvalidRequest(
                f"a tier cannot be called {spec.name!r}; use letters, digits, '-', '_' and '.', and not \"device\", "
                "which is the engine's own memory",
                param="attach",
            )
        return spec.name
    kind = "host" if spec.host is not None else "disk" if spec.disk is not None else "remote"
    return next(name for number in count(1) if (name := kind if number == 1 else f"{kind}{number}") not in there)


def _bytes(size: int | str, param: str) -> int:
    """
    Raises:
        InvalidRequest: text that is no size.
    """
    try:
        return size if isinstance(size, int) else parse_bytes(size)
    except ValueError as error:
        raise InvalidRequest(f"{param}: {error}", param=param) from None
