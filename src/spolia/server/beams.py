"""Beams over HTTP: which fields ask for them, what goes with them, and the answers, each of which comes whole."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import fields
from typing import Any

from spolia.engine import (
    AsyncEngine,
    BeamOutput,
    BeamParams,
    BeamRun,
    Delta,
    History,
    RequestOutput,
    SamplingParams,
    Tenant,
    Timings,
)
from spolia.errors import InvalidRequest
from spolia.generation import ReasoningSplitter
from spolia.models import Model, Tokenizer
from spolia.server.schema import ChatRequest, CompletionRequest
from spolia.server.search import Found, Search, params_of_search, refuse_company
from spolia.server.toolcalls import ToolUse

__all__ = ["DRAWING", "beam_search"]

_ONLY_WITH_BEAMS = (
    *("length_penalty", "early_stopping", "do_sample", "num_beam_groups", "diversity_penalty"),
    *("force_words", "force_words_ids"),
)
# Parameters that say how beams are drawn.
DRAWING = (
    *("temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "top_h", "top_n_sigma"),
    *("dynatemp_range", "dynatemp_exponent", "filter_order"),
)


async def beam_search(
    body: ChatRequest | CompletionRequest,
    engine: AsyncEngine,
    model: Model,
    thoughts: ReasoningSplitter | None = None,
    tool_use: ToolUse | None = None,
) -> Search | None:
    """What to search; None if the request does not ask for beams.

    Raises:
        InvalidRequest: a field that has no meaning with beams, or none without them.
    """
    if not body.wants_beams:
        _check_no_beams(body)
        return None
    refuse_company(body, "beam search", "penalty_alpha")
    asked = await params_of_search(body, engine, model, thoughts, tool_use)
    params = _beam_params(body, model.tokenizer, asked)

    def run(
        prompt: list[int], request_id: str, cache_salt: str, tenant: Tenant | None, history: History | None
    ) -> AsyncIterator[list[Found]]:
        steps = engine.beam_search(
            prompt, params, request_id=request_id, cache_salt=cache_salt, tenant=tenant, history=history
        )
        return (
            [Found(done.prompt_token_ids, Delta.of(_output(done, beam)), told(beam)) for beam in done.beams()]
            async for done in steps
            if done.is_over
        )

    def told(beam: BeamOutput) -> dict[str, Any]:
        group = {} if params.num_beam_groups == 1 else {"group": beam.group}
        return {"score": beam.score, **group}

    return Search("beam search", params.num_beams, params.num_return_sequences or params.num_beams, run)


def _check_no_beams(body: ChatRequest | CompletionRequest) -> None:
    for name in _ONLY_WITH_BEAMS:
        neutral: tuple[object, ...] = (None, False, [], 1) if name == "length_penalty" else (None, False, [])
        if getattr(body, name) not in neutral:
            raise InvalidRequest(
                f"{name} is of beam search; add use_beam_search: true or num_beams, or leave it out", param=name
            )


def _beam_params(body: ChatRequest | CompletionRequest, tokenizer: Tokenizer, params: SamplingParams) -> BeamParams:
    _check_drawing(body, params)
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


def _check_drawing(body: ChatRequest | CompletionRequest, params: SamplingParams) -> None:
    """Refuse what beams cannot honour: an answer that leaves out what was asked for would be a wrong one."""
    for field in fields(SamplingParams):
        value = getattr(params, field.name)
        is_drawing = field.name in DRAWING and not body.do_sample
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


def _output(run: BeamRun, beam: BeamOutput) -> RequestOutput:
    first = run.first
    return RequestOutput(
        request_id="",
        prompt_token_ids=tuple(run.prompt_token_ids),
        token_ids=beam.token_ids,
        text=beam.text,
        logprobs=beam.logprobs,
        finish_reason=beam.finish_reason,
        stop_reason=beam.stop_reason,
        num_cached_tokens=0 if first is None else first.num_cached_tokens,
        num_restored_tokens={} if first is None else first.num_restored_tokens,
        explanation=None if first is None else first.explanation,
        seed=run.seed,
        timings=Timings(None, None, 0.0),
        num_truncated_tokens=run.num_truncated_tokens,
        namespace=b"" if first is None else first.namespace,
        ranges=() if first is None else first.ranges,
        evicted_age_s=None if first is None else first.evicted_age_s,
        decisions=beam.decisions,
        strategy="beam search",
        choices=beam.choices,
    )
