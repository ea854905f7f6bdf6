"""Green lists are transformers', to the token: its detector finds what is marked here."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import WatermarkDetector, WatermarkingConfig, WatermarkLogitsProcessor

from engine.toy import VOCAB_SIZE as TOY_VOCAB_SIZE
from engine.toy import answer, toy_engine
from spolia.errors import InvalidRequest
from spolia.generation import SamplingParams
from spolia.generation.pipeline import build_pipeline
from spolia.generation.processors import green_list

from .test_processors import PROMPT, VOCAB_SIZE, filtered, vocabulary

SETTINGS = [
    {},
    {"greenlist_ratio": 0.9, "bias": -1.5, "hashing_key": 2**40 + 3, "context_width": 3},
    {"greenlist_ratio": 0.001},  # none of so few tokens
    {"seeding_scheme": "selfhash"},
    {"seeding_scheme": "selfhash", "greenlist_ratio": 0.6, "context_width": 4, "hashing_key": 15485863 * 7},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("greedy", [False, True])
def test_each_token_of_an_answer_is_marked_as_transformers_marks_it(settings, greedy):
    """After the filters, and not before there is a whole context."""
    rng = np.random.default_rng(0)
    reference = WatermarkLogitsProcessor(VOCAB_SIZE, "cpu", **settings)
    sampling = {"temperature": 0.0} if greedy else {"temperature": 0.5, "top_k": 60}
    pipeline = build_pipeline(SamplingParams(watermarking_config=settings, **sampling), vocabulary(), max_tokens=100)
    buffer = np.array(PROMPT + rng.integers(0, VOCAB_SIZE, 40).tolist(), np.int32)
    pipeline.follow(buffer, 1, seed=0)
    num_changed = 0
    for position in range(1, len(buffer)):
        row = (rng.standard_normal((1, VOCAB_SIZE)) * 3).astype(np.float32)
        given = row.copy()
        if not greedy:
            given[0] /= np.float32(0.5)
            given[0, np.argsort(-row[0])[60:]] = -np.inf
        expected = reference(torch.from_numpy(buffer[None, :position].astype(np.int64)), torch.from_numpy(given.copy()))
        changed = row.copy()
        pipeline.process(changed, position)
        if not greedy:
            changed = filtered(pipeline, changed)
        assert (changed[0] == expected[0].numpy()).all()
        num_changed += not np.array_equal(expected[0].numpy(), given[0])
    least = settings.get("context_width", 1)
    assert num_changed == (len(buffer) - least if settings.get("greenlist_ratio") != 0.001 else 0)


def test_the_table_of_a_key_is_made_with_the_pipeline_and_never_for_a_token():
    """It is of a million places: made between two steps it would hold up everybody's."""
    green_list._table.cache_clear()
    pipelines = []
    for key in range(6):  # more than are kept for all
        settings = {"seeding_scheme": "selfhash", "hashing_key": key}
        params = SamplingParams(watermarking_config=settings, temperature=0.0)
        pipelines.append(build_pipeline(params, vocabulary(), max_tokens=100))
        pipelines[-1].follow(np.array(PROMPT, np.int32), 1, seed=0)
    made = green_list._table.cache_info()
    assert made.misses == len(pipelines)
    for _ in range(2):
        for pipeline in pipelines:
            pipeline.process(np.zeros((1, VOCAB_SIZE), np.float32), len(PROMPT))
    assert green_list._table.cache_info() == made


class ToyConfig:
    """What the detector asks of a model's config."""

    bos_token_id = -1
    is_encoder_decoder = False
    vocab_size = TOY_VOCAB_SIZE


@pytest.mark.parametrize("scheme", ["lefthash", "selfhash"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_transformers_detector_finds_the_mark_in_an_answer_and_none_in_a_plain_one(scheme, temperature):
    config = WatermarkingConfig(bias=2.5, seeding_scheme=scheme, context_width=2)
    base = {"max_tokens": 120, "seed": 3, "temperature": temperature, "ignore_eos": True}
    detector = WatermarkDetector(ToyConfig(), "cpu", config)
    scores = []
    for mark in ({}, {"watermarking_config": config.to_dict()}, {"logits_processors": [processor_of(config)]}):
        output = answer(toy_engine(max_context=400), [1, 2, 3], SamplingParams(**base, **mark))
        scores.append(detector(torch.tensor([output.token_ids]), return_dict=True).z_score[0])
    plain, ours, theirs = scores
    assert abs(plain) < 3 < 6 < ours
    assert theirs == ours


def processor_of(config):
    return config.construct_processor(TOY_VOCAB_SIZE, "cpu")


@pytest.mark.parametrize(
    "settings",
    [
        *(7, {"ratio": 0.5}, {"keys": [1]}, {"greenlist_ratio": 1.0}, {"bias": "much"}, {"hashing_key": -1}),
        *({"seeding_scheme": "minhash"}, {"context_width": 0}),
    ],
    ids=str,
)
def test_impossible_settings_are_refused_by_name(settings):
    with pytest.raises(InvalidRequest, match="watermarking_config") as caught:
        SamplingParams(watermarking_config=settings)
    assert caught.value.param == "watermarking_config"
    if isinstance(settings, dict):
        (name,) = settings
        assert name in str(caught.value)
