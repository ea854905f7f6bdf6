"""Contrastive search over HTTP: `penalty_alpha` with `top_k`, as transformers has it."""

from __future__ import annotations

from collections.abc import AsyncIterator

from spolia.engine import AsyncEngine, ContrastiveParams, History, Tenant
from spolia.errors import InvalidRequest
from spolia.generation import ReasoningSplitter
from spolia.models import Model
from spolia.server.schema import ChatRequest, CompletionRequest
from spolia.server.search import Found, Search, params_of_search, refuse_company
from spolia.server.toolcalls import ToolUse

__all__ = ["contrastive_search"]

_NAME = "contrastive search"


async def contrastive_search(
    body: ChatRequest | CompletionRequest,
    engine: AsyncEngine,
    model: Model,
    thoughts: ReasoningSplitter | None = None,
    tool_use: ToolUse | None = None,
) -> Search | None:
    """What to search; None if the request does not ask for it.

    Raises:
        InvalidRequest: a value that is not allowed, or a field that does not go with it.
    """
    if not body.penalty_alpha:
        return None
    refuse_company(body, _NAME, "priority", "ttl", "retention")
    asked = await params_of_search(body, engine, model, thoughts, tool_use)
    for name, value in (("n", body.n), ("best_of", body.best_of)):
        if value not in (None, 1):
            raise InvalidRequest(f"{name} is {value}; {_NAME} has one answer", param=name)
    if asked.temperature not in (0, 1):
        raise InvalidRequest(
            f"temperature is {asked.temperature}: {_NAME} draws no token; leave it out", param="temperature"
        )
    if asked.max_tokens is None:
        raise InvalidRequest(f"{_NAME} needs max_tokens", param="max_tokens")
    given = {} if body.top_k is None else {"top_k": body.top_k}
    params = ContrastiveParams(
        penalty_alpha=body.penalty_alpha,
        max_tokens=asked.max_tokens,
        stop_token_ids=asked.stop_token_ids,
        ignore_eos=asked.ignore_eos,
        processing=asked,
        **given,
    )

    def run(
        prompt: list[int], _: str, cache_salt: str, tenant: Tenant | None, history: History | None
    ) -> AsyncIterator[list[Found]]:
        tokens = engine.contrastive_search(prompt, params, cache_salt=cache_salt, tenant=tenant, history=history)
        return ([Found(each.prompt_token_ids, each.delta)] async for each in tokens)

    return Search(_NAME, 1, 1, run)
