"""A `GenerationConfig` of transformers as parameters of ours: the same answers, or a refusal that names the field.

Each field of transformers' is in one of the tables below. Nothing is imported from there: a config is a mapping, or has
`to_dict`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spolia.errors import InvalidRequest
from spolia.generation.beams import BeamParams
from spolia.generation.contrastive import ContrastiveParams
from spolia.generation.params import SamplingParams

__all__ = ["BEAM_FIELDS", "NO_EFFECT", "OTHER_FIELDS", "REFUSED", "RENAMED", "SAME", "from_generation_config"]

SAME = (
    *("min_length", "max_time", "repetition_penalty", "encoder_repetition_penalty", "no_repeat_ngram_size"),
    *("encoder_no_repeat_ngram_size", "bad_words_ids", "renormalize_logits", "forced_bos_token_id"),
    *("forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens"),
    *("begin_suppress_tokens", "sequence_bias", "token_healing", "guidance_scale", "dola_layers"),
)
DRAWING = ("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
RENAMED = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "stop_strings": "stop"}
BEAM_FIELDS = ("length_penalty", "early_stopping", "num_beam_groups", "diversity_penalty")
OTHER_FIELDS = (
    *DRAWING,
    *("max_length", "do_sample", "num_beams", "num_return_sequences", "force_words_ids", "penalty_alpha"),
    *("eos_token_id", "watermarking_config"),
)
NO_EFFECT = (
    *("use_mtp", "use_cache", "cache_implementation", "cache_config", "max_cache_len", "return_dict_in_generate"),
    *("pad_token_id", "bos_token_id", "is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule"),
    *("assistant_confidence_threshold", "prompt_lookup_num_tokens", "max_matching_ngram_size", "assistant_early_exit"),
    *("assistant_lookbehind", "target_lookbehind", "speculation_type", "compile_config", "disable_compile"),
    *("continuous_batching_config", "low_memory", "prefill_chunk_size", "_from_model_config", "transformers_version"),
    "generation_kwargs",
)
"""How the answer is computed, and not which it is: this engine decides that itself."""
REFUSED = {
    "constraints": "objects of transformers' are not taken; give force_words_ids",
    "decoder_start_token_id": "models with an encoder do not run here; leave it out",
    "assistant_ensemble_weight": "drafts of an assistant never change an answer here; leave it out",
    "output_attentions": "attention is not kept; leave it out",
    "output_hidden_states": "hidden states are not kept; use LLM.embed for the last one",
    "output_scores": "use logprobs or explain_candidates",
    "output_logits": "use logprobs or explain_candidates",
}
_TOP_K, _MAX_TOKENS = 50, 20  # transformers' own, where a config does not say


def from_generation_config(
    config: Any, *, num_prompt_tokens: int | None = None
) -> SamplingParams | BeamParams | ContrastiveParams:
    """What `generate` of transformers would do with a config: for `LLM.generate`, `beam_search`, `contrastive_search`.

    Args:
        config: a `GenerationConfig`, or a mapping such as the content of generation_config.json.
        num_prompt_tokens: of the prompt, which `max_length` counts; needed where that decides.

    Raises:
        InvalidRequest: a field that this engine cannot honour, or that nobody knows; names it.
    """
    given: dict[str, Any] = dict(config if isinstance(config, Mapping) else config.to_dict())
    given = {name: value for name, value in given.items() if value is not None and name not in NO_EFFECT}
    known = {*SAME, *RENAMED, *BEAM_FIELDS, *OTHER_FIELDS}
    for name, value in given.items():
        if name in REFUSED and value is not False:
            raise InvalidRequest(f"{name} is {value!r}: {REFUSED[name]}", param=name)
        if name not in known and name not in REFUSED:
            raise InvalidRequest(f"{name} is {value!r}: no field of GenerationConfig that is known here", param=name)
    params = SamplingParams(**_sampling(given, num_prompt_tokens))
    if (num_beams := given.get("num_beams", 1)) > 1:
        return _beams(given, num_beams, params)
    if given.get("num_return_sequences", 1) != 1:
        raise InvalidRequest(
            f"num_return_sequences is {given['num_return_sequences']}: ask for each answer, with a seed of its own",
            param="num_return_sequences",
        )
    top_k = given.get("top_k", _TOP_K)
    if given.get("penalty_alpha", 0) > 0 and top_k > 1 and not given.get("do_sample"):
        return ContrastiveParams(
            top_k=top_k,
            penalty_alpha=given["penalty_alpha"],
            max_tokens=_max_tokens(params),
            stop_token_ids=params.stop_token_ids,
            processing=params,
        )
    return params


def _sampling(given: Mapping[str, Any], num_prompt_tokens: int | None) -> dict[str, Any]:
    made = {name: given[name] for name in SAME if name in given}
    made |= {ours: given[theirs] for theirs, ours in RENAMED.items() if theirs in given}
    if "stop" in made:
        made["include_stop_str_in_output"] = True
    if "max_tokens" not in made:
        made["max_tokens"] = _max_new_tokens(given, num_prompt_tokens)
    if given.get("do_sample"):
        made |= {"top_k": _TOP_K} | {name: given[name] for name in DRAWING if name in given}
    elif given.get("num_beams", 1) == 1:
        made["temperature"] = 0.0
    ids = given.get("eos_token_id", ())
    made["stop_token_ids"] = (ids,) if isinstance(ids, int) else tuple(ids)
    mark = given.get("watermarking_config")
    if mark is not None:
        settings = dict(mark if isinstance(mark, Mapping) else mark.to_dict())
        settings.pop("debug_mode", None)
        made["synthid" if "keys" in settings else "watermarking_config"] = settings
    return made


def _max_new_tokens(given: Mapping[str, Any], num_prompt_tokens: int | None) -> int:
    if "max_length" not in given:
        return _MAX_TOKENS
    length = given["max_length"]
    if num_prompt_tokens is None:
        raise InvalidRequest(
            f"max_length is {length}, which counts the prompt: give num_prompt_tokens, or max_new_tokens",
            param="max_length",
        )
    if length <= num_prompt_tokens:
        raise InvalidRequest(
            f"max_length is {length}, and the prompt has {num_prompt_tokens} tokens; give max_new_tokens",
            param="max_length",
        )
    most: int = length - num_prompt_tokens
    return most


def _max_tokens(params: SamplingParams) -> int:
    return params.max_tokens or 1


def _beams(given: Mapping[str, Any], num_beams: int, params: SamplingParams) -> BeamParams:
    words = [
        (tuple(word),) if isinstance(word[0], int) else tuple(map(tuple, word))
        for word in given.get("force_words_ids", ())
    ]
    draws = bool(given.get("do_sample"))
    return BeamParams(
        num_beams=num_beams,
        max_tokens=_max_tokens(params),
        num_return_sequences=given.get("num_return_sequences", 1),
        stop_token_ids=params.stop_token_ids,
        sampling=params if draws else None,
        processing=None if draws else params,
        force_words_ids=tuple(words),
        **{name: given[name] for name in BEAM_FIELDS if name in given},
    )
