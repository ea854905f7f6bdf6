"""One answer to bytes, whole or as events; what differs between endpoints is a `Rendering`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from spolia.engine import Delta, RequestOutput, TokenLogprobs
from spolia.errors import SpoliaError
from spolia.models import Tokenizer
from spolia.server.answer import Answer
from spolia.server.errors import error_body
from spolia.server.replies import PromptLogprob, Usage
from spolia.server.resuming import ResumableStreams
from spolia.server.schema import SamplingRequest
from spolia.server.sse import DONE, EventStream, watch_for_disconnect

__all__ = ["Extras", "Rendering", "prompt_logprobs", "respond"]


class Extras(msgspec.Struct, frozen=True):
    """What ends an answer; UNSET where the client did not ask for it."""

    usage: Usage | UnsetType = UNSET
    spolia: dict[str, Any] | UnsetType = UNSET


class Rendering(Protocol):
    """An endpoint's shapes, for one answer. Called in the order of the stream."""

    def whole(self, outputs: Sequence[RequestOutput], extras: Extras) -> msgspec.Struct:
        """The answer to a request that does not stream; an output a choice."""

    def chunk(self, choice: int, delta: Delta) -> msgspec.Struct | None:
        """A delta of one choice; None if it has nothing to show yet."""

    def closing(self, extras: Extras) -> msgspec.Struct:
        """The last chunk, which has no choice."""


def prompt_logprobs(
    tokens: Sequence[TokenLogprobs] | None, tokenizer: Tokenizer
) -> list[dict[str, PromptLogprob] | None]:
    """A prompt's log-probabilities as vLLM has them: per token, the likeliest ones and itself, by id."""
    rows: list[dict[str, PromptLogprob] | None] = [None]
    for token in tokens or ():
        named = {**dict(token.top), token.token_id: token.logprob}
        rows.append({str(id_): PromptLogprob(p, tokenizer.token_text(id_)) for id_, p in named.items()})
    return rows


async def respond(request: Request, body: SamplingRequest, answer: Answer, rendering: Rendering) -> Response:
    """The response to `request`. Its client's going away aborts `answer`."""
    headers = {"x-request-id": answer.id}
    if body.stream and body.resumable:
        streams: ResumableStreams = request.app.state.resumable_streams
        return streams.open(answer.id, _events(body, answer, rendering), abort=answer.abort, headers=headers)
    if body.stream:
        return EventStream(_events(body, answer, rendering), on_disconnect=answer.abort, headers=headers)
    with watch_for_disconnect(request.receive, answer.abort):
        outputs = _best(await answer.finish(), body)
    extras = _extras(body, answer, usage=True)
    whole = rendering.whole(outputs, extras)
    return Response(msgspec.json.encode(whole), headers=headers, media_type="application/json")


def _best(outputs: list[RequestOutput], body: SamplingRequest) -> list[RequestOutput]:
    """Of each prompt's `best_of` answers the `n` with the highest log-probability a token, best first."""
    of, kept = body.num_candidates, body.num_choices
    if of == kept:
        return outputs
    asked = getattr(body, "logprobs", None)  # a number for completions, 0 included; a flag for chats
    wanted = asked is not None and asked is not False
    best: list[RequestOutput] = []
    for first in range(0, len(outputs), of):
        ranked = sorted(outputs[first : first + of], key=_mean_logprob, reverse=True)[:kept]
        best += ranked if wanted else [replace(output, logprobs=None) for output in ranked]
    return best


def _mean_logprob(output: RequestOutput) -> float:
    return sum(token.logprob for token in output.logprobs or ()) / max(1, len(output.token_ids))


async def _events(body: SamplingRequest, answer: Answer, rendering: Rendering) -> AsyncIterator[bytes]:
    """What fails in mid-stream is told by the last event, and then there is no `[DONE]`."""
    encode = msgspec.json.Encoder().encode
    with_ids = bool(body.return_token_ids)
    try:
        async for choice, delta in answer.deltas():
            # A token that only began a character has nothing to show, unless its id or its logprob was asked for.
            if (
                delta.text
                or delta.logprobs
                or delta.output is not None
                or with_ids
                or delta.prompt_logprobs is not None
            ):
                chunk = rendering.chunk(choice, delta)
                if chunk is not None:
                    yield b"data: %b\n\n" % encode(chunk)
    except SpoliaError as error:
        yield b"data: %b\n\n" % error_body(error)
        return
    extras = _extras(body, answer, usage=body.include_usage)
    if extras != Extras():
        yield b"data: %b\n\n" % encode(rendering.closing(extras))
    yield DONE


def _extras(body: SamplingRequest, answer: Answer, *, usage: bool) -> Extras:
    return Extras(
        usage=answer.usage() if usage else UNSET,
        spolia=answer.explanation() if body.explain else UNSET,
    )
