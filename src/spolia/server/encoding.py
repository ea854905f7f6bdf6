"""Encoding and compiling without holding up the event loop."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from spolia.engine import AsyncEngine, SamplingParams
from spolia.errors import InvalidRequest
from spolia.generation import ReasoningSplitter
from spolia.models import Tokenizer
from spolia.server.sampling import SamplingFields
from spolia.server.schema import ChatRequest, CompletionRequest

__all__ = ["after_thoughts", "encode", "params_of_choices", "prepare_form", "prepare_form_of"]

# Encoding runs at some 4 MB/s: shorter texts cost less than the way to a thread and back.
_INLINE_CHARACTERS = 4096


async def encode(tokenizer: Tokenizer, text: str, *, add_special: bool = True) -> list[int]:
    """Token ids of `text`; a long one is encoded on another thread, so that streams do not wait for it."""
    if len(text) <= _INLINE_CHARACTERS:
        return tokenizer.encode(text, add_special=add_special)
    return await asyncio.to_thread(tokenizer.encode, text, add_special=add_special)


def after_thoughts(params: SamplingParams, thoughts: ReasoningSplitter | None) -> SamplingParams:
    """`params` whose form, if there is one, begins where thoughts end that the prompt has opened."""
    form = params.structured_outputs
    if form is None or thoughts is None or not thoughts.is_inside:
        return params
    return replace(params, structured_outputs=replace(form, after=thoughts.closing))


async def params_of_choices(
    body: ChatRequest | CompletionRequest, engine: AsyncEngine, thoughts: ReasoningSplitter | None = None
) -> list[SamplingParams]:
    """The parameters of each answer to compute, with the form that they ask for compiled on another thread.

    Args:
        thoughts: what will tell them from the answer, to which alone the form applies.

    Raises:
        InvalidRequest: a parameter is impossible, or the form cannot be compiled; names the client's field.
    """
    params = [after_thoughts(body.sampling_params(choice), thoughts) for choice in range(body.num_candidates)]
    if body.num_candidates > body.num_choices:  # the best are known by their log-probabilities
        params = [replace(each, logprobs=each.logprobs or 0) for each in params]
    await prepare_form(body, engine, params[0])
    return params


async def prepare_form(body: SamplingFields, engine: AsyncEngine, params: SamplingParams) -> None:
    """Compile the form of an answer on another thread.

    Raises:
        InvalidRequest: it cannot be compiled; names the client's field.
    """
    try:
        await engine.prepare(params)
    except InvalidRequest as error:
        form = body.form()
        raise _named(error, "structured_outputs" if form is None else form[0]) from None


async def prepare_form_of(field: str, engine: AsyncEngine, params: SamplingParams) -> None:
    """The same where one field has the form."""
    try:
        await engine.prepare(params)
    except InvalidRequest as error:
        raise _named(error, field) from None


def _named(error: InvalidRequest, field: str) -> InvalidRequest:
    return InvalidRequest(str(error).replace("structured_outputs", field, 1), param=field)
