"""The endpoints, and the reply as one object or as events. Its streams have no `[DONE]`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

import spolia
from spolia.engine import AsyncEngine, Delta, LaneView, RequestOutput, TokenLogprobs, lanes
from spolia.errors import InvalidRequest, NotReady, SpoliaError
from spolia.models import Tokenizer
from spolia.server.access import current_caller
from spolia.server.answer import Answer
from spolia.server.body import read_body
from spolia.server.config import ServerConfig
from spolia.server.embeddings import embed, normalised, texts_or_ids
from spolia.server.encoding import encode
from spolia.server.errors import error_body
from spolia.server.fill_in import infill_ids
from spolia.server.llamacpp.schema import (
    CompletionRequest,
    EmbeddingRequest,
    InfillRequest,
    SlotRequest,
    TemplateRequest,
    defaults,
)
from spolia.server.routes import Route
from spolia.server.served import ServedModel, ServedModels
from spolia.server.slots import Slot
from spolia.server.sse import EventStream, watch_for_disconnect
from spolia.server.turn import Conversation

__all__ = ["LlamaCppEndpoints"]

# Between two looks at how far a prompt has come.
_PROGRESS_S = 0.1


class LlamaCppEndpoints:
    """Bound to the models and limits of one app."""

    def __init__(self, models: ServedModels, config: ServerConfig) -> None:
        self._models = models
        self._config = config

    def routes(self) -> list[Route]:
        return [
            Route("POST", "/completion", self.complete, CompletionRequest),
            Route("POST", "/infill", self.infill, InfillRequest),
            Route("POST", "/embedding", self.embedding, EmbeddingRequest),
            Route("POST", "/embeddings", self.embedding, EmbeddingRequest),
            Route("POST", "/apply-template", self.apply_template, TemplateRequest),
            Route("GET", "/props", self.props),
            Route("GET", "/slots", self.slots),
            Route("POST", "/slots/{id_slot}", self.slot, SlotRequest),
        ]

    async def complete(self, request: Request) -> Response:
        """llama.cpp's completion."""
        body = await read_body(request, CompletionRequest, max_bytes=self._config.max_body_bytes)
        served = await self._models.ready(body.model)
        parts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        ids: list[int] = []
        for number, part in enumerate(parts):
            if isinstance(part, str):
                ids += await encode(served.engine.model.tokenizer, part, add_special=number == 0)
            else:
                ids.append(part)
        return await self._respond(request, served, body, ids)

    async def infill(self, request: Request) -> Response:
        """Fill in what stands between two pieces of code."""
        body = await read_body(request, InfillRequest, max_bytes=self._config.max_body_bytes)
        served = await self._models.ready(body.model)
        files = [_file(item, f"input_extra[{index}]") for index, item in enumerate(body.input_extra or ())]
        tokenizer = served.engine.model.tokenizer
        ids = await asyncio.to_thread(
            infill_ids, tokenizer, body.input_prefix + body.prompt, body.input_suffix, files=files
        )
        return await self._respond(request, served, body, ids)

    async def embedding(self, request: Request) -> Response:
        """llama.cpp's vectors."""
        body = await read_body(request, EmbeddingRequest, max_bytes=self._config.max_body_bytes)
        served = await self._models.ready(body.model)
        asked = body.input if body.content is None else body.content
        if asked is None:
            raise InvalidRequest("content is missing; send a text, texts, or token ids", param="content")
        _, embeddings = await embed(
            served,
            texts_or_ids(asked),
            pooling=body.pooling,
            cache_salt=body.cache_salt or "",
            max_waiting=self._config.max_waiting,
        )
        norm = min(max(body.embd_normalize, -1), 1000)
        return _json(
            [
                {"index": index, "embedding": [normalised(each.vector, norm).tolist()]}
                for index, each in enumerate(embeddings)
            ]
        )

    async def apply_template(self, request: Request) -> Response:
        """The prompt that a chat becomes."""
        body = await read_body(request, TemplateRequest, max_bytes=self._config.max_body_bytes)
        served = await self._models.ready(body.model)
        ids = await Conversation(messages=body.messages).encode(served)
        return _json({"prompt": served.engine.model.tokenizer.decode(ids, skip_special=False)})

    async def props(self) -> Response:
        """Settings, template and limits."""
        served = await self._models.ready(self._first().name)
        engine, model = served.engine, served.engine.model
        special = model.tokenizer.special
        roles = {"bos_token": special.bos, "eos_token": special.eos}
        return _json(
            {
                "default_generation_settings": {
                    "id": 0,
                    "id_task": -1,
                    "n_ctx": engine.context_tokens,
                    "speculative": engine.config.speculation != "off",
                    "is_processing": engine.stats.num_running > 0,
                    "params": defaults(),
                },
                "total_slots": engine.config.max_sequences,
                "model_alias": served.name,
                "model_path": served.name,
                "modalities": {"vision": False, "audio": False},
                "chat_template": "" if model.chat_template is None else model.chat_template.source,
                **{name: "" if id_ is None else model.tokenizer.token_text(id_) for name, id_ in roles.items()},
                "build_info": f"spolia {spolia.__version__}",
                "is_sleeping": False,
            }
        )

    async def slots(self, request: Request) -> Response:
        """What runs in each slot, and how much each has. Requests of other APIs are shown in slots that are idle."""
        query = request.query_params
        served = self._models.get(query.get("model") or self._first().name)
        engine = served.engine
        running = {lane.request_id: lane for lane in await engine.call(lanes) if lane.request_id is not None}
        shown: list[tuple[Slot, LaneView | None]] = []
        for number in range(engine.config.max_sequences):
            slot = served.slots.get(number)
            mine = [running.pop(id_) for id_ in slot.running if id_ in running]
            shown.append((slot, mine[0] if mine else None))
        for index, (slot, lane) in enumerate(shown):
            if lane is None and running:
                shown[index] = slot, running.pop(next(iter(running)))
        if query.get("fail_on_no_slot") and all(lane is not None for _, lane in shown):
            raise NotReady(f"all of the {len(shown)} slots are in use; requests wait until one is free")
        return _json(
            [
                {
                    "id": number,
                    "n_ctx": engine.context_tokens,
                    "is_processing": lane is not None,
                    "id_task": None if lane is None else lane.request_id,
                    "n_prompt_tokens": 0 if lane is None else lane.num_prompt_tokens,
                    "n_prompt_tokens_cache": 0 if lane is None else lane.num_cached_tokens,
                    "n_prompt_tokens_processed": 0
                    if lane is None
                    else min(lane.num_computed_tokens, lane.num_prompt_tokens),
                    "n_decoded": 0 if lane is None else lane.num_generated_tokens,
                    "n_tokens_held": len(slot.token_ids),
                }
                for number, (slot, lane) in enumerate(shown)
            ]
        )

    async def slot(self, request: Request, id_slot: int) -> Response:
        """`?action=save`, `restore` or `erase`."""
        action = request.query_params.get("action")
        if action not in ("save", "restore", "erase"):
            raise InvalidRequest(f"action is {action!r}; it must be save, restore or erase", param="action")
        body = SlotRequest()
        if action != "erase" or request.headers.get("content-length", "0") != "0":
            body = await read_body(request, SlotRequest, max_bytes=self._config.max_body_bytes)
        served = await self._models.ready(body.model or self._first().name)
        _check_slot(served, id_slot)
        slot = served.slots.get(id_slot)
        if action == "erase":
            num_erased = len(slot.token_ids)
            if num_erased:
                served.engine.spend(slot.token_ids, cache_salt=slot.cache_salt)
            slot.token_ids, slot.cache_salt = [], ""
            return _json({"id_slot": id_slot, "n_erased": num_erased})
        path = self._slot_file(body.filename)
        begun_s = time.perf_counter()
        if action == "save":
            num_tokens, num_bytes = await served.engine.save_kv(slot.token_ids, path, cache_salt=slot.cache_salt)
            figures: dict[str, Any] = {"n_saved": num_tokens, "n_written": num_bytes}
        else:
            if body.cache_salt is None and slot.token_ids:
                cache_salt = slot.cache_salt
            else:
                cache_salt = current_caller().cache_salt(body.cache_salt or "")
            ids, num_tokens, num_bytes = await served.engine.restore_kv(path, cache_salt=cache_salt)
            slot.token_ids, slot.cache_salt = ids, cache_salt
            figures = {"n_restored": num_tokens, "n_read": num_bytes}
        timings = {f"{action}_ms": 1e3 * (time.perf_counter() - begun_s)}
        return _json({"id_slot": id_slot, "filename": path.name, **figures, "timings": timings})

    def _slot_file(self, name: str | None) -> Path:
        """A plain name inside the folder: no path is made of what a client says."""
        folder = self._config.slot_save_path
        if folder is None:
            raise InvalidRequest("this server saves no slots; start it with --slot-save-path DIR", code="not_supported")
        if not name or name.startswith(".") or len(name) > 128 or not all(c.isalnum() or c in "._-" for c in name):
            raise InvalidRequest(
                f"filename is {name!r}; it must be letters, digits, dots, dashes and underscores", param="filename"
            )
        return folder / name

    def _first(self) -> ServedModel:
        return self._models.all()[0]

    async def _respond(
        self, request: Request, served: ServedModel, body: CompletionRequest | InfillRequest, ids: list[int]
    ) -> Response:
        params = body.sampling_params()
        id_slot = -1 if body.id_slot is None else body.id_slot
        if id_slot >= 0:
            _check_slot(served, id_slot)
        await served.engine.prepare(params)
        answer = Answer.submit(
            "cmpl",
            served,
            [ids],
            [params],
            cache_salt=body.cache_salt or "",
            max_waiting=self._config.max_waiting,
        )
        place = _Place(served, answer, id_slot, ids, current_caller().cache_salt(body.cache_salt or ""))
        shown = _Shown(
            answer,
            served.engine,
            id_slot=place.id_slot,
            with_tokens=bool(body.return_tokens),
            with_progress=bool(body.return_progress),
        )
        headers = {"x-request-id": answer.id}
        if body.stream:

            def leave() -> None:
                answer.abort()
                place.leave()

            return EventStream(place.held(shown.events()), on_disconnect=leave, headers=headers)
        try:
            with watch_for_disconnect(request.receive, answer.abort):
                (output,) = await answer.finish()
        finally:
            place.leave()
        return Response(msgspec.json.encode(shown.whole(output)), headers=headers, media_type="application/json")


class _Place:
    """One answer's stay in a slot, from its submission to its end.

    Args:
        id_slot: as the client wants it; below 0: any.
    """

    def __init__(self, served: ServedModel, answer: Answer, id_slot: int, prompt_ids: list[int], salt: str) -> None:
        num_slots = served.engine.config.max_sequences
        self.id_slot = id_slot if id_slot >= 0 else served.slots.choose(prompt_ids, salt, num_slots)
        self._slots = served.slots
        self._answer = answer
        self._salt = salt
        self._has_left = False
        self._slots.begin(self.id_slot, f"{answer.id}-0")

    def leave(self) -> None:
        """What the answer has so far is what the slot holds."""
        if self._has_left:
            return
        self._has_left = True
        output = self._answer.outputs.get(0)
        ids = [] if output is None else [*output.prompt_token_ids, *output.token_ids]
        self._slots.end(self.id_slot, f"{self._answer.id}-0", ids, self._salt)

    async def held(self, events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        try:
            async for event in events:
                yield event
        finally:
            self.leave()


class _Shown:
    """One reply in llama.cpp's shapes.

    Args:
        with_progress: a stream tells how far the prompt has come.
    """

    def __init__(
        self, answer: Answer, engine: AsyncEngine, *, id_slot: int, with_tokens: bool, with_progress: bool
    ) -> None:
        self._answer = answer
        self._engine = engine
        self._tokenizer: Tokenizer = engine.model.tokenizer
        self._id_slot = id_slot
        self._with_tokens = with_tokens
        self._with_progress = with_progress
        self._begun_s = time.perf_counter()

    def whole(self, output: RequestOutput, *, content: str | None = None) -> dict[str, Any]:
        """
        Args:
            content: of the last event of a stream, where the rest of the text has gone before.
        """
        is_last = content is not None
        reply: dict[str, Any] = {
            "index": 0,
            "id_slot": self._id_slot,
            "content": content if content is not None else output.text,
            "tokens": list(output.token_ids) if self._with_tokens and not is_last else [],
            "stop": True,
            "model": self._answer.model,
            "tokens_predicted": len(output.token_ids),
            "tokens_evaluated": len(output.prompt_token_ids),
            "tokens_cached": output.num_cached_tokens,
            "truncated": False,
            "stop_type": _stop_type(output),
            "stopping_word": output.stop_reason if _stop_type(output) == "word" else "",
            "generation_settings": {"seed": output.seed},
            "timings": _timings(output),
        }
        if output.logprobs is not None and not is_last:
            reply["completion_probabilities"] = self._probabilities(output.logprobs)
        return reply

    async def events(self) -> AsyncIterator[bytes]:
        num_predicted = 0
        try:
            deltas = self._answer.deltas()
            if self._with_progress:
                async for progress in self._progress(first := asyncio.ensure_future(anext(deltas))):
                    yield progress
                deltas = _with_first(first, deltas)
            async for _, delta in deltas:
                num_predicted += len(delta.token_ids)
                if delta.output is not None:
                    if delta.logprobs:
                        yield self._event(self._piece(Delta("", delta.token_ids, delta.logprobs), num_predicted))
                    yield self._event(self.whole(delta.output, content=delta.text))
                elif delta.text or delta.logprobs or self._with_tokens:
                    yield self._event(self._piece(delta, num_predicted))
        except SpoliaError as error:
            yield b"data: %b\n\n" % error_body(error)

    async def _progress(self, first: asyncio.Future[tuple[int, Delta]]) -> AsyncIterator[bytes]:
        """How far the prompt is, whenever that has changed, until the first token is there; then that all of it is.

        Nothing of an answer that is over before anybody could look.
        """
        told = -1
        num_cached: int | None = None
        try:
            while not first.done():
                await asyncio.wait([first], timeout=_PROGRESS_S)
                mine = [lane for lane in await self._engine.call(lanes) if lane.request_id == f"{self._answer.id}-0"]
                for lane in mine:
                    num_cached = lane.num_cached_tokens
                    done = min(lane.num_computed_tokens, lane.num_prompt_tokens)
                    if done > told and not first.done():
                        told = done
                        yield self._progress_event(num_cached, done)
            num_tokens = len(self._answer.prompt_token_ids(0))
            if first.exception() is None and num_cached is not None and told < num_tokens:
                yield self._progress_event(num_cached, num_tokens)
        finally:
            first.cancel()

    def _progress_event(self, num_cached: int, num_done: int) -> bytes:
        piece = self._piece(Delta("", ()), 0)
        piece["prompt_progress"] = {
            "total": len(self._answer.prompt_token_ids(0)),
            "cache": num_cached,
            "processed": num_done,
            "time_ms": round(1e3 * (time.perf_counter() - self._begun_s)),
        }
        return self._event(piece)

    def _piece(self, delta: Delta, num_predicted: int) -> dict[str, Any]:
        piece: dict[str, Any] = {
            "index": 0,
            "id_slot": self._id_slot,
            "content": delta.text,
            "tokens": list(delta.token_ids) if self._with_tokens else [],
            "stop": False,
            "tokens_predicted": num_predicted,
            "tokens_evaluated": len(self._answer.prompt_token_ids(0)),
        }
        if delta.logprobs:
            piece["completion_probabilities"] = self._probabilities(delta.logprobs)
        return piece

    def _probabilities(self, tokens: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
        return [
            {
                **self._named(token.token_id, token.logprob),
                "top_logprobs": [self._named(id_, logprob) for id_, logprob in token.top],
            }
            for token in tokens
        ]

    def _named(self, token_id: int, logprob: float) -> dict[str, Any]:
        spelt = self._tokenizer.token_bytes(token_id)
        return {
            "id": token_id,
            "token": self._tokenizer.token_text(token_id),
            "bytes": list(spelt),
            "logprob": logprob,
        }

    @staticmethod
    def _event(content: dict[str, Any]) -> bytes:
        return b"data: %b\n\n" % msgspec.json.encode(content)


async def _with_first(
    first: asyncio.Future[tuple[int, Delta]], rest: AsyncIterator[tuple[int, Delta]]
) -> AsyncIterator[tuple[int, Delta]]:
    yield await first
    async for item in rest:
        yield item


def _check_slot(served: ServedModel, id_slot: int) -> None:
    num_slots = served.engine.config.max_sequences
    if not 0 <= id_slot < num_slots:
        raise InvalidRequest(f"id_slot is {id_slot}; there are slots 0 to {num_slots - 1}", param="id_slot")


def _stop_type(output: RequestOutput) -> str:
    if output.finish_reason == "length":
        return "limit"
    if output.finish_reason == "abort":
        return "none"
    return "word" if isinstance(output.stop_reason, str) else "eos"


def _timings(output: RequestOutput) -> dict[str, float]:
    """Milliseconds, and tokens a second; `cache_n` tokens of the prompt were reused, `prompt_n` computed.

    `draft_n` were guessed ahead, of which `draft_n_accepted` were right.
    """
    timings = output.timings
    first_s = timings.first_token_s or timings.total_s
    prompt_ms = max(1e3 * (first_s - (timings.queue_s or 0.0)), 1e-3)
    predicted_ms = max(1e3 * (timings.total_s - first_s), 1e-3)
    num_computed = len(output.prompt_token_ids) - output.num_cached_tokens
    num_predicted = len(output.token_ids)
    return {
        "cache_n": output.num_cached_tokens,
        "prompt_n": num_computed,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": prompt_ms / max(1, num_computed),
        "prompt_per_second": 1e3 * num_computed / prompt_ms,
        "predicted_n": num_predicted,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": predicted_ms / max(1, num_predicted),
        "predicted_per_second": 1e3 * num_predicted / predicted_ms,
        "draft_n": output.num_drafted_tokens,
        "draft_n_accepted": output.num_accepted_tokens,
    }


def _file(item: dict[str, Any], path: str) -> tuple[str, str]:
    name, text = item.get("filename", ""), item.get("text")
    if not isinstance(name, str) or not isinstance(text, str):
        raise InvalidRequest(f"{path} must have a text and may have a filename", param=path)
    return name, text


def _json(content: Any) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
