"""What a request reused and why not more, in words and numbers: for `"explain": true` and `/v1/cache/explain/{id}`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from spolia.engine import Embedding, Explanation, MissReason, RequestOutput, TokenRange
from spolia.models import Tokenizer
from spolia.server.conversations import Conversation, ConversationLog, Difference

__all__ = ["ExplainLog", "explain", "explain_embedding"]

_CONTEXT_TOKENS = 8  # of the prompt, on either side of the place where reuse ended
_MAX_EXPLAINED = 4_096


def explain(
    output: RequestOutput,
    tokenizer: Tokenizer,
    *,
    messages: Sequence[Mapping[str, Any]] | None = None,
    earlier: Conversation | None = None,
) -> dict[str, Any]:
    """Explain a request that has ended, in what JSON can say.

    Args:
        messages: the history that the prompt was rendered from, if it was.
        earlier: the conversation before this one that is closest to it.
    """
    why, namespace = output.explanation, output.namespace
    facts: dict[str, Any] = {
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_cached_tokens": output.num_cached_tokens,
        "num_restored_tokens": dict(output.num_restored_tokens),
        "num_rounded_tokens": dict(output.num_rounded_tokens),
    }
    if why is None:
        return facts
    is_otherwise = why.reason in (MissReason.DIVERGED, MissReason.TEMPLATE_DRIFT)
    if is_otherwise and messages is not None and earlier is not None:
        difference = ConversationLog.difference(earlier, messages)
        if difference is not None:
            facts["message"] = _message(difference, messages)
        facts["earlier_request"] = earlier.id
    facts |= _why(why, output.prompt_token_ids, tokenizer)
    if why.evicted is not None:
        facts["evicted_s_ago"] = output.evicted_age_s
        label, theirs = why.evicted.beneficiary
        if label:
            facts["evicted_for"] = label if theirs == namespace else "another tenant's request"
    facts["ranges"] = [_range(part) for part in output.ranges]
    return facts


def explain_embedding(embedding: Embedding, token_ids: Sequence[int], tokenizer: Tokenizer) -> dict[str, Any]:
    """Explain an input of which a vector was made; `token_ids` are its own."""
    return {
        "num_prompt_tokens": embedding.num_tokens,
        "num_cached_tokens": embedding.num_cached_tokens,
        **_why(embedding.explanation, token_ids[: embedding.num_tokens], tokenizer),
        "ranges": [_range(part) for part in embedding.ranges],
    }


def _why(why: Explanation, token_ids: Sequence[int], tokenizer: Tokenizer) -> dict[str, Any]:
    facts: dict[str, Any] = {"reason": why.reason.value, "divergence": why.divergence}
    if why.divergence is not None:
        # The client's own text only: what the cache holds instead may be another client's.
        before, after = why.divergence - _CONTEXT_TOKENS, why.divergence + _CONTEXT_TOKENS
        facts["text_around"] = tokenizer.decode(token_ids[max(0, before) : after], skip_special=False)
        facts["text_after"] = tokenizer.decode(token_ids[why.divergence : after], skip_special=False)
    if why.evicted is not None:
        facts["evicted_by"] = why.evicted.cause
    return facts


class ExplainLog:
    """The explanations of the last requests, by the answer's id."""

    def __init__(self, capacity: int = _MAX_EXPLAINED) -> None:
        self._capacity = capacity
        self._held: OrderedDict[tuple[str, str | None], dict[int, dict[str, Any]]] = OrderedDict()

    def add(self, answer_id: str, choice: int, facts: dict[str, Any], tenant: str | None) -> None:
        self._held.setdefault((answer_id, tenant), {})[choice] = facts
        while len(self._held) > self._capacity:
            self._held.popitem(last=False)

    def get(self, answer_id: str, tenant: str | None) -> list[dict[str, Any]] | None:
        """By choice; None if that tenant has had no such answer lately."""
        held = self._held.get((answer_id, tenant))
        return None if held is None else [{"index": choice, **held[choice]} for choice in sorted(held)]


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
