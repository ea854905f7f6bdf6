"""llama.cpp's bodies. Its defaults hold where a field is left out."""

from __future__ import annotations

from typing import Any

import msgspec

from spolia.engine import SamplingParams
from spolia.server.sampling import SamplingFields

__all__ = ["CompletionRequest", "EmbeddingRequest", "InfillRequest", "SlotRequest", "TemplateRequest", "defaults"]

# llama.cpp's own, which its users expect where they say nothing.
_DEFAULTS: dict[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "repeat_last_n": 64}


def defaults() -> dict[str, Any]:
    """What holds where a request says nothing."""
    return dict(_DEFAULTS)


class _Sampling(SamplingFields, kw_only=True):
    model: str | None = None
    n_predict: int | None = None
    stream: bool | None = None
    n_probs: int | None = None
    return_tokens: bool | None = None
    id_slot: int | None = None
    return_progress: bool | None = None
    cache_salt: str | None = None

    def sampling_params(self) -> SamplingParams:
        """
        Raises:
            InvalidRequest: a value that is not allowed.
        """
        given = {**_DEFAULTS, **self.given()}
        if given.get("seed", 0) < 0:  # llama.cpp's -1 draws one
            del given["seed"]
        if self.n_predict is not None and self.n_predict >= 1:  # its -1 and -2 mean as many as fit
            given["max_tokens"] = self.n_predict
        return SamplingParams(**given, logprobs=self.n_probs or None)


class CompletionRequest(_Sampling, kw_only=True):
    """`/completion`: text, or a list of texts and token ids that are one prompt."""

    prompt: str | list[str | int]


class InfillRequest(_Sampling, kw_only=True):
    """`/infill`. `prompt` is put after the prefix; `input_extra` holds other files."""

    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: list[dict[str, Any]] | None = None
    prompt: str = ""


class SlotRequest(msgspec.Struct, kw_only=True):
    """`/slots/{id_slot}?action=`: save, restore, or erase, which needs no body.

    Attributes:
        cache_salt: restore: that of the requests which are to find it, and of those it was saved from. Default: that of
            the conversation that is in the slot, if one is.
    """

    filename: str | None = None
    model: str | None = None
    cache_salt: str | None = None


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    """`/embedding`.

    Attributes:
        content: as `input` of `/v1/embeddings`, which is another name for it here.
        embd_normalize: -1 not at all, 0 the largest magnitude to 32,760, p the p-norm to 1.
    """

    content: str | list[str | int | list[int]] | None = None
    input: str | list[str | int | list[int]] | None = None
    model: str | None = None
    embd_normalize: int = 2
    pooling: str | None = None
    cache_salt: str | None = None


class TemplateRequest(msgspec.Struct, kw_only=True):
    """`/apply-template`."""

    model: str | None = None
    messages: list[dict[str, Any]]
