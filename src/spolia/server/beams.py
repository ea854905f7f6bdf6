"""Beams over HTTP: which fields ask for them, what goes with them, and the answer, which comes whole."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import fields

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from spolia.engine import BeamOutput, BeamParams, BeamRun, RequestOutput, SamplingParams, Timings
from spolia.errors import InvalidRequest, Overloaded
from spolia.models import Tokenizer
from spolia.server.access import current_caller
from spolia.server.answer import Answer
from spolia.server.rendering import Extras, Rendering
from spolia.server.schema import ChatRequest, CompletionRequest
from spolia.server.served import ServedModel
from spolia.server.sse import watch_for_disconnect

__all__ = ["beam_params", "respond_with_beams"]

_ONLY_WITH_BEAMS = (
    *("length_penalty", "early_stopping", "do_sample", "num_beam_groups", "diversity_penalty"),
    *("force_words", "force_words_ids"),
)
# Parameters that say how beams are drawn.
_DRAWING = (
    *("temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "top_h", "top_n_sigma"),
    *("dynatemp_range", "dynatemp_exponent", "filter_order"),
)


def beam_params(body: ChatRequest | CompletionRequest, tokenizer: Tokenizer) -> BeamParams | None:
    """How to search; None if the request does not ask for beams.

    Raises:
        InvalidRequest: a field that has no meaning with beams, or none without them.
    """
    if not body.wants_beams:
        for name in _ONLY_WITH_BEAMS:
            neutral: tuple[object, ...] = (None, False, [], 1) if name == "length_penalty" else (None, False, [])
            if getattr(body, name) not in neutral:
                raise InvalidRequest(
                    f"{name} is of beam search; add use_beam_search: true or num_beams, or leave it out", param=name
                )
        return None
    params = body.sampling_params(0)
    _check_company(body, params)
    if params.max_tokens is None:
        raise InvalidRequest("beam search needs max_tokens: every beam is computed up to there", param="max_tokens")
    num_beams = body.num_candidates if body.num_beams is None else body.num_beams
    if body.num_choices > num_beams > 0:
        raise InvalidRequest(f"n is {body.n}; {num_beams} beams have no more answers; raise num_beams", param="n")
    given = {
        "length_penalty": body.length_penalty,
        "early_stopping": body.early_stopping,
        "num_beam_groups": body.num_beam_groups,
        "diversity_penalty": body.diversity_penalty,
    }
    return BeamParams(
        num_beams=num_beams,
        max_tokens=params.max_tokens,
        num_return_sequences=body.num_choices,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        sampling=params if body.do_sample else None,
        processing=None if body.do_sample else params,
        force_words_ids=_force_words(body, tokenizer),  # type: ignore[arg-type]
        **{name: value for name, value in given.items() if value is not None},  # type: ignore[arg-type]
    )


def _check_company(body: ChatRequest | CompletionRequest, params: SamplingParams) -> None:
    """Refuse what beams cannot honour: an answer that leaves out what was asked for would be a wrong one."""
    if body.stream:
        raise InvalidRequest("beams do not stream: which of them is the answer is known at the end", param="stream")
    for name in ("session", "explain", "tools"):
        if getattr(body, name, None):
            raise InvalidRequest(f"{name} does not go with beam search", param=name)
    for field in fields(SamplingParams):
        value = getattr(params, field.name)
        is_drawing = field.name in _DRAWING and not body.do_sample
        if is_drawing and value != field.default and (field.name != "temperature" or value != 0):
            raise InvalidRequest(
                f"{field.name} is {value!r}: beam search takes the likeliest beams; to draw them, add do_sample: true",
                param=field.name,
            )
    if body.do_sample and params.is_greedy:
        raise InvalidRequest("do_sample draws beams, which temperature 0 and top_k 1 do not allow", param="do_sample")


def _force_words(body: ChatRequest | CompletionRequest, tokenizer: Tokenizer) -> list[list[list[int]]]:
    """Each phrase with its alternatives: a word may begin the answer, or follow a space."""
    words = [
        [tokenizer.encode(text, add_special=False) for text in (f" {word}", word)]
        for word in body.force_words or ()
        if word
    ]
    return words + [[ids] for ids in body.force_words_ids or ()]


async def respond_with_beams(
    request: Request,
    kind: str,
    served: ServedModel,
    prompts: Sequence[list[int]],
    params: BeamParams,
    rendering: Callable[[Answer], Rendering],
    *,
    cache_salt: str,
    max_waiting: int,
) -> Response:
    """Search from each prompt. The client's going away ends it.

    Raises:
        InvalidRequest: a prompt does not fit the context.
        Overloaded: too many wait, or it took longer than an answer may.
    """
    if served.num_waiting + len(prompts) * params.num_beams > max_waiting:
        raise Overloaded(
            f"{served.num_waiting} requests are waiting, of at most {max_waiting}, and {params.num_beams} beams for "
            f"each of {len(prompts)} prompts are asked for; try again later, or with fewer"
        )
    caller = current_caller()
    num_choices = params.num_return_sequences or params.num_beams
    answer = Answer(kind, served, num_choices)
    if caller.account is not None:
        caller.account.admit(sum(map(len, prompts)))

    async def search() -> list[BeamRun]:
        one = served.engine.beam_search
        salt = caller.cache_salt(cache_salt)
        return [await one(prompt, params, cache_salt=salt, tenant=caller.share) for prompt in prompts]

    started_s = time.perf_counter()
    task = asyncio.ensure_future(asyncio.wait_for(search(), served.request_timeout_s))
    num_tokens = sum(map(len, prompts))

    def cancel() -> None:
        task.cancel()

    try:
        with watch_for_disconnect(request.receive, cancel):
            runs = await task
        total_s = time.perf_counter() - started_s
        scores: list[float] = []
        for run in runs:
            for beam in run.beams():
                answer.take(len(scores), _output(f"{answer.id}-{len(scores)}", run, beam, total_s))
                scores.append(beam.score)
                num_tokens += len(beam.token_ids)
    except TimeoutError:
        raise Overloaded(
            f"beam search took longer than {served.request_timeout_s} s; ask for fewer beams or tokens"
        ) from None
    except asyncio.CancelledError:
        if not task.cancelled():
            raise
        return Response(status_code=499)  # to nobody
    finally:
        task.cancel()
        if caller.account is not None:
            caller.account.settle(num_tokens)
    outputs = [answer.outputs[choice] for choice in range(len(scores))]
    beams = [{"index": index, "score": score} for index, score in enumerate(scores)]
    whole = rendering(answer).whole(outputs, Extras(usage=answer.usage(), spolia={"beams": beams}))
    return Response(msgspec.json.encode(whole), headers={"x-request-id": answer.id}, media_type="application/json")


def _output(request_id: str, run: BeamRun, beam: BeamOutput, total_s: float) -> RequestOutput:
    return RequestOutput(
        request_id=request_id,
        prompt_token_ids=tuple(run.prompt_token_ids),
        token_ids=beam.token_ids,
        text=beam.text,
        logprobs=beam.logprobs,
        finish_reason=beam.finish_reason,
        stop_reason=beam.stop_reason,
        num_cached_tokens=run.num_cached_tokens,
        num_restored_tokens={},
        explanation=None,
        seed=run.seed,
        timings=Timings(None, None, total_s),
        num_truncated_tokens=run.num_truncated_tokens,
    )
