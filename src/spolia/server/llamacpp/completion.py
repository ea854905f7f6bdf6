"""A completion in llama.cpp's shapes, as one object, several, or events. Its streams have no `[DONE]`."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from spolia.engine import Delta, RequestOutput, TokenLogprobs
from spolia.errors import InvalidRequest, SpoliaError
from spolia.generation import Stage
from spolia.models import Tokenizer
from spolia.server.access import current_caller
from spolia.server.answer import Answer
from spolia.server.config import ServerConfig
from spolia.server.encoding import prepare_form
from spolia.server.errors import llamacpp_error_body
from spolia.server.llamacpp.schema import SamplingBody, settings_of
from spolia.server.replies import Progress
from spolia.server.resuming import stream
from spolia.server.served import ServedModel
from spolia.server.sse import watch_for_disconnect, with_signs_of_life
from spolia.server.timings import Stopwatch, timings_of, with_progress

__all__ = ["check_slot", "respond"]

_TIME_IS_UP = "t_max_predict_ms"
_PING = b":\n\n"


async def respond(
    request: Request, served: ServedModel, body: SamplingBody, prompts: Sequence[list[int]], config: ServerConfig
) -> Response:
    """Each of `prompts` completed `num_choices` times."""
    params = body.sampling_params()
    id_slot = -1 if body.id_slot is None else body.id_slot
    if id_slot >= 0:
        check_slot(served, id_slot)
        if len(prompts) * len(params) != 1:
            raise InvalidRequest("id_slot is given, and a slot has one completion at a time", param="id_slot")
    await prepare_form(body, served.engine, params[0])
    salt = body.cache_salt or ""
    if body.cache_prompt is False:
        salt = f"{salt}\0{uuid.uuid4().hex}"  # nobody else's, so nothing is there, and nothing of it is found
    answer = Answer.submit(
        "cmpl", served, prompts, params, cache_salt=salt, max_waiting=config.max_waiting, is_limit_soft=True
    )
    answer.is_prompt_only = body.num_predict == 0
    places = [
        _Place(served, f"{answer.id}-{choice}", id_slot, prompts[choice // len(params)], salt, body.cache_prompt)
        for choice in range(len(prompts) * len(params))
    ]
    shown = _Shown(answer, served, body, places)
    headers = {"x-request-id": answer.id}
    if body.stream:
        events = shown.events()
        if body.sse_ping_interval is not None and body.sse_ping_interval >= 1:
            events = with_signs_of_life(events, _PING, body.sse_ping_interval)

        def leave() -> None:
            answer.abort()
            shown.leave()

        return stream(request, answer.id, events, abort=leave, headers=headers, is_resumable=body.resumable)
    with watch_for_disconnect(request.receive, answer.abort):
        replies = await shown.whole()
    content = replies[0] if len(replies) == 1 else replies
    return Response(msgspec.json.encode(content), headers=headers, media_type="application/json")


def check_slot(served: ServedModel, id_slot: int) -> None:
    """
    Raises:
        InvalidRequest: there is no such slot.
    """
    num_slots = served.engine.config.max_sequences
    if not 0 <= id_slot < num_slots:
        raise InvalidRequest(f"id_slot is {id_slot}; there are slots 0 to {num_slots - 1}", param="id_slot")


class _Place:
    """One completion's stay in a slot, from its submission to its end.

    Args:
        id_slot: as the client wants it; below 0: any.
        is_kept: None or true: the slot holds the conversation afterwards. If not, its KV is the first to go.
    """

    def __init__(
        self,
        served: ServedModel,
        request_id: str,
        id_slot: int,
        prompt_ids: list[int],
        salt: str,
        is_kept: bool | None,
    ) -> None:
        self._engine = served.engine
        self._salt = current_caller().cache_salt(salt)
        self.id_slot = id_slot
        if id_slot < 0:
            self.id_slot = served.slots.choose(prompt_ids, self._salt, served.engine.config.max_sequences)
        self._slots = served.slots
        self._request_id = request_id
        self._is_kept = is_kept is not False
        self._has_left = False
        self._slots.begin(self.id_slot, request_id)

    def leave(self, output: RequestOutput | None) -> None:
        """What the answer has so far is what the slot holds."""
        if self._has_left:
            return
        self._has_left = True
        ids = [] if output is None else [*output.prompt_token_ids, *output.token_ids]
        if ids and not self._is_kept:
            self._engine.spend(ids, cache_salt=self._salt)
        self._slots.end(self.id_slot, self._request_id, ids if self._is_kept else [], self._salt)


class _Shown:
    """One request's replies, a choice each."""

    def __init__(self, answer: Answer, served: ServedModel, body: SamplingBody, places: Sequence[_Place]) -> None:
        self._answer = answer
        self._engine = served.engine
        self._tokenizer: Tokenizer = served.model.tokenizer
        self._body = body
        self._places = places
        self._first_s: dict[int, float] = {}
        self._has_line: set[int] = set()
        self._num_predicted = dict.fromkeys(range(len(places)), 0)

    def leave(self) -> None:
        """The places are others' again."""
        for choice, place in enumerate(self._places):
            place.leave(self._answer.outputs.get(choice))

    async def whole(self) -> list[dict[str, Any]]:
        """All, at the end."""
        try:
            ended: dict[int, RequestOutput] = {}
            async for choice, delta in self._answer.deltas():
                if (delta := self._bounded(choice, delta)).output is not None:
                    ended[choice] = delta.output
        finally:
            self.leave()
        return [self._fields(self._ended(choice, ended[choice])) for choice in sorted(ended)]

    async def events(self) -> AsyncIterator[bytes]:
        try:
            async for event in self._events():
                yield event
        except SpoliaError as error:
            yield b"data: %b\n\n" % llamacpp_error_body(error)
        finally:
            self.leave()

    async def _events(self) -> AsyncIterator[bytes]:
        watches: dict[int, Stopwatch] = {}
        if self._body.timings_per_token:
            watches = {choice: Stopwatch(self._answer, choice) for choice in range(len(self._places))}
        answer, body = self._answer, self._body
        async for choice, item in with_progress(answer, self._engine) if body.return_progress else answer.deltas():
            if isinstance(item, Progress):
                yield self._event({**self._piece(choice, Delta("", ())), "prompt_progress": item})
                continue
            delta = self._bounded(choice, item)
            more = {"timings": await watches[choice].read(delta)} if choice in watches else {}
            probabilities = self._probabilities_of(choice, delta)
            self._num_predicted[choice] += len(delta.token_ids)
            if delta.output is not None:
                if probabilities:
                    piece = self._piece(choice, Delta("", delta.token_ids))
                    yield self._event({**piece, "completion_probabilities": probabilities, **more})
                yield self._event(self._fields(self._ended(choice, delta.output, content=delta.text)))
            elif delta.text or probabilities or body.return_tokens or more:
                shown = {"completion_probabilities": probabilities} if probabilities else {}
                yield self._event({**self._piece(choice, delta), **shown, **more})

    def _bounded(self, choice: int, delta: Delta) -> Delta:
        """`delta`, within `n_indent`; and within `t_max_predict_ms`, or the answer ends."""
        output, limit_ms = delta.output, self._body.t_max_predict_ms
        if output is not None and output.stop_reason is not None and output.stop_reason == self._body.indent_pattern:
            output = replace(output, text=output.text[:-1], stop_reason="n_indent", finish_reason="length")
            return replace(delta, text=delta.text[:-1], output=output)
        if limit_ms is not None and limit_ms > 0 and delta.token_ids:
            now_s = time.perf_counter()
            begun_s = self._first_s.setdefault(choice, now_s)
            if "\n" in delta.text:
                self._has_line.add(choice)
            # All choices end together: they began together.
            if output is None and now_s - begun_s > 1e-3 * limit_ms and len(self._has_line) == len(self._places):
                self._answer.cut(_TIME_IS_UP)
        return delta

    def _ended(self, choice: int, output: RequestOutput, *, content: str | None = None) -> dict[str, Any]:
        """
        Args:
            content: of the last event of a stream, where the rest of the text has gone before.
        """
        body, is_last = self._body, content is not None
        params = self._answer.params(choice)
        reply: dict[str, Any] = {
            "index": choice,
            "id_slot": self._places[choice].id_slot,
            "content": output.text if content is None else content,
            "tokens": list(output.token_ids) if body.return_tokens and not is_last else [],
            "stop": True,
            "model": self._answer.model,
            "tokens_predicted": len(output.token_ids),
            "tokens_evaluated": len(output.prompt_token_ids),
            "tokens_cached": output.num_cached_tokens,
            "generation_settings": {
                "n_ctx": self._engine.context_tokens,
                "model": self._answer.model,
                **settings_of(params, body),
                "seed": output.seed,
            },
            "prompt": self._tokenizer.decode(list(output.prompt_token_ids), skip_special=False),
            "has_new_line": "\n" in output.text,
            "truncated": output.num_truncated_tokens > 0,
            "stop_type": _stop_type(output),
            "stopping_word": output.stop_reason if _stop_type(output) == "word" else "",
            "timings": timings_of(output),
        }
        if not is_last and body.n_probs:
            reply["completion_probabilities"] = self._probabilities(
                output.token_ids, output.logprobs or (), output.decisions or ()
            )
        return reply

    def _fields(self, reply: dict[str, Any]) -> dict[str, Any]:
        """Only what `response_fields` names, if it names any."""
        if not self._body.response_fields:
            return reply
        shown: dict[str, Any] = {}
        for path in self._body.response_fields:
            value: Any = reply
            *_, name = steps = path.split("/")
            for step in steps:
                value = value.get(step, msgspec.UNSET) if isinstance(value, Mapping) else msgspec.UNSET
            if value is not msgspec.UNSET:
                shown[name] = value
        return shown

    def _piece(self, choice: int, delta: Delta) -> dict[str, Any]:
        return {
            "index": choice,
            "id_slot": self._places[choice].id_slot,
            "content": delta.text,
            "tokens": list(delta.token_ids) if self._body.return_tokens else [],
            "stop": False,
            "tokens_predicted": self._num_predicted[choice],
            "tokens_evaluated": len(self._answer.prompt_token_ids(choice)),
        }

    def _probabilities_of(self, choice: int, delta: Delta) -> list[dict[str, Any]]:
        if not self._body.n_probs or not delta.token_ids:
            return []
        decisions: Sequence[Sequence[Stage]] = ()
        if self._body.post_sampling_probs:
            begun = self._num_predicted[choice]
            decisions = self._answer.decisions(choice)[begun : begun + len(delta.token_ids)]
        return self._probabilities(delta.token_ids, delta.logprobs, decisions)

    def _probabilities(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs],
        decisions: Sequence[Sequence[Stage]],
    ) -> list[dict[str, Any]]:
        """The model's, or with `post_sampling_probs` those that the token was drawn by.

        A token that was drawn from beyond the likeliest twenty has null.
        """
        if not self._body.post_sampling_probs:
            return [
                {
                    **self._named(token.token_id),
                    "logprob": token.logprob,
                    "top_logprobs": [{**self._named(id_), "logprob": logprob} for id_, logprob in token.top],
                }
                for token in logprobs
            ]
        return [
            {
                **self._named(token_id),
                "prob": dict(stages[-1].top).get(token_id),
                "top_probs": [{**self._named(id_), "prob": p} for id_, p in stages[-1].top[: self._body.n_probs]],
            }
            for token_id, stages in zip(token_ids, decisions, strict=False)
        ]

    def _named(self, token_id: int) -> dict[str, Any]:
        spelt = self._tokenizer.token_bytes(token_id)
        return {"id": token_id, "token": self._tokenizer.token_text(token_id), "bytes": list(spelt)}

    @staticmethod
    def _event(content: dict[str, Any]) -> bytes:
        return b"data: %b\n\n" % msgspec.json.encode(content)


def _stop_type(output: RequestOutput) -> str:
    if output.finish_reason == "length":
        return "limit"
    if output.finish_reason == "abort":
        return "none"
    return "word" if isinstance(output.stop_reason, str) else "eos"
