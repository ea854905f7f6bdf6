"""Each field of transformers' GenerationConfig is honoured, without effect on the answer, or refused by its name."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)

from models.tiny import write_tokenizer
from spolia.engine import LLM, BeamParams, ContrastiveParams, SamplingParams
from spolia.errors import InvalidRequest
from spolia.generation import from_generation_config
from spolia.generation.generation_config import BEAM_FIELDS, NO_EFFECT, OTHER_FIELDS, REFUSED, RENAMED, SAME

PROMPT = [5, 6, 7, 5, 6]


def test_every_field_that_transformers_has_is_in_one_table():
    tables = [SAME, RENAMED, BEAM_FIELDS, OTHER_FIELDS, NO_EFFECT, REFUSED]
    named = [name for table in tables for name in table]
    assert len(named) == len(set(named))
    assert set(GenerationConfig().to_dict()) <= set(named)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=258,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.3,
        eos_token_id=257,
        max_position_embeddings=256,
    )
    path = tmp_path_factory.mktemp("tiny")
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(path)
    write_tokenizer(path)
    with LLM(path, kv_dtype="f32", max_batch_tokens=32) as llm:
        yield model, llm


def answer(llm, params):
    if isinstance(params, BeamParams):
        return [list(beam.token_ids) for beam in llm.beam_search(PROMPT, params)]
    if isinstance(params, ContrastiveParams):
        return [list(llm.contrastive_search(PROMPT, params).token_ids)]
    return [list(llm.generate(PROMPT, params).token_ids)]


CONFIGS = [
    {"max_new_tokens": 8},
    {"max_length": 12},
    {"max_new_tokens": 9, "temperature": 0.3, "top_k": 3, "do_sample": False},  # which does not draw
    {"max_new_tokens": 9, "repetition_penalty": 1.4, "no_repeat_ngram_size": 2, "encoder_repetition_penalty": 1.2},
    {"max_new_tokens": 9, "bad_words_ids": [[5], [6, 7]], "suppress_tokens": [9, 40], "sequence_bias": [[[30], 4.0]]},
    {"max_new_tokens": 9, "min_new_tokens": 4, "eos_token_id": list(range(0, 257, 3))},
    {"max_new_tokens": 9, "min_length": 10, "forced_eos_token_id": 7, "forced_bos_token_id": None},
    {"max_new_tokens": 9, "guidance_scale": 1.7},
    {"max_new_tokens": 7, "num_beams": 3, "length_penalty": 0.4, "early_stopping": True, "num_return_sequences": 2},
    {"max_new_tokens": 7, "num_beams": 2, "no_repeat_ngram_size": 2, "early_stopping": "never"},
    {"max_new_tokens": 9, "do_sample": True, "top_k": 1},
    {"max_new_tokens": 16, "eos_token_id": [256, 257], "watermarking_config": WatermarkingConfig(bias=6.0)},
    {
        "max_new_tokens": 16,
        "eos_token_id": [256, 257],
        "watermarking_config": WatermarkingConfig(seeding_scheme="selfhash", context_width=3),
    },
    {"max_new_tokens": 9, "watermarking_config": SynthIDTextWatermarkingConfig(keys=[1, 2, 3], ngram_len=3)},
]


@pytest.mark.parametrize("fields", CONFIGS, ids=str)
def test_a_config_gives_the_answer_that_transformers_gives(tiny, fields):
    model, llm = tiny
    config = GenerationConfig(**{"eos_token_id": 257, "pad_token_id": 0, **fields})
    with torch.no_grad():
        expected = model.generate(torch.tensor([PROMPT]), generation_config=config)
    ours = answer(llm, from_generation_config(config, num_prompt_tokens=len(PROMPT)))
    ends = {ids[-1] for ids in ours}
    assert [[*PROMPT, *ids] for ids in ours] == [
        row[: len(PROMPT) + len(ids)].tolist() for row, ids in zip(expected, ours, strict=True)
    ]
    for row, ids in zip(expected, ours, strict=True):  # and nothing but padding after it
        assert set(row[len(PROMPT) + len(ids) :].tolist()) <= {0}, ends


def test_what_draws_has_transformers_defaults_and_searches_are_found():
    assert from_generation_config({}) == SamplingParams(max_tokens=20, temperature=0.0)
    drawn = from_generation_config({"do_sample": True, "max_new_tokens": 4, "top_p": 0.9})
    assert drawn == SamplingParams(max_tokens=4, top_k=50, top_p=0.9)
    beams = from_generation_config(
        {"num_beams": 4, "max_new_tokens": 4, "force_words_ids": [[5, 6], [[7], [8, 9]]], "num_beam_groups": 1}
    )
    assert beams.force_words_ids == (((5, 6),), ((7,), (8, 9)))
    contrastive = from_generation_config({"penalty_alpha": 0.6, "top_k": 4, "max_new_tokens": 4})
    assert (contrastive.top_k, contrastive.penalty_alpha) == (4, 0.6)


@pytest.mark.parametrize(
    ("fields", "param"),
    [({name: 1}, name) for name in REFUSED]
    + [
        ({"max_length": 30, "max_new_tokens": None}, "max_length"),
        ({"num_return_sequences": 2}, "num_return_sequences"),
        ({"magic": 1}, "magic"),
        ({"repetition_penalty": -1.0}, "repetition_penalty"),
    ],
    ids=str,
)
def test_what_cannot_be_honoured_is_refused_by_name(fields, param):
    with pytest.raises(InvalidRequest) as caught:
        from_generation_config({"max_new_tokens": 4, **fields})
    assert caught.value.param == param
