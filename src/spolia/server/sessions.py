"""`/v1/sessions`, and how messages become tokens that are added to one.

    POST   /v1/sessions                  open
    GET    /v1/sessions                  list
    GET    /v1/sessions/{id}             look at
    POST   /v1/sessions/{id}/append      add text, token ids or messages without an answer
    POST   /v1/sessions/{id}/fork        a second one from here on
    POST   /v1/sessions/{id}/rewind      forget the last turns
    DELETE /v1/sessions/{id}             close

Turns are taken by `/v1/chat/completions` and `/v1/completions` with `"session": id`. With a disk, what was answered
outlives the server.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from spolia.engine import Session, SessionTurn
from spolia.errors import InvalidRequest
from spolia.models import Tokenizer
from spolia.server.access import current_caller
from spolia.server.body import read_body
from spolia.server.config import ServerConfig
from spolia.server.conversations import compare_messages
from spolia.server.encoding import encode
from spolia.server.prompting import render_chat
from spolia.server.routes import Route
from spolia.server.schema import chat_messages
from spolia.server.served import ServedModel, ServedModels

__all__ = ["SessionEndpoints", "chat_turn", "completion_turn", "find_session"]

Message: TypeAlias = Mapping[str, Any]
Render: TypeAlias = Callable[[Sequence[Message], bool], str]
"""A whole conversation to its text; True: up to where the reply begins."""

_MARK = "spolia-reply-7d0c1f"
"""Stands for the last reply when a conversation is rendered to see what comes after it."""
_TITLE_CHARACTERS = 60


class OpenSession(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    cache_salt: str | None = None
    ttl: float | None = None


class AppendToSession(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    cache_salt: str | None = None
    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None


class ForkSession(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    cache_salt: str | None = None


class RewindSession(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    cache_salt: str | None = None
    turns: int | None = None
    num_tokens: int | None = None


class SessionCard(msgspec.Struct, kw_only=True):
    """What is told of a session.

    Attributes:
        title: how the first message of the user begins; empty in a session of text.
        idle: seconds since it was last used.
    """

    id: str
    model: str
    title: str
    num_tokens: int
    num_turns: int
    num_messages: int
    ttl: float
    idle: float
    is_busy: bool
    object: str = "session"


class WholeSession(SessionCard, kw_only=True):
    """
    Attributes:
        turns: the number of messages at the end of each turn.
    """

    messages: Sequence[Message]
    turns: list[int]


async def find_session(served: ServedModel, session_id: str, cache_salt: str | None) -> Session:
    """A session of whoever asks.

    Raises:
        UnknownSession: there is none of that id, or it is another tenant's or has another salt.
        StorageUnavailable: it may be on a disk that does not answer.
    """
    return await served.sessions.find(session_id, current_caller().cache_salt(cache_salt or ""))


async def completion_turn(session: Session, tokenizer: Tokenizer, prompt: str | Sequence[int]) -> SessionTurn:
    """The next turn of a session of text: `prompt` goes after what is there.

    Raises:
        SessionBusy: a turn is running.
    """
    return SessionTurn(session, await _added_ids(session, tokenizer, prompt), ())


async def chat_turn(session: Session, tokenizer: Tokenizer, messages: Sequence[Message], render: Render) -> SessionTurn:
    """The next turn of a session of messages.

    Args:
        messages: those that are new, or the whole conversation as chat clients send it: then what the session has
            already is skipped, and its own replies count, whatever has become of them on the way.

    Raises:
        InvalidRequest: nothing new, or messages that the template does not take.
        SessionBusy: a turn is running.
    """
    new = _new_messages(session.messages, messages)
    if not new:
        raise InvalidRequest("messages has nothing that the session does not have; add one", param="messages")
    if session.num_tokens and not session.messages:
        raise InvalidRequest(
            "this session is of text, not of messages; go on with /v1/completions, or open another", param="session"
        )
    text = _added_text(session, new, render)
    ids = await encode(tokenizer, text, add_special=False)
    if session.token_ids and ids[:1] == session.token_ids[-1:] and tokenizer.is_special(ids[0]):
        ids = ids[1:]  # the reply ended with the token that ends a turn; it is in the session
    return SessionTurn(session, ids, new)


def _new_messages(known: Sequence[Message], messages: Sequence[Message]) -> list[Message]:
    """Of `messages`, those that a session of `known` ones has not."""
    if known and len(messages) > len(known):
        beginning = messages[: len(known)]
        if all(
            mine.get("role") == theirs.get("role")
            and (mine.get("role") == "assistant" or compare_messages([mine], [theirs]) is None)
            for mine, theirs in zip(known, beginning, strict=True)
        ):
            return list(messages[len(known) :])
    return list(messages)


def _added_text(session: Session, new: Sequence[Message], render: Render) -> str:
    """What the template puts after the session's last reply, or, where there is none, all of it.

    History is never rendered for its own sake: only where the last reply ends is looked for, by a mark in its place.
    """
    if not session.messages:
        return render(new, True)
    history = [dict(message) for message in session.messages]
    if history[-1].get("role") != "assistant":  # messages that were appended without an answer
        before, after = render(history, False), render([*history, *new], True)
        return after[_common_prefix(before, after) :]
    history[-1]["content"] = _MARK
    text = render([*history, *new], True)
    _, mark, added = text.rpartition(_MARK)
    if not mark:
        raise InvalidRequest("the model's chat template leaves replies out, so a session cannot go on after one")
    return added


def _up_to_the_reply(render: Callable[[list[Message]], str], messages: Sequence[Message]) -> str:
    """A conversation, which ends with its last message's text if that is a reply.

    What the template puts after a reply comes with the next turn, as it does for replies that were generated.
    """
    last = messages[-1]
    if last.get("role") != "assistant" or last.get("tool_calls"):
        return render(list(messages))
    before, mark, _ = render([*messages[:-1], {**last, "content": _MARK}]).rpartition(_MARK)
    if not mark:
        raise InvalidRequest("the model's chat template leaves replies out, so none can be appended", param="messages")
    return before + str(last["content"])


def _common_prefix(one: str, other: str) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


async def _added_ids(session: Session, tokenizer: Tokenizer, prompt: str | Sequence[int]) -> list[int]:
    if isinstance(prompt, str):
        return await encode(tokenizer, prompt, add_special=not session.token_ids)
    for id_ in prompt:
        if not 0 <= id_ < tokenizer.vocab_size:
            raise InvalidRequest(f"token id {id_} is not in the vocabulary of {tokenizer.vocab_size}", param="prompt")
    return list(prompt)


class SessionEndpoints:
    """Bound to the models and limits of one app."""

    def __init__(self, models: ServedModels, config: ServerConfig) -> None:
        self._models = models
        self._config = config

    def routes(self) -> list[Route]:
        return [
            Route("POST", "/v1/sessions", self.open, OpenSession),
            Route("GET", "/v1/sessions", self.list),
            Route("GET", "/v1/sessions/{session_id}", self.show),
            Route("DELETE", "/v1/sessions/{session_id}", self.close),
            Route("POST", "/v1/sessions/{session_id}/append", self.append, AppendToSession),
            Route("POST", "/v1/sessions/{session_id}/fork", self.fork, ForkSession),
            Route("POST", "/v1/sessions/{session_id}/rewind", self.rewind, RewindSession),
        ]

    async def open(self, request: Request) -> Response:
        """Begin a conversation that the server keeps token for token."""
        body = await read_body(request, OpenSession, max_bytes=self._config.max_body_bytes)
        served = await self._models.ready(body.model)
        return await _reply(
            served, served.sessions.open(current_caller().cache_salt(body.cache_salt or ""), ttl_s=body.ttl)
        )

    async def list(self, request: Request) -> Response:
        """The sessions of the key's tenant."""
        served = await self._models.ready(request.query_params.get("model"))
        sessions = await served.sessions.listed(current_caller().cache_salt(request.query_params.get("cache_salt", "")))
        cards = [_card(served, session) for session in sessions]
        return Response(msgspec.json.encode({"object": "list", "data": cards}), media_type="application/json")

    async def show(self, request: Request, session_id: str) -> Response:
        """Its messages, and where its turns end."""
        served = await self._models.ready(request.query_params.get("model"))
        session = await find_session(served, session_id, request.query_params.get("cache_salt"))
        served.engine.expect([session])  # who looks at it is about to go on
        await session.kept()
        turns = [num_messages for _, num_messages in session.marks]
        whole = WholeSession(**msgspec.structs.asdict(_card(served, session)), messages=session.messages, turns=turns)
        return Response(msgspec.json.encode(whole), media_type="application/json")

    async def close(self, request: Request, session_id: str) -> Response:
        """Forget it; its KV is the first to go."""
        served = await self._models.ready(request.query_params.get("model"))
        session = await find_session(served, session_id, request.query_params.get("cache_salt"))
        served.sessions.close(session)
        closed = {"id": session.id, "object": "session", "deleted": True}
        return Response(msgspec.json.encode(closed), media_type="application/json")

    async def append(self, request: Request, session_id: str) -> Response:
        """Add messages or text without answering."""
        body = await read_body(request, AppendToSession, max_bytes=self._config.max_body_bytes)
        served = await self._models.ready(body.model)
        session = await find_session(served, session_id, body.cache_salt)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequest("send either prompt or messages", param="prompt")
        model = served.model
        if body.prompt is not None:
            session.append(await _added_ids(session, model.tokenizer, body.prompt))
            return await _reply(served, session)
        messages = chat_messages(body.messages or [])

        def render(all_messages: Sequence[Message], _: bool) -> str:
            return _up_to_the_reply(lambda each: render_chat(model, each, add_generation_prompt=False), all_messages)

        turn = await chat_turn(session, model.tokenizer, messages, render)
        turn.abandon()
        session.append(turn.prompt_ids[turn.num_history_tokens :], _new_messages(session.messages, messages))
        return await _reply(served, session)

    async def fork(self, request: Request, session_id: str) -> Response:
        """A session of its own with the same tokens so far."""
        body = await read_body(request, ForkSession, max_bytes=self._config.max_body_bytes)
        served = await self._models.ready(body.model)
        return await _reply(served, served.sessions.fork(await find_session(served, session_id, body.cache_salt)))

    async def rewind(self, request: Request, session_id: str) -> Response:
        """Take tokens or messages back."""
        body = await read_body(request, RewindSession, max_bytes=self._config.max_body_bytes)
        served = await self._models.ready(body.model)
        session = await find_session(served, session_id, body.cache_salt)
        session.rewind(turns=body.turns, num_tokens=body.num_tokens)
        served.engine.expect([session])
        return await _reply(served, session)


def _card(served: ServedModel, session: Session) -> SessionCard:
    said = (str(message.get("content")) for message in session.messages if message.get("role") == "user")
    return SessionCard(
        id=session.id,
        model=served.name,
        title=" ".join(next(said, "")[: 2 * _TITLE_CHARACTERS].split())[:_TITLE_CHARACTERS],
        num_tokens=session.num_tokens,
        num_turns=len(session.marks),
        num_messages=len(session.messages),
        ttl=session.ttl_s,
        idle=round(served.sessions.idle_s(session), 1),
        is_busy=session.is_busy,
    )


async def _reply(served: ServedModel, session: Session) -> Response:
    await session.kept()
    return Response(msgspec.json.encode(_card(served, session)), media_type="application/json")
