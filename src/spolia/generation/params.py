"""What a client may ask of generation, checked once, at birth."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from spolia.errors import InvalidRequest
from spolia.generation.checks import (
    MAX_INT,
    as_tuple,
    bias_pairs,
    check_bool,
    check_integer,
    check_number,
    strings,
    token_ids,
)
from spolia.generation.structured import StructuredOutput

__all__ = ["FILTER_NAMES", "MAX_LOGPROBS", "SamplingParams"]

MAX_LOGPROBS = 20
"""Most alternatives that `logprobs` reports, as in OpenAI's API."""

FILTER_NAMES = (
    *("temperature", "top_n_sigma", "top_h", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"),
    *("xtc", "mirostat"),
)
"""Filters in the order in which they apply; `filter_order` changes it."""

_MIN_TEMPERATURE = 1e-5  # below it, dividing float32 logits would overflow, and the best token has all the weight
_MAX_BIAS = 1e4
_MAX_LIST = 4_096  # entries of a list of sequences: each is compared at each step
_MAX_BREAKERS = 256

# (lowest, highest) of the fields that are plain numbers.
_INTEGERS = {
    "min_tokens": (0, MAX_INT),
    "min_length": (0, MAX_INT),
    "top_k": (-1, MAX_INT),
    "repeat_last_n": (-1, MAX_INT),
    "no_repeat_ngram_size": (0, MAX_INT),
    "encoder_no_repeat_ngram_size": (0, MAX_INT),
    "dry_allowed_length": (0, MAX_INT),
    "dry_penalty_last_n": (-1, MAX_INT),
}
_NUMBERS = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-100.0, 100.0),
    "frequency_penalty": (-100.0, 100.0),
    "typical_p": (0.0, 1.0),
    "epsilon_cutoff": (0.0, 1.0),
    "eta_cutoff": (0.0, 1.0),
    "top_h": (0.0, 1.0),
    "top_n_sigma": (-1.0, 1e6),
    "xtc_probability": (0.0, 1.0),
    "xtc_threshold": (0.0, 1.0),
    "dynatemp_range": (0.0, 100.0),
    "dynatemp_exponent": (0.0, 100.0),
    "mirostat_eta": (0.0, 100.0),
    "dry_multiplier": (0.0, 1e4),
    "guidance_scale": (-100.0, 100.0),
}
_LEAST_POSITIVE = 1e-3  # logits that are divided by less may leave the range of numbers
_POSITIVE = {
    "repetition_penalty": 100.0,
    "encoder_repetition_penalty": 100.0,
    "mirostat_tau": 100.0,
    "dry_base": 100.0,
}
_OPTIONAL_INTEGERS = {
    "max_tokens": (1, MAX_INT),
    "seed": (-(2**63), 2**64 - 1),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
    "forced_bos_token_id": (0, MAX_INT),
    "explain_candidates": (1, MAX_LOGPROBS),
    "truncate_prompt_tokens": (1, MAX_INT),
    "thinking_budget": (0, MAX_INT),
}
_BOOLS = (
    *("ignore_eos", "include_stop_str_in_output", "remove_invalid_values", "renormalize_logits", "token_healing"),
    *("skip_special_tokens", "exact_kv", "speculation"),
)
_TRUNCATIONS = ("none", "head", "middle")


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SamplingParams:
    """How to turn logits into tokens, and when to stop.

    What applies, applies in this order: biases, penalties, bans, own processors, the form, and then, unless the
    temperature is 0, the filters: temperature, `top_n_sigma`, `top_h`, `top_k`, `top_p`, `min_p`, `typical_p`,
    `epsilon_cutoff`, `eta_cutoff`, XTC. One seed, prompt and set of parameters gives one answer, in any batch.

    Attributes:
        max_tokens: most tokens to generate; None: as many as the context has room for.
        min_tokens: until this many are generated, no end-of-text token, stop id or stop string ends the answer.
        temperature: 0 (or less than 1e-5) takes the most likely token, the lowest id where several are.
        top_k: only the k most likely tokens, ties included; 0 or -1: all; 1: as temperature 0.
        top_p: only the most likely tokens that together reach this probability; 1: all.
        min_p: only tokens at least this likely relative to the most likely one; 0: all.
        seed: None draws one, which the answer reports.
        stop: strings that end the answer, which is cut before them. A single string is accepted.
        stop_token_ids: ids that end the answer.
        ignore_eos: generate past the model's own end-of-text tokens.
        logprobs: report each token's log-probability and this many most likely alternatives (0 to 20). They are those
            of the model's distribution, before temperature and filters. None: do not.
        explain_candidates: tell for each token this many of the likeliest candidates before and after each processor
            and filter. Changes no answer.
        prompt_logprobs: the same for the prompt's tokens, each after those before it. None: do not.
        stop_regex: a regular expression (Rust's, no look-around); the answer ends after the first place that matches.
        stopping_criteria: Python only: functions of the ids so far, prompt included, as an int32 array, that are true
            when the answer is to end; or a `StoppingCriteria` of transformers.
        max_time: seconds after submission at which the answer ends, with finish reason "length".
        truncate: what to do with a prompt that is too long: "none" refuses it, "head" drops its beginning, "middle" its
            middle.
        context_shift: {"sinks": n}: an answer that fills the context goes on: all but the prompt's first n tokens (4
            unless told) and the later half of the rest is dropped, and what is left is read again, at its new place.
            `max_tokens` may then exceed the context. None: an answer ends where the context does.
        truncate_prompt_tokens: keep this many of the prompt's last tokens.
        token_healing: take the prompt's last token back, and let the model write its text anew.
        thinking_budget: most tokens between `reasoning_tags`; then, where no character is cut, the closing tag is
            forced.
        include_stop_str_in_output: keep the stop string, or the stop id's text, at the end of the text.
        speculation: let tokens be guessed ahead, if the engine does; changes no answer.
        prediction: text, or token ids, that much of the answer will be like: it is guessed from. Changes no answer.
        skip_special_tokens: leave special tokens, such as marks of tool calls in some models, out of the text.
        exact_kv: use no KV that was kept in fewer bits, where the engine does that (`kv_offload_dtype`); refused
            where it has no other (`kv_dtype` int8).

        repetition_penalty: tokens of prompt and answer have their logits divided by it (multiplied if negative).
        presence_penalty: subtracted from the logit of each token that the answer has.
        frequency_penalty: subtracted for each time that the answer has the token.
        repeat_last_n: these penalties look at the last n tokens, prompt included; -1: at all (the latter two: at all of
            the answer); 0: at none.
        encoder_repetition_penalty: above 1, tokens of the prompt become likelier.
        no_repeat_ngram_size: no sequence of this many tokens occurs twice; 0: it may.
        encoder_no_repeat_ngram_size: no sequence of this many tokens of the prompt occurs in the answer.
        dry_multiplier: a token that would prolong a repetition of n tokens loses
            `dry_multiplier * dry_base ** (n - dry_allowed_length)`; 0: it does not.
        dry_penalty_last_n: DRY looks at the last n tokens; -1: at all; 0: at none.
        dry_sequence_breakers: texts that a repetition does not reach across.

        logit_bias: token id to what is added to its logit, -inf included; a mapping, or pairs of id and bias.
        sequence_bias: (ids, bias): what is added to the token that would complete these ids.
        bad_words: texts that do not come about, with a space before them or without.
        bad_words_ids: the same, as token ids.
        allowed_token_ids: only these are drawn.
        suppress_tokens: these are not.
        begin_suppress_tokens: these do not begin the answer.
        prefix_allowed_tokens_fn: of 0 and the ids so far (an int32 array); returns the ids that may follow.
        min_length: no end-of-text token before prompt and answer have this many tokens.
        forced_bos_token_id: the answer's first token.
        forced_eos_token_id: the token, or one of those, that ends an answer which reaches `max_tokens`.
        exponential_decay_length_penalty: (n, factor): after n tokens the logit of ending grows by powers of `factor`.

        typical_p: only the tokens whose surprise is closest to the expected, up to this probability; 0 or 1: all.
        epsilon_cutoff: only tokens of this probability; 0: all.
        eta_cutoff: the same, less strictly where the model is unsure.
        top_h: only the likeliest tokens with this share of the entropy; 0: all.
        top_n_sigma: only tokens whose logit is within so many standard deviations of the best; 0 or -1: all.
        xtc_probability: how often, of all tokens of at least `xtc_threshold`, only the least likely stays.
        dynatemp_range: the temperature goes this far up and down with the model's entropy, to the power of
            `dynatemp_exponent`.
        mirostat: 2 holds the surprise at `mirostat_tau` bits a token, learning at the rate `mirostat_eta`, in place of
            all other filters but the temperature; 0: does not.
        filter_order: names of filters in another order; those that are not named stay where they are.
        guidance_scale: above 1, the answer is drawn towards what the prompt says and away from what the model would say
            after `negative_prompt` alone: a second sequence runs beside it. 1: off.
        negative_prompt: text or token ids; None: the prompt's last token.
        dola_layers: contrast the last layer with earlier ones: "low", "high", or a list of them, from 0; see `Dola`.
            None: do not.
        structured_outputs: the form that the answer must have, a `StructuredOutput` or a mapping with one of json (a
            schema), json_object, regex, choice, grammar; see there.
        watermark: settings of a `Watermark`: ratio, bias, key, context_width; {} for the usual ones.
        watermarking_config: settings of a `GreenList`, which is transformers' watermark and follows all filters:
            greenlist_ratio, bias, hashing_key, seeding_scheme, context_width; {} for the usual ones.
        synthid: settings of a `SynthId`, another watermark, which follows all filters: keys, and ngram_len,
            context_history_size, sampling_table_size, sampling_table_seed, skip_first_ngram_calls.
        remove_invalid_values: logits that are no numbers do not fail the request.
        renormalize_logits: make what is left log-probabilities; of use to processors of one's own that follow.
        logits_processors: one's own: a `Processor`, a class or function that makes one, its import path
            "module:Name", the name that the engine knows it by, `{"name": ..., "args": {...}}`, or a `LogitsProcessor`
            of transformers.

    Raises:
        InvalidRequest: naming the parameter, the value and what is allowed.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    explain_candidates: int | None = None
    prompt_logprobs: int | None = None
    stop_regex: str | None = None
    stopping_criteria: tuple[Any, ...] = ()
    max_time: float | None = None
    truncate: str = "none"
    context_shift: Mapping[str, int] | None = None
    truncate_prompt_tokens: int | None = None
    token_healing: bool = False
    thinking_budget: int | None = None
    reasoning_tags: tuple[str, str] = ("<think>", "</think>")
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    exact_kv: bool = False
    speculation: bool = True
    prediction: str | tuple[int, ...] | None = None

    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repeat_last_n: int = -1
    encoder_repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    encoder_no_repeat_ngram_size: int = 0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")

    logit_bias: tuple[tuple[int, float], ...] = ()
    sequence_bias: tuple[tuple[tuple[int, ...], float], ...] = ()
    bad_words: tuple[str, ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    prefix_allowed_tokens_fn: Callable[..., Sequence[int]] | None = None
    min_length: int = 0
    forced_bos_token_id: int | None = None
    forced_eos_token_id: int | tuple[int, ...] | None = None
    exponential_decay_length_penalty: tuple[int, float] | None = None

    typical_p: float = 1.0
    epsilon_cutoff: float = 0.0
    eta_cutoff: float = 0.0
    top_h: float = 0.0
    top_n_sigma: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    filter_order: tuple[str, ...] = ()
    guidance_scale: float = 1.0
    negative_prompt: str | tuple[int, ...] | None = None
    dola_layers: str | tuple[int, ...] | None = None
    structured_outputs: StructuredOutput | None = None
    watermark: Mapping[str, Any] | None = None
    watermarking_config: Mapping[str, Any] | None = None
    synthid: Mapping[str, Any] | None = None
    remove_invalid_values: bool = False
    renormalize_logits: bool = False
    logits_processors: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        for name, (lowest, highest) in _OPTIONAL_INTEGERS.items():
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), lowest, highest)
        for name, (lowest, highest) in _INTEGERS.items():
            check_integer(name, getattr(self, name), lowest, highest)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens is {self.min_tokens}, more than max_tokens ({self.max_tokens}); it may be equal at most",
                param="min_tokens",
            )
        for name, (low, high) in _NUMBERS.items():
            check_number(name, getattr(self, name), low, high)
        for name, high in _POSITIVE.items():
            check_number(name, getattr(self, name), _LEAST_POSITIVE, high)
        for name in _BOOLS:
            check_bool(name, getattr(self, name))
        if self.mirostat not in (0, 2) or isinstance(self.mirostat, bool):
            raise InvalidRequest(f"mirostat is {self.mirostat!r}; it must be 0 (off) or 2", param="mirostat")
        if self.max_time is not None:
            check_number("max_time", self.max_time, 0.0, 1e9, above=True)
        if self.stop_regex is not None and (not isinstance(self.stop_regex, str) or not self.stop_regex):
            raise InvalidRequest(
                f"stop_regex is {self.stop_regex!r}; it must be text, and not empty", param="stop_regex"
            )
        if self.truncate not in _TRUNCATIONS:
            raise InvalidRequest(
                f"truncate is {self.truncate!r}; it must be one of {', '.join(_TRUNCATIONS)}", param="truncate"
            )
        if self.context_shift is not None:
            self._set("context_shift", _context_shift(self.context_shift))
            if self.max_tokens is None:
                raise InvalidRequest(
                    "context_shift needs max_tokens, or nothing would end the answer", param="context_shift"
                )
            if self.guidance_scale != 1:
                raise InvalidRequest("context_shift does not go with guidance_scale", param="context_shift")
        self._set("stopping_criteria", as_tuple("stopping_criteria", self.stopping_criteria))
        if not all(map(callable, self.stopping_criteria)):
            raise InvalidRequest(
                f"stopping_criteria is {self.stopping_criteria!r}; it must hold functions", param="stopping_criteria"
            )
        tags = strings("reasoning_tags", self.reasoning_tags, "a tag")
        if len(tags) != 2:
            raise InvalidRequest(
                f"reasoning_tags is {tags!r}; it must be an opening and a closing tag", param="reasoning_tags"
            )
        self._set("reasoning_tags", tags)
        if self.prediction is not None and not isinstance(self.prediction, str):
            self._set("prediction", token_ids("prediction", self.prediction))
        self._set("stop", strings("stop", self.stop, "a stop string"))
        self._set("stop_token_ids", token_ids("stop_token_ids", self.stop_token_ids))
        self._check_guidance()
        self._check_dola()
        self._check_bans()
        self._check_lists()

    def __repr__(self) -> str:
        """Only what differs from the defaults: there are many parameters."""
        given = [f"{f.name}={value!r}" for f in fields(self) if (value := getattr(self, f.name)) != f.default]
        return f"SamplingParams({', '.join(given)})"

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_guidance(self) -> None:
        if self.negative_prompt is None:
            return
        if self.guidance_scale == 1:
            raise InvalidRequest(
                "negative_prompt does nothing while guidance_scale is 1; set guidance_scale, 1.5 say, or leave it out",
                param="negative_prompt",
            )
        if isinstance(self.negative_prompt, str):
            strings("negative_prompt", self.negative_prompt, "a prompt")
        else:
            self._set("negative_prompt", token_ids("negative_prompt", self.negative_prompt, required=True))

    def _check_dola(self) -> None:
        layers = self.dola_layers
        if layers is None:
            return
        if isinstance(layers, str):
            if layers not in ("low", "high"):
                raise InvalidRequest(
                    f"dola_layers is {layers!r}; it must be 'low', 'high' or a list of layers", param="dola_layers"
                )
        else:
            self._set("dola_layers", tuple(dict.fromkeys(token_ids("dola_layers", layers, required=True))))
        if self.guidance_scale != 1:
            raise InvalidRequest(
                "dola_layers does not go with guidance_scale: each has its own second opinion; leave one out",
                param="dola_layers",
            )

    def _check_bans(self) -> None:
        self._set("bad_words", strings("bad_words", self.bad_words, "a bad word"))
        self._set("suppress_tokens", token_ids("suppress_tokens", self.suppress_tokens))
        self._set("begin_suppress_tokens", token_ids("begin_suppress_tokens", self.begin_suppress_tokens))
        if self.allowed_token_ids is not None:
            self._set("allowed_token_ids", token_ids("allowed_token_ids", self.allowed_token_ids, required=True))
        self._set("logit_bias", bias_pairs("logit_bias", self.logit_bias, _MAX_BIAS))
        sequences = as_tuple("bad_words_ids", self.bad_words_ids)
        self._set("bad_words_ids", tuple(token_ids("bad_words_ids", ids, required=True) for ids in sequences))
        pairs = self.sequence_bias.items() if isinstance(self.sequence_bias, Mapping) else self.sequence_bias
        self._set("sequence_bias", tuple(_sequence_bias(pair) for pair in as_tuple("sequence_bias", pairs)))
        for name in ("sequence_bias", "bad_words", "bad_words_ids"):
            if len(getattr(self, name)) > _MAX_LIST:
                raise InvalidRequest(
                    f"{name} has {len(getattr(self, name))} entries; allowed are {_MAX_LIST}", param=name
                )
        if self.prefix_allowed_tokens_fn is not None and not callable(self.prefix_allowed_tokens_fn):
            raise InvalidRequest(
                f"prefix_allowed_tokens_fn is {self.prefix_allowed_tokens_fn!r}; it must be a function",
                param="prefix_allowed_tokens_fn",
            )

    def _check_lists(self) -> None:
        breakers = strings("dry_sequence_breakers", self.dry_sequence_breakers, "a breaker")
        if len(breakers) > _MAX_BREAKERS:
            raise InvalidRequest(
                f"dry_sequence_breakers has {len(breakers)} entries; allowed are {_MAX_BREAKERS}",
                param="dry_sequence_breakers",
            )
        self._set("dry_sequence_breakers", breakers)
        if self.forced_eos_token_id is not None:
            one_or_many = self.forced_eos_token_id
            ids = (one_or_many,) if isinstance(one_or_many, int | float | str) else one_or_many
            self._set("forced_eos_token_id", token_ids("forced_eos_token_id", ids, required=True))
        if self.exponential_decay_length_penalty is not None:
            name = "exponential_decay_length_penalty"
            pair = as_tuple(name, self.exponential_decay_length_penalty)
            if len(pair) != 2:
                raise InvalidRequest(f"{name} is {pair!r}; it must be (number of tokens, factor)", param=name)
            check_integer(name, pair[0], 0, MAX_INT)
            check_number(name, pair[1], 1.0, 100.0)
            self._set(name, pair)
        self._set("filter_order", strings("filter_order", self.filter_order, "a filter's name"))
        for filter_name in self.filter_order:
            if filter_name not in FILTER_NAMES or self.filter_order.count(filter_name) > 1:
                raise InvalidRequest(
                    f"filter_order holds {filter_name!r}; it may name each of {', '.join(FILTER_NAMES)} once",
                    param="filter_order",
                )
        if self.structured_outputs is not None:
            self._set("structured_outputs", StructuredOutput.of(self.structured_outputs))
        if self.watermark is not None:
            self._set("watermark", _watermark(self.watermark))
        if self.watermarking_config is not None:
            self._set("watermarking_config", _green_list(self.watermarking_config))
        if self.synthid is not None:
            self._set("synthid", _synthid(self.synthid))
        self._set("logits_processors", as_tuple("logits_processors", self.logits_processors))

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken, so that neither filters nor the seed matter."""
        return (self.temperature < _MIN_TEMPERATURE and not self.dynatemp_range) or self.top_k == 1


def _sequence_bias(pair: Any) -> tuple[tuple[int, ...], float]:
    entry = as_tuple("sequence_bias", pair)
    if len(entry) != 2:
        raise InvalidRequest(f"sequence_bias holds {pair!r}; it must be (token ids, bias)", param="sequence_bias")
    ids, bias = entry
    if bias != -math.inf:
        check_number("sequence_bias", bias, -_MAX_BIAS, _MAX_BIAS)
    return token_ids("sequence_bias", ids, required=True), float(bias)


def _context_shift(settings: Any) -> dict[str, int]:
    if not isinstance(settings, Mapping) or not set(settings) <= {"sinks"}:
        raise InvalidRequest(f'context_shift is {settings!r}; it must be {{"sinks": number}}', param="context_shift")
    num_sinks = settings.get("sinks", 4)
    check_integer("context_shift", num_sinks, 0, MAX_INT)
    return {"sinks": num_sinks}


def _watermark(settings: Any) -> dict[str, Any]:
    known = ("bias", "context_width", "key", "ratio")
    if not isinstance(settings, Mapping) or not set(settings) <= set(known):
        raise InvalidRequest(
            f"watermark is {settings!r}; it must be a mapping with any of {', '.join(known)}", param="watermark"
        )
    if "ratio" in settings:
        check_number("watermark.ratio", settings["ratio"], 0.001, 0.999)
    if "bias" in settings:
        check_number("watermark.bias", settings["bias"], -100.0, 100.0)
    if "key" in settings:
        check_integer("watermark.key", settings["key"], 0, 2**64 - 1)
    if "context_width" in settings:
        check_integer("watermark.context_width", settings["context_width"], 1, 64)
    return dict(settings)


def _green_list(settings: Any) -> dict[str, Any]:
    name, known = "watermarking_config", ("bias", "context_width", "greenlist_ratio", "hashing_key", "seeding_scheme")
    if not isinstance(settings, Mapping) or not set(settings) <= set(known):
        raise InvalidRequest(
            f"{name} is {settings!r}; it must be a mapping with any of {', '.join(known)} (SynthID's are those of "
            "synthid)",
            param=name,
        )
    if "greenlist_ratio" in settings:
        check_number(f"{name}.greenlist_ratio", settings["greenlist_ratio"], 0.001, 0.999)
    if "bias" in settings:
        check_number(f"{name}.bias", settings["bias"], -100.0, 100.0)
    if "hashing_key" in settings:
        check_integer(f"{name}.hashing_key", settings["hashing_key"], 0, 2**63 - 1)
    if "context_width" in settings:
        check_integer(f"{name}.context_width", settings["context_width"], 1, 64)
    if (scheme := settings.get("seeding_scheme", "lefthash")) not in ("lefthash", "selfhash"):
        raise InvalidRequest(f"{name}.seeding_scheme is {scheme!r}; it must be lefthash or selfhash", param=name)
    return dict(settings)


_SYNTHID = {
    "ngram_len": (2, 64),
    "context_history_size": (1, 2**16),
    "sampling_table_size": (2, 2**24),
    "sampling_table_seed": (0, 2**32 - 1),
}
_MAX_ROUNDS = 64


def _synthid(settings: Any) -> dict[str, Any]:
    known = ("keys", *_SYNTHID, "skip_first_ngram_calls")
    if not isinstance(settings, Mapping) or not set(settings) <= set(known) or "keys" not in settings:
        raise InvalidRequest(
            f"synthid is {settings!r}; it must be a mapping with keys, and any of {', '.join(known[1:])}",
            param="synthid",
        )
    keys = as_tuple("synthid", settings["keys"])
    if not 1 <= len(keys) <= _MAX_ROUNDS:
        raise InvalidRequest(f"synthid has {len(keys)} keys; allowed are 1 to {_MAX_ROUNDS}", param="synthid")
    for key in keys:
        check_integer("synthid.keys", key, -(2**63), 2**63 - 1)
    for name, (low, high) in _SYNTHID.items():
        if name in settings:
            check_integer(f"synthid.{name}", settings[name], low, high)
    check_bool("synthid.skip_first_ngram_calls", settings.get("skip_first_ngram_calls", False))
    return {**settings, "keys": keys}
