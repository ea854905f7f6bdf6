"""Contrastive search by way of the engine: the next token's probabilities, then the state of each candidate for it.

The former is a request of one token, the latter are inputs of `EmbeddingRun`. All of it asks for exact KV, as states
are compared with those of the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from spolia.engine.admission import Admission
from spolia.engine.embedding import Embedding, StatesRun
from spolia.engine.outputs import ContrastiveOutput
from spolia.engine.request import answer_text
from spolia.generation import ContrastiveParams, ContrastiveSearch, LogitsTap, SamplingParams

__all__ = ["ContrastiveRun"]


class ContrastiveRun:
    """One prompt's search; whoever drives it has things computed.

        step run.prompt until it has states, then run.begin()
        while not run.is_over:
            have run.request() answered
            run.take(the vectors of run.candidates())

    Attributes:
        prompt: the states of its tokens. Nothing keeps them, so that all are computed, whatever is cached.

    Raises:
        InvalidRequest: the prompt and `max_tokens` do not fit the context.
    """

    def __init__(
        self,
        admission: Admission,
        prompt: str | Sequence[int] | NDArray[np.int32],
        params: ContrastiveParams,
        *,
        cache_salt: str,
    ) -> None:
        asked = SamplingParams(
            max_tokens=params.max_tokens, stop_token_ids=params.stop_token_ids, ignore_eos=params.ignore_eos
        )
        self._request = request = admission.admit(prompt, asked, cache_salt=cache_salt)
        self._params = params
        self._tokenizer = admission.tokenizer
        self._ids: list[int] = request.prompt_token_ids.tolist()
        self._tap = LogitsTap()
        self._ask = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            ignore_eos=True,
            exact_kv=admission.has_exact_kv,
            logits_processors=(self._tap,),
        )
        self.prompt = StatesRun(request.prompt_token_ids, namespace=admission.namespace_for(cache_salt, is_exact=True))

    def begin(self) -> None:
        """Take the prompt's states, which are there."""
        states = self.prompt.states
        assert states is not None
        self._search = ContrastiveSearch(self._params, self._request.final_ids, states)

    @property
    def is_over(self) -> bool:
        return self._search.is_over

    def request(self) -> tuple[list[int], SamplingParams]:
        """What to answer first for the next token: a prompt and its parameters."""
        return self._ids, self._ask

    def candidates(self) -> list[list[int]]:
        """The texts whose last tokens' states are needed then."""
        return [[*self._ids, candidate] for candidate in self._search.propose(self._tap.log_probs)]

    def take(self, candidates: Sequence[Embedding]) -> None:
        """Go on by a token, with the vectors of the last `candidates`."""
        self._ids.append(self._search.choose(np.array([each.vector for each in candidates])))

    def output(self) -> ContrastiveOutput:
        """The answer so far."""
        ids = tuple(self._search.token_ids)
        if not self._search.has_stopped:
            return ContrastiveOutput(ids, answer_text(self._request, self._tokenizer, ids)[0], "length")
        text, _ = answer_text(self._request, self._tokenizer, ids[:-1])
        return ContrastiveOutput(ids, text, "stop", ids[-1] if ids[-1] in self._params.stop_token_ids else None)
