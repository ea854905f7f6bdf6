"""Contrastive search: likely tokens whose place in the model's mind is unlike what has been said already.

    score = (1 - alpha) * probability - alpha * largest cosine of the candidate's state with any earlier token's state

This module deals in ids, probabilities and states; whoever drives it computes them.

Source: Su et al. 2022, A Contrastive Framework for Neural Text Generation.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spolia.generation.checks import MAX_INT, check_bool, check_integer, check_number, token_ids
from spolia.generation.processors.candidates import largest

__all__ = ["ContrastiveParams", "ContrastiveSearch"]

States = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class ContrastiveParams:
    """How to search.

    Attributes:
        top_k: candidates that are looked at for each token.
        penalty_alpha: how much being unlike counts beside being likely; 0: greedy.
        max_tokens: most tokens of the answer.
        stop_token_ids: end the answer, besides the model's own end-of-text tokens.
        ignore_eos: the model's own do not.

    Raises:
        InvalidRequest: naming the parameter, the value and what is allowed.
    """

    top_k: int = 4
    penalty_alpha: float = 0.6
    max_tokens: int = 64
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        check_integer("top_k", self.top_k, 1, 256)
        check_number("penalty_alpha", self.penalty_alpha, 0.0, 1.0)
        check_integer("max_tokens", self.max_tokens, 1, MAX_INT)
        check_bool("ignore_eos", self.ignore_eos)
        object.__setattr__(self, "stop_token_ids", token_ids("stop_token_ids", self.stop_token_ids))


class ContrastiveSearch:
    """One prompt's search: `propose`, then `choose`, until `is_over`.

    Args:
        states: `[num_prompt_tokens, hidden_size]` of the last layer.

    Attributes:
        token_ids: generated; the one that ended the answer included.
        has_stopped: a final id ended the answer, and not its length.
    """

    def __init__(self, params: ContrastiveParams, final_ids: Collection[int], states: States) -> None:
        self._params = params
        self._final_ids = frozenset(final_ids)
        self._states = np.empty((len(states) + params.max_tokens, states.shape[1]), np.float32)
        self._states[: len(states)] = _unit(states)
        self._num_states = len(states)
        self._candidates: NDArray[np.intp] = np.empty(0, np.intp)
        self._probabilities: NDArray[np.float32] = np.empty(0, np.float32)
        self.token_ids: list[int] = []
        self.has_stopped = False

    @property
    def is_over(self) -> bool:
        return self.has_stopped or len(self.token_ids) >= self._params.max_tokens

    def propose(self, log_probs: NDArray[np.float32]) -> list[int]:
        """The candidates for the next token, likeliest first, given the log-probabilities `[vocab_size]`."""
        best = largest(log_probs, self._params.top_k)
        self._candidates = best[np.argsort(-log_probs[best], kind="stable")][: self._params.top_k]
        self._probabilities = np.exp(log_probs[self._candidates])
        return [int(token_id) for token_id in self._candidates]

    def choose(self, states: States) -> int:
        """Take the best candidate, given the state `[num_candidates, hidden_size]` that each would have."""
        alpha = np.float32(self._params.penalty_alpha)
        unit = _unit(states)
        alike = (self._states[: self._num_states] @ unit.T).max(axis=0)
        index = int(((1 - alpha) * self._probabilities - alpha * alike).argmax())
        self._states[self._num_states] = unit[index]
        self._num_states += 1
        token_id = int(self._candidates[index])
        self.token_ids.append(token_id)
        self.has_stopped = token_id in self._final_ids
        return token_id


def _unit(states: States) -> States:
    lengths = np.sqrt((states.astype(np.float64) ** 2).sum(axis=1, keepdims=True))
    unit: States = (states / np.maximum(lengths, 1e-30)).astype(np.float32)
    return unit
