"""Beam search by way of the engine: each step asks for the next token's log-probabilities of every running beam.

A beam is a request of one token whose prompt is the prompt and what the beam has said, so beams share in the cache all
that they have in common, a beam that forks copies at most a part of a block, and neighbours in the batch do what they
do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from spolia.engine.admission import Admission
from spolia.engine.outputs import BeamOutput, RequestOutput
from spolia.errors import InvalidRequest
from spolia.generation import BeamParams, BeamSearch, LogitsTap, SamplingParams
from spolia.models import Tokenizer

__all__ = ["BeamRun"]

_HOPELESS = -1e8  # beams below it are placeholders, or have ended


class BeamRun:
    """One prompt's search; whoever drives it has the requests answered.

        while not run.is_over:
            run.take([answer of prompt and params, for prompt, params in run.requests()])

    Attributes:
        prompt_token_ids: as admitted.
        num_cached_tokens: of the prompt, when the search began.

    Raises:
        InvalidRequest: the prompt and `max_tokens` do not fit the context, or the model lacks a token of a phrase.
    """

    def __init__(
        self, admission: Admission, tokenizer: Tokenizer, prompt: str | Sequence[int] | np.ndarray, params: BeamParams
    ) -> None:
        checked = SamplingParams(
            max_tokens=params.max_tokens,
            stop_token_ids=params.stop_token_ids,
            seed=None if params.sampling is None else params.sampling.seed,
        )
        highest = max((id_ for word in params.force_words_ids for ids in word for id_ in ids), default=0)
        if highest >= admission.vocab_size:
            raise InvalidRequest(
                f"force_words_ids holds {highest}; token ids go up to {admission.vocab_size - 1}",
                param="force_words_ids",
            )
        request = admission.admit(prompt, checked)
        self.prompt_token_ids: list[int] = request.prompt_token_ids.tolist()
        self.num_cached_tokens = 0
        self.seed = request.seed
        self._params = params
        self._tokenizer = tokenizer
        self._final_ids = frozenset(params.stop_token_ids) | (
            frozenset() if params.ignore_eos else frozenset(admission.eos_token_ids)
        )
        self._search = BeamSearch(params, self._final_ids, seed=request.seed)
        self._log_probs = np.zeros((params.num_beams, admission.vocab_size), np.float32)
        self._alive: list[int] = []
        self._taps: list[LogitsTap] = []
        self._has_begun = False

    @property
    def is_over(self) -> bool:
        return self._search.is_over

    def requests(self) -> list[tuple[list[int], SamplingParams]]:
        """What to answer for the next step: prompts and their parameters."""
        # At first all beams are the prompt; later a beam that has no chance need not be computed.
        self._alive = [index for index, beam in enumerate(self._search.running) if beam.score > _HOPELESS]
        self._taps = [LogitsTap() for _ in self._alive]
        plain = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, exact_kv=True)  # nothing tells of less
        prompts = [self.prompt_token_ids + list(self._search.running[index].token_ids) for index in self._alive]
        return [
            (prompt, replace(plain, logits_processors=(tap,))) for prompt, tap in zip(prompts, self._taps, strict=True)
        ]

    def take(self, outputs: Sequence[RequestOutput]) -> None:
        """Go on, with the answers to the last `requests`."""
        if not self._has_begun:
            self._has_begun = True
            self.num_cached_tokens = outputs[0].num_cached_tokens
        self._log_probs[:] = 0.0
        for index, tap in zip(self._alive, self._taps, strict=True):
            self._log_probs[index] = tap.log_probs
        self._search.advance(self._log_probs)

    def beams(self) -> list[BeamOutput]:
        """The answers so far, best first."""
        return [
            BeamOutput(
                beam.token_ids,
                self._tokenizer.decode(beam.token_ids),
                beam.score,
                "stop" if beam.token_ids[-1] in self._final_ids else "length",
            )
            for beam in self._search.answers
        ]
