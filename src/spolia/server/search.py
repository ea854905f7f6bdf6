"""Searches over HTTP, whose answers come whole: which beam is best is known at the end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from spolia.engine import History, RequestOutput, Tenant, Timings
from spolia.errors import InvalidRequest, Overloaded
from spolia.server.access import current_caller
from spolia.server.answer import Answer
from spolia.server.rendering import Extras, Rendering
from spolia.server.schema import ChatRequest, CompletionRequest
from spolia.server.served import ServedModel
from spolia.server.sse import watch_for_disconnect

__all__ = ["Found", "Search", "refuse_company", "respond_with_search"]


class Found(NamedTuple):
    """An answer; its id and timings are whatever, and `beam` is what to tell of it as a beam, None where it is none."""

    output: RequestOutput
    beam: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Search:
    """What was asked for.

    Attributes:
        name: for people.
        num_rows: requests that a prompt has in the queue at a time.
        num_choices: answers of a prompt.
        run: finds them, given the prompt, a cache salt, the tenant, and what is known of the prompt.
    """

    name: str
    num_rows: int
    num_choices: int
    run: Callable[[list[int], str, Tenant | None, History | None], Awaitable[list[Found]]]


def refuse_company(body: ChatRequest | CompletionRequest, search: str, *names: str) -> None:
    """Refuse what no search can honour, and `names`: an answer that leaves out what was asked for would be wrong.

    Raises:
        InvalidRequest: naming the field.
    """
    if body.stream:
        raise InvalidRequest(f"{search} does not stream: its answer comes whole; leave stream out", param="stream")
    if getattr(body, "echo", None) and getattr(body, "logprobs", None) is not None:
        raise InvalidRequest(f"echo with logprobs scores the prompt; {search} does not: leave one out", param="echo")
    for name in ("session", "tools", *names):
        if getattr(body, name, None):
            raise InvalidRequest(f"{name} does not go with {search}; leave it out", param=name)


async def respond_with_search(
    request: Request,
    kind: str,
    served: ServedModel,
    prompts: Sequence[list[int]],
    search: Search,
    rendering: Callable[[Answer], Rendering],
    *,
    cache_salt: str,
    max_waiting: int,
    explains: bool,
    messages: Sequence[Mapping[str, Any]] | None = None,
) -> Response:
    """Search from each prompt. The client's going away ends it.

    Args:
        explains: tell how each answer came about.
        messages: the history that the prompt was rendered from, if it was.

    Raises:
        InvalidRequest: a prompt does not fit the context.
        Overloaded: too many wait, or it took longer than an answer may.
    """
    if served.num_waiting + len(prompts) * search.num_rows > max_waiting:
        raise Overloaded(
            f"{served.num_waiting} requests are waiting, of at most {max_waiting}, and {search.name} asks for "
            f"{search.num_rows} at a time for each of {len(prompts)} prompts; try again later, or with fewer"
        )
    caller = current_caller()
    answer = Answer(kind, served, search.num_choices, messages)
    salt = caller.cache_salt(cache_salt)
    known = answer.history(served.engine.search_namespace(salt))
    if caller.account is not None:
        caller.account.admit(sum(map(len, prompts)))

    async def run() -> list[Found]:
        return [found for prompt in prompts for found in await search.run(prompt, salt, caller.share, known)]

    started_s = time.perf_counter()
    task = asyncio.ensure_future(asyncio.wait_for(run(), served.request_timeout_s))
    num_tokens = 0

    def cancel() -> None:
        task.cancel()

    try:
        with watch_for_disconnect(request.receive, cancel):
            answers = await task
        timings = Timings(None, None, time.perf_counter() - started_s)
        for choice, found in enumerate(answers):
            answer.take(choice, replace(found.output, request_id=f"{answer.id}-{choice}", timings=timings))
            num_tokens += len(found.output.token_ids)
        answer.remember(*answer.outputs)
    except TimeoutError:
        raise Overloaded(
            f"{search.name} took longer than {served.request_timeout_s} s; ask for fewer beams, candidates or tokens"
        ) from None
    except asyncio.CancelledError:
        if not task.cancelled():
            raise
        return Response(status_code=499)  # to nobody
    finally:
        task.cancel()
        if caller.account is not None:
            caller.account.settle(num_tokens)
    outputs = [answer.outputs[choice] for choice in range(len(answers))]
    beams = [{"index": index, **found.beam} for index, found in enumerate(answers) if found.beam is not None]
    told = {**({"beams": beams} if beams else {}), **(answer.explanation() if explains else {})}
    extras = Extras(usage=answer.usage(), spolia=told or UNSET)
    whole = rendering(answer).whole(outputs, extras)
    return Response(msgspec.json.encode(whole), headers={"x-request-id": answer.id}, media_type="application/json")
