"""Searches over HTTP: answers come as they are found, token by token, or whole where the best is known at the end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from spolia.engine import AsyncEngine, Delta, History, SamplingParams, SessionTurn, Tenant, Timings
from spolia.errors import InvalidRequest, Overloaded
from spolia.generation import ReasoningSplitter
from spolia.models import Model
from spolia.server.answer import Answer
from spolia.server.encoding import after_thoughts, prepare_form
from spolia.server.errors import TookTooLong
from spolia.server.rendering import Rendering, respond
from spolia.server.replies import Usage
from spolia.server.schema import ChatRequest, CompletionRequest
from spolia.server.served import ServedModel
from spolia.server.sse import next_of
from spolia.server.toolcalls import ToolUse

__all__ = ["Found", "Search", "params_of_search", "refuse_company", "respond_with_search"]


class Found(NamedTuple):
    """What was added to an answer. Of several, each ends before the next begins.

    Attributes:
        prompt_token_ids: as admitted.
        delta: its output's id and timings are whatever.
        beam: with the output, what to tell of it as a beam; None where it is none.
    """

    prompt_token_ids: list[int]
    delta: Delta
    beam: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Search:
    """What was asked for.

    Attributes:
        name: for people.
        num_rows: requests that a prompt has in the queue at a time.
        num_choices: answers of a prompt.
        run: admits a prompt, given it, the id of a request that computes it, a cache salt, the tenant, and what is
            known of it; yields what it finds.
    """

    name: str
    num_rows: int
    num_choices: int
    run: Callable[[list[int], str, str, Tenant | None, History | None], AsyncIterator[list[Found]]]


def refuse_company(body: ChatRequest | CompletionRequest, search: str, *names: str) -> None:
    """Refuse what no search can honour, and `names`: an answer that leaves out what was asked for would be wrong.

    Raises:
        InvalidRequest: naming the field.
    """
    if getattr(body, "echo", None) and getattr(body, "logprobs", None) is not None:
        raise InvalidRequest(f"echo with logprobs scores the prompt; {search} does not: leave one out", param="echo")
    for name in names:
        if getattr(body, name, None):
            raise InvalidRequest(f"{name} does not go with {search}; leave it out", param=name)


async def params_of_search(
    body: ChatRequest | CompletionRequest,
    engine: AsyncEngine,
    model: Model,
    thoughts: ReasoningSplitter | None,
    tool_use: ToolUse | None,
) -> SamplingParams:
    """What is asked of the answer, with its form, and that of the tools' calls, compiled on another thread.

    Args:
        model: the engine's, with the template that the prompt was made by.
        thoughts: what will tell them from the answer, to which alone the form applies.

    Raises:
        InvalidRequest: a parameter is impossible, or a form cannot be compiled; names the client's field.
    """
    params = after_thoughts(body.sampling_params(0), None if tool_use is not None else thoughts)
    await prepare_form(body, engine, params)
    return params if tool_use is None else await tool_use.prepare(params, engine, model, thoughts)


async def respond_with_search(
    request: Request,
    body: ChatRequest | CompletionRequest,
    kind: str,
    served: ServedModel,
    prompts: Sequence[list[int]],
    search: Search,
    rendering: Callable[[Answer], Rendering],
    *,
    max_waiting: int,
    messages: Sequence[Mapping[str, Any]] | None = None,
    turn: SessionTurn | None = None,
) -> Response:
    """Search from each prompt, one after the other. The client's going away ends it.

    Args:
        messages: the history that the prompt was rendered from, if it was.
        turn: of a session, which the only answer becomes part of; of what else was looked at nothing stays.

    Raises:
        InvalidRequest: a prompt does not fit the context.
        Overloaded: too many wait, or it took longer than an answer may.
        SessionBusy: it is not the turn's turn.
    """
    if served.num_waiting + len(prompts) * search.num_rows > max_waiting:
        raise Overloaded(
            f"{served.num_waiting} requests are waiting, of at most {max_waiting}, and {search.name} asks for "
            f"{search.num_rows} at a time for each of {len(prompts)} prompts; try again later, or with fewer"
        )
    if turn is not None:
        turn.begin()
    try:
        answer = _SearchAnswer(kind, served, search, prompts, body.cache_salt or "", messages, turn)
    except BaseException:
        if turn is not None:
            turn.abandon()
        raise
    return await respond(request, body, answer, rendering(answer))


class _SearchAnswer(Answer):
    """An answer whose deltas a search finds, by way of requests of its own."""

    def __init__(
        self,
        kind: str,
        served: ServedModel,
        search: Search,
        prompts: Sequence[list[int]],
        cache_salt: str,
        messages: Sequence[Mapping[str, Any]] | None,
        turn: SessionTurn | None,
    ) -> None:
        super().__init__(kind, served, search.num_choices, messages, turn)
        caller = self._caller
        salt = caller.cache_salt(cache_salt)
        known = self.history(served.engine.search_namespace(salt))
        self._name = search.name
        self._searches = [
            search.run(prompt, f"{self.id}-{number * search.num_choices}", salt, caller.share, known)
            for number, prompt in enumerate(prompts)
        ]
        self._prompt_ids: dict[int, list[int]] = {}  # by choice that has begun
        self._first_s: dict[int, float] = {}  # until the first delta of those that come in several
        self._step: asyncio.Task[list[Found] | None] | None = None
        served.searches.add(self)
        if caller.account is not None:
            caller.account.admit(sum(map(len, prompts)))

    def prompt_token_ids(self, choice: int) -> list[int]:
        return self._prompt_ids[choice]

    def usage_so_far(self) -> Usage:
        firsts = (ids for choice, ids in self._prompt_ids.items() if choice % self._num_choices == 0)
        num_prompt, num_completion = sum(map(len, firsts)), self._num_tokens.total()
        return Usage(num_prompt, num_completion, num_prompt + num_completion)

    def abort(self) -> None:
        super().abort()
        if self._step is not None:
            self._step.cancel()

    async def deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        """As of any answer.

        Raises:
            TookTooLong: its time is up.
            SpoliaError: the search or the engine failed.
        """
        self._is_read = True
        try:
            for number, search in enumerate(self._searches):
                choice = number * self._num_choices
                while (several := await self._next(search)) is not None:
                    deltas = []
                    for found in several:
                        deltas.append(self._take_found(choice, found))
                        choice += found.delta.output is not None
                    # Before the client hears of the end, and goes on from it.
                    self.remember(*(choice for choice, delta in deltas if delta.output is not None))
                    for choice, delta in deltas:
                        if delta.output is not None and self._turn is not None:
                            await self._turn.session.kept()
                        yield choice, delta
        finally:
            self.abort()
            self._settle()

    def _settle(self) -> None:
        super()._settle()
        self._served.searches.discard(self)

    async def _next(self, search: AsyncIterator[list[Found]]) -> list[Found] | None:
        """What the search finds next; None: nothing more, or the client has gone."""
        if self._is_left:
            return None
        limit_s = self._served.request_timeout_s
        self._step = step = asyncio.ensure_future(next_of(search))
        await asyncio.wait([step], timeout=max(0.0, self.submitted_s + limit_s - time.perf_counter()))
        if not step.done():
            raise TookTooLong(
                f"{self._name} took longer than {limit_s:g} s, the longest that an answer may take here; ask for fewer "
                "beams, candidates or tokens, or raise --request-timeout"
            )
        return None if step.cancelled() else step.result()

    def _take_found(self, choice: int, found: Found) -> tuple[int, Delta]:
        delta, passed_s = found.delta, time.perf_counter() - self.submitted_s
        self._prompt_ids[choice] = found.prompt_token_ids
        self._num_tokens[choice] += len(delta.token_ids)
        if delta.output is None:
            self._first_s.setdefault(choice, passed_s)
            return choice, delta
        timings = Timings(None, self._first_s.get(choice), passed_s)
        output = replace(delta.output, request_id=f"{self.id}-{choice}", timings=timings)
        self.take(choice, output)
        if self._turn is not None:
            self._turn.finish(output.token_ids, output.text)
        if found.beam is not None:
            self.beams.append({"index": choice, **found.beam})
        return choice, replace(delta, output=output)
