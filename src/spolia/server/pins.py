"""Pins, which outlive the engine that they were put in: see `Pins`."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from spolia.engine import AsyncEngine, Pin, SamplingParams
from spolia.errors import Overloaded, SpoliaError
from spolia.server.logs import log_fields
from spolia.server.served import ServedModel
from spolia.server.shelf import Shelf

__all__ = ["PinCard", "Pins"]

logger = logging.getLogger("spolia.server")


@dataclass(frozen=True, slots=True)
class _Kept:
    """A pin of an engine that has ended; `until` by `time.monotonic`."""

    id: int
    cache_salt: str
    exact_kv: bool
    token_ids: NDArray[np.int32]
    until: float | None

    @property
    def ttl_s(self) -> float | None:
        return None if self.until is None else self.until - time.monotonic()


class PinCard(NamedTuple):
    """What is told of a pin; `exact_kv`: only requests for exact KV have what it holds."""

    id: int
    num_tokens: int
    exact_kv: bool


class Pins:
    """Puts pins, and puts them again when a model that was unloaded is back.

    What they hold is then brought up from the tiers, or computed, while the model answers already: a pin was asked for
    so that nobody waits for that prompt. Event loop only.

    Args:
        shelf: the model stays on it until its pins hold again.
    """

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        self._kept: dict[ServedModel, list[_Kept]] = {}
        self._leaving = asyncio.Lock()  # who asks for the pins of an engine that is ending has to wait
        self._tasks: set[asyncio.Task[None]] = set()

    async def put(
        self,
        served: ServedModel,
        token_ids: Sequence[int],
        cache_salt: str,
        ttl_s: float | None,
        *,
        exact_kv: bool = False,
    ) -> PinCard:
        """Keep what is cached of a prompt.

        Args:
            exact_kv: what requests for exact KV have of it.

        Raises:
            InvalidRequest: there is no exact KV here.
            Overloaded: pins have no room for it.
        """
        engine = served.engine
        namespace = engine.namespace_for(cache_salt, exact_kv=exact_kv)
        # Its label is the salt, which a namespace does not tell.
        pin = await engine.call(lambda core: core.cache.pin(namespace, token_ids, ttl_s, label=cache_salt))
        if pin is None:
            raise Overloaded(
                "pins may take half of the cache, and be a few thousand; with this one they would be more: lift others"
            )
        return PinCard(pin.id, pin.num_tokens, _is_exact(engine, pin))

    async def leave(self, served: ServedModel, engine: AsyncEngine) -> None:
        """Its engine is about to end: remember its pins.

        Raises:
            SpoliaError: it has failed, and can tell nothing.
        """
        async with self._leaving:
            pinned = await engine.call(lambda core: core.cache.pinned())
            self._kept[served] = [
                _Kept(pin.id, pin.label, _is_exact(engine, pin), ids, pin.until) for pin, ids in pinned
            ]

    async def of(self, served: ServedModel, cache_salt: str) -> list[PinCard]:
        """Those of a salt, of both kinds; of a model that is not in memory, those that it will have again.

        Raises:
            NotReady: it is loading, or has failed.
        """
        if served.state == "unloaded":
            async with self._leaving:
                kept = [pin for pin in self._kept.get(served, ()) if pin.ttl_s is None or pin.ttl_s > 0]
            return [PinCard(pin.id, len(pin.token_ids), pin.exact_kv) for pin in kept if pin.cache_salt == cache_salt]
        engine = served.engine
        namespaces = engine.namespaces(cache_salt)
        pins = await engine.call(lambda core: core.cache.pins())
        return [PinCard(pin.id, pin.num_tokens, _is_exact(engine, pin)) for pin in pins if pin.namespace in namespaces]

    async def lift(self, served: ServedModel, pin_id: int) -> None:
        """One of `of`: what it held goes when its room is wanted."""
        if served.state == "unloaded":
            self._kept[served] = [pin for pin in self._kept.get(served, ()) if pin.id != pin_id]
        else:
            await served.engine.call(lambda core: core.cache.unpin(pin_id))

    async def put_again(self, served: ServedModel) -> None:
        """Its next engine is there: its pins are, too, and hold what they held as soon as that is there again."""
        kept = self._kept.pop(served, [])
        for pin in kept:
            await self._put_again(served, pin)
        if kept:
            self._shelf.hold(served)
            # Nobody's request: whoever made it load does not pay for this.
            task = asyncio.get_running_loop().create_task(self._fill(served, kept), context=contextvars.Context())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _fill(self, served: ServedModel, kept: Sequence[_Kept]) -> None:
        try:
            for pin in kept:
                engine = served.engine
                once = SamplingParams(max_tokens=1, temperature=0.0, exact_kv=pin.exact_kv)
                async with engine.generate(pin.token_ids.tolist(), once, cache_salt=pin.cache_salt) as stream:
                    await stream.output()
                await self._put_again(served, pin, only_if_there=True)
        except SpoliaError as error:
            log_fields(logger, "pins hold less than before", {"model": served.name, "reason": str(error)})
        finally:
            self._shelf.release(served)

    async def _put_again(self, served: ServedModel, kept: _Kept, *, only_if_there: bool = False) -> None:
        ttl_s = kept.ttl_s
        if ttl_s is not None and ttl_s <= 0:
            return
        engine = served.engine
        namespace = engine.namespace_for(kept.cache_salt, exact_kv=kept.exact_kv)
        if only_if_there:
            there = await engine.call(lambda core: core.cache.pins(namespace))
            if kept.id not in [pin.id for pin in there]:
                return
        pin = await engine.call(
            lambda core: core.cache.pin(namespace, kept.token_ids, ttl_s, pin_id=kept.id, label=kept.cache_salt)
        )
        if pin is None:
            log_fields(logger, "pin lifted", {"model": served.name, "pin": kept.id, "reason": "the cache is smaller"})


def _is_exact(engine: AsyncEngine, pin: Pin) -> bool:
    """Whether usual requests have nothing of it: never where an engine rounds nothing."""
    return pin.namespace != engine.namespace(pin.label)
