"""The fields of a request body that become `SamplingParams`, under the names that clients know them by.

OpenAI's, vLLM's, transformers' and llama.cpp's fields have one name here wherever they agree. Where llama.cpp spells
one its own way, `_ALIASES` has its spelling. Values are checked by `SamplingParams`; types here.
"""

from __future__ import annotations

from typing import Any

import msgspec

from spolia.engine import StructuredOutput
from spolia.errors import InvalidRequest

__all__ = ["SamplingFields", "sampler_names"]

# llama.cpp's spelling: ours.
_ALIASES = {
    "repeat_penalty": "repetition_penalty",
    "samplers": "filter_order",
    "min_new_tokens": "min_tokens",
    "typ_p": "typical_p",
    "thinking_token_budget": "thinking_budget",
}
# Names in `samplers` that are ours under another name, or no filter of ours: penalties and DRY always come first.
_FILTER_ALIASES = {"typ_p": "typical_p", "temp": "temperature"}
_NO_FILTERS = ("penalties", "dry")
_SAMPLER_LETTERS = {
    "e": "penalties",
    "d": "dry",
    "s": "top_n_sigma",
    "k": "top_k",
    "y": "typ_p",
    "p": "top_p",
    "m": "min_p",
    "x": "xtc",
    "t": "temperature",
}

# Fields that give the answer a form, with its kind; None where they name the kind themselves.
_FORMS = {
    "structured_outputs": None,
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "grammar": "grammar",
}

Ids = list[int]


class SamplingFields(msgspec.Struct, kw_only=True):
    """None means the default, so that an explicit null is one too."""

    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: Ids | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    exact_kv: bool | None = None

    explain_candidates: int | None = None
    prompt_logprobs: int | None = None
    stop_regex: str | None = None
    max_time: float | None = None
    truncate: str | None = None
    context_shift: dict[str, int] | None = None
    truncate_prompt_tokens: int | None = None
    token_healing: bool | None = None
    thinking_budget: int | None = None
    reasoning_tags: tuple[str, str] | None = None
    speculation: bool | None = None
    prediction: dict[str, Any] | str | None = None

    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repeat_last_n: int | None = None
    encoder_repetition_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    encoder_no_repeat_ngram_size: int | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: list[str] | None = None

    logit_bias: dict[str, float] | list[tuple[int, float | bool]] | None = None
    sequence_bias: list[tuple[Ids, float]] | None = None
    bad_words: str | list[str] | None = None
    bad_words_ids: list[Ids] | None = None
    allowed_token_ids: Ids | None = None
    suppress_tokens: Ids | None = None
    begin_suppress_tokens: Ids | None = None
    min_length: int | None = None
    forced_bos_token_id: int | None = None
    forced_eos_token_id: int | Ids | None = None
    exponential_decay_length_penalty: tuple[int, float] | None = None

    typical_p: float | None = None
    epsilon_cutoff: float | None = None
    eta_cutoff: float | None = None
    top_h: float | None = None
    top_n_sigma: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    dynatemp_range: float | None = None
    dynatemp_exponent: float | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    filter_order: list[str] | None = None
    guidance_scale: float | None = None
    negative_prompt: str | Ids | None = None
    dola_layers: str | Ids | None = None
    watermark: dict[str, Any] | None = None
    watermarking_config: dict[str, Any] | None = None
    synthid: dict[str, Any] | None = None
    remove_invalid_values: bool | None = None
    renormalize_logits: bool | None = None
    logits_processors: list[str | dict[str, Any]] | None = None

    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: dict[str, Any] | bool | None = None
    grammar: str | None = None

    repeat_penalty: float | None = None
    samplers: list[str] | str | None = None
    min_new_tokens: int | None = None
    typ_p: float | None = None
    thinking_token_budget: int | None = None

    def given(self) -> dict[str, Any]:
        """Arguments for `SamplingParams`: what the client sent.

        Raises:
            InvalidRequest: one parameter under two names with two values, or an import path.
        """
        others = (*_ALIASES, *_FORMS, "response_format")
        values = {name: getattr(self, name) for name in SamplingFields.__struct_fields__ if name not in others}
        for alias, name in _ALIASES.items():
            value = getattr(self, alias)
            if value is None:
                continue
            if alias == "samplers":
                value = _filter_order(value)
            if values[name] not in (None, value):
                raise InvalidRequest(
                    f"{alias} is {value!r} and {name} is {values[name]!r}: two names of one parameter; send one",
                    param=alias,
                )
            values[name] = value
        for entry in self.logits_processors or ():
            called = entry.get("name") if isinstance(entry, dict) else entry
            if isinstance(called, str) and ":" in called:
                raise InvalidRequest(
                    f"logits_processors names {called!r}; over HTTP only names that the server was started with are "
                    "known (spolia serve --processor NAME=MODULE:CLASS)",
                    param="logits_processors",
                )
        values["prediction"] = None if self.prediction is None else _prediction(self.prediction)
        form = self.form()
        values["structured_outputs"] = None if form is None else form[1]
        return {name: value for name, value in values.items() if value is not None}

    def form(self) -> tuple[str, StructuredOutput] | None:
        """The form that the answer must have, with the field that says so; None: any.

        Raises:
            InvalidRequest: two fields say so, or one of them is wrong.
        """
        fields = [name for name in _FORMS if getattr(self, name) not in (None, "")]
        if self.response_format is not None and (format_ := _response_format(self.response_format)) is not None:
            fields.append("response_format")
        if len(fields) > 1:
            raise InvalidRequest(
                f"{' and '.join(fields)} each give the answer a form; send one of them", param=fields[1]
            )
        if not fields:
            return None
        (field,) = fields
        kind = _FORMS.get(field)
        asked = format_ if field == "response_format" else getattr(self, field)
        try:
            return field, StructuredOutput.of({kind: asked} if kind else asked)
        except InvalidRequest as error:
            raise InvalidRequest(str(error).replace("structured_outputs", field, 1), param=field) from None


def _response_format(given: dict[str, Any]) -> dict[str, Any] | None:
    """OpenAI's `response_format`, and llama.cpp's, which has the schema beside the type; None for plain text."""
    match given:
        case {"type": "text"}:
            return None
        case {"type": "json_schema", "json_schema": {"schema": dict() | bool() as schema}}:
            return {"json": schema}
        case {"type": "json_object" | "json_schema", "schema": dict() | bool() as schema}:
            return {"json": schema}
        case {"type": "json_object"}:
            return {"json_object": True}
    raise InvalidRequest(
        f"response_format is {given!r:.100}; it must be "
        '{"type": "text"}, {"type": "json_object"}, or '
        '{"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}',
        param="response_format",
    )


def _prediction(given: dict[str, Any] | str) -> str:
    """OpenAI's `prediction`: text, or parts of it; here also the plain text."""
    content: Any = given
    if isinstance(given, dict):
        content = given.get("content", None) if given.get("type", "content") == "content" else None
    if isinstance(content, list):
        parts: list[Any] = [part.get("text") if isinstance(part, dict) else None for part in content]
        content = "".join(parts) if all(isinstance(part, str) for part in parts) else None
    if not isinstance(content, str):
        raise InvalidRequest(
            'prediction must be {"type": "content", "content": text}, where text may be a list of text parts',
            param="prediction",
        )
    return content


def sampler_names(samplers: list[str] | str) -> list[str]:
    """llama.cpp's names, from a list of them or from a letter each; a letter that it has not is left as it is."""
    return [_SAMPLER_LETTERS.get(name, name) for name in samplers] if isinstance(samplers, str) else samplers


def _filter_order(samplers: list[str] | str) -> list[str]:
    return [_FILTER_ALIASES.get(name, name) for name in sampler_names(samplers) if name not in _NO_FILTERS]
