"""One step after another: plan, run, commit, sample."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from spolia.engine.drafter import Drafter
from spolia.engine.outputs import Counters, Delta, EngineStats, RequestOutput
from spolia.engine.request import Request, Sequence, text_stream
from spolia.engine.runner import Runner
from spolia.engine.scheduler import Scheduler, StepPlan
from spolia.engine.tiering import Tiering
from spolia.errors import InvalidRequest, ModelError, Overloaded, SpoliaError
from spolia.generation import DraftCount, Sampler, Samples, TextStream
from spolia.kernels import BLOCK_SIZE, Executable
from spolia.kvcache import Explanation, KVCache, MissReason, TokenRange

__all__ = ["EngineCore", "Observer", "StepStats"]

_MAX_NAMESPACES = 4_096
"""Whose tenants are kept in mind."""

_SMALLER = (
    "the KV cache was made smaller while this request was on its way, and has no room for it any more; lower "
    "max_tokens or shorten the prompt"
)


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
        special_token_bytes: text of any token, for requests that want special ones shown; None: as `token_bytes`.
        max_context: most tokens of a sequence.
        clock: seconds; only differences matter.
        tiering: where KV goes to and comes from beyond the pools; it may have no tier.
        drafter: guesses tokens ahead; None: nobody does.
        check: verify the cache's invariants after each step.
    """

    def __init__(
        self,
        executable: Executable,
        cache: KVCache,
        *,
        token_bytes: Callable[[int], bytes],
        special_token_bytes: Callable[[int], bytes] | None = None,
        tiering: Tiering,
        max_batch_tokens: int,
        max_sequences: int,
        max_context: int,
        clock: Callable[[], float],
        observer: Observer | None = None,
        sampler: Sampler | None = None,
        drafter: Drafter | None = None,
        check: bool = False,
    ) -> None:
        self.cache = cache
        self.executable = executable
        self._token_bytes = token_bytes
        self._special_token_bytes = special_token_bytes or token_bytes
        self._clock = clock
        self._observer = observer
        self._sampler = sampler or Sampler(executable.vocab_size, executable.argmax)
        self.tiering = tiering
        self._drafter = drafter
        self._check = check
        tiering.planner.step_tokens = max_batch_tokens
        self._scheduler = Scheduler(
            cache,
            max_batch_tokens=max_batch_tokens,
            max_sequences=max_sequences,
            token_bytes=sum(map(executable.block_bytes, range(len(cache.groups)))) // cache.block_size,
        )
        self._runner = Runner(
            executable,
            num_groups=len(cache.groups),
            max_tokens=max_batch_tokens,
            max_sequences=max_sequences,
            max_context=max_context,
        )
        self._by_id: dict[str, Sequence] = {}
        self._tenants: OrderedDict[bytes, str] = OrderedDict()  # of the namespaces that were used last
        self._deltas: list[tuple[str, Delta | SpoliaError]] = []
        self._num_steps = self._num_computed = self._num_recomputed = self._num_generated = self._num_preemptions = 0
        self._num_prompt = self._num_cached = 0
        self._num_finished: Counter[str] = Counter()
        self._num_restored: Counter[str] = Counter()
        self._num_rounded: Counter[str] = Counter()
        self._drafts: dict[str, DraftCount] = {}
        self._num_by_source: Counter[str] = Counter()
        self._num_missed: Counter[MissReason] = Counter()
        self._reuse_ended: Counter[MissReason] = Counter()
        self._stats = self._snapshot()

    @property
    def max_batch_tokens(self) -> int:
        """Token budget of a step."""
        return self._scheduler.max_batch_tokens

    def note_other_work(self, num_tokens: int) -> None:
        """So many tokens went through the model between two steps, for no sequence."""
        self._num_computed += num_tokens
        self._stats = self._snapshot()
        if self._check:
            self.cache.check()

    def count_prompt(self, explanation: Explanation | None, ranges: Iterable[TokenRange]) -> None:
        """Count a prompt by where its tokens' KV came from, and why not from the cache. None: it was not looked up."""
        if explanation is None:
            return
        self._reuse_ended[explanation.reason] += 1
        for start, stop, source, reason in ranges:
            self._num_by_source[source] += stop - start
            if reason is not None:
                self._num_missed[reason] += stop - start

    @property
    def stats(self) -> EngineStats:
        """As of the last step; the tiers as of now. Any thread."""
        return replace(self._stats, tiers=self.tiering.stats())

    @property
    def has_work(self) -> bool:
        """Whether there are requests that have not been answered to the end."""
        return bool(self._by_id or self._deltas)

    @property
    def idle_s(self) -> float | None:
        """For how long `step` would find nothing to do unless something arrives: 0: not at all; None: for ever."""
        if self._deltas or self._scheduler.num_waiting or self._scheduler.num_running:
            return 0.0
        return self.tiering.idle_s

    def namespaces_of(self, tenant: str) -> set[bytes]:
        """Where a tenant's KV is, as far as it has asked for anything lately."""
        return {namespace for namespace, name in self._tenants.items() if name == tenant}

    @property
    def in_flight(self) -> Iterable[Sequence]:
        """All that have not ended, those included that wait for other tiers."""
        return list(self._by_id.values())

    def can_end(self, sequence: Sequence) -> bool:
        """Whether it, and the other of its pair, has room for the longest answer when all others have given way."""
        num_tokens = sequence.max_kept_tokens
        if sequence.guide is not None:  # each may begin a block more than its tokens fill
            num_tokens += sequence.guide.max_kept_tokens + 2 * self.cache.block_size
        return self.cache.fits(num_tokens, self.max_batch_tokens)

    def note_resized(self) -> None:
        """The cache has another size."""
        self._scheduler.note_room()
        self._stats = self._snapshot()

    @property
    def max_sequences(self) -> int:
        """Lanes of the batch."""
        return self._scheduler.max_sequences

    def sequences(self) -> Iterable[Sequence]:
        """All that have not ended: running, preempted, waiting."""
        return self._scheduler.sequences()

    def set_waker(self, wake: Callable[[], None]) -> None:
        """`wake` is called, on any thread, when something arrives that `step` should see to."""
        self.tiering.set_waker(wake)

    def close(self, flush_s: float = 10.0) -> None:
        """Write what is to outlive the process, for so long at most, and end all I/O."""
        self.tiering.close(flush_s)

    def submit(self, request: Request) -> None:
        params = request.params
        token_bytes = self._token_bytes if params.skip_special_tokens else self._special_token_bytes
        if request.num_skipped_bytes:
            token_bytes = _without_first(request.num_skipped_bytes, token_bytes)
        sequence = Sequence(request, text_stream(request, token_bytes))
        if request.guide is not None:
            sequence.pair_with(Sequence(request.guide, TextStream(token_bytes)))
        if not self.can_end(sequence):  # it was admitted for pools that have been made smaller since
            self._num_finished["error"] += 1
            self._deltas.append((request.request_id, Overloaded(_SMALLER)))
            return
        if request.guide is None and self._drafter is not None and params.context_shift is None:
            # Guesses go by places, which a shift changes.
            sequence.guesser = self._drafter.guesser(request, sequence.token_ids)
        self._by_id[request.request_id] = sequence
        if request.tenant.name:
            self._tenants[request.namespace] = request.tenant.name
            self._tenants.move_to_end(request.namespace)
            if len(self._tenants) > _MAX_NAMESPACES:
                self._tenants.popitem(last=False)
        if not self.tiering.begin(sequence):
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
        for sequence in self.tiering.poll(is_busy=self._scheduler.num_running > 0):
            sequence.restored_s = self._clock()
            self._scheduler.submit(sequence)
        met = self.tiering.take_met()
        self._num_cached += met.total()
        self._num_restored.update(met)
        if self._by_id:
            started_s = self._clock()
            if self._drafter is not None:
                self._drafter.draft(self._scheduler.running)
            plan = self._scheduler.plan_step()
            if plan.entries:
                self._note_starts(plan, started_s)
                logits = self._runner.run(plan)
                sampled = self._commit(plan)
                num_sampled = len(sampled)
                if plan.is_plain:
                    self._contrast(sampled, range(len(sampled)))
                    samples = self._sampler.sample(logits, [sequence.next_row() for sequence in sampled])
                    now_s = self._clock()
                    self._take_samples(sampled, samples, now_s)
                else:
                    num_sampled = self._sample_and_verify(plan, logits)
                    now_s = self._clock()
                self._count(plan, num_sampled, now_s - started_s)
            if self._check:
                self.cache.check()
                if self._drafter is not None:
                    self._drafter.check()
        deltas, self._deltas = self._deltas, []
        return deltas

    def _note_starts(self, plan: StepPlan, now_s: float) -> None:
        """Record what new sequences found in the cache. Those that return after a preemption are told apart."""
        for sequence, start, stop in plan.entries:
            if sequence.leader is not None:
                if sequence.first_step_s is None:
                    sequence.explanation = sequence.held_lease.hit.explanation
                    sequence.note_start(start, now_s)
            elif sequence.first_step_s is None:
                hit = sequence.held_lease.hit
                sequence.explanation = hit.explanation
                self.tiering.start(sequence)
                sequence.num_rounded_tokens = self.tiering.blocks.num_rounded_tokens(sequence, start)
                self._num_rounded.update(sequence.num_rounded_tokens)
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
        commit, stats = self.tiering.commit, self.cache.stats
        num_duplicate_tokens = stats.num_duplicate_tokens
        sampled = []
        for sequence, start, stop in plan.entries:
            if stop > sequence.num_tokens:  # drafts are not true yet
                stop = sequence.num_tokens
            sequence.num_computed_tokens = stop
            if stop - start > 1 or stop % BLOCK_SIZE == 0:
                commit(sequence)
            if stats.num_duplicate_tokens != num_duplicate_tokens:  # its blocks may have been exchanged for equal ones
                num_duplicate_tokens = stats.num_duplicate_tokens
                sequence.table_changed = True
            if stop == sequence.num_tokens:
                sampled.append(sequence)
        return sampled

    def _contrast(self, sampled: Seq[Sequence], rows: Iterable[int]) -> None:
        """Give those that contrast layers what earlier ones say in their rows of the step."""
        for sequence, row in zip(sampled, rows, strict=True):
            pipeline = sequence.request.pipeline
            if pipeline is not None and pipeline.dola is not None:
                pipeline.dola.take(self._runner.early_logits(row, pipeline.dola.layers))

    def _sample_and_verify(self, plan: StepPlan, logits: NDArray[np.float32]) -> int:
        """Score prompts, and draw token after token as long as drafts foresaw them; how many were drawn.

        A draft is right if it is the token that is drawn with the same random number that would be used without it. So
        speculation changes neither greedy nor sampled answers: they are the same tokens.
        """
        checks: list[_Check] = []
        row = 0
        for sequence, start, stop in plan.entries:
            first = sequence.first_logit(start)
            if stop <= first:
                continue
            self._score(sequence, logits[row : row + stop - first], first)
            if stop >= sequence.num_tokens:
                known = sequence.num_tokens
                last = row + known - 1 - first
                drafts = sequence.token_ids[known:stop].tolist()
                chosen = sequence.pair_up(logits[last])
                if chosen is not None:
                    checks.append(_Check(chosen, last, drafts))
                if drafts and sequence.guesser is not None:
                    sequence.guesser.note_drafted(sequence.draft_source, len(drafts))
            row += stop - first
        num_sampled = 0
        now_s: float | None = None
        drafted = [check for check in checks if check.drafts]
        while checks:
            rows = [check.row + check.num_accepted for check in checks]
            self._contrast([check.sequence for check in checks], rows)
            of_checks = logits[rows[0] : rows[0] + 1] if len(rows) == 1 else logits[rows]  # one is not copied
            samples = self._sampler.sample(of_checks, [check.sequence.next_row() for check in checks])
            num_sampled += len(checks)
            foreseen = [
                check for check, token_id in zip(checks, samples.token_ids, strict=True) if check.is_foreseen(token_id)
            ]
            now_s = self._clock() if now_s is None else now_s  # the tokens of a step come together
            self._take_samples([check.sequence for check in checks], samples, now_s)
            checks = [check for check in foreseen if check.goes_on()]
        for check in drafted:
            sequence = check.sequence
            source, count = sequence.draft_source, DraftCount(len(check.drafts), check.num_accepted)
            self._drafts[source] = self._drafts.get(source, DraftCount()).plus(*count)
            if sequence.lease is not None:
                self._commit_whole_blocks(sequence)
        return num_sampled

    def _score(self, sequence: Sequence, logits: NDArray[np.float32], first: int) -> None:
        """Note what rows from token `first` on say of the prompt tokens that follow them."""
        num_top = sequence.request.params.prompt_logprobs
        if sequence.num_scored is None or num_top is None:
            return
        last = min(first + len(logits), sequence.num_prompt_tokens - 1)
        for position in range(max(first, sequence.num_scored), last):
            token_id = int(sequence.token_ids[position + 1])
            sequence.prompt_logprobs.append(self._sampler.score(logits[position - first], token_id, num_top))
        sequence.num_scored = last if last < sequence.num_prompt_tokens - 1 else None

    def _commit_whole_blocks(self, sequence: Sequence) -> None:
        """As `_commit`, for tokens that became true after the step."""
        lease = sequence.held_lease
        if sequence.num_computed_tokens // BLOCK_SIZE > lease.num_computed_tokens // BLOCK_SIZE:
            num_duplicate_tokens = self.cache.stats.num_duplicate_tokens
            self.tiering.commit(sequence)
            if self.cache.stats.num_duplicate_tokens != num_duplicate_tokens:
                sequence.table_changed = True

    def _take_samples(self, sampled: Seq[Sequence], samples: Samples, now_s: float) -> None:
        deltas = self._deltas
        for sequence, token_id, logprobs in zip(sampled, samples.token_ids, samples.logprobs, strict=True):
            if sequence.first_token_s is None:
                sequence.first_token_s = now_s
            if token_id is None:
                self._fail(sequence)
                continue
            text = sequence.append(token_id)
            if sequence.request.may_end_early:
                text += sequence.end_early(now_s)
            if logprobs is None:
                delta = Delta(text, (token_id,))
            else:
                sequence.logprobs.append(logprobs)
                delta = Delta(text, (token_id,), (logprobs,))
            if sequence.num_generated_tokens == 1 and sequence.request.params.prompt_logprobs is not None:
                delta = replace(delta, prompt_logprobs=tuple(sequence.prompt_logprobs))
            if sequence.finish_reason is None:
                deltas.append((sequence.request.request_id, delta))
                if sequence.is_full:
                    self._scheduler.restart(sequence, sequence.shift)
            else:
                self._finish(sequence, delta)

    def _finish(self, sequence: Sequence, last: Delta) -> None:
        """Let go of a sequence whose `finish_reason` is set, and send its last delta."""
        self._release(sequence)
        del self._by_id[sequence.request.request_id]
        self._num_finished[str(sequence.finish_reason)] += 1
        output = sequence.output(self._clock())
        self._count_prompts(sequence)
        self._deltas.append((output.request_id, replace(last, output=output)))
        if self._observer is not None:
            self._observer.on_finish(output)

    def _fail(self, sequence: Sequence) -> None:
        """End a request for which the model has no answer. Others go on: only its own prefix has its KV."""
        self._release(sequence)
        request_id = sequence.request.request_id
        del self._by_id[request_id]
        self._num_finished["error"] += 1
        self._count_prompts(sequence)
        pipeline = sequence.request.pipeline
        error: SpoliaError
        if pipeline is not None and pipeline.trouble is not None:
            error = InvalidRequest(f"after {sequence.num_generated_tokens} tokens of the answer: {pipeline.trouble}")
        else:
            error = ModelError(
                f"after {sequence.num_tokens} tokens the model's logits are not finite numbers: the model file is "
                "broken, or its values leave the KV type's range; try kv_dtype f32"
            )
        self._deltas.append((request_id, error))

    def _count_prompts(self, sequence: Sequence) -> None:
        """Count what a sequence that has ended, however that was, was computed from."""
        for one in (sequence, sequence.guide):
            if one is not None and not one.request.is_part:
                self.count_prompt(one.explanation, one.ranges())

    def _release(self, sequence: Sequence) -> None:
        """Forget a sequence, wherever it is; what it computed stays."""
        if self._drafter is not None:
            self._drafter.release(sequence)
        if self.tiering.drop(sequence):
            return
        if sequence.lease is not None:
            if len(sequence.uncommitted_ids):  # drafts may have completed a block in the answer's last step
                self.tiering.commit(sequence)
            self.tiering.finish(sequence)
        self._scheduler.finish(sequence)

    def _count(self, plan: StepPlan, num_sampled: int, duration_s: float) -> None:
        num_tokens = sum(stop - start for _, start, stop in plan.entries)
        self.tiering.note_step(num_tokens, duration_s)
        if self._drafter is not None:
            self._drafter.note_step(len(plan.entries), num_tokens, duration_s)
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
            num_waiting=self._scheduler.num_waiting + self.tiering.restores.num_held,
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
                num_rounded_tokens=dict(self._num_rounded),
                drafts=dict(self._drafts),
                num_tokens_by_source=dict(self._num_by_source),
                num_missed_tokens=dict(self._num_missed),
                reuse_ended=dict(self._reuse_ended),
                num_lost_blocks=self.tiering.tiers.offloader.num_lost_blocks,
            ),
            ledger=tuple(self.cache.ledger()),
        )


@dataclass(slots=True)
class _Check:
    """A sequence whose drafts are being compared with what is drawn, from row `row` of the logits on."""

    sequence: Sequence
    row: int
    drafts: list[int]
    num_accepted: int = 0

    def is_foreseen(self, token_id: int | None) -> bool:
        """Whether `token_id`, which was just drawn, had been drafted."""
        sequence, drafts = self.sequence, self.drafts
        sequence.num_drafts = 0
        if self.num_accepted == len(drafts) or token_id != drafts[self.num_accepted]:
            return False
        self.num_accepted += 1
        if sequence.guesser is not None:
            sequence.guesser.note_foreseen(sequence.draft_source, sequence.num_tokens)
        return True

    def goes_on(self) -> bool:
        """Whether the logits after the token that was foreseen are wanted: its KV is there, and it ended nothing."""
        if self.sequence.finish_reason is not None:
            return False
        self.sequence.num_computed_tokens += 1
        return True


def _without_first(num_bytes: int, token_bytes: Callable[[int], bytes]) -> Callable[[int], bytes]:
    """`token_bytes` of a stream whose first bytes are not to be shown."""
    left = num_bytes

    def shown(token_id: int) -> bytes:
        nonlocal left
        token = token_bytes(token_id)
        skipped, left = min(left, len(token)), max(0, left - len(token))
        return token[skipped:]

    return shown
