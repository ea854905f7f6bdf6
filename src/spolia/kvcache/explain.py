"""Why a prompt's tokens were or were not reused, in a closed list of reasons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

__all__ = [
    "NOBODY",
    "Beneficiary",
    "Eviction",
    "Explanation",
    "History",
    "MissReason",
    "PrefixHit",
    "TokenRange",
    "attribute",
]


class MissReason(StrEnum):
    """Why reuse ended where it ended."""

    FULL = "full"
    """It did not: every token was reused, but the last, which is computed to have logits."""
    NEVER_SEEN = "never_seen"
    """New text: nothing cached goes on from there, and nothing that did is remembered; or the conversation is known up
    to there, and others that are cached went on from it otherwise."""
    DIVERGED = "diverged"
    """Cached sequences go on from there, but with other tokens."""
    EVICTED = "evicted"
    """This continuation was cached and had to make room."""
    EXPIRED = "expired"
    """This continuation was cached, its time was over or its conversation closed, and it had to make room."""
    CLEARED = "cleared"
    """This continuation was cached and somebody cleared it."""
    OUTSIDE_WINDOW = "outside_window"
    """The tokens are known, but a window group no longer has the blocks that the next token would look at."""
    TOO_SHORT = "too_short"
    """Other tiers keep whole blocks only, and these were too few for one. They were computed once, or may have been:
    what is before them came back from a tier, the prompt ends with them, and nothing is known of the conversation."""
    RESULTS_WANTED = "results_wanted"
    """Cached or not: what the model says of each of these tokens was asked for, and that no cache keeps."""
    TEMPLATE_DRIFT = "template_drift"
    """The conversation is cached, but its history was put into other tokens this time: see `History`."""
    OTHER_NAMESPACE = "other_namespace"
    """Cached, but for somebody else. Told to an operator who looks a prompt up; no request's tokens are counted so."""


class Beneficiary(NamedTuple):
    """For whom something had to make room: a sequence's name and its namespace. Not for other namespaces' eyes."""

    label: str
    namespace: bytes


NOBODY = Beneficiary("", b"")


class History(NamedTuple):
    """What who asks knows of a prompt: its first `num_tokens` are a conversation whose KV has been computed before.

    `is_exact`: token for token, as a session keeps it. Else the same messages, which may have become other tokens.
    """

    num_tokens: int
    is_exact: bool = False


class Eviction(NamedTuple):
    """What the tree remembers at the place where it cut something off."""

    time: float
    reason: MissReason  # EVICTED, EXPIRED or CLEARED
    cause: str  # the policy or call that did it
    beneficiary: Beneficiary = NOBODY
    num_tokens: int = 0  # of the longest continuation that was cut off there


@dataclass(frozen=True, slots=True)
class Explanation:
    """The reason of a miss, with its evidence.

    Attributes:
        reason: why reuse ended.
        divergence: position of the first token that was not reused although it might have been; None if FULL.
        num_matched_tokens: tokens that the tree knows; more than were reused if OUTSIDE_WINDOW.
        continuation: the first tokens that the cache has at `divergence` instead (of one sequence), if DIVERGED.
        beyond: why the tokens from `until` on are not there either, where that is known.
        evicted: when, by what and for whom, if EVICTED, EXPIRED or CLEARED, or TOO_SHORT since then.
        until: the reason is that of the tokens before this position; None: of all.
    """

    reason: MissReason
    divergence: int | None
    num_matched_tokens: int
    continuation: tuple[int, ...] = ()
    evicted: Eviction | None = None
    beyond: Explanation | None = None
    until: int | None = None


class TokenRange(NamedTuple):
    """Where the KV of prompt tokens [start, stop) came from.

    `source` is "shared" (in use by another running sequence), "device" (cached), the name of the tier that it was
    brought up from for this request, or "computed"; `reason` says why the latter was not reused, else None.
    """

    start: int
    stop: int
    source: str
    reason: MissReason | None = None


def attribute(
    explanation: Explanation,
    *,
    num_shared: int,
    num_reused: int,
    num_prompt_tokens: int,
    restored: Sequence[tuple[int, int, str]] = (),
    met: Sequence[tuple[int, int, str]] = (),
) -> tuple[TokenRange, ...]:
    """Every token of a prompt, in order, with its source and, if it was computed, one reason.

    Of what was evicted the tree remembers how long it was, not what it said: the prompt may differ from it sooner.

    Args:
        restored: (start, stop, tier) of what was brought up for it, in order, without overlaps.
        met: likewise, of what was brought up while tokens before it were computed.
    """
    ranges: list[TokenRange] = []
    position = 0
    for start, stop, tier in [*restored, (num_reused, num_reused, "")]:
        start, stop = min(start, num_reused), min(stop, num_reused)
        ranges.append(TokenRange(position, min(start, num_shared), "shared"))
        ranges.append(TokenRange(max(position, num_shared), start, "device"))
        ranges.append(TokenRange(start, stop, tier))
        position = stop
    position = num_reused
    why: Explanation | None = explanation
    while why is not None:
        stop = num_prompt_tokens if why.until is None else min(why.until, num_prompt_tokens)
        ranges.append(TokenRange(position, stop, "computed", why.reason))
        position, why = stop, why.beyond
    ranges.append(TokenRange(position, num_prompt_tokens, "computed", MissReason.NEVER_SEEN))
    for start, stop, tier in met:
        ranges = [piece for part in ranges for piece in _with_restored(part, start, stop, tier)]
    return tuple(part for part in ranges if part.start < part.stop)


def _with_restored(part: TokenRange, start: int, stop: int, tier: str) -> tuple[TokenRange, ...]:
    """A range, of which tokens [start, stop) came from a tier."""
    start, stop = max(start, part.start), min(stop, part.stop)
    if start >= stop:
        return (part,)
    return part._replace(stop=start), TokenRange(start, stop, tier), part._replace(start=stop)


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """What a match found: the first `num_tokens` of `num_prompt_tokens` need no computing."""

    num_tokens: int
    num_prompt_tokens: int
    explanation: Explanation
