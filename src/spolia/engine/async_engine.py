"""The engine for asyncio programs: requests in, streams out, computing on a thread of its own."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from spolia.engine.assembly import Engine, build_engine
from spolia.engine.beams import BeamRun
from spolia.engine.config import EngineConfig
from spolia.engine.contrastive import ContrastiveRun
from spolia.engine.core import EngineCore, Observer
from spolia.engine.embedding import Embedding, EmbeddingRun, Pooling
from spolia.engine.fairness import Tenant
from spolia.engine.kv_files import put_in, take_out
from spolia.engine.news import CacheNews, cache_news
from spolia.engine.outputs import Delta, EngineStats, RequestOutput
from spolia.engine.request import Request
from spolia.engine.resizing import PoolSizes
from spolia.engine.session_files import SessionFiles
from spolia.engine.sessions import Session, SessionStore
from spolia.engine.storage import make_sealer
from spolia.engine.thread import EngineThread, RetiredTier
from spolia.errors import NotReady, SpoliaError
from spolia.generation import BeamParams, ContrastiveParams, GreenList, SamplingParams
from spolia.kvcache import CacheStats, History, RetentionPolicy, Wish, namespace_key
from spolia.models import Model
from spolia.tiers import HandedDown, TierUse, payload_of, read_archive, write_archive

__all__ = ["AsyncEngine", "TokenStream"]

T = TypeVar("T")

_NUM_EXPECTED = 8
"""Sessions of an earlier process that are expected to go on."""

_MAX_SALTS = 1 << 12
"""That are remembered, for what is done to the KV of all."""

_NO_ROOM_S = 0.02
"""Until it is tried again whether running requests have left room in the cache for an input."""


class AsyncEngine:
    """Serves many requests at a time to the coroutines of any event loop.

    Attributes:
        sealer: what closes all that leaves memory.
        sessions: conversations that are kept; with `kv_disk`, those of earlier processes, too.

    Args:
        model: a source as `models.load` takes it, a loaded model, or a whole `Engine` that was built elsewhere.
        config: settings; None: all measured.
        observer: told of each step and each finished request, on the engine's thread. It must be quick.

    Raises:
        ModelError: the model cannot be had or read.
        InvalidRequest: a setting that is impossible with this model.
    """

    def __init__(
        self,
        model: str | Path | Model | Engine,
        config: EngineConfig | None = None,
        *,
        observer: Observer | None = None,
    ) -> None:
        self._engine = model if isinstance(model, Engine) else build_engine(model, config, observer=observer)
        self._thread: EngineThread[_Mailbox] = EngineThread(self._engine.core, _deliver)
        self._salts: dict[str, None] = {"": None}  # the last one used at the end
        # By id of the loop, which lives as long as its outbox, and that as long as its streams.
        self._outboxes: weakref.WeakValueDictionary[int, _Outbox] = weakref.WeakValueDictionary()
        weakref.finalize(self, self._thread.close)  # the thread ends with its owner, or before the interpreter does
        self.sessions = SessionStore(
            clock=time.monotonic, closed=_Closed(weakref.ref(self)), files=_session_files(self._engine)
        )
        self._admission = self._engine.admission
        self.sealer = make_sealer(self._engine.config)
        self.sessions.loaded.add_done_callback(partial(_expect_latest, weakref.ref(self)))

    @property
    def model(self) -> Model:
        """For its name, tokenizer and chat template."""
        return self._engine.model

    @property
    def weights_bytes(self) -> int:
        """Memory that the weights take, as they are packed."""
        return self._engine.core.executable.packed_bytes

    @property
    def hidden_size(self) -> int:
        """Values of a vector that `embed` makes."""
        return self._engine.core.executable.hidden_size

    @property
    def fingerprint(self) -> str:
        """Of all that an answer depends on besides its request."""
        return self._engine.fingerprint

    @property
    def config(self) -> EngineConfig:
        """The settings as resolved at start: nothing that was to be measured is left None."""
        return self._engine.config

    @property
    def sizes(self) -> PoolSizes:
        """Of the KV pools, and how far they can grow."""
        return self._engine.sizes

    @property
    def stats(self) -> EngineStats:
        """Queue lengths, counters and block ledger as of the last step. Costs nothing; any thread."""
        return self._engine.core.stats

    @property
    def cache_stats(self) -> CacheStats:
        """The cache's own counters, which the engine's thread goes on counting up: read, and do not keep."""
        return self._engine.core.cache.stats

    @property
    def policy_type(self) -> type[RetentionPolicy]:
        """Of the cache's retention policy now. Any thread."""
        return type(self._engine.core.cache.policy)

    @property
    def most_blocks(self) -> int:
        """Blocks of the first cache group for which memory was reserved."""
        return self._engine.core.cache.capacity[0]

    @property
    def block_size(self) -> int:
        """Tokens of a block of the cache."""
        return self._engine.core.cache.block_size

    @property
    def next_event_number(self) -> int:
        """How many events the cache has had, so that who follows them need not ask in vain. Any thread."""
        return self._engine.core.cache.next_event_number

    def news(self, since: int | None) -> Future[CacheNews]:
        """What the cache has stored and given up from event `since` on; see `cache_news`. Any thread.

        Raises:
            Overloaded, Bug: as `generate`.
        """
        return self._thread.call(lambda core: cache_news(core, since))

    @property
    def failure(self) -> SpoliaError | None:
        """Why no request can be answered any more; None while all is well."""
        return self._thread.failure

    def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        cache_salt: str = "",
        wishes: Sequence[Wish] = (),
        tenant: Tenant | None = None,
        history: History | None = None,
        is_part: bool = False,
    ) -> TokenStream:
        """Submit a request. Returns at once; call it on the event loop that will read the stream.

            async with engine.generate("Name three rivers.", SamplingParams(max_tokens=50)) as stream:
                async for delta in stream:
                    print(delta.text, end="")

        Args:
            prompt: text, or token ids as they are.
            request_id: unique among the requests in flight; None makes one.
            cache_salt: only requests with the same salt share KV.
            wishes: how long its KV is worth keeping, by token range.
            tenant: who it is for; None where nobody is told apart.
            history: what is known of the prompt.
            is_part: its prompt is another request's, which is counted there.

        Raises:
            InvalidRequest: it can never be answered; nothing was submitted.
            Overloaded: the engine is draining or closed.
            Bug: the engine has failed; see `failure`.
        """
        request = self._admission.admit(
            prompt,
            params,
            request_id=request_id,
            cache_salt=cache_salt,
            wishes=wishes,
            tenant=tenant,
            history=history,
            is_part=is_part,
        )
        self._salts.pop(cache_salt, None)
        self._salts[cache_salt] = None
        if len(self._salts) > _MAX_SALTS:
            del self._salts[next(iter(self._salts))]
        mailbox = _Mailbox(self._outbox())
        self._thread.submit([(request, mailbox)])
        return TokenStream(request, mailbox, self._thread.abort)

    def beam_search(
        self,
        prompt: str | Sequence[int],
        params: BeamParams | None = None,
        *,
        request_id: str | None = None,
        cache_salt: str = "",
        tenant: Tenant | None = None,
        history: History | None = None,
    ) -> AsyncIterator[BeamRun]:
        """As `LLM.beam_search`: the search, after each of its steps; with the last of them it is over.

        It is admitted at once and goes on while it is read. Cancelling who waits for a step ends it.

        Args:
            request_id: of the first of its requests, which computes the prompt.

        Raises:
            InvalidRequest: the prompt and `max_tokens` do not fit the context.
            Overloaded, Bug: as `generate`, while it is read.
        """
        run = BeamRun(self._admission, prompt, params or BeamParams())

        async def steps() -> AsyncIterator[BeamRun]:
            while not run.is_over:
                streams = [
                    self.generate(
                        ids,
                        each,
                        request_id=None if is_part else request_id,
                        cache_salt=cache_salt,
                        tenant=tenant,
                        is_part=is_part,
                        history=history,
                    )
                    for ids, each, is_part in run.requests()
                ]
                try:
                    run.take([_whole(await stream.output()) for stream in streams])
                finally:
                    for stream in streams:
                        await stream.aclose()
                yield run

        return steps()

    def contrastive_search(
        self,
        prompt: str | Sequence[int],
        params: ContrastiveParams | None = None,
        *,
        cache_salt: str = "",
        tenant: Tenant | None = None,
        history: History | None = None,
    ) -> AsyncIterator[ContrastiveRun]:
        """As `LLM.contrastive_search`: the search, after each token, which is its `delta`; with the last it is over.

        It is admitted at once and goes on while it is read. Cancelling who waits for a token ends it.

        Raises:
            InvalidRequest, ModelError: as `LLM.contrastive_search`; the latter while it is read.
            Overloaded, Bug: as `generate`, while it is read.
        """
        run = ContrastiveRun(
            self._admission, prompt, params or ContrastiveParams(), cache_salt=cache_salt, history=history
        )

        async def tokens() -> AsyncIterator[ContrastiveRun]:
            while run.prompt.states is None:
                if not await self.call(run.prompt.step):
                    await asyncio.sleep(_NO_ROOM_S)
            await asyncio.to_thread(run.begin)  # long prompts take a while to be measured; streams do not wait for it
            while not run.is_over:
                ids, one = run.request()
                async with self.generate(ids, one, cache_salt=cache_salt, tenant=tenant, is_part=True) as stream:
                    _whole(await stream.output())
                candidates = await asyncio.to_thread(run.candidates)
                vectors = await self.embed(candidates, cache_salt=cache_salt, is_part=True)
                await asyncio.to_thread(run.take, vectors)
                yield run

        return tokens()

    def _outbox(self) -> _Outbox:
        """The running loop's."""
        loop = asyncio.get_running_loop()
        outbox = self._outboxes.get(id(loop))
        if outbox is None:
            outbox = self._outboxes[id(loop)] = _Outbox(loop, self.config.stream_interval_ms / 1e3)
        return outbox

    async def prepare(self, params: SamplingParams) -> None:
        """Make on another thread what `params` ask for and takes a while, so that `generate` finds it made.

        That is the form of an answer, and the table of a watermark's key.

        Raises:
            InvalidRequest: the form cannot be compiled.
        """
        form = params.structured_outputs
        if form is not None:
            await asyncio.to_thread(self._admission.vocabulary.grammars.compile, form)
        if params.watermarking_config is not None:
            await asyncio.to_thread(GreenList, **params.watermarking_config)

    def warm_forms(self, *, after_s: float = 0.0) -> threading.Timer:
        """Make what the first answer of a form would wait for, on a thread of its own, in so many seconds.

        A request that comes sooner makes it itself, or waits for the thread.
        """
        timer = threading.Timer(after_s, self._admission.vocabulary.grammars.warm)
        timer.name, timer.daemon = "spolia-forms", True
        timer.start()
        return timer

    def namespace(self, cache_salt: str = "") -> bytes:
        """What requests with this salt share, and no others."""
        return self._admission.namespace(cache_salt)

    def exact_namespace(self, cache_salt: str = "") -> bytes:
        """What requests with this salt share that want exact KV; the same where tiers keep all KV as it is."""
        return self._admission.namespace_for(cache_salt, is_exact=True)

    def namespace_for(self, cache_salt: str, *, exact_kv: bool) -> bytes:
        """What requests with this salt share that ask for exact KV, or that do not.

        Raises:
            InvalidRequest: there is no exact KV here.
        """
        if exact_kv:
            self._admission.require_exact_kv()
        return self._admission.namespace_for(cache_salt, is_exact=exact_kv)

    def namespace_of(self, params: SamplingParams, cache_salt: str) -> bytes:
        """Where a request with these parameters looks for KV."""
        return self._admission.namespace_of(params, cache_salt)

    def search_namespace(self, cache_salt: str) -> bytes:
        """Where searches look for KV: exact KV, where there is any."""
        return self._admission.namespace_for(cache_salt, is_exact=self._admission.has_exact_kv)

    def namespaces(self, cache_salt: str = "") -> frozenset[bytes]:
        """All that requests with this salt share, those that want exact KV and the others."""
        return frozenset({self.namespace(cache_salt), self.exact_namespace(cache_salt)})

    @property
    def salts(self) -> frozenset[str]:
        """Those that requests had last, up to a limit: no namespace tells its own."""
        return frozenset(self._salts)

    def spend(self, token_ids: Sequence[int], *, cache_salt: str = "") -> None:
        """Nobody goes on from these tokens any more: what of their KV, exact and usual, nobody else uses goes first.

        Does not wait.

        Raises:
            Overloaded, Bug: as `generate`.
        """
        namespaces = self.namespaces(cache_salt)

        def spend(core: EngineCore) -> None:
            for namespace in namespaces:
                core.cache.spend(namespace, token_ids)

        self._thread.call(spend)

    def expect(self, sessions: Sequence[Session]) -> None:
        """Likely, these sessions go on next: what lies in tiers of their KV is brought up, the first first.

        What there is of exact KV as well, after the other: a session does not say how it goes on. Only into memory that
        is free, and only while no request waits for a tier. Does not wait.
        """
        wanted = [
            (self.namespace(session.cache_salt), self.exact_namespace(session.cache_salt), tuple(session.token_ids))
            for session in sessions
        ]

        def bring(core: EngineCore) -> None:
            if core.tiering.tiers.uses:
                for usual, exact, token_ids in wanted:
                    core.tiering.transfers.bring(usual, token_ids)
                    if exact != usual:
                        core.tiering.transfers.bring(exact, token_ids, is_exact=True)

        with suppress(SpoliaError):  # an engine that has ended brings nothing
            self._thread.call(bring)

    def abort(self, request_id: str) -> None:
        """End a request wherever it is: waiting, in its prompt, or generating.

        Its stream ends with finish_reason "abort", and its blocks are free or evictable before the next step. Requests
        that have ended are ignored.
        """
        self._thread.abort([request_id])

    async def embed(
        self,
        prompts: Sequence[str | Sequence[int]],
        *,
        pooling: Pooling = "last",
        cache_salt: str = "",
        truncate: bool = False,
        is_part: bool = False,
        on_step: Callable[[int], None] = lambda _: None,
    ) -> list[Embedding]:
        """As `LLM.embed`. Other requests go on meanwhile: between two steps, these inputs have one.

        Who cancels it gets it back when the step that is being computed has ended.

        Args:
            is_part: the inputs are a part of another request, and not counted as prompts.
            on_step: told how many of all tokens are done, after each step, the last one of a cancelled call included.

        Raises:
            InvalidRequest, ModelError: as `LLM.embed`.
            Overloaded, Bug: as `generate`.
        """
        admission = self._admission
        inputs = await asyncio.to_thread(  # thousands take a while
            lambda: [admission.check_input(prompt, truncate=truncate) for prompt in prompts]
        )
        # Vectors are compared with those of another day, so nothing in them may have been rounded.
        namespace = admission.namespace_for(cache_salt, is_exact=True)
        run = EmbeddingRun(inputs, namespace=namespace, pooling=pooling, is_part=is_part)
        while (embeddings := run.embeddings) is None:
            step = asyncio.ensure_future(self.call(run.step))
            try:
                num_tokens = await asyncio.shield(step)
            except asyncio.CancelledError:
                await step  # it is being computed all the same
                raise
            finally:
                on_step(run.num_done_tokens)
            if not num_tokens:
                await asyncio.sleep(_NO_ROOM_S)
        return embeddings

    async def save_kv(self, token_ids: Sequence[int], path: Path, *, cache_salt: str = "") -> tuple[int, int]:
        """Write what is cached of these tokens to a file; how many tokens, and bytes. Whole blocks only.

        Raises:
            InvalidRequest: the file cannot be written, or a part of the KV was rounded.
            Overloaded, Bug: as `generate`.
        """
        namespace = self.namespace(cache_salt)
        extents = await self.call(lambda core: take_out(core, namespace, token_ids, core.tiering.blocks.exact))
        num_groups = max(1, len(self.stats.ledger))
        num_bytes = await asyncio.to_thread(write_archive, path, extents, make_sealer(self.config))
        return len(extents) // num_groups * self.block_size, num_bytes

    async def restore_kv(self, path: Path, *, cache_salt: str = "") -> tuple[list[int], int, int]:
        """Bring back what `save_kv` wrote; the tokens, how many of them are cached now, and the file's bytes.

        Raises:
            InvalidRequest: the file is damaged, or of another model, KV type or owner; nothing was brought back.
            Overloaded, Bug: as `generate`.
        """
        namespace = self.namespace(cache_salt)
        parts = await asyncio.to_thread(read_archive, path, make_sealer(self.config))
        num_bytes = sum(len(extent) for _, extent in parts)
        blocks = [(header, payload_of(header, extent)) for header, extent in parts]

        def put(core: EngineCore) -> tuple[NDArray[np.int32], int]:
            written = core.tiering.blocks
            return put_in(core, namespace, blocks, written.exact, kept=written.usual)

        ids, num_cached = await self.call(put)
        return ids.tolist(), num_cached, num_bytes

    async def call(self, function: Callable[[EngineCore], T]) -> T:
        """Run `function` on the engine's thread between two steps, for instance to look into its cache."""
        return await asyncio.wrap_future(self._thread.call(function))

    async def attach_tier(self, use: TierUse, index: int | None = None) -> None:
        """As `LLM.attach_tier`."""
        await asyncio.to_thread(self._thread.attach_tier, use, index)

    async def detach_tier(self, name: str, timeout_s: float = 10.0) -> HandedDown:
        """As `LLM.detach_tier`."""
        return await asyncio.to_thread(self._thread.detach_tier, name, timeout_s)

    async def retire_tier(self, name: str, timeout_s: float = 10.0) -> RetiredTier:
        """As `EngineThread.retire_tier`."""
        return await asyncio.to_thread(self._thread.retire_tier, name, timeout_s)

    @property
    def kv_bytes(self) -> int:
        """Memory that the KV pools may take now."""
        pools = self._engine.sizes.pools
        return sum(ledger.total * pool.shape[1] for ledger, pool in zip(self.stats.ledger, pools, strict=True))

    @property
    def context_tokens(self) -> int:
        """Most tokens of a prompt and its answer, in the KV memory that there is now."""
        return self._admission.context_tokens

    async def resize(self, kv_bytes: int) -> None:
        """Let the KV pools take so many bytes from now on, evicting what is too much. Requests go on meanwhile.

        Raises:
            InvalidRequest: too few to be of use, or more than was reserved when the engine was made.
            Overloaded: requests that have not ended need more. The size is as it was.
        """
        sizes = self._engine.sizes
        fitting = await self.call(lambda core: sizes.resize(core, kv_bytes))
        self._admission = replace(self._admission, fitting_tokens=fitting)

    async def drain(self, timeout_s: float | None = None) -> bool:
        """Refuse new requests and wait for those in flight; False if that took longer than `timeout_s`."""
        self._thread.drain()
        return await asyncio.to_thread(self._thread.wait_drained, timeout_s)

    async def aclose(self) -> None:
        """Abort what is in flight, end the engine's thread, and write what is to outlive it."""
        await asyncio.to_thread(self._thread.close)
        await asyncio.to_thread(self.sessions.end)

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


def _whole(output: RequestOutput) -> RequestOutput:
    """
    Raises:
        NotReady: a part of a search was cut off.
    """
    if output.finish_reason == "abort":
        raise NotReady("the engine was closed before the search ended; send the request again when it has been started")
    return output


def _expect_latest(engine: weakref.ref[AsyncEngine], _: Future[None]) -> None:
    """What earlier processes had open is there: those that were used last go on first."""
    if (there := engine()) is not None and (kept := there.sessions.latest(_NUM_EXPECTED)):
        there.expect(kept)


class _Closed:
    """Hears of sessions that are closed: what only they used goes first. Keeps no engine alive."""

    def __init__(self, engine: weakref.ref[AsyncEngine]) -> None:
        self._engine = engine

    def __call__(self, session: Session) -> None:
        engine = self._engine()
        if engine is None:
            return
        with suppress(SpoliaError):  # an engine that has ended keeps nothing
            engine.spend(session.token_ids, cache_salt=session.cache_salt)


def _session_files(engine: Engine) -> SessionFiles | None:
    """Where its sessions are kept; None without a disk. They are the model's: token ids mean nothing to another."""
    config = engine.config
    if config.kv_disk is None:
        return None
    owner = namespace_key(what="sessions", model=engine.model.digest, engine_salt=config.cache_salt)
    return SessionFiles(Path(config.kv_disk), owner, make_sealer(config))


class TokenStream:
    """An answer as it comes: an async iterator of deltas, the last of which carries the whole `RequestOutput`.

    Ending early ends the request: leaving `async with`, `aclose()`, cancelling a task that waits for the next delta, or
    dropping the stream. What several steps computed within `EngineConfig.stream_interval_ms`, or while the reader was
    behind, comes as one delta.

    Attributes:
        request: as admitted: its id, prompt ids, resolved `max_tokens` and seed.
    """

    def __init__(self, request: Request, mailbox: _Mailbox, abort: Callable[[Sequence[str]], None]) -> None:
        self.request = request
        self._mailbox = mailbox
        self._abort = abort
        self._is_over = False

    @property
    def request_id(self) -> str:
        return self.request.request_id

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        """The next delta.

        Raises:
            Bug: the engine failed.
        """
        if self._is_over:
            raise StopAsyncIteration
        try:
            event = await self._mailbox.get()
        except asyncio.CancelledError:
            self._end()
            raise
        if isinstance(event, SpoliaError):
            self._is_over = True
            raise event
        self._is_over = event.output is not None
        return event

    async def output(self) -> RequestOutput:
        """Read to the end; the whole answer, deltas that were read before included."""
        async for delta in self:
            if delta.output is not None:
                return delta.output
        raise RuntimeError(f"request {self.request_id}: its stream was read to the end or closed before")

    async def aclose(self) -> None:
        """End the request if it has not ended. Does not wait."""
        self._end()

    async def __aenter__(self) -> TokenStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def __del__(self) -> None:
        self._end()

    def _end(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._abort([self.request_id])


class _Mailbox:
    """Where one stream's events wait. Filled and read on its loop's thread only.

    Attributes:
        has_begun: its first event is on its way. The engine's thread owns it.
    """

    __slots__ = ("_event", "_waiter", "has_begun", "outbox")

    def __init__(self, outbox: _Outbox) -> None:
        self.outbox = outbox
        self.has_begun = False
        self._event: Delta | SpoliaError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, event: Delta | SpoliaError) -> None:
        if isinstance(self._event, Delta) and isinstance(event, Delta):
            self._event = self._event + event
        else:
            self._event = event
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> Delta | SpoliaError:
        while self._event is None:
            self._waiter = self.outbox.loop.create_future()
            await self._waiter
        event, self._event = self._event, None
        return event


class _Outbox:
    """Events on their way from the engine's thread to the streams of one event loop.

    An answer's first token, its end and errors go at once; what comes between goes at most once an interval, for all
    streams together. A loop that is woken for every token of every stream takes the cores from the step that computes
    the next ones, and nobody reads text that changes more often than a screen does.

    While a timer runs it is the timer that empties the outbox, so the engine's thread wakes the loop only for what is
    urgent, or when the loop has had nothing to do for an interval.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, interval_s: float) -> None:
        self.loop = loop
        self._interval_s = interval_s
        self._timer: asyncio.TimerHandle | None = None  # of the loop's thread
        self._lock = threading.Lock()  # guards the fields below
        self._events: list[tuple[_Mailbox, Delta | SpoliaError]] = []
        self._is_timed = False
        self._is_woken = False

    def put(self, events: Sequence[tuple[_Mailbox, Delta | SpoliaError]], *, urgent: bool) -> None:
        """On the engine's thread."""
        with self._lock:
            self._events += events
            if self._is_woken or (self._is_timed and not urgent):
                return
            self._is_woken = True
        try:
            self.loop.call_soon_threadsafe(self._empty)
        except RuntimeError:  # the loop is closed, so nobody is left to read: dropping is right
            return

    def _empty(self) -> None:
        with self._lock:
            events, self._events = self._events, []
            self._is_woken = False
            self._is_timed = bool(events) and self._interval_s > 0
        for mailbox, event in events:
            mailbox.put(event)
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(self._interval_s, self._empty) if self._is_timed else None


def _deliver(events: Sequence[tuple[_Mailbox, Delta | SpoliaError]]) -> None:
    """Hand events over to their loops. On the engine's thread."""
    urgent = False
    for mailbox, event in events:
        if not mailbox.has_begun or isinstance(event, SpoliaError) or event.output is not None:
            mailbox.has_begun = urgent = True
    outboxes = {mailbox.outbox for mailbox, _ in events}
    for outbox in outboxes:
        mine = events if len(outboxes) == 1 else [event for event in events if event[0].outbox is outbox]
        outbox.put(mine, urgent=urgent)
