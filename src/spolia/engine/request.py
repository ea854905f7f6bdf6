"""A request as it was admitted, and the sequence that answers it.

A sequence's tokens, by what has become of them:

    |<------------- num_prompt_tokens ------------->|<------ generated ------>|
    |<-- num_cached_tokens -->|                     |                         |
    |<------------- num_computed_tokens ------------------->|<-- pending ---->|
                                                                              num_tokens

A decoding sequence has one pending token, the one sampled last; a prefill has many; there is no other difference.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from spolia.engine.fairness import Tenant
from spolia.engine.outputs import FinishReason, RequestOutput, Timings
from spolia.errors import Bug
from spolia.generation import (
    Guesser,
    PatternTextStream,
    Pipeline,
    RowSampling,
    SamplingParams,
    Stage,
    StopPattern,
    TextStream,
    TokenLogprobs,
    first_met,
)
from spolia.kvcache import Explanation, History, Lease, Outcome, TokenRange, Wish, attribute
from spolia.tiers import KeyChain

__all__ = ["Request", "Sequence", "answer_text", "shown_bytes", "text_stream"]

_TOOL_CALL_MARKS = ("<tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<function=", "```tool_call")
"""How the models that call tools write it. A call that is not recognised is kept like any other reply."""

_NO_IDS: NDArray[np.int32] = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Request:
    """What a client asked, checked against the engine's limits (see `Admission`).

    Attributes:
        prompt_token_ids: int32 `[num_prompt_tokens]`, at least one.
        max_tokens: resolved: prompt and answer fit the context and the pools.
        seed: the client's, or one drawn for it.
        namespace: who may share its KV.
        final_ids: generating one of these ends the answer.
        arrival_s: when it was submitted, by the engine's clock.
        is_exact: all KV that it uses is as it was computed; where it is not so, some may have been rounded in a tier.
        wishes: how long its KV is worth keeping, by token range.
        tenant: who it is for.
        history: what is known of its prompt.
        is_part: its prompt is another request's, which is counted there.
        stop_pattern: ends the answer where its text first matches.
        num_skipped_bytes: of the answer's beginning, which the prompt has already shown.
        num_truncated_tokens: dropped from the prompt, which was too long.
        max_length: most tokens of prompt and answer at a time.
        prediction_ids: int32, what its client says that the answer will be like; None: nothing.
        guide: the other prompt, for guidance: computed beside this one, with this one's answer behind it.
        pipeline: its logits processors, whose state is this one request's; None if it has none.
    """

    request_id: str
    prompt_token_ids: NDArray[np.int32]
    params: SamplingParams
    max_tokens: int
    seed: int
    namespace: bytes
    final_ids: frozenset[int]
    arrival_s: float
    is_exact: bool = True
    wishes: tuple[Wish, ...] = ()
    tenant: Tenant = Tenant()  # noqa: RUF009 - frozen
    history: History | None = None
    is_part: bool = False
    pipeline: Pipeline | None = None
    stop_pattern: StopPattern | None = None
    num_skipped_bytes: int = 0
    num_truncated_tokens: int = 0
    max_length: int | None = None
    prediction_ids: NDArray[np.int32] | None = None
    guide: Request | None = None

    @property
    def decisions(self) -> tuple[tuple[Stage, ...], ...] | None:
        """Notes of how each token came about, if they were asked for."""
        return None if self.pipeline is None or self.pipeline.log is None else self.pipeline.log.decisions

    @property
    def may_end_early(self) -> bool:
        """Whether anything but its tokens and its text may end it."""
        return self.params.max_time is not None or bool(self.params.stopping_criteria)


def text_stream(request: Request, token_bytes: Callable[[int], bytes]) -> TextStream:
    """The text of an answer to `request`, from its first token on."""
    params, keep_stop = request.params, request.params.include_stop_str_in_output
    if request.stop_pattern is None:
        return TextStream(token_bytes, stop=params.stop, keep_stop=keep_stop)
    pattern = request.stop_pattern.fork()
    return PatternTextStream(token_bytes, pattern=pattern, stop=params.stop, keep_stop=keep_stop)


class TokenTexts(Protocol):
    """The part of a tokenizer that makes text of tokens."""

    def token_bytes(self, token_id: int) -> bytes: ...

    def is_special(self, token_id: int) -> bool: ...


def shown_bytes(request: Request, tokenizer: TokenTexts) -> Callable[[int], bytes]:
    """What each token of an answer to `request` adds to its text."""
    hides_special = request.params.skip_special_tokens

    def shown(token_id: int) -> bytes:
        hidden = hides_special and tokenizer.is_special(token_id)
        return b"" if hidden else tokenizer.token_bytes(token_id)

    return shown


def answer_text(request: Request, tokenizer: TokenTexts, ids: Seq[int]) -> tuple[str, str | None]:
    """The text of a whole answer to `request`, and the stop string that ends it."""
    stream = text_stream(request, shown_bytes(request, tokenizer))
    parts = []
    for index, token_id in enumerate(ids):
        text, stop = stream.feed(token_id, may_stop=index >= request.params.min_tokens)
        parts.append(text)
        if stop is not None:
            return "".join(parts), stop
    return "".join(parts) + stream.finish(), None


def ends_in_tool_call(text: str) -> bool:
    """Whether a reply asks for a tool's result, by the marks that models make."""
    return any(mark in text for mark in _TOOL_CALL_MARKS)


class Sequence:
    """One token stream with a lease on its KV. The engine thread owns it.

    Attributes:
        token_ids: int32 buffer; the first `num_tokens` count.
        lease: held while running, else None.
        lane: row of the runner's block tables while running.
        num_slots: tokens [0, num_slots) have slots.
        table_changed: the lease's block table is not the one that the runner has seen.
        num_ever_computed_tokens: how far it had come before it was preempted: computing these again is rework.
        num_drafts: tokens after the first `num_tokens` that were guessed, and that the next step checks.
        draft_source: where these are from.
        guesser: what it may go on with; None: nobody guesses.
        num_shifted_tokens: dropped because the context was full; those that it had generated are `gone_ids`.
        num_scored: prompt tokens whose successors have their log-probabilities; None: nobody asked for these, or all
            have.
        num_passed_over: later requests that were admitted before it.
        chain: names of its whole blocks in other tiers; None as long as nobody asked.
        guide: follows this one's answer behind another prompt; None: nobody does. The two run, are preempted and end
            together.
        leader: whose guide it is; None: nobody's.
        held_logits: the last token's, as long as the other of the pair has none for the same token.
        restored: (start, stop, tier) of tokens whose KV was brought up from a tier for it.
        num_restored_tokens: by tier, those of them that it found when it started, and those that met it later.
        num_rounded_tokens: prompt tokens that it found with KV which had been kept in fewer bits, by the kind of these.
        met: (start, stop, tier) of tokens that were brought up while those before them were computed.
        meets_at: the KV from this token on has been brought up, so computing need go no further; None: none has.
    """

    __slots__ = (
        "_banned_ids",
        "chain",
        "draft_source",
        "explanation",
        "finish_reason",
        "first_step_s",
        "first_token_s",
        "gone_ids",
        "guesser",
        "guide",
        "held_logits",
        "lane",
        "leader",
        "lease",
        "logprobs",
        "meets_at",
        "met",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_drafts",
        "num_ever_computed_tokens",
        "num_passed_over",
        "num_prompt_tokens",
        "num_restored_tokens",
        "num_rounded_tokens",
        "num_scored",
        "num_shared_tokens",
        "num_shifted_tokens",
        "num_slots",
        "num_tokens",
        "prompt_logprobs",
        "request",
        "restored",
        "restored_s",
        "stop_reason",
        "table_changed",
        "text",
        "text_parts",
        "token_ids",
    )

    def __init__(self, request: Request, text: TextStream) -> None:
        self.request = request
        self.guesser: Guesser | None = None
        self.num_drafts = 0
        self.draft_source = ""
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.num_tokens = self.num_prompt_tokens
        wants_scores = request.params.prompt_logprobs is not None and self.num_prompt_tokens > 1
        self.num_scored = 0 if wants_scores else None
        length = self.num_prompt_tokens + request.max_tokens
        self.token_ids = np.empty(length if request.max_length is None else min(length, request.max_length), np.int32)
        self.gone_ids: tuple[int, ...] = ()
        self.num_shifted_tokens = 0
        self.token_ids[: self.num_tokens] = request.prompt_token_ids
        self.text = text
        self.text_parts: list[str] = []
        self.logprobs: list[TokenLogprobs] = []
        self.lease: Lease | None = None
        self.lane = -1
        self.guide: Sequence | None = None
        self.leader: Sequence | None = None
        self.held_logits: NDArray[np.float32] | None = None
        self.num_computed_tokens = 0
        self.num_slots = 0
        self.table_changed = False
        self.num_ever_computed_tokens = 0
        self.num_passed_over = 0
        self.num_cached_tokens = 0
        self.num_shared_tokens = 0
        self.chain: KeyChain | None = None
        self.restored: list[tuple[int, int, str]] = []
        self.num_restored_tokens: dict[str, int] = {}
        self.num_rounded_tokens: dict[str, int] = {}
        self.met: list[tuple[int, int, str]] = []
        self.meets_at: int | None = None
        self.explanation: Explanation | None = None
        self.first_step_s: float | None = None
        self.restored_s: float | None = None
        self.first_token_s: float | None = None
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self._banned_ids = np.fromiter(sorted(request.final_ids), np.int32) if request.params.min_tokens else _NO_IDS
        if request.pipeline is not None:
            request.pipeline.follow(self.token_ids, self.num_prompt_tokens, seed=request.seed)

    def pair_with(self, guide: Sequence) -> None:
        """Let `guide` follow this sequence's answer."""
        self.guide, guide.leader = guide, self

    @property
    def is_paired(self) -> bool:
        return self.guide is not None or self.leader is not None

    def pair_up(self, logits: NDArray[np.float32]) -> Sequence | None:
        """Take the row of this one's last token; the leader, once both rows are there, of which this one is now its.

        Args:
            logits: `[vocab_size]`; the leader's when a leader is returned.
        """
        leader = self.leader or self
        guide = leader.guide
        if guide is None:
            return self
        self.held_logits = logits.copy()
        if leader.held_logits is None or guide.held_logits is None:
            return None
        logits[:] = leader.held_logits
        pipeline = leader.request.pipeline
        if pipeline is None or pipeline.guidance is None:
            raise Bug(f"request {leader.request.request_id} has a guide and no guidance")
        pipeline.guidance.take(guide.held_logits)
        leader.held_logits = guide.held_logits = None
        return leader

    @property
    def held_lease(self) -> Lease:
        """The lease of a running sequence."""
        if self.lease is None:
            raise Bug(f"request {self.request.request_id} does not run, so it has no lease")
        return self.lease

    @property
    def uncommitted_ids(self) -> NDArray[np.int32]:
        """Tokens that are computed, but that the cache has not been told of."""
        return self.token_ids[self.held_lease.num_computed_tokens : self.num_computed_tokens]

    @property
    def max_kept_tokens(self) -> int:
        """Tokens that have KV when the answer is as long as it may be: the last one has none."""
        return len(self.token_ids) - 1

    @property
    def num_pending_tokens(self) -> int:
        return self.num_tokens - self.num_computed_tokens

    @property
    def num_generated_tokens(self) -> int:
        return len(self.gone_ids) + self.num_tokens - self.num_prompt_tokens

    @property
    def known_ids(self) -> NDArray[np.int32]:
        return self.token_ids[: self.num_tokens]

    @property
    def is_scoring(self) -> bool:
        """Whether log-probabilities of the prompt are still to come."""
        return self.num_scored is not None

    @property
    def reusable_ids(self) -> NDArray[np.int32]:
        """What tiers may be asked for: they give all but the last. Tokens that are to be scored must be computed."""
        return self.known_ids[: self.num_scored + 1] if self.num_scored is not None else self.known_ids

    @property
    def generated_ids(self) -> tuple[int, ...]:
        return self.gone_ids + tuple(self.token_ids[self.num_prompt_tokens : self.num_tokens].tolist())

    @property
    def is_full(self) -> bool:
        """Whether it goes on and has no room to."""
        return self.finish_reason is None and self.num_tokens == len(self.token_ids)

    def shift(self) -> None:
        """Make room: drop the earlier half of all but the sinks. What is left moves up, so its KV is another."""
        settings = self.request.params.context_shift
        if settings is None:
            raise Bug(f"request {self.request.request_id} is full, and was not to be")
        first = min(settings["sinks"], self.num_prompt_tokens)
        last = first + (self.num_tokens - first) // 2
        said = self.token_ids[max(first, self.num_prompt_tokens) : max(last, self.num_prompt_tokens)].tolist()
        self.token_ids[first : first + self.num_tokens - last] = self.token_ids[last : self.num_tokens].copy()
        num_dropped = last - first
        self.num_tokens -= num_dropped
        self.num_prompt_tokens -= num_dropped - len(said)
        self.num_shifted_tokens += num_dropped
        self.gone_ids += tuple(said)
        self.chain = None
        if self.request.pipeline is not None:
            self.request.pipeline.note_dropped(
                num_dropped,
                num_prompt_tokens=self.num_prompt_tokens,
                num_of_answer=len(said),
                seed=self.request.seed,
            )

    def ranges(self) -> tuple[TokenRange, ...]:
        """Every prompt token with its source and reason; none before it was looked up."""
        if self.explanation is None:
            return ()
        return attribute(
            self.explanation,
            num_shared=self.num_shared_tokens,
            num_reused=self.num_cached_tokens - sum(stop - start for start, stop, _ in self.met),
            num_prompt_tokens=len(self.request.prompt_token_ids),
            restored=self.restored,
            met=self.met,
        )

    def _by_index(self, foreseen: dict[int, str]) -> dict[int, str]:
        return {position - self.num_prompt_tokens: source for position, source in foreseen.items()}

    def _evicted_age_s(self) -> float | None:
        evicted = None if self.explanation is None else self.explanation.evicted
        return None if evicted is None or self.first_step_s is None else self.first_step_s - evicted.time

    @property
    def outcome(self) -> Outcome:
        """How it ended, for retention."""
        if self.finish_reason in (None, "abort"):
            return Outcome.BROKEN_OFF
        return Outcome.TOOL_CALL if ends_in_tool_call("".join(self.text_parts)) else Outcome.TURN

    def first_logit(self, start: int) -> int:
        """The first token of a step that begins at `start` whose logits are wanted, if the step gets there."""
        first = self.num_tokens - 1 if self.num_scored is None else min(self.num_scored, self.num_tokens - 1)
        return max(start, first)

    def next_row(self) -> RowSampling:
        """How to draw the token after `num_tokens`."""
        request = self.request
        banned = self._banned_ids
        if len(banned) and self.num_generated_tokens >= request.params.min_tokens:
            banned = self._banned_ids = _NO_IDS
        return RowSampling(
            request.params, request.seed, self.num_tokens, banned, request.pipeline, self.num_shifted_tokens
        )

    def note_start(self, start: int, now_s: float) -> None:
        """It begins to be computed, at token `start`; what is before was cached, in part since it was restored."""
        self.first_step_s = now_s
        self.num_cached_tokens = start
        self.num_shared_tokens = min(start, self.held_lease.num_shared_tokens)
        for first, stop, tier in self.restored:
            num_tokens = min(stop, start) - first
            if num_tokens > 0:
                self.num_restored_tokens[tier] = self.num_restored_tokens.get(tier, 0) + num_tokens

    def note_met(self, ranges: Seq[tuple[int, int, str]]) -> None:
        """These tokens, the next ones, need not be computed: they were brought up meanwhile."""
        self.met += ranges
        self.meets_at = None
        for start, stop, tier in ranges:
            self.num_cached_tokens += stop - start
            self.num_restored_tokens[tier] = self.num_restored_tokens.get(tier, 0) + stop - start
        self.num_computed_tokens = ranges[-1][1]

    def append(self, token_id: int) -> str:
        """Take a sampled token; returns the text that it completed, and sets `finish_reason` if it ends the answer."""
        request = self.request
        params = request.params
        self.token_ids[self.num_tokens] = token_id
        self.num_tokens += 1
        if self.guide is not None:
            self.guide.token_ids[self.guide.num_tokens] = token_id
            self.guide.num_tokens += 1
        num_generated = self.num_generated_tokens
        may_stop = num_generated > params.min_tokens
        if may_stop and token_id in request.final_ids:
            self.finish_reason = "stop"
            self.stop_reason = token_id if token_id in params.stop_token_ids else None
            text = (self.text.feed(token_id).text if params.include_stop_str_in_output else "") + self.text.finish()
        else:
            text, stop = self.text.feed(token_id, may_stop=may_stop)
            is_complete = request.pipeline is not None and request.pipeline.advance(self.num_tokens)
            if stop is not None:
                self.finish_reason = "stop"
                self.stop_reason = stop
            elif is_complete:
                self.finish_reason = "stop"
                text += self.text.finish()
            elif num_generated >= request.max_tokens:
                self.finish_reason = "length"
                text += self.text.finish()
        if text:
            self.text_parts.append(text)
        return text

    def flush_text(self) -> str:
        """Text that was held back, when the answer ends from outside."""
        text = self.text.finish()
        self.text_parts.append(text)
        return text

    def end_early(self, now_s: float) -> str:
        """End the answer if it has had its time, or a criterion of the user's is met; the text that was held back."""
        params = self.request.params
        if self.finish_reason is not None:
            return ""
        if params.max_time is not None and now_s - self.request.arrival_s >= params.max_time:
            self.finish_reason = "length"
            self.stop_reason = "max_time"
        elif self.num_generated_tokens > params.min_tokens and (
            met := first_met(params.stopping_criteria, self.known_ids)
        ):
            self.finish_reason = "stop"
            self.stop_reason = met
        return "" if self.finish_reason is None else self.flush_text()

    def output(self, now_s: float) -> RequestOutput:
        """The whole answer, once `finish_reason` is set."""
        if self.finish_reason is None:
            raise Bug(f"request {self.request.request_id} has no output before it is finished")
        arrival_s = self.request.arrival_s
        return RequestOutput(
            request_id=self.request.request_id,
            prompt_token_ids=tuple(self.request.prompt_token_ids.tolist()),
            token_ids=self.generated_ids,
            text="".join(self.text_parts),
            logprobs=None if self.request.params.logprobs is None else tuple(self.logprobs),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            num_cached_tokens=self.num_cached_tokens,
            num_restored_tokens=self.num_restored_tokens,
            num_rounded_tokens=self.num_rounded_tokens,
            explanation=self.explanation,
            seed=self.request.seed,
            num_truncated_tokens=self.request.num_truncated_tokens,
            num_shifted_tokens=self.num_shifted_tokens,
            prompt_logprobs=None if self.request.params.prompt_logprobs is None else tuple(self.prompt_logprobs),
            decisions=self.request.decisions,
            strategy="greedy" if self.request.params.is_greedy else "sampled",
            drafts={} if self.guesser is None else dict(self.guesser.counts),
            foreseen={} if self.guesser is None else self._by_index(self.guesser.foreseen),
            timings=Timings(
                queue_s=None if self.first_step_s is None else self.first_step_s - arrival_s,
                first_token_s=None if self.first_token_s is None else self.first_token_s - arrival_s,
                total_s=now_s - arrival_s,
                restore_s=None if self.restored_s is None else self.restored_s - arrival_s,
            ),
            namespace=self.request.namespace,
            outcome=self.outcome,
            ranges=self.ranges(),
            evicted_age_s=self._evicted_age_s(),
        )
