"""Contrastive search by way of the engine: the next token's probabilities, then the state of each candidate for it.

The former is a request of one token, the latter are inputs of `EmbeddingRun`. All of it asks for exact KV, as states
are compared with those of the prompt. Processors, the form and stop strings see the text as they would see an answer.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from spolia.engine.admission import Admission
from spolia.engine.embedding import Embedding, StatesRun
from spolia.engine.outputs import Delta, RequestOutput
from spolia.engine.request import Sequence, shown_bytes, text_stream
from spolia.errors import InvalidRequest
from spolia.generation import (
    Choice,
    ContrastiveParams,
    ContrastiveSearch,
    LogitsTap,
    SamplingParams,
    TokenLogprobs,
    score_token,
)
from spolia.kvcache import History

__all__ = ["ContrastiveRun"]


class ContrastiveRun:
    """One prompt's search; whoever drives it has things computed.

        step run.prompt until it has states, then run.begin()
        while not run.is_over:
            have run.request() answered
            run.take(the vectors of run.candidates())

    Attributes:
        prompt: the states of its tokens. Nothing keeps them, so that all are computed, whatever is cached.
        delta: what the last `take` added.

    Raises:
        InvalidRequest: the prompt and `max_tokens` do not fit the context, or a processor or form cannot be made.
    """

    def __init__(
        self,
        admission: Admission,
        prompt: str | Seq[int] | NDArray[np.int32],
        params: ContrastiveParams,
        *,
        cache_salt: str,
        history: History | None = None,
    ) -> None:
        given = params.processing or SamplingParams()
        asked = replace(
            given,
            max_tokens=params.max_tokens,
            stop_token_ids=params.stop_token_ids,
            ignore_eos=params.ignore_eos,
            exact_kv=given.exact_kv or admission.has_exact_kv,
        )
        self._request = request = admission.admit(prompt, asked, cache_salt=cache_salt)
        self._params = params
        self._clock = admission.clock
        self._text = Sequence(request, text_stream(request, shown_bytes(request, admission.tokenizer)))
        self._choices: list[Choice] = []
        self._tap = LogitsTap()
        self._ask = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            ignore_eos=True,
            exact_kv=admission.has_exact_kv,
            logits_processors=(self._tap,),
        )
        self.delta = Delta("", ())
        self.prompt = StatesRun(request.prompt_token_ids, namespace=request.namespace, history=history)

    def begin(self) -> None:
        """Take the prompt's states, which are there."""
        states = self.prompt.states
        assert states is not None
        self._search = ContrastiveSearch(self._params, states)

    @property
    def prompt_token_ids(self) -> list[int]:
        """As admitted."""
        ids: list[int] = self._request.prompt_token_ids.tolist()
        return ids

    @property
    def is_over(self) -> bool:
        return self._text.finish_reason is not None

    def request(self) -> tuple[list[int], SamplingParams]:
        """What to answer first for the next token: a prompt and its parameters."""
        return self._text.known_ids.tolist(), self._ask

    def candidates(self) -> list[list[int]]:
        """The texts whose last tokens' states are needed then.

        Raises:
            InvalidRequest: what is forbidden leaves no token to go on with, or a processor of the user's fails.
        """
        ids = self._text.known_ids.tolist()
        return [[*ids, candidate] for candidate in self._search.propose(self._processed(self._tap.log_probs))]

    def _processed(self, log_probs: NDArray[np.float32]) -> NDArray[np.float32]:
        """The log-probabilities of what processors leave of the model's."""
        row = self._text.next_row()
        if row.pipeline is None and not len(row.banned_ids):
            return log_probs
        changed = log_probs[None].copy()
        if row.pipeline is None:
            changed[0, row.banned_ids] = -np.inf
        else:
            row.pipeline.process(changed, row.position, row.banned_ids)
        if not np.isfinite(changed.max()):
            trouble = None if row.pipeline is None else row.pipeline.trouble
            raise InvalidRequest(
                f"after {self._text.num_generated_tokens} tokens of the answer: "
                + (trouble or "what this request forbids leaves no token to go on with; loosen its constraints")
            )
        renormalised = LogitsTap()
        renormalised.process(changed, ())
        return renormalised.log_probs

    def take(self, candidates: Seq[Embedding]) -> None:
        """Go on by a token, with the vectors of the last `candidates`."""
        choice = self._search.choose(np.array([each.vector for each in candidates]))
        params, token_id = self._request.params, choice.options[0].token_id
        scored: tuple[TokenLogprobs, ...] = ()
        if params.logprobs is not None:
            scored = (score_token(self._tap.log_probs, token_id, params.logprobs),)
            self._text.logprobs += scored
        if params.explain_candidates is not None:
            self._choices.append(choice._replace(options=choice.options[: params.explain_candidates]))
        text = self._text.append(token_id)
        self.delta = Delta(text, (token_id,), scored, self.output() if self.is_over else None)

    def output(self) -> RequestOutput:
        """The answer, once it is over."""
        explanation, ranges = self.prompt.found
        return replace(
            self._text.output(self._clock()),
            strategy="contrastive search",
            choices=tuple(self._choices),
            explanation=explanation,
            ranges=ranges,
        )
