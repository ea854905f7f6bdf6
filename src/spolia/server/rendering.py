"""One answer to bytes, whole or as events; what differs between endpoints is a `Rendering`."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Protocol, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from spolia.engine import Delta, RequestOutput, SamplingParams, TokenLogprobs
from spolia.errors import SpoliaError
from spolia.models import Tokenizer
from spolia.server.answer import Answer
from spolia.server.errors import error_body
from spolia.server.replies import ChatChunk, CompletionReply, Progress, PromptLogprob, Usage
from spolia.server.resuming import stream
from spolia.server.schema import SamplingRequest
from spolia.server.served import ServedModel
from spolia.server.sse import DONE, watch_for_disconnect, with_signs_of_life
from spolia.server.timings import Stopwatch, timings_of, with_progress

__all__ = ["Extras", "Rendering", "prompt_ids", "prompt_logprobs", "rendered_prompt", "respond"]

_SIGN_OF_LIFE = b": searching\n\n"


class Extras(msgspec.Struct, frozen=True):
    """What ends an answer; UNSET where the client did not ask for it."""

    usage: Usage | UnsetType = UNSET
    spolia: dict[str, Any] | UnsetType = UNSET
    timings: dict[str, float] | UnsetType = UNSET


Chunk: TypeAlias = ChatChunk | CompletionReply


class Rendering(Protocol):
    """An endpoint's shapes, for one answer. Called in the order of the stream."""

    def whole(self, outputs: Mapping[int, RequestOutput], extras: Extras) -> msgspec.Struct:
        """The answer to a request that does not stream; outputs by choice."""

    def chunk(self, choice: int, delta: Delta) -> Chunk | None:
        """A delta of one choice; None if it has nothing to show yet."""

    def blank(self, choice: int) -> Chunk:
        """A chunk of one choice that adds nothing to it."""

    def closing(self, extras: Extras) -> msgspec.Struct:
        """The last chunk, which has no choice."""


def prompt_ids(answer: Answer, choice: int, delta: Delta) -> list[int]:
    """Those of the choice that `delta` is of: which of several answers was the best is known by it alone."""
    return answer.prompt_token_ids(choice) if delta.output is None else list(delta.output.prompt_token_ids)


def prompt_logprobs(
    tokens: Sequence[TokenLogprobs] | None, tokenizer: Tokenizer
) -> list[dict[str, PromptLogprob] | None]:
    """A prompt's log-probabilities as vLLM has them: per token, the likeliest ones and itself, by id."""
    rows: list[dict[str, PromptLogprob] | None] = [None]
    for token in tokens or ():
        named = {**dict(token.top), token.token_id: token.logprob}
        rows.append({str(id_): PromptLogprob(p, tokenizer.token_text(id_)) for id_, p in named.items()})
    return rows


def rendered_prompt(
    kind: str, served: ServedModel, body: SamplingRequest, ids: Sequence[int], params: SamplingParams
) -> dict[str, Any]:
    """What an engine would be given for a prompt, as vLLM's render endpoints say it; `sampling_params` that differ."""
    plain = SamplingParams()
    names = [each.name for each in fields(params) if getattr(params, each.name) != getattr(plain, each.name)]
    given = {name: getattr(params, name) for name in names}
    return {
        "request_id": f"{kind}-{uuid.uuid4().hex}",
        "token_ids": list(ids),
        "prompt": served.model.tokenizer.decode(list(ids), skip_special=False),
        "model": served.name,
        "sampling_params": msgspec.to_builtins(given, enc_hook=str),
        "stream": bool(body.stream),
        "cache_salt": body.cache_salt,
        "priority": body.priority,
    }


async def respond(request: Request, body: SamplingRequest, answer: Answer, rendering: Rendering) -> Response:
    """The response to `request`. Its client's going away aborts `answer`."""
    headers = {"x-request-id": answer.id}
    if body.stream:
        events = _events(body, answer, rendering)
        if body.comes_at_the_end:
            events = with_signs_of_life(events, _SIGN_OF_LIFE)
        return stream(request, answer.id, events, abort=answer.abort, headers=headers, is_resumable=body.resumable)
    with watch_for_disconnect(request.receive, answer.abort):
        outputs = await answer.finish()
    if not outputs:
        return Response(status_code=499)  # to nobody
    if body.takes_best:
        outputs = dict(enumerate(_best(list(outputs.values()), body)))
    extras = _extras(body, answer, usage=True)
    whole = rendering.whole(outputs, extras)
    return Response(msgspec.json.encode(whole), headers=headers, media_type="application/json")


def _best(outputs: list[RequestOutput], body: SamplingRequest) -> list[RequestOutput]:
    """Of each prompt's `best_of` answers the `n` with the highest log-probability a token, best first."""
    of, kept = body.num_candidates, body.num_choices
    asked = getattr(body, "logprobs", None)  # a number for completions, 0 included; a flag for chats
    wanted = asked is not None and asked is not False
    best: list[RequestOutput] = []
    for first in range(0, len(outputs), of):
        ranked = sorted(outputs[first : first + of], key=_mean_logprob, reverse=True)[:kept]
        best += ranked if wanted else [replace(output, logprobs=None) for output in ranked]
    return best


async def _best_of(
    items: AsyncIterator[tuple[int, Delta | Progress]], answer: Answer, body: SamplingRequest
) -> AsyncIterator[tuple[int, Delta | Progress]]:
    """The best answers, all at once, when all have ended; before, how far the prompts of as many are."""
    of, kept = body.num_candidates, body.num_choices
    async for candidate, item in items:
        prompt, rank = divmod(candidate, of)
        if isinstance(item, Progress) and rank < kept:
            yield prompt * kept + rank, item
    outputs = [answer.outputs[candidate] for candidate in sorted(answer.outputs)]
    for choice, output in enumerate(_best(outputs, body)):
        yield choice, Delta.of(output)


def _mean_logprob(output: RequestOutput) -> float:
    return sum(token.logprob for token in output.logprobs or ()) / max(1, len(output.token_ids))


async def _events(body: SamplingRequest, answer: Answer, rendering: Rendering) -> AsyncIterator[bytes]:
    """What fails in mid-stream is told by the last event, and then there is no `[DONE]`."""
    encode = msgspec.json.Encoder().encode
    with_ids = bool(body.return_token_ids)
    with_usage = body.stream_options is not None and body.stream_options.continuous_usage_stats
    watches: dict[int, Stopwatch] = {}
    items: AsyncIterator[tuple[int, Delta | Progress]]
    items = with_progress(answer, answer.engine) if body.return_progress else answer.deltas()
    if body.takes_best:
        items = _best_of(items, answer, body)
    try:
        async for choice, item in items:
            if isinstance(item, Progress):
                blank = rendering.blank(choice)
                blank.prompt_progress = item
                yield b"data: %b\n\n" % encode(blank)
                continue
            # A token that only began a character has nothing to show, unless its id or its logprob was asked for.
            if not (
                item.text or item.logprobs or item.output is not None or with_ids or item.prompt_logprobs is not None
            ):
                continue
            chunk = rendering.chunk(choice, item)
            if chunk is not None:
                if with_usage:
                    chunk.usage = answer.usage_so_far()
                if body.timings_per_token:
                    watch = watches.setdefault(choice, Stopwatch(answer, choice))
                    chunk.timings = await watch.read(item)
                yield b"data: %b\n\n" % encode(chunk)
    except SpoliaError as error:
        yield b"data: %b\n\n" % error_body(error)
        return
    extras = _extras(body, answer, usage=body.include_usage)
    if extras != Extras():
        yield b"data: %b\n\n" % encode(rendering.closing(extras))
    yield DONE


def _extras(body: SamplingRequest, answer: Answer, *, usage: bool) -> Extras:
    told = {**({"beams": answer.beams} if answer.beams else {}), **(answer.explanation() if body.explain else {})}
    return Extras(
        usage=answer.usage() if usage else UNSET,
        spolia=told or UNSET,
        timings=timings_of(answer.outputs[0]) if body.timings_per_token and not body.stream else UNSET,
    )
