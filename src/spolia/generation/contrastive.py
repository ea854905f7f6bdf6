"""Contrastive search: likely tokens whose place in the model's mind is unlike what has been said already.

    score = (1 - alpha) * probability - alpha * largest cosine of the candidate's state with any earlier token's state

This module deals in ids, probabilities and states; whoever drives it computes them.

Source: Su et al. 2022, A Contrastive Framework for Neural Text Generation.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spolia.errors import InvalidRequest
from spolia.generation.checks import MAX_INT, check_bool, check_integer, check_number, token_ids
from spolia.generation.decisions import Choice, Option
from spolia.generation.params import SamplingParams
from spolia.generation.processors.candidates import largest

__all__ = ["NOT_WITH_CONTRASTIVE", "ContrastiveParams", "ContrastiveSearch"]

States = NDArray[np.float32]

NOT_WITH_CONTRASTIVE = (
    *("top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "top_h", "top_n_sigma", "xtc_probability"),
    *(
        "dynatemp_range",
        "mirostat",
        "filter_order",
        "watermarking_config",
        "synthid",
    ),  # of tokens that are drawn, and none is
    *("guidance_scale", "dola_layers", "token_healing", "context_shift", "prompt_logprobs", "max_time"),
    *("stopping_criteria", "prediction"),
)
"""Parameters that say how tokens are drawn, or that follow a text which the engine writes by itself."""

_DEFAULTS = SamplingParams()


@dataclass(frozen=True, slots=True, kw_only=True)
class ContrastiveParams:
    """How to search.

    Attributes:
        top_k: candidates that are looked at for each token.
        penalty_alpha: how much being unlike counts beside being likely; 0: greedy.
        max_tokens: most tokens of the answer.
        stop_token_ids: end the answer, besides the model's own end-of-text tokens.
        ignore_eos: the model's own do not.
        processing: processors, the form, `min_tokens`, stop strings, log-probabilities and `explain_candidates` of
            these apply; neither temperature nor filters, as no token is drawn.

    Raises:
        InvalidRequest: naming the parameter, the value and what is allowed.
    """

    top_k: int = 4
    penalty_alpha: float = 0.6
    max_tokens: int = 64
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    processing: SamplingParams | None = None

    def __post_init__(self) -> None:
        check_integer("top_k", self.top_k, 1, 256)
        check_number("penalty_alpha", self.penalty_alpha, 0.0, 1.0)
        check_integer("max_tokens", self.max_tokens, 1, MAX_INT)
        check_bool("ignore_eos", self.ignore_eos)
        object.__setattr__(self, "stop_token_ids", token_ids("stop_token_ids", self.stop_token_ids))
        for name in NOT_WITH_CONTRASTIVE:
            if self.processing is not None and (value := getattr(self.processing, name)) != getattr(_DEFAULTS, name):
                raise InvalidRequest(
                    f"{name} is {value!r}: it does not go with contrastive search; leave it out", param=name
                )


class ContrastiveSearch:
    """One prompt's search: `propose`, then `choose`, a token at a time.

    Args:
        states: `[num_prompt_tokens, hidden_size]` of the last layer.
    """

    def __init__(self, params: ContrastiveParams, states: States) -> None:
        self._params = params
        self._states = np.empty((len(states) + params.max_tokens, states.shape[1]), np.float32)
        self._states[: len(states)] = _unit(states)
        self._num_states = len(states)
        self._candidates: NDArray[np.intp] = np.empty(0, np.intp)
        self._probabilities: NDArray[np.float32] = np.empty(0, np.float32)

    def propose(self, log_probs: NDArray[np.float32]) -> list[int]:
        """The candidates for the next token, likeliest first, given the log-probabilities `[vocab_size]`.

        -inf: must not come.
        """
        best = largest(log_probs, self._params.top_k)
        best = best[log_probs[best] > -np.inf]
        self._candidates = best[np.argsort(-log_probs[best], kind="stable")][: self._params.top_k]
        self._probabilities = np.exp(log_probs[self._candidates])
        return [int(token_id) for token_id in self._candidates]

    def choose(self, states: States) -> Choice:
        """Go on with the first of the options, given the state `[num_candidates, hidden_size]` of each candidate."""
        alpha = np.float32(self._params.penalty_alpha)
        unit = _unit(states)
        alike = (self._states[: self._num_states] @ unit.T).max(axis=0)
        scores = (1 - alpha) * self._probabilities - alpha * alike
        order = np.argsort(-scores, kind="stable")
        self._states[self._num_states] = unit[order[0]]
        self._num_states += 1
        options = [
            Option(
                int(self._candidates[index]),
                float(scores[index]),
                {"probability": float(self._probabilities[index]), "likeness": float(alike[index])},
                is_kept=rank == 0,
            )
            for rank, index in enumerate(order.tolist())
        ]
        return Choice(tuple(options), 0, options[0].score)


def _unit(states: States) -> States:
    lengths = np.sqrt((states.astype(np.float64) ** 2).sum(axis=1, keepdims=True))
    unit: States = (states / np.maximum(lengths, 1e-30)).astype(np.float32)
    return unit
