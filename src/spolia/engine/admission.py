"""Requests checked against every limit before they are queued: what is admitted can be answered."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from spolia.engine.fairness import Tenant
from spolia.engine.request import Request
from spolia.errors import InvalidRequest, PromptTooLong
from spolia.generation import Depth, Healing, SamplingParams, StopPattern, Vocabulary, build_pipeline
from spolia.kernels import BLOCK_SIZE
from spolia.kvcache import History, Wish

__all__ = ["Admission", "TextEncoder"]


class TextEncoder(Protocol):
    """The part of a tokenizer that prompts and constraints on text need."""

    def encode(self, text: str, *, add_special: bool = True) -> list[int]: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def is_special(self, token_id: int) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """Makes requests. Immutable, so any thread may use it.

    Attributes:
        max_context: most tokens of prompt and answer, if there is KV memory for them.
        fitting_tokens: most tokens for which the pools, when empty, have blocks: as much as two contexts.
        model_tokens: what the model is made for; 0: no more than `max_context`.
        max_sequences: lanes of the batch.
        namespace: the namespace of a cache salt.
        exact_namespace: that of requests which want exact KV; None: the same.
        has_exact_kv: there is KV as it was computed: the device keeps it so.
        depth: of the model.
        processors: makers of logits processors, by the names that requests may use.
        vocabulary: what constraints on text are made from.
    """

    tokenizer: TextEncoder
    vocab_size: int
    eos_token_ids: Collection[int]
    max_context: int
    fitting_tokens: int
    max_sequences: int
    namespace: Callable[[str], bytes]
    clock: Callable[[], float]
    model_tokens: int = 0
    exact_namespace: Callable[[str], bytes] | None = None
    has_exact_kv: bool = True
    depth: Depth = Depth(0, has_tied_head=False)  # noqa: RUF009 - frozen
    processors: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    vocabulary: Vocabulary = field(init=False)

    def __post_init__(self) -> None:
        vocabulary = Vocabulary(
            self.vocab_size,
            eos_token_ids=self.eos_token_ids,
            encode=lambda text: self.tokenizer.encode(text, add_special=False),
            token_bytes=self.tokenizer.token_bytes,
            is_special=self.tokenizer.is_special,
        )
        object.__setattr__(self, "vocabulary", vocabulary)

    @property
    def context_tokens(self) -> int:
        """Most tokens of prompt and answer."""
        return min(self.max_context, self.fitting_tokens)

    def admit(
        self,
        prompt: str | Sequence[int] | NDArray[np.int32],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        cache_salt: str = "",
        wishes: Sequence[Wish] = (),
        tenant: Tenant | None = None,
        history: History | None = None,
        is_part: bool = False,
    ) -> Request:
        """A request that can be answered.

        Args:
            wishes: how long its KV is worth keeping, by token range.
            tenant: who it is for; None where nobody is told apart.
            history: what is known of the prompt.
            is_part: its prompt is another request's, which is counted there.

        Raises:
            InvalidRequest: it cannot, ever; says which value, which limit and what to do.
        """
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise InvalidRequest(f"params is {params!r}; give SamplingParams(...)", param="params")
        if params.exact_kv:
            self.require_exact_kv()
        _check_salt(cache_salt)
        token_ids, num_truncated_tokens = self._fit(self._token_ids(prompt), params)
        healing = None
        if params.token_healing and len(token_ids) > 1 and not self.tokenizer.is_special(int(token_ids[-1])):
            taken_back = self.tokenizer.token_bytes(int(token_ids[-1]))
            token_ids, healing = token_ids[:-1], Healing(taken_back, self.vocabulary)
        final_ids = frozenset(params.stop_token_ids) | frozenset(() if params.ignore_eos else self.eos_token_ids)
        if params.min_tokens and len(final_ids) >= self.vocab_size:
            raise InvalidRequest(
                "with min_tokens, stop_token_ids may not be the whole vocabulary: nothing is left to generate",
                param="stop_token_ids",
            )
        max_tokens = self._max_tokens(len(token_ids), params)
        is_exact = _wants_exact(params)
        guide_ids = self._guide_ids(token_ids, params)
        if guide_ids is not None:
            max_tokens = min(max_tokens, self._max_guided_tokens(len(token_ids), len(guide_ids), params))
        request = Request(
            request_id=request_id or uuid.uuid4().hex,
            prompt_token_ids=token_ids,
            params=params,
            max_tokens=max_tokens,
            seed=secrets.randbits(63) if params.seed is None else params.seed,
            namespace=self.namespace_for(cache_salt, is_exact=is_exact),
            is_exact=is_exact or self.exact_namespace is None,
            final_ids=final_ids,
            pipeline=build_pipeline(
                params,
                self.vocabulary,
                max_tokens=max_tokens,
                depth=self.depth,
                known=self.processors,
                first=healing,
            ),
            stop_pattern=None if params.stop_regex is None else StopPattern(params.stop_regex),
            num_skipped_bytes=0 if healing is None else len(taken_back),
            num_truncated_tokens=num_truncated_tokens,
            max_length=None if params.context_shift is None else self.context_tokens,
            prediction_ids=self._prediction_ids(params),
            arrival_s=self.clock(),
            wishes=tuple(wishes),
            tenant=tenant or Tenant(),
            history=None if num_truncated_tokens else history,
            is_part=is_part,
        )
        if guide_ids is None:
            return request
        plain = SamplingParams(max_tokens=max_tokens)
        guide = replace(
            request,
            request_id=f"{request.request_id}/guide",
            prompt_token_ids=guide_ids,
            params=plain,
            pipeline=None,
            stop_pattern=None,
            wishes=(),
            history=None,
        )
        return replace(request, guide=guide)

    def _guide_ids(self, token_ids: NDArray[np.int32], params: SamplingParams) -> NDArray[np.int32] | None:
        """The other prompt of a request's guidance; None if it has none."""
        if params.guidance_scale == 1:
            return None
        if params.negative_prompt is None:
            return token_ids[-1:]
        try:
            return self._token_ids(params.negative_prompt)
        except InvalidRequest as error:
            raise InvalidRequest(f"negative_prompt: {error}", param="negative_prompt") from None

    def _max_guided_tokens(self, num_prompt_tokens: int, num_guide_tokens: int, params: SamplingParams) -> int:
        """Most tokens of an answer that two sequences get."""
        # Each may begin a block more than its tokens fill.
        room = self.fitting_tokens - num_prompt_tokens - num_guide_tokens - 2 * BLOCK_SIZE
        most = min(room // 2, self.max_context - num_guide_tokens)
        wanted = params.max_tokens if params.max_tokens is not None else max(params.min_tokens, 1)
        if self.max_sequences < 2 or wanted > most:
            raise InvalidRequest(
                f"guidance_scale is {params.guidance_scale}: guidance computes a second sequence, of "
                f"{num_guide_tokens} tokens and the {wanted} of the answer, which does not fit beside the first of "
                f"{num_prompt_tokens}: there are {self.max_sequences} lanes, a context of {self.max_context} tokens, "
                f"and KV blocks for {self.fitting_tokens}. Lower max_tokens, shorten the prompts, or raise "
                "max_context, kv_memory or max_sequences",
                param="guidance_scale",
            )
        return most

    def require_exact_kv(self) -> None:
        """
        Raises:
            InvalidRequest: there is none here.
        """
        if not self.has_exact_kv:
            raise InvalidRequest(
                "exact_kv is true, and this engine keeps all KV in fewer bits (kv_dtype int8): leave exact_kv out, or "
                "ask an engine whose kv_dtype is bf16, f16 or f32",
                param="exact_kv",
            )

    def namespace_of(self, params: SamplingParams, cache_salt: str) -> bytes:
        """Where a request with these parameters looks for KV."""
        return self.namespace_for(cache_salt, is_exact=_wants_exact(params))

    def namespace_for(self, cache_salt: str, *, is_exact: bool) -> bytes:
        """Who may share KV; `is_exact`: none that was kept in fewer bits."""
        namespace_of = self.exact_namespace if is_exact else None
        return (namespace_of or self.namespace)(cache_salt)

    def check_input(self, prompt: str | Sequence[int], *, truncate: bool = False) -> NDArray[np.int32]:
        """Token ids of a text that is only read, such as one to embed.

        Args:
            truncate: keep the beginning of one that is too long.

        Raises:
            InvalidRequest: as `admit`; `param` is "input".
        """
        try:
            ids = self._token_ids(prompt)
        except InvalidRequest as error:
            raise InvalidRequest(str(error), param="input", code=error.code) from None
        limit = self.context_tokens
        if len(ids) > limit and not truncate:
            raise PromptTooLong(
                f'an input has {len(ids)} tokens; the context holds {limit}. Shorten it, or have it cut ("truncate": '
                f"true). {self._larger_context()}",
                param="input",
                num_tokens=len(ids),
                context_tokens=limit,
            )
        return ids[:limit]

    def _token_ids(self, prompt: str | Sequence[int] | NDArray[np.int32]) -> NDArray[np.int32]:
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        try:
            wide = np.asarray(ids)
        except (ValueError, OverflowError):
            wide = np.empty(())
        if wide.shape == (0,):
            raise InvalidRequest("the prompt is empty; it must have at least one token", param="prompt")
        if wide.ndim != 1 or wide.dtype.kind not in "iu":
            raise InvalidRequest("the prompt is neither text nor a list of integers, token ids", param="prompt")
        wrong = np.flatnonzero((wide < 0) | (wide >= self.vocab_size))
        if len(wrong):
            raise InvalidRequest(
                f"token {wrong[0]} of the prompt has id {wide[wrong[0]]}; "
                f"this model's ids go from 0 to {self.vocab_size - 1}",
                param="prompt",
            )
        return wide.astype(np.int32)

    def _prediction_ids(self, params: SamplingParams) -> NDArray[np.int32] | None:
        """What the answer will be like, as tokens."""
        said = params.prediction
        if not said:
            return None
        ids = self.tokenizer.encode(said, add_special=False) if isinstance(said, str) else said
        if ids and max(ids) >= self.vocab_size:
            raise InvalidRequest(
                f"prediction holds {max(ids)}; token ids go up to {self.vocab_size - 1}", param="prediction"
            )
        return np.array(ids, np.int32)

    def _fit(self, token_ids: NDArray[np.int32], params: SamplingParams) -> tuple[NDArray[np.int32], int]:
        """The prompt as far as `params` want it and the context has room for it, and how many tokens were dropped."""
        kept = token_ids
        if params.truncate_prompt_tokens is not None:
            kept = kept[-params.truncate_prompt_tokens :]
        wanted = _wanted(params)
        room = self.context_tokens - wanted
        if params.truncate != "none" and 0 < room < len(kept):
            num_first = room // 2 if params.truncate == "middle" else 0
            kept = np.concatenate([kept[:num_first], kept[len(kept) - room + num_first :]])
        return kept, len(token_ids) - len(kept)

    def _larger_context(self) -> str:
        """How to have one, where this one is too small."""
        if self.fitting_tokens < self.max_context:
            return (
                "The memory for KV bounds it: start with more (--kv-memory, or --memory for all models; kv_memory in "
                "Python), or with a smaller model, which leaves more"
            )
        if self.max_context < self.model_tokens:
            return (
                f"This model is made for up to {self.model_tokens}: start with a larger --max-context (max_context in "
                "Python)"
            )
        return "This model is made for no more: take one with a longer context"

    def _max_tokens(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        limit = self.context_tokens
        wanted = _wanted(params)
        if params.context_shift is not None and params.context_shift["sinks"] > limit // 2:
            raise InvalidRequest(
                f"context_shift keeps {params.context_shift['sinks']} tokens; at most half of the {limit} that "
                "there is room for may be kept",
                param="context_shift",
            )
        if num_prompt_tokens + wanted > limit:
            raise PromptTooLong(
                f"the prompt has {num_prompt_tokens} tokens and {wanted} more are asked for, "
                f"{num_prompt_tokens + wanted} in all; the context holds {limit}. Shorten the prompt, lower "
                f'max_tokens, or have the prompt cut ("truncate": "head" or "middle"). {self._larger_context()}',
                param="prompt",
                num_tokens=num_prompt_tokens,
                context_tokens=limit,
            )
        return params.max_tokens if params.max_tokens is not None else limit - num_prompt_tokens


def _wants_exact(params: SamplingParams) -> bool:
    # What is computed again for a prompt's log-probabilities would be exchanged for rounded KV that is there.
    return params.exact_kv or params.prompt_logprobs is not None


def _wanted(params: SamplingParams) -> int:
    """Tokens of the answer that there must be room for beside the prompt."""
    if params.context_shift is not None:
        return 1
    return params.max_tokens if params.max_tokens is not None else max(params.min_tokens, 1)


def _check_salt(salt: object) -> None:
    if not isinstance(salt, str):
        raise InvalidRequest(f"cache_salt is {salt!r}; it must be text", param="cache_salt")
    try:
        salt.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"cache_salt is {salt!r}, which is no text: {error.reason} at character {error.start}", param="cache_salt"
        ) from None
