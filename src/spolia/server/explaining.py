"""What a request reused and why not more, in words and numbers: for `"explain": true` and `/v1/cache/explain/{id}`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from spolia.engine import MissReason, RequestOutput, TokenRange
from spolia.models import Tokenizer
from spolia.server.conversations import Conversation, ConversationLog, Difference

__all__ = ["ExplainLog", "Explained", "explain"]

_CONTEXT_TOKENS = 8  # of the prompt, on either side of the place where reuse ended
_MAX_EXPLAINED = 4_096


class Explained:
    """One choice's explanation.

    Attributes:
        ranges: every prompt token with its source and reason, template drift told apart.
    """

    def __init__(self, output: RequestOutput, ranges: Sequence[TokenRange], facts: dict[str, Any]) -> None:
        self.output = output
        self.ranges = tuple(ranges)
        self.facts = facts


def explain(
    output: RequestOutput,
    tokenizer: Tokenizer,
    *,
    messages: Sequence[Mapping[str, Any]] | None = None,
    log: ConversationLog | None = None,
) -> Explained:
    """Explain a request that has ended.

    Args:
        messages: the history that the prompt was rendered from, if it was.
        log: the conversations before this one.
    """
    why = output.explanation
    facts: dict[str, Any] = {
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_cached_tokens": output.num_cached_tokens,
        "num_restored_tokens": dict(output.num_restored_tokens),
        "num_rounded_tokens": dict(output.num_rounded_tokens),
    }
    if why is None:
        return Explained(output, (), facts)
    reason, ranges = why.reason, list(output.ranges)
    if reason is MissReason.DIVERGED and messages is not None and log is not None and why.divergence is not None:
        earlier = log.closest(output.namespace, messages)
        if earlier is not None:
            difference = log.difference(earlier, messages)
            if difference is not None:
                facts["message"] = _message(difference, messages)
            elif _is_history(earlier, messages) and why.divergence < earlier.num_tokens:
                reason = MissReason.TEMPLATE_DRIFT
                ranges = [
                    part._replace(reason=reason) if part.reason is MissReason.DIVERGED else part for part in ranges
                ]
            facts["earlier_request"] = earlier.id
    facts["reason"] = reason.value
    facts["divergence"] = why.divergence
    if why.divergence is not None:
        # The client's own text only: what the cache holds instead may be another client's.
        before, after = why.divergence - _CONTEXT_TOKENS, why.divergence + _CONTEXT_TOKENS
        around = output.prompt_token_ids[max(0, before) : after]
        facts["text_around"] = tokenizer.decode(around, skip_special=False)
        facts["text_after"] = tokenizer.decode(output.prompt_token_ids[why.divergence : after], skip_special=False)
    if why.evicted is not None:
        facts["evicted_by"] = why.evicted.cause
        facts["evicted_s_ago"] = output.evicted_age_s
        label, namespace = why.evicted.beneficiary
        if label:
            facts["evicted_for"] = label if namespace == output.namespace else "another tenant's request"
    facts["ranges"] = [_range(part) for part in ranges]
    return Explained(output, ranges, facts)


class ExplainLog:
    """The explanations of the last requests, by the answer's id."""

    def __init__(self, capacity: int = _MAX_EXPLAINED) -> None:
        self._capacity = capacity
        self._held: OrderedDict[tuple[str, str | None], dict[int, dict[str, Any]]] = OrderedDict()

    def add(self, answer_id: str, choice: int, explained: Explained, tenant: str | None) -> None:
        self._held.setdefault((answer_id, tenant), {})[choice] = explained.facts
        while len(self._held) > self._capacity:
            self._held.popitem(last=False)

    def get(self, answer_id: str, tenant: str | None) -> list[dict[str, Any]] | None:
        """By choice; None if that tenant has had no such answer lately."""
        held = self._held.get((answer_id, tenant))
        return None if held is None else [{"index": choice, **held[choice]} for choice in sorted(held)]


def _is_history(earlier: Conversation, messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the request's messages begin with all of the earlier one's."""
    return len(messages) >= len(earlier.messages) and list(messages[: len(earlier.messages)]) == list(earlier.messages)


def _message(difference: Difference, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    told: dict[str, Any] = {"field": difference.field, "kind": difference.kind}
    if difference.message > 0:  # else it is a setting, such as the tools
        told = {"index": difference.message - 1, "role": messages[difference.message].get("role"), **told}
    if difference.position is not None:
        told["character"] = difference.position
    return told


def _range(part: TokenRange) -> dict[str, Any]:
    told: dict[str, Any] = {"start": part.start, "stop": part.stop, "source": part.source}
    if part.reason is not None:
        told["reason"] = part.reason.value
    return told
