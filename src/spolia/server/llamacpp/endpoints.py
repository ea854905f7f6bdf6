"""The endpoints, and the reply as one object or as events. Its streams have no `[DONE]`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

import spolia
from spolia.engine import Delta, RequestOutput, TokenLogprobs, lanes
from spolia.errors import InvalidRequest, SpoliaError
from spolia.models import Tokenizer
from spolia.server.answer import Answer
from spolia.server.body import read_body
from spolia.server.config import ServerConfig
from spolia.server.embeddings import embed, normalised, texts_or_ids
from spolia.server.encoding import encode
from spolia.server.errors import error_body
from spolia.server.fill_in import infill_ids
from spolia.server.llamacpp.schema import CompletionRequest, EmbeddingRequest, InfillRequest, TemplateRequest
from spolia.server.routes import Route
from spolia.server.served import ServedModel, ServedModels
from spolia.server.sse import EventStream, watch_for_disconnect
from spolia.server.turn import Conversation

__all__ = ["LlamaCppEndpoints"]


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
        ]

    async def complete(self, request: Request) -> Response:
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
        body = await read_body(request, InfillRequest, max_bytes=self._config.max_body_bytes)
        served = await self._models.ready(body.model)
        files = [_file(item, f"input_extra[{index}]") for index, item in enumerate(body.input_extra or ())]
        tokenizer = served.engine.model.tokenizer
        ids = await asyncio.to_thread(
            infill_ids, tokenizer, body.input_prefix + body.prompt, body.input_suffix, files=files
        )
        return await self._respond(request, served, body, ids)

    async def embedding(self, request: Request) -> Response:
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
        body = await read_body(request, TemplateRequest, max_bytes=self._config.max_body_bytes)
        served = await self._models.ready(body.model)
        ids = await Conversation(messages=body.messages).encode(served)
        return _json({"prompt": served.engine.model.tokenizer.decode(ids, skip_special=False)})

    async def props(self) -> Response:
        served = await self._models.ready(self._first().name)
        engine, model = served.engine, served.engine.model
        special = model.tokenizer.special
        roles = {"bos_token": special.bos, "eos_token": special.eos}
        return _json(
            {
                "default_generation_settings": {"n_ctx": engine.config.max_context},
                "total_slots": engine.config.max_sequences,
                "model_path": served.name,
                "modalities": {"vision": False, "audio": False},
                "chat_template": "" if model.chat_template is None else model.chat_template.source,
                **{name: "" if id_ is None else model.tokenizer.token_text(id_) for name, id_ in roles.items()},
                "build_info": f"spolia {spolia.__version__}",
            }
        )

    async def slots(self) -> Response:
        """What each lane is doing. Lanes share one cache, so no request has to ask for one."""
        engine = self._first().engine
        shown = [
            {
                "id": lane.lane,
                "n_ctx": engine.config.max_context,
                "is_processing": lane.request_id is not None,
                "id_task": lane.request_id,
                "n_prompt_tokens": lane.num_prompt_tokens,
                "n_prompt_tokens_cache": lane.num_cached_tokens,
                "n_prompt_tokens_processed": min(lane.num_computed_tokens, lane.num_prompt_tokens),
                "n_decoded": lane.num_generated_tokens,
            }
            for lane in await engine.call(lanes)
        ]
        return _json(shown)

    def _first(self) -> ServedModel:
        return self._models.all()[0]

    async def _respond(
        self, request: Request, served: ServedModel, body: CompletionRequest | InfillRequest, ids: list[int]
    ) -> Response:
        params = body.sampling_params()
        await served.engine.prepare(params)
        answer = Answer.submit(
            "cmpl",
            served,
            [ids],
            [params],
            cache_salt=body.cache_salt or "",
            max_waiting=self._config.max_waiting,
        )
        shown = _Shown(answer, served.engine.model.tokenizer, with_tokens=bool(body.return_tokens))
        headers = {"x-request-id": answer.id}
        if body.stream:
            return EventStream(shown.events(), on_disconnect=answer.abort, headers=headers)
        with watch_for_disconnect(request.receive, answer.abort):
            (output,) = await answer.finish()
        return Response(msgspec.json.encode(shown.whole(output)), headers=headers, media_type="application/json")


class _Shown:
    """One reply in llama.cpp's shapes."""

    def __init__(self, answer: Answer, tokenizer: Tokenizer, *, with_tokens: bool) -> None:
        self._answer = answer
        self._tokenizer = tokenizer
        self._with_tokens = with_tokens

    def whole(self, output: RequestOutput, *, content: str | None = None) -> dict[str, Any]:
        """
        Args:
            content: of the last event of a stream, where the rest of the text has gone before.
        """
        is_last = content is not None
        reply: dict[str, Any] = {
            "index": 0,
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
            async for _, delta in self._answer.deltas():
                num_predicted += len(delta.token_ids)
                if delta.output is not None:
                    if delta.logprobs:
                        yield self._event(self._piece(Delta("", delta.token_ids, delta.logprobs), num_predicted))
                    yield self._event(self.whole(delta.output, content=delta.text))
                elif delta.text or delta.logprobs or self._with_tokens:
                    yield self._event(self._piece(delta, num_predicted))
        except SpoliaError as error:
            yield b"data: %b\n\n" % error_body(error)

    def _piece(self, delta: Delta, num_predicted: int) -> dict[str, Any]:
        piece: dict[str, Any] = {
            "index": 0,
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


def _stop_type(output: RequestOutput) -> str:
    if output.finish_reason == "length":
        return "limit"
    if output.finish_reason == "abort":
        return "none"
    return "word" if isinstance(output.stop_reason, str) else "eos"


def _timings(output: RequestOutput) -> dict[str, float]:
    """Milliseconds, and tokens a second; `cache_n` tokens of the prompt were reused, `prompt_n` computed."""
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
    }


def _file(item: dict[str, Any], path: str) -> tuple[str, str]:
    name, text = item.get("filename", ""), item.get("text")
    if not isinstance(name, str) or not isinstance(text, str):
        raise InvalidRequest(f"{path} must have a text and may have a filename", param=path)
    return name, text


def _json(content: Any) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
