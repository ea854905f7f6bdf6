"""The endpoints."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

import spolia
from spolia.engine import LaneView, SamplingParams, lanes
from spolia.errors import InvalidRequest, NotReady
from spolia.server.access import current_caller
from spolia.server.body import read_body
from spolia.server.config import ServerConfig
from spolia.server.embeddings import embed, encoded, normalised, texts_or_ids
from spolia.server.encoding import encode
from spolia.server.fill_in import infill_ids
from spolia.server.llamacpp.completion import check_slot, respond
from spolia.server.llamacpp.schema import (
    CompletionRequest,
    EmbeddingRequest,
    InfillRequest,
    SamplingBody,
    SlotRequest,
    TemplateRequest,
    settings_of,
)
from spolia.server.prompting import prompt_options, render_chat
from spolia.server.routes import Route
from spolia.server.served import ServedModel, ServedModels
from spolia.server.slots import Slot

__all__ = ["LlamaCppEndpoints"]


class LlamaCppEndpoints:
    """Bound to the models and limits of one app."""

    def __init__(self, models: ServedModels, config: ServerConfig) -> None:
        self._models = models
        self._config = config

    def routes(self) -> list[Route]:
        return [
            Route("POST", "/completion", self.complete, CompletionRequest),
            Route("POST", "/completions", self.complete, CompletionRequest),
            Route("POST", "/infill", self.infill, InfillRequest),
            Route("POST", "/embedding", self.embedding, EmbeddingRequest),
            Route("POST", "/embeddings", self.embedding, EmbeddingRequest),
            Route("POST", "/apply-template", self.apply_template, TemplateRequest),
            Route("GET", "/props", self.props),
            Route("POST", "/props", self.set_props),
            Route("GET", "/lora-adapters", self.adapters),
            Route("GET", "/slots", self.slots),
            Route("POST", "/slots/{id_slot}", self.slot, SlotRequest),
        ]

    async def complete(self, request: Request) -> Response:
        """llama.cpp's completion."""
        body = await read_body(request, CompletionRequest, max_bytes=self._config.max_body_bytes)
        served = await self._models.ready(body.model)
        body.check()
        prompts = []
        for parts in body.prompts():
            ids: list[int] = []
            for number, part in enumerate(parts):
                if isinstance(part, str):
                    ids += await encode(served.model.tokenizer, part, add_special=number == 0)
                else:
                    ids.append(part)
            prompts.append(ids)
        return await respond(request, served, body, prompts, self._config)

    async def infill(self, request: Request) -> Response:
        """Fill in what stands between two pieces of code."""
        body = await read_body(request, InfillRequest, max_bytes=self._config.max_body_bytes)
        served = await self._models.ready(body.model)
        body.check()
        files = [_file(item, f"input_extra[{index}]") for index, item in enumerate(body.input_extra or ())]
        tokenizer = served.model.tokenizer
        ids = await asyncio.to_thread(
            infill_ids, tokenizer, body.input_prefix + body.prompt, body.input_suffix, files=files
        )
        return await respond(request, served, body, [ids], self._config)

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

        def reply() -> list[dict[str, Any]]:
            return [
                {"index": index, "embedding": [normalised(each.vector, norm).tolist()]}
                for index, each in enumerate(embeddings)
            ]

        return Response(await encoded(reply), media_type="application/json")

    async def apply_template(self, request: Request) -> Response:
        """The prompt that a chat becomes."""
        body = await read_body(request, TemplateRequest, max_bytes=self._config.max_body_bytes)
        served = await self._models.ready(body.model)
        model = served.model
        return _json({"prompt": render_chat(model, body.messages, **prompt_options(body, model))})

    async def props(self, request: Request) -> Response:
        """Settings, template and limits."""
        served = await self._models.ready(request.query_params.get("model") or self._first().name)
        engine, model = served.engine, served.model
        special = model.tokenizer.special
        roles = {"bos_token": special.bos, "eos_token": special.eos}
        template = "" if model.chat_template is None else model.chat_template.source
        body = SamplingBody()
        return _json(
            {
                "default_generation_settings": {
                    "id": 0,
                    "id_task": -1,
                    "n_ctx": engine.context_tokens,
                    "speculative": engine.config.speculation != "off",
                    "is_processing": engine.stats.num_running > 0,
                    "params": settings_of(body.sampling_params()[0], body),
                    "prompt": "",
                    "next_token": _next_token(None),
                },
                "total_slots": engine.config.max_sequences,
                "model_alias": served.name,
                "model_path": served.name,
                "modalities": {"vision": False, "audio": False},
                "endpoint_slots": True,
                "endpoint_props": False,
                "endpoint_metrics": True,
                "chat_template": template,
                "chat_template_caps": {
                    "supports_tools": "tools" in template,
                    "supports_tool_calls": "tool" in template,
                },
                **{name: "" if id_ is None else model.tokenizer.token_text(id_) for name, id_ in roles.items()},
                "build_info": f"spolia {spolia.__version__}",
                "is_sleeping": False,
            }
        )

    async def set_props(self) -> Response:
        """There is none to set."""
        raise InvalidRequest("no property can be set here; the cache's are at /v1/cache/config", code="not_supported")

    async def adapters(self) -> Response:
        """There are none."""
        return _json([])

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
        params = {stream.request_id: stream.request.params for stream in served.streams}
        return _json(
            [
                {
                    "id": number,
                    "n_ctx": engine.context_tokens,
                    "speculative": engine.config.speculation != "off",
                    "is_processing": lane is not None,
                    "id_task": None if lane is None else lane.request_id,
                    "params": _params(lane, params),
                    "next_token": _next_token(lane),
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
        check_slot(served, id_slot)
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


def _next_token(lane: LaneView | None) -> dict[str, Any]:
    return {
        "has_next_token": lane is not None,
        "n_remain": -1,
        "n_decoded": 0 if lane is None else lane.num_generated_tokens,
    }


def _params(lane: LaneView | None, by_request: Mapping[str, SamplingParams]) -> dict[str, Any]:
    """What holds for the request in a lane, whichever API it came by."""
    params = None if lane is None else by_request.get(lane.request_id or "")
    if params is None:
        return {}
    return settings_of(params, SamplingBody(n_predict=params.max_tokens, n_probs=params.logprobs))


def _file(item: dict[str, Any], path: str) -> tuple[str, str]:
    name, text = item.get("filename", ""), item.get("text")
    if not isinstance(name, str) or not isinstance(text, str):
        raise InvalidRequest(f"{path} must have a text and may have a filename", param=path)
    return name, text


def _json(content: Any) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
