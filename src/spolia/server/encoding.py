"""Encoding and compiling without holding up the event loop."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from spolia.engine import AsyncEngine, SamplingParams
from spolia.errors import InvalidRequest
from spolia.models import Tokenizer
from spolia.server.schema import ChatRequest, CompletionRequest

__all__ = ["encode", "params_of_choices", "prepare_form"]

# Encoding runs at some 4 MB/s: shorter texts cost less than the way to a thread and back.
_INLINE_CHARACTERS = 4096


async def encode(tokenizer: Tokenizer, text: str, *, add_special: bool = True) -> list[int]:
    """Token ids of `text`; a long one is encoded on another thread, so that streams do not wait for it."""
    if len(text) <= _INLINE_CHARACTERS:
        return tokenizer.encode(text, add_special=add_special)
    return await asyncio.to_thread(tokenizer.encode, text, add_special=add_special)


async def params_of_choices(body: ChatRequest | CompletionRequest, engine: AsyncEngine) -> list[SamplingParams]:
    """The parameters of each answer to compute, with the form that they ask for compiled on another thread.

    Raises:
        InvalidRequest: a parameter is impossible, or the form cannot be compiled; names the client's field.
    """
    params = [body.sampling_params(choice) for choice in range(body.num_candidates)]
    if body.num_candidates > body.num_choices:  # the best are known by their log-probabilities
        params = [replace(each, logprobs=each.logprobs or 0) for each in params]
    await prepare_form(body, engine, params[0])
    return params


async def prepare_form(body: ChatRequest | CompletionRequest, engine: AsyncEngine, params: SamplingParams) -> None:
    """Compile the form of an answer on another thread.

    Raises:
        InvalidRequest: it cannot be compiled; names the client's field.
    """
    try:
        await engine.prepare(params)
    except InvalidRequest as error:
        form = body.form()
        field = "structured_outputs" if form is None else form[0]
        raise InvalidRequest(str(error).replace("structured_outputs", field, 1), param=field) from None
