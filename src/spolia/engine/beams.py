"""Beam search by way of the engine: each step asks for the next token's log-probabilities of every running beam.

A beam is a request of one token whose prompt is the prompt and what the beam has said, so beams share in the cache all
that they have in common, a beam that forks copies at most a part of a block, and neighbours in the batch do what they
do. Processors, the form and stop strings see a beam as they would see an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from spolia.engine.admission import Admission
from spolia.engine.outputs import BeamOutput, RequestOutput
from spolia.engine.request import answer_text
from spolia.errors import InvalidRequest
from spolia.generation import (
    BeamParams,
    BeamSearch,
    Choice,
    LogitsTap,
    Pipeline,
    SamplingParams,
    Scratch,
    TokenLogprobs,
    score_token,
)

__all__ = ["BeamRun"]

_HOPELESS = -1e8  # beams below it are placeholders, or have ended
_ASK = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Path:
    """What is known of a beam besides its score.

    Attributes:
        pipeline: its place in the form, and what processors see of it; None: there are no processors.
        logprobs: of its tokens; empty if nobody asked.
        text: without what ended it.
        stop_reason: the stop string, pattern or id that ended it.
        has_ended: by its text, its form or its last token.
    """

    pipeline: Pipeline | None
    logprobs: tuple[TokenLogprobs, ...] = ()
    text: str = ""
    stop_reason: str | int | None = None
    has_ended: bool = False


class BeamRun:
    """One prompt's search; whoever drives it has the requests answered.

        while not run.is_over:
            run.take([answer of prompt and params, for prompt, params, is_part in run.requests()])

    Attributes:
        prompt_token_ids: as admitted.
        first: the answer to the first request, which tells what of the prompt was cached; None before there is one.
        num_truncated_tokens: dropped from the prompt, which was too long.

    Raises:
        InvalidRequest: the prompt and `max_tokens` do not fit the context, the model lacks a token of a phrase, or a
            processor or form cannot be made.
    """

    def __init__(self, admission: Admission, prompt: str | Sequence[int] | np.ndarray, params: BeamParams) -> None:
        highest = max((id_ for word in params.force_words_ids for ids in word for id_ in ids), default=0)
        if highest >= admission.vocab_size:
            raise InvalidRequest(
                f"force_words_ids holds {highest}; token ids go up to {admission.vocab_size - 1}",
                param="force_words_ids",
            )
        asked = replace(
            params.scoring,
            max_tokens=params.max_tokens,
            stop_token_ids=params.stop_token_ids,
            ignore_eos=params.ignore_eos,
        )
        self._request = request = admission.admit(prompt, asked)
        self.prompt_token_ids: list[int] = request.prompt_token_ids.tolist()
        self.first: RequestOutput | None = None
        self.num_truncated_tokens = request.num_truncated_tokens
        self.seed = request.seed
        self._tokenizer = admission.tokenizer
        self._search = BeamSearch(params, request.final_ids, seed=request.seed, has_ended=self._has_ended)
        self._log_probs = np.zeros((params.num_beams, admission.vocab_size), np.float32)
        self._final_ids = np.fromiter(request.final_ids, np.int32)
        self._ask = replace(_ASK, exact_kv=admission.has_exact_kv)  # nothing tells of rounded KV
        self._alive: list[int] = []
        self._taps: list[LogitsTap] = []
        self._raw: dict[Ids, np.ndarray] = {}  # by beam: the model's own log-probabilities for its next token
        self._paths: dict[Ids, _Path] = {(): _Path(self._pipeline_of((), request.pipeline))}
        # By group and beam, of its tokens: two groups may come to one text in their own ways.
        self._choices: dict[tuple[int, Ids], tuple[Choice, ...]] = {
            (group, ()): () for group in range(params.num_beam_groups)
        }
        self._drawing = None if params.sampling is None else Scratch(admission.vocab_size)

    @property
    def is_over(self) -> bool:
        return self._search.is_over

    def requests(self) -> list[tuple[list[int], SamplingParams, bool]]:
        """What to answer for the next step: prompts, their parameters, and whether they count no more as prompts."""
        # At first all beams are the prompt; later a beam that has no chance need not be computed.
        self._alive = [index for index, beam in enumerate(self._search.running) if beam.score > _HOPELESS]
        self._taps = [LogitsTap() for _ in self._alive]
        prompts = [self.prompt_token_ids + list(self._search.running[index].token_ids) for index in self._alive]
        return [
            (prompt, replace(self._ask, logits_processors=(tap,)), self.first is not None or index > 0)
            for index, (prompt, tap) in enumerate(zip(prompts, self._taps, strict=True))
        ]

    def take(self, outputs: Sequence[RequestOutput]) -> None:
        """Go on, with the answers to the last `requests`.

        Raises:
            InvalidRequest: what is forbidden leaves no beam to go on with, or none that is an answer at the end; or a
                processor of the user's fails.
        """
        self.first = self.first or outputs[0]
        running = self._search.running
        self._log_probs[:] = 0.0
        self._raw = {running[i].token_ids: tap.log_probs for i, tap in zip(self._alive, self._taps, strict=True)}
        done: dict[Ids, np.ndarray] = {}
        for index, tap in zip(self._alive, self._taps, strict=True):
            ids, row = running[index].token_ids, self._log_probs[index]
            if ids in done:  # of another group: processors see each text once
                row[:] = done[ids]
                continue
            row[:] = tap.log_probs
            self._process(row, ids)
            done[ids] = row
        if not np.isfinite(self._log_probs[self._alive].max()):
            raise InvalidRequest("what this request forbids leaves no token for any beam; loosen its constraints")
        self._search.advance(self._log_probs)
        kept = [beam for beam in self._search.running if beam.score > _HOPELESS] + self._search.answers
        self._paths = {beam.token_ids: self._path(beam.token_ids) for beam in kept}
        if (num_options := self._request.params.explain_candidates) is not None:
            known, self._choices = self._choices, {}
            for beam in kept:
                group, ids = beam.group, beam.token_ids
                self._choices[group, ids] = known.get((group, ids)) or (
                    *known[group, ids[:-1]],
                    self._search.choice(beam, num_options),
                )
        if self.is_over and not self._search.answers:
            raise InvalidRequest(
                f"no beam came to an answer in {self._request.params.max_tokens} tokens: what this request demands and "
                "what it forbids leave none; loosen its constraints, or raise max_tokens"
            )

    def _process(self, row: np.ndarray, ids: Ids) -> None:
        banned = self._final_ids[: None if len(ids) < self._request.params.min_tokens else 0]
        pipeline = self._paths[ids].pipeline
        if pipeline is None:
            row[banned] = -np.inf
            return
        pipeline.process(row[None], len(self.prompt_token_ids) + len(ids), banned)
        if pipeline.trouble is not None:
            raise InvalidRequest(f"after {len(ids)} tokens of a beam: {pipeline.trouble}")
        if pipeline.log is not None and self._drawing is not None and row.max() > -np.inf:
            pipeline.candidates(row, self._drawing)  # which takes notes; the search filters all beams by itself

    def _has_ended(self, ids: Ids) -> bool:
        return self._path(ids).has_ended

    def _path(self, ids: Ids) -> _Path:
        """Of a beam that runs, has ended, or is a token longer than one that ran."""
        if ids not in self._paths:
            self._paths[ids] = self._longer(self._paths[ids[:-1]], ids)
        return self._paths[ids]

    def _longer(self, parent: _Path, ids: Ids) -> _Path:
        params, token_id = self._request.params, ids[-1]
        logprobs = parent.logprobs
        if params.logprobs is not None:
            logprobs += (score_token(self._raw[ids[:-1]], token_id, params.logprobs),)
        pipeline = self._pipeline_of(ids, parent.pipeline)
        may_stop = len(ids) > params.min_tokens
        if may_stop and token_id in self._request.final_ids:
            text, _ = answer_text(
                self._request, self._tokenizer, ids if params.include_stop_str_in_output else ids[:-1]
            )
            return _Path(pipeline, logprobs, text, token_id if token_id in params.stop_token_ids else None, True)
        text, stop = answer_text(self._request, self._tokenizer, ids)
        is_complete = pipeline is not None and pipeline.is_complete
        return _Path(pipeline, logprobs, text, stop, stop is not None or is_complete)

    def _pipeline_of(self, ids: Ids, parent: Pipeline | None) -> Pipeline | None:
        if parent is None:
            return None
        said = np.array([*self.prompt_token_ids, *ids], np.int32)
        return parent.fork(said, len(self.prompt_token_ids), seed=self.seed)

    def beams(self) -> list[BeamOutput]:
        """The answers so far, best first."""
        with_logprobs = self._request.params.logprobs is not None
        return [
            BeamOutput(
                beam.token_ids,
                path.text,
                beam.score,
                "stop" if path.has_ended else "length",
                path.stop_reason,
                path.logprobs if with_logprobs else None,
                None if path.pipeline is None or path.pipeline.log is None else path.pipeline.log.decisions,
                self._choices.get((beam.group, beam.token_ids), ()),
                beam.group,
            )
            for beam in self._search.answers
            if (path := self._path(beam.token_ids))
        ]
