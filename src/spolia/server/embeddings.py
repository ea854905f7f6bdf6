"""`POST /v1/embeddings`, and what the embeddings of every API are made by."""

from __future__ import annotations

import asyncio
import base64
import logging
import math
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import msgspec
import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response

from spolia.engine import Embedding, Pooling
from spolia.errors import InvalidRequest, Overloaded
from spolia.server.access import current_caller
from spolia.server.body import read_body
from spolia.server.config import ServerConfig
from spolia.server.errors import TookTooLong
from spolia.server.explaining import explain_embedding
from spolia.server.logs import log_fields
from spolia.server.replies import Usage
from spolia.server.routes import Route
from spolia.server.served import ServedModel, ServedModels

__all__ = ["EmbeddingEndpoint", "check_dimensions", "embed", "encoded", "normalised", "texts_or_ids"]

logger = logging.getLogger("spolia.requests")

_MAX_INPUTS = 2048  # OpenAI's


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    """OpenAI's fields, and `pooling`, `cache_salt`, `truncate`.

    Attributes:
        input: a text, texts, token ids, or lists of token ids.
        pooling: "last", the last token's hidden state, or "mean", that of all.
        truncate: keep the beginning of inputs that are too long.
    """

    input: str | list[str | int | list[int]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    pooling: str | None = None
    cache_salt: str | None = None
    truncate: bool | None = None


class EmbeddingEndpoint:
    """Bound to the models and limits of one app."""

    def __init__(self, models: ServedModels, config: ServerConfig) -> None:
        self._models = models
        self._config = config

    def routes(self) -> list[Route]:
        return [Route("POST", "/v1/embeddings", self.respond, EmbeddingRequest)]

    async def respond(self, request: Request) -> Response:
        """Vectors of texts or token ids."""
        body = await read_body(request, EmbeddingRequest, max_bytes=self._config.max_body_bytes)
        served = await self._models.ready(body.model)
        check_dimensions(served, body.dimensions)
        request_id, embeddings = await embed(
            served,
            texts_or_ids(body.input),
            pooling=body.pooling,
            cache_salt=body.cache_salt or "",
            truncate=bool(body.truncate),
            max_waiting=self._config.max_waiting,
        )
        shown: Callable[[NDArray[np.float32]], Any] = _base64 if body.encoding_format == "base64" else _numbers

        def reply() -> dict[str, Any]:
            return {
                "object": "list",
                "data": [
                    {"object": "embedding", "index": index, "embedding": shown(normalised(each.vector))}
                    for index, each in enumerate(embeddings)
                ],
                "model": served.name,
                "usage": Usage.of(
                    sum(each.num_tokens for each in embeddings), 0, sum(each.num_cached_tokens for each in embeddings)
                ),
            }

        headers = {"x-request-id": request_id}
        return Response(await encoded(reply), headers=headers, media_type="application/json")


def texts_or_ids(asked: str | Sequence[str | int | list[int]]) -> list[str | list[int]]:
    """Inputs, each text or token ids: a flat list of ids is one.

    Raises:
        InvalidRequest: none at all, or texts and ids mixed.
    """
    if isinstance(asked, str):
        return [asked]
    kinds = {type(item) for item in asked}
    if kinds == {int}:
        return [cast("list[int]", list(asked))]
    if len(kinds) != 1:
        problem = "mixes texts and token ids" if kinds else "is empty"
        raise InvalidRequest(f"input {problem}; send text, texts, token ids, or lists of them", param="input")
    return cast("list[str | list[int]]", list(asked))


def check_dimensions(served: ServedModel, asked: int | None) -> None:
    """
    Raises:
        InvalidRequest: vectors of this model have another size.
    """
    size = served.engine.hidden_size
    if asked is not None and asked != size:
        raise InvalidRequest(
            f"dimensions is {asked}; vectors of {served.name} have {size}, and a part of one means nothing: this model "
            "was not trained for shorter ones. Leave it out",
            param="dimensions",
        )


async def embed(
    served: ServedModel,
    inputs: Sequence[str | list[int]],
    *,
    pooling: str | None = None,
    cache_salt: str = "",
    truncate: bool = False,
    max_waiting: int,
) -> tuple[str, list[Embedding]]:
    """A vector an input, not normalised, and the id under which the log has the request.

    Raises:
        InvalidRequest: an input is empty or too long, there are too many, or there is no such pooling.
        Overloaded: as many are waiting as may.
        TookTooLong: not done within `request_timeout_s`.
    """
    request_id, begun_s = f"embd-{uuid.uuid4().hex}", time.perf_counter()
    if len(inputs) > _MAX_INPUTS:
        raise InvalidRequest(f"input has {len(inputs)} entries; at most {_MAX_INPUTS} in one request", param="input")
    if served.num_embedding >= max_waiting:
        raise Overloaded(f"{served.num_embedding} requests for embeddings are waiting, as many as may; try again later")
    engine, caller = served.engine, current_caller()
    # Encoded here once, for the account and for the engine: a long text takes milliseconds, so on another thread.
    encode = engine.model.tokenizer.encode
    ids = await asyncio.to_thread(lambda: [encode(each) if isinstance(each, str) else each for each in inputs])
    num_admitted = sum(map(len, ids))
    if caller.account is not None:
        caller.account.admit(num_admitted)
    num_done = 0

    def note(num_tokens: int) -> None:
        nonlocal num_done
        num_done = num_tokens

    try:
        async with asyncio.timeout(served.request_timeout_s), served.embedding():
            embeddings = await engine.embed(
                ids,
                pooling=cast("Pooling", pooling or "last"),
                cache_salt=caller.cache_salt(cache_salt),
                truncate=truncate,
                on_step=note,
            )
    except TimeoutError:
        raise TookTooLong(
            f"the vectors were not there within {served.request_timeout_s:g} s; send fewer or shorter inputs at a time"
        ) from None
    finally:
        if caller.account is not None:
            caller.account.settle(num_done - num_admitted)  # also who left has paid for what was computed

    def explain_all() -> list[dict[str, Any]]:
        tokenizer = engine.model.tokenizer
        return [explain_embedding(*pair, tokenizer) for pair in zip(embeddings, ids, strict=True)]

    for index, facts in enumerate(await asyncio.to_thread(explain_all)):
        served.explained.add(request_id, index, facts, caller.tenant)
    fields: dict[str, Any] = {
        "request": request_id,
        "model": served.name,
        "inputs": len(ids),
        "prompt_tokens": sum(each.num_tokens for each in embeddings),
        "cached_tokens": sum(each.num_cached_tokens for each in embeddings),
        "total_ms": round(1e3 * (time.perf_counter() - begun_s), 1),
    }
    if caller.account is not None:
        fields |= {"key": caller.account.settings.name, "tenant": caller.tenant}
    log_fields(logger, "embedded", fields)
    return request_id, embeddings


async def encoded(reply: Callable[[], object]) -> bytes:
    """What `reply` makes of many vectors, as JSON; made on another thread, so that streams do not wait for it."""
    return await asyncio.to_thread(lambda: msgspec.json.encode(reply()))


def normalised(vector: NDArray[np.float32], norm: int = 2) -> NDArray[np.float32]:
    """`vector` at length 1 in the p-norm, or as llama.cpp has it: -1 as it is, 0 with 32,760 as the largest."""
    wide = vector.astype(np.float64)
    if norm < 0:
        return vector
    magnitudes = np.abs(wide)
    largest = magnitudes.max()
    if largest == 0:
        return vector
    if norm == 0:
        length = largest / 32760
    elif norm == 2:
        length = math.sqrt(float(np.square(wide).sum()))
    else:  # scaled, so that no high power overflows
        length = largest * float(((magnitudes / largest) ** norm).sum()) ** (1 / norm)
    return np.asarray(wide / length, np.float32)


def _numbers(vector: NDArray[np.float32]) -> list[float]:
    numbers: list[float] = vector.tolist()
    return numbers


def _base64(vector: NDArray[np.float32]) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
