"""One step after another: plan, run, commit, sample."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Protocol

from spolia.engine.outputs import Counters, Delta, EngineStats, RequestOutput
from spolia.engine.request import Request, Sequence
from spolia.engine.runner import Runner
from spolia.engine.scheduler import Scheduler, StepPlan
from spolia.engine.tiering import Tiering
from spolia.errors import InvalidRequest, ModelError, SpoliaError
from spolia.generation import PatternTextStream, Sampler, Samples, TextStream
from spolia.kernels import BLOCK_SIZE, Executable
from spolia.kvcache import KVCache

__all__ = ["EngineCore", "Observer", "StepStats"]


@dataclass(frozen=True, slots=True)
class StepStats:
    """What one step did.

    Attributes:
        num_tokens: rows computed.
        num_sampled: of those, rows whose logits were wanted.
        duration_s: of the whole step, by the engine's clock.
    """

    num_sequences: int
    num_tokens: int
    num_sampled: int
    num_preempted: int
    duration_s: float


class Observer(Protocol):
    """Hears what happens, on the engine's thread, between steps. What it raises ends the engine."""

    def on_step(self, stats: StepStats) -> None: ...

    def on_finish(self, output: RequestOutput) -> None: ...


class EngineCore:
    """The step loop's body. One thread; `stats` may be read by any.

    Args:
        executable: with its KV pools bound, of the sizes that `cache` was made with.
        token_bytes: text of a token; b"" for special ones.
        max_context: most tokens of a sequence.
        clock: seconds; only differences matter.
        tiering: where KV goes to and comes from beyond the pools; None: nowhere.
        check: verify the cache's invariants after each step.
    """

    def __init__(
        self,
        executable: Executable,
        cache: KVCache,
        *,
        token_bytes: Callable[[int], bytes],
        max_batch_tokens: int,
        max_sequences: int,
        max_context: int,
        clock: Callable[[], float],
        observer: Observer | None = None,
        sampler: Sampler | None = None,
        tiering: Tiering | None = None,
        check: bool = False,
    ) -> None:
        self.cache = cache
        self.executable = executable
        self._token_bytes = token_bytes
        self._clock = clock
        self._observer = observer
        self._sampler = sampler or Sampler(executable.vocab_size)
        self._tiering = tiering
        self._check = check
        self._max_batch_tokens = max_batch_tokens
        self._scheduler = Scheduler(cache, max_batch_tokens=max_batch_tokens, max_sequences=max_sequences)
        self._runner = Runner(
            executable,
            num_groups=len(cache.groups),
            max_tokens=max_batch_tokens,
            max_sequences=max_sequences,
            max_context=max_context,
        )
        self._by_id: dict[str, Sequence] = {}
        self._deltas: list[tuple[str, Delta | SpoliaError]] = []
        self._num_steps = self._num_computed = self._num_recomputed = self._num_generated = self._num_preemptions = 0
        self._num_prompt = self._num_cached = 0
        self._num_finished: Counter[str] = Counter()
        self._num_restored: Counter[str] = Counter()
        self._stats = self._snapshot()

    def set_max_batch_tokens(self, max_batch_tokens: int) -> None:
        """Change the token budget of the next steps: from one a lane to what the engine was made with. Answers stay.

        Raises:
            ValueError: out of that range.
        """
        low, high = self._scheduler.max_sequences, self._max_batch_tokens
        if not low <= max_batch_tokens <= high:
            raise ValueError(f"max_batch_tokens is {max_batch_tokens}; it must be from {low} to {high}")
        self._scheduler.max_batch_tokens = max_batch_tokens

    @property
    def stats(self) -> EngineStats:
        """As of the last step; the tiers as of now. Any thread."""
        return self._stats if self._tiering is None else replace(self._stats, tiers=self._tiering.stats())

    @property
    def has_work(self) -> bool:
        """Whether there are requests that have not been answered to the end."""
        return bool(self._by_id or self._deltas)

    @property
    def idle_s(self) -> float | None:
        """For how long `step` would find nothing to do unless something arrives: 0: not at all; None: for ever."""
        if self._deltas or self._scheduler.num_waiting or self._scheduler.num_running:
            return 0.0
        return None if self._tiering is None else self._tiering.idle_s

    def set_waker(self, wake: Callable[[], None]) -> None:
        """`wake` is called, on any thread, when something arrives that `step` should see to."""
        if self._tiering is not None:
            self._tiering.set_waker(wake)

    def close(self, flush_s: float = 10.0) -> None:
        """Write what is to outlive the process, for so long at most, and end all I/O."""
        if self._tiering is not None:
            self._tiering.close(flush_s)

    def submit(self, request: Request) -> None:
        params = request.params
        token_bytes = self._token_bytes
        if request.num_skipped_bytes:
            token_bytes = _without_first(request.num_skipped_bytes, token_bytes)
        keep_stop, pattern = params.include_stop_str_in_output, request.stop_pattern
        if pattern is None:
            text = TextStream(token_bytes, stop=params.stop, keep_stop=keep_stop)
        else:
            text = PatternTextStream(token_bytes, pattern=pattern, stop=params.stop, keep_stop=keep_stop)
        sequence = Sequence(request, text)
        self._by_id[request.request_id] = sequence
        if self._tiering is None or not self._tiering.begin(sequence):
            self._scheduler.submit(sequence)
        self._stats = self._snapshot()

    def abort(self, request_id: str) -> None:
        """End a request now, whatever it is doing; the next step returns its output. Ended requests are ignored."""
        sequence = self._by_id.get(request_id)
        if sequence is not None:
            sequence.finish_reason = "abort"
            self._finish(sequence, Delta(sequence.flush_text(), ()))
            self._stats = self._snapshot()

    def abort_all(self) -> None:
        for request_id in list(self._by_id):
            self.abort(request_id)

    def step(self) -> list[tuple[str, Delta | SpoliaError]]:
        """Run one step, if there is something to compute; what has been generated, or ended, since the last one.

        A request ends with a delta that carries its output, or with an error that is its alone.
        """
        if self._tiering is not None:
            for sequence in self._tiering.poll(is_busy=self._scheduler.num_running > 0):
                self._scheduler.submit(sequence)
        if self._by_id:
            started_s = self._clock()
            plan = self._scheduler.plan_step()
            if plan.entries:
                self._note_starts(plan, started_s)
                logits = self._runner.run(plan)
                sampled = self._commit(plan)
                samples = self._sampler.sample(logits, [sequence.next_row() for sequence in sampled])
                now_s = self._clock()
                self._take_samples(sampled, samples, now_s)
                self._count(plan, len(sampled), now_s - started_s)
            if self._check:
                self.cache.check()
        deltas, self._deltas = self._deltas, []
        return deltas

    def _note_starts(self, plan: StepPlan, now_s: float) -> None:
        """Record what new sequences found in the cache. Those that return after a preemption are told apart."""
        for sequence, start, stop in plan.entries:
            if sequence.first_step_s is None:
                hit = sequence.held_lease.hit
                sequence.explanation = hit.explanation
                if self._tiering is not None:
                    self._tiering.start(sequence)
                sequence.note_start(start, now_s)
                self._num_prompt += sequence.num_prompt_tokens
                self._num_cached += start
                self._num_restored.update(sequence.num_restored_tokens)
            self._num_recomputed += max(0, min(sequence.num_ever_computed_tokens, stop) - start)

    def _commit(self, plan: StepPlan) -> list[Sequence]:
        """Make what the step computed visible to others; the sequences whose next token is due.

        Single tokens become visible a block at a time, or when their sequence stops: a part of a block that still grows
        is hardly ever asked for, and the tree's work is the same for sixteen tokens as for one. Since no block is begun
        before the last one is committed, nothing else depends on it.
        """
        commit, stats = self.cache.commit, self.cache.stats
        num_duplicate_tokens = stats.num_duplicate_tokens
        sampled = []
        for sequence, start, stop in plan.entries:
            sequence.num_computed_tokens = stop
            if stop - start > 1 or stop % BLOCK_SIZE == 0:
                if self._tiering is None:
                    commit(sequence.held_lease, sequence.uncommitted_ids)
                else:
                    self._tiering.commit(sequence)
            if stats.num_duplicate_tokens != num_duplicate_tokens:  # its blocks may have been exchanged for equal ones
                num_duplicate_tokens = stats.num_duplicate_tokens
                sequence.table_changed = True
            if stop == sequence.num_tokens:
                sampled.append(sequence)
        return sampled

    def _take_samples(self, sampled: Seq[Sequence], samples: Samples, now_s: float) -> None:
        deltas = self._deltas
        for sequence, token_id, logprobs in zip(sampled, samples.token_ids, samples.logprobs, strict=True):
            if sequence.first_token_s is None:
                sequence.first_token_s = now_s
            if token_id is None:
                self._fail(sequence)
                continue
            text = sequence.append(token_id)
            if sequence.request.params.max_time is not None:
                text += sequence.end_early(now_s)
            if logprobs is None:
                delta = Delta(text, (token_id,))
            else:
                sequence.logprobs.append(logprobs)
                delta = Delta(text, (token_id,), (logprobs,))
            if sequence.finish_reason is None:
                deltas.append((sequence.request.request_id, delta))
            else:
                self._finish(sequence, delta)

    def _finish(self, sequence: Sequence, last: Delta) -> None:
        """Let go of a sequence whose `finish_reason` is set, and send its last delta."""
        self._release(sequence)
        del self._by_id[sequence.request.request_id]
        self._num_finished[str(sequence.finish_reason)] += 1
        output = sequence.output(self._clock())
        self._deltas.append((output.request_id, Delta(last.text, last.token_ids, last.logprobs, output)))
        if self._observer is not None:
            self._observer.on_finish(output)

    def _fail(self, sequence: Sequence) -> None:
        """End a request for which the model has no answer. Others go on: only its own prefix has its KV."""
        self._release(sequence)
        request_id = sequence.request.request_id
        del self._by_id[request_id]
        self._num_finished["error"] += 1
        pipeline = sequence.request.pipeline
        error: SpoliaError
        if pipeline is not None and pipeline.has_left_nothing:
            error = InvalidRequest(
                f"after {sequence.num_generated_tokens} tokens of the answer, what this request forbids leaves no "
                "token to go on with; loosen its constraints (allowed_token_ids, bad_words, min_tokens, ...)"
            )
        else:
            error = ModelError(
                f"after {sequence.num_tokens} tokens the model's logits are not finite numbers: the model file is "
                "broken, or its values leave the KV type's range; try kv_dtype f32"
            )
        self._deltas.append((request_id, error))

    def _release(self, sequence: Sequence) -> None:
        """Forget a sequence, wherever it is; what it computed stays."""
        if self._tiering is not None:
            if self._tiering.drop(sequence):
                return
            if sequence.lease is not None:
                self._tiering.finish(sequence)
        self._scheduler.finish(sequence)

    def _count(self, plan: StepPlan, num_sampled: int, duration_s: float) -> None:
        num_tokens = sum(stop - start for _, start, stop in plan.entries)
        if self._tiering is not None:
            self._tiering.note_step(num_tokens, duration_s)
        self._num_steps += 1
        self._num_computed += num_tokens
        self._num_generated += num_sampled
        self._num_preemptions += plan.num_preempted
        self._stats = self._snapshot()
        if self._observer is not None:
            self._observer.on_step(
                StepStats(len(plan.entries), num_tokens, num_sampled, plan.num_preempted, duration_s)
            )

    def _snapshot(self) -> EngineStats:
        return EngineStats(
            num_waiting=self._scheduler.num_waiting + (0 if self._tiering is None else self._tiering.num_held),
            num_running=self._scheduler.num_running,
            counters=Counters(
                num_steps=self._num_steps,
                num_prompt_tokens=self._num_prompt,
                num_cached_tokens=self._num_cached,
                num_computed_tokens=self._num_computed,
                num_recomputed_tokens=self._num_recomputed,
                num_generated_tokens=self._num_generated,
                num_preemptions=self._num_preemptions,
                num_finished=dict(self._num_finished),
                num_restored_tokens=dict(self._num_restored),
            ),
            ledger=tuple(self.cache.ledger()),
        )


def _without_first(num_bytes: int, token_bytes: Callable[[int], bytes]) -> Callable[[int], bytes]:
    """`token_bytes` of a stream whose first bytes are not to be shown."""
    left = num_bytes

    def shown(token_id: int) -> bytes:
        nonlocal left
        token = token_bytes(token_id)
        skipped, left = min(left, len(token)), max(0, left - len(token))
        return token[skipped:]

    return shown
