"""llama.cpp's bodies. Its defaults hold where a field is left out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from spolia.engine import SamplingParams
from spolia.errors import InvalidRequest
from spolia.server.sampling import SamplingFields, sampler_names
from spolia.server.schema import refuse_unless

__all__ = [
    "CompletionRequest",
    "EmbeddingRequest",
    "InfillRequest",
    "SamplingBody",
    "SlotRequest",
    "TemplateRequest",
    "settings_of",
]

# llama.cpp's own, which its users expect where they say nothing. Its temperature comes after the other filters.
_DEFAULTS: dict[str, Any] = {
    "temperature": 0.8,
    "top_k": 40,
    "top_p": 0.95,
    "min_p": 0.05,
    "repeat_last_n": 64,
    "dry_penalty_last_n": 64,
    "filter_order": ["top_n_sigma", "top_k", "typical_p", "top_p", "min_p", "xtc", "temperature"],
}
# By the name that `samplers` has for it: what it is here, and the parameters of one that is not used.
_SAMPLERS: dict[str, tuple[str | None, dict[str, Any]]] = {
    "penalties": (None, {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}),
    "dry": (None, {"dry_multiplier": 0.0}),
    "top_n_sigma": ("top_n_sigma", {"top_n_sigma": 0.0}),
    "top_k": ("top_k", {"top_k": 0}),
    "typ_p": ("typical_p", {"typical_p": 1.0}),
    "top_p": ("top_p", {"top_p": 1.0}),
    "min_p": ("min_p", {"min_p": 0.0}),
    "xtc": ("xtc", {"xtc_probability": 0.0}),
    "temperature": ("temperature", {"temperature": 1.0, "dynatemp_range": 0.0}),
}
_SAMPLER_ALIASES = {"typical_p": "typ_p", "temp": "temperature"}
# Ours: theirs, where they differ.
_SPELT = {
    "max_tokens": "n_predict",
    "logprobs": "n_probs",
    "explain_candidates": "n_probs",
    "repetition_penalty": "repeat_penalty",
    "filter_order": "samplers",
    "stop_regex": "n_indent",
}
_NEUTRAL: dict[str, tuple[object, ...]] = {"lora": ([],), "min_keep": (0,), "image_data": ([],)}
_MAX_CHOICES = 64
_MAX_PROBS = 20


class SamplingBody(SamplingFields, kw_only=True):
    """What `/completion` and `/infill` share.

    Attributes:
        n_predict: -1 and -2 mean as many as fit; 0 computes the prompt and generates nothing.
        n_cmpl: answers to each prompt.
        n_indent: the answer ends before a line that is indented less than this.
        t_max_predict_ms: after the first token; the answer then ends once it has a line break.
        cache_prompt: false neither reuses KV nor leaves any.
        post_sampling_probs: probabilities after all filters in place of the model's log-probabilities.
        response_fields: only these of the reply; "a/b" is put out as b.
        sse_ping_interval: seconds of silence after which a stream has a comment; below 1: none.
        resumable, cache_salt: as in OpenAI's API here.
    """

    model: str | None = None
    n_predict: int | None = None
    max_tokens: int | None = None
    n_cmpl: int | None = None
    n: int | None = None
    stream: bool | None = None
    n_probs: int | None = None
    return_tokens: bool | None = None
    id_slot: int | None = None
    return_progress: bool | None = None
    timings_per_token: bool | None = None
    n_indent: int | None = None
    t_max_predict_ms: float | None = None
    cache_prompt: bool | None = None
    post_sampling_probs: bool | None = None
    response_fields: list[str] | None = None
    sse_ping_interval: float | None = None
    resumable: bool | None = None
    cache_salt: str | None = None

    # Refused unless neutral; see `_NEUTRAL`.
    lora: Any = None
    min_keep: Any = None
    image_data: Any = None

    @property
    def num_choices(self) -> int:
        return self.n_cmpl or self.n or 1

    @property
    def num_predict(self) -> int | None:
        """Most tokens to generate; None: as many as fit."""
        asked = self.max_tokens if self.n_predict is None else self.n_predict
        return None if asked is None or asked < 0 else asked

    @property
    def indent_pattern(self) -> str | None:
        """What ends an answer for `n_indent`: the first character of a line that has less before it."""
        return rf"\n[ \t]{{0,{self.n_indent - 1}}}[^ \t\n]" if self.n_indent and self.n_indent > 0 else None

    def check(self) -> None:
        """
        Raises:
            InvalidRequest: a field that is not supported and would change the answer, or is out of range.
        """
        refuse_unless(self, _NEUTRAL)
        if not 1 <= self.num_choices <= _MAX_CHOICES:
            raise InvalidRequest(f"n_cmpl is {self.num_choices}; allowed are 1 to {_MAX_CHOICES}", param="n_cmpl")
        if self.stop_regex is not None and self.indent_pattern is not None:
            raise InvalidRequest("n_indent does not go with stop_regex; send one of them", param="n_indent")
        if self.n_probs is not None and self.n_probs > _MAX_PROBS:
            raise InvalidRequest(f"n_probs is {self.n_probs}; allowed are 0 to {_MAX_PROBS}", param="n_probs")

    def sampling_params(self) -> list[SamplingParams]:
        """The parameters of each of `num_choices` answers to a prompt.

        Raises:
            InvalidRequest: a value that is not allowed, named as llama.cpp has it.
        """
        given = {**_DEFAULTS, **self.given()}
        if self.samplers is not None:
            given |= _used_samplers(self.samplers)
        if given.get("seed", 0) < 0:  # llama.cpp's -1 draws one
            del given["seed"]
        if self.num_predict is not None:
            given["max_tokens"] = max(1, self.num_predict)
        if self.indent_pattern is not None:
            given["stop_regex"] = self.indent_pattern
        if self.n_probs and self.post_sampling_probs:
            given["explain_candidates"] = _MAX_PROBS  # so that the token itself is most often among them
        elif self.n_probs:
            given["logprobs"] = self.n_probs
        try:
            params = SamplingParams(**given)
        except InvalidRequest as error:
            raise InvalidRequest(
                str(error), param=_SPELT.get(error.param or "", error.param), code=error.code
            ) from None
        first = params.seed
        seeds = (None if first is None else (first + choice) % 2**64 for choice in range(self.num_choices))
        return [replace(params, seed=seed) for seed in seeds]


def _used_samplers(asked: list[str] | str) -> dict[str, Any]:
    """`filter_order`, and neutral parameters for what is not named. Names that nobody knows are skipped, as there."""
    aliased = (_SAMPLER_ALIASES.get(name, name) for name in sampler_names(asked))
    used = [name for name in aliased if name in _SAMPLERS]
    given: dict[str, Any] = {}
    for name, (_, unused) in _SAMPLERS.items():
        if name not in used:
            given |= unused
    order = [ours for name in dict.fromkeys(used) if (ours := _SAMPLERS[name][0]) is not None]
    return {**given, "filter_order": order}


def settings_of(params: SamplingParams, body: SamplingBody) -> dict[str, Any]:
    """What held for an answer, under llama.cpp's names."""
    same = (
        *("temperature", "dynatemp_range", "dynatemp_exponent", "top_k", "top_p", "min_p", "top_n_sigma"),
        *("xtc_probability", "xtc_threshold", "typical_p", "repeat_last_n", "presence_penalty", "frequency_penalty"),
        *("dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers"),
        *("mirostat", "mirostat_tau", "mirostat_eta", "stop", "ignore_eos"),
    )
    num_predict = -1 if body.num_predict is None else body.num_predict
    theirs = {ours: name for name, (ours, _) in _SAMPLERS.items()}
    return {
        "n_predict": num_predict,
        "max_tokens": num_predict,
        "seed": -1 if params.seed is None else params.seed,
        **{name: getattr(params, name) for name in same},
        "repeat_penalty": params.repetition_penalty,
        "n_keep": 0,
        "n_discard": 0,
        "n_probs": body.n_probs or 0,
        "min_keep": 0,
        "grammar": body.grammar or "",
        "samplers": [theirs[name] for name in params.filter_order if name in theirs],
        "stream": bool(body.stream),
        "timings_per_token": bool(body.timings_per_token),
        "post_sampling_probs": bool(body.post_sampling_probs),
        "lora": [],
    }


class CompletionRequest(SamplingBody, kw_only=True):
    """`/completion`.

    Attributes:
        prompt: text; token ids, texts among them or not; `{"prompt_string": text}`; or a list of such, each a prompt.
    """

    prompt: str | dict[str, Any] | list[str | int | dict[str, Any] | list[str | int]]

    def prompts(self) -> list[list[str | int]]:
        """Each prompt in parts, which are texts and token ids.

        Raises:
            InvalidRequest: one that is neither, or with images or sound.
        """
        asked = self.prompt
        if not isinstance(asked, list):
            return [_parts(asked)]
        if any(isinstance(part, int) for part in asked) and all(isinstance(part, str | int) for part in asked):
            return [[part for part in asked if isinstance(part, str | int)]]
        if not asked or any(isinstance(part, int) for part in asked):
            raise InvalidRequest("prompt must be text, token ids and texts, or a list of such prompts", param="prompt")
        return [_parts(part) for part in asked if not isinstance(part, int)]


def _parts(prompt: str | dict[str, Any] | list[str | int]) -> list[str | int]:
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list):
        return prompt
    text = prompt.get("prompt_string")
    if not isinstance(text, str) or prompt.get("multimodal_data"):
        raise InvalidRequest(
            "prompt must have a prompt_string, and no multimodal_data: this model takes text only", param="prompt"
        )
    return [text]


class InfillRequest(SamplingBody, kw_only=True):
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
    """`/apply-template`: what goes into the prompt of `/v1/chat/completions`."""

    model: str | None = None
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
