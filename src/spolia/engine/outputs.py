"""What comes back from the engine: a delta a step, and one output at the end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from spolia.generation import Choice, DraftCount, Stage, TokenLogprobs
from spolia.kvcache import Explanation, Ledger, MissReason, Outcome, TokenRange
from spolia.tiers import TierStats

__all__ = [
    "BeamOutput",
    "Counters",
    "Delta",
    "EngineStats",
    "FinishReason",
    "RequestOutput",
    "Timings",
]

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds, by the engine's clock; those of an event that never came are None.

    Attributes:
        queue_s: from submission to the first step that computed something for it.
        restore_s: from submission until it waited no more for KV from another tier, which is a part of `queue_s`.
        first_token_s: from submission to the first generated token.
        total_s: from submission to the end.
    """

    queue_s: float | None
    first_token_s: float | None
    total_s: float
    restore_s: float | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A finished request.

    Attributes:
        token_ids: all generated ids, the one that ended the answer included.
        text: the generated text; without the end-of-text token, and cut before a stop string unless asked otherwise.
        logprobs: one entry a generated token where asked for, else None.
        finish_reason: "stop" (end-of-text token, stop id or stop string), "length" or "abort".
        stop_reason: the stop string, regular expression or stop id that ended it, or "max_time"; None for the model's
            own end-of-text token.
        num_cached_tokens: prompt tokens whose KV was reused.
        num_restored_tokens: of those, by tier, the ones that were brought up from there for this request.
        num_rounded_tokens: of the cached ones, by type ("int8", "int4"), those whose KV was kept in a tier in so few
            bits (`kv_offload_dtype`), for this request or an earlier one. It is not quite what was computed.
        explanation: why the other prompt tokens were not; None if the request was aborted before it was looked up.
        num_truncated_tokens: dropped from the prompt, which was too long; 0 unless that was asked for.
        num_shifted_tokens: of prompt and answer, that the answer's end did not see because the context was full
            (`context_shift`).
        prompt_logprobs: where asked for, one entry a prompt token from the second on: nothing comes before the first.
        decisions: where asked for, per generated token the likeliest candidates after each stage.
        strategy: how tokens were chosen: "greedy", "sampled", "beam search" or "contrastive search".
        choices: of searches, where `decisions` are asked for: per generated token what the search weighed.
        drafts: what speculation guessed ahead, by where the guesses were from.
        foreseen: by index in `token_ids`, where the guess of a token was from that was guessed ahead.
        seed: the one that was used; passing it again gives the same answer.
        namespace: who may share its KV.
        outcome: how it ended, for retention.
        ranges: every prompt token with its source and the reason it was computed, if it was; empty if the request was
            aborted before it was looked up.
        evicted_age_s: how long before the look-up the missing content had been evicted, if that is why.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] | None
    finish_reason: FinishReason
    stop_reason: str | int | None
    num_cached_tokens: int
    num_restored_tokens: Mapping[str, int]
    explanation: Explanation | None
    seed: int
    timings: Timings
    namespace: bytes = b""
    outcome: Outcome = Outcome.TURN
    ranges: tuple[TokenRange, ...] = ()
    num_rounded_tokens: Mapping[str, int] = field(default_factory=dict)
    evicted_age_s: float | None = None
    num_truncated_tokens: int = 0
    num_shifted_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    decisions: tuple[tuple[Stage, ...], ...] | None = None
    strategy: str = "sampled"
    choices: tuple[Choice, ...] = ()
    drafts: Mapping[str, DraftCount] = field(default_factory=dict)
    foreseen: Mapping[int, str] = field(default_factory=dict)

    @property
    def num_drafted_tokens(self) -> int:
        """Guessed ahead by speculation."""
        return sum(count.num_drafted for count in self.drafts.values())

    @property
    def num_accepted_tokens(self) -> int:
        """Of those, right, so that they cost no step of their own."""
        return sum(count.num_accepted for count in self.drafts.values())


class BeamOutput(NamedTuple):
    """A continuation that beam search found.

    Attributes:
        token_ids: generated ids, the one that ended it included.
        score: sum of log-probabilities, divided by the length to the power of the length penalty.
        finish_reason: "stop" or "length".
        stop_reason: as in `RequestOutput`.
        logprobs: where asked for, one entry a token: of the model, before any processor.
        decisions, choices: where asked for, as in `RequestOutput`.
        group: of diverse beams, which one found it.
    """

    token_ids: tuple[int, ...]
    text: str
    score: float
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    decisions: tuple[tuple[Stage, ...], ...] | None = None
    choices: tuple[Choice, ...] = ()
    group: int = 0


@dataclass(frozen=True, slots=True)
class Delta:
    """What one or several steps added to a stream.

    Attributes:
        text: new text; "" while a character or a possible stop string is incomplete.
        token_ids: new ids.
        logprobs: one entry a new id where asked for, else empty.
        output: the whole answer, with the last delta; None before.
        prompt_logprobs: with the first delta, where asked for, as in the output; None with all others.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    output: RequestOutput | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None

    @classmethod
    def of(cls, output: RequestOutput) -> Delta:
        """A whole answer, all at once."""
        return cls(output.text, output.token_ids, output.logprobs or (), output, output.prompt_logprobs)

    @property
    def finish_reason(self) -> FinishReason | None:
        return None if self.output is None else self.output.finish_reason

    def __add__(self, later: Delta) -> Delta:
        """Both, as one delta: how a reader that is behind catches up."""
        return Delta(
            self.text + later.text,
            self.token_ids + later.token_ids,
            self.logprobs + later.logprobs,
            later.output,
            self.prompt_logprobs,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """Totals since the engine was made.

    Attributes:
        num_prompt_tokens: prompt tokens of requests that were looked up in the cache.
        num_cached_tokens: of those, reused.
        num_restored_tokens: of those, brought up from another tier, by tier.
        num_rounded_tokens: of the cached ones, those with KV that was kept in fewer bits, by type.
        num_lost_blocks: evicted before they could be copied to a tier that was to have them.
        num_computed_tokens: tokens that went through the model, `num_recomputed_tokens` included.
        num_recomputed_tokens: computed a second time because their KV was evicted while their sequence was preempted.
        num_generated_tokens: tokens sampled.
        num_finished: requests that ended, by finish reason.
        drafts: what speculation drafted, by where the guesses were from.
        num_tokens_by_source: prompt tokens of all that was asked, by where their KV came from: see `TokenRange`.
        num_missed_tokens: of those that were computed, by reason.
        reuse_ended: prompts, by why reuse ended where it did.
    """

    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_computed_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_generated_tokens: int = 0
    num_preemptions: int = 0
    num_finished: Mapping[str, int]
    num_restored_tokens: Mapping[str, int] = field(default_factory=dict)
    num_rounded_tokens: Mapping[str, int] = field(default_factory=dict)
    num_lost_blocks: int = 0
    drafts: Mapping[str, DraftCount] = field(default_factory=dict)
    num_tokens_by_source: Mapping[str, int] = field(default_factory=dict)
    num_missed_tokens: Mapping[MissReason, int] = field(default_factory=dict)
    reuse_ended: Mapping[MissReason, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The engine between two steps: consistent within itself, as old as the last step.

    Attributes:
        num_waiting: requests that do not run yet, those included whose prefix is being restored.
        ledger: blocks of each cache group, in the order of `Program.cache_groups`.
        tiers: where KV lives beyond the pools, the fastest first.
    """

    num_waiting: int
    num_running: int
    counters: Counters
    ledger: tuple[Ledger, ...]
    tiers: tuple[TierStats, ...] = ()
