"""Contrastive search over HTTP: `penalty_alpha` with `top_k`, as transformers has it."""

from __future__ import annotations

from dataclasses import fields

from spolia.engine import AsyncEngine, ContrastiveParams, RequestOutput, SamplingParams, Tenant, Timings
from spolia.errors import InvalidRequest
from spolia.server.schema import ChatRequest, CompletionRequest
from spolia.server.search import Found, Search, refuse_company

__all__ = ["contrastive_search"]

_NAME = "contrastive search"
# What it takes, or what changes nothing in its answer: no token is drawn, and tags are read from the text.
_TAKEN = ("max_tokens", "top_k", "stop_token_ids", "ignore_eos", "seed", "speculation", "reasoning_tags")


def contrastive_search(body: ChatRequest | CompletionRequest, engine: AsyncEngine) -> Search | None:
    """What to search; None if the request does not ask for it.

    Raises:
        InvalidRequest: a value that is not allowed, or a field that does not go with it.
    """
    if not body.penalty_alpha:
        return None
    asked = body.sampling_params(0)
    refuse_company(body, _NAME, "priority", "ttl", "retention")
    for name, value in (("n", body.n), ("best_of", body.best_of)):
        if value not in (None, 1):
            raise InvalidRequest(f"{name} is {value}; {_NAME} has one answer", param=name)
    if (form := body.form()) is not None:
        raise InvalidRequest(f"{form[0]} does not go with {_NAME}; leave it out", param=form[0])
    for field in fields(SamplingParams):
        value = getattr(asked, field.name)
        is_neutral = value == field.default or (field.name == "temperature" and value == 0)
        if field.name not in _TAKEN and not is_neutral:
            raise InvalidRequest(
                f"{field.name} is {value!r}: it does not go with {_NAME}; leave it out", param=field.name
            )
    if asked.max_tokens is None:
        raise InvalidRequest(f"{_NAME} needs max_tokens", param="max_tokens")
    given = {} if body.top_k is None else {"top_k": body.top_k}
    params = ContrastiveParams(
        penalty_alpha=body.penalty_alpha,
        max_tokens=asked.max_tokens,
        stop_token_ids=asked.stop_token_ids,
        ignore_eos=asked.ignore_eos,
        **given,
    )

    async def run(prompt: list[int], cache_salt: str, tenant: Tenant | None) -> list[Found]:
        found = await engine.contrastive_search(prompt, params, cache_salt=cache_salt, tenant=tenant)
        output = RequestOutput(
            request_id="",
            prompt_token_ids=tuple(prompt),
            token_ids=found.token_ids,
            text=found.text,
            logprobs=None,
            finish_reason=found.finish_reason,
            stop_reason=found.stop_reason,
            num_cached_tokens=0,  # the prompt's states are computed anew each time
            num_restored_tokens={},
            explanation=None,
            seed=0,
            timings=Timings(None, None, 0.0),
        )
        return [Found(output)]

    return Search(_NAME, 1, 1, run)
