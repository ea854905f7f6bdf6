"""SynthID marks as transformers does, to the token, and its mark is found by its keys and by no others."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import SynthIDTextWatermarkLogitsProcessor

from spolia.errors import InvalidRequest
from spolia.generation import History, SamplingParams, SynthId, SynthIdDetector
from spolia.generation.pipeline import build_pipeline
from spolia.generation.processors.candidates import Candidates, Scratch

from .test_processors import VOCAB_SIZE, filtered, vocabulary

KEYS = (654, 400, 836, 123, 340, 443, 597, 160, 57)
PROMPT = [5, 6, 7]
SETTINGS = [
    {"keys": KEYS},
    {"keys": KEYS[:1], "ngram_len": 2, "context_history_size": 3},
    {"keys": (-5, 2**62, 0), "ngram_len": 3, "sampling_table_size": 1_000, "sampling_table_seed": 7},
    {"keys": KEYS, "ngram_len": 4, "skip_first_ngram_calls": True, "context_history_size": 5},
]


def theirs(settings):
    defaults = {"ngram_len": 5, "context_history_size": 1024, "sampling_table_size": 2**16, "sampling_table_seed": 0}
    made = {**defaults, **settings, "keys": list(settings["keys"])}
    return SynthIDTextWatermarkLogitsProcessor(**made, device=torch.device("cpu"))


def assert_same(row, expected):
    lowest = np.finfo(np.float32).min
    forbidden = (expected == lowest) | np.isneginf(expected)
    assert (np.isneginf(row) | (row == lowest) == forbidden).all()
    np.testing.assert_allclose(row[~forbidden], expected[~forbidden], rtol=2e-5, atol=3e-5)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("greedy", [False, True])
def test_each_token_of_an_answer_is_marked_as_transformers_marks_it(settings, greedy):
    """Few tokens are said, so that contexts recur and are left alone; the filters come before."""
    rng = np.random.default_rng(0)
    reference = theirs(settings)
    params = SamplingParams(synthid=settings, **({"temperature": 0.0} if greedy else {"top_k": 40}))
    pipeline = build_pipeline(params, vocabulary(), max_tokens=100)
    buffer = np.array(PROMPT + rng.integers(0, 3, 60).tolist(), np.int32)
    pipeline.follow(buffer, len(PROMPT), seed=0)
    num_changed = 0
    for position in range(len(PROMPT), len(buffer)):
        row = (rng.standard_normal((1, VOCAB_SIZE)) * 3).astype(np.float32)
        given = row.copy()
        if not greedy:
            given[0, np.argsort(-row[0])[40:]] = -np.inf
        expected = reference(torch.from_numpy(buffer[None, :position].astype(np.int64)), torch.from_numpy(given.copy()))
        changed = row.copy()
        pipeline.process(changed, position)
        if not greedy:
            changed = filtered(pipeline, changed)
        assert_same(changed[0], expected[0].numpy())
        num_changed += not np.array_equal(expected[0].numpy(), given[0])
    assert 2 < num_changed < len(buffer) - len(PROMPT)  # some contexts recur


def test_coins_and_repetitions_of_a_text_are_those_of_transformers():
    for settings in SETTINGS:
        ids = np.random.default_rng(1).integers(0, 4, 200).tolist()
        ours, reference = SynthId(**settings), theirs(settings)
        tensor = torch.tensor([ids])
        assert (ours.g_values(ids) == reference.compute_g_values(tensor)[0].numpy()).all()
        assert (ours.is_fresh(ids) == reference.compute_context_repetition_mask(tensor)[0].numpy()).all()


def say(synthid, num_tokens, rng):
    """Text of a model without opinions."""
    said: list[int] = []
    scratch = Scratch(VOCAB_SIZE)
    for _ in range(num_tokens):
        flat = Candidates(None, rng.standard_normal(VOCAB_SIZE).astype(np.float32))
        history = History.of([1], said, vocab_size=VOCAB_SIZE)
        scores = (flat if synthid is None else synthid.apply(flat, history, scratch)).scores
        weights = np.exp(scores.astype(np.float64))
        said.append(int(rng.choice(VOCAB_SIZE, p=weights / weights.sum())))
    return said


def test_a_mark_is_found_by_its_keys_and_by_no_other_and_plain_text_has_none():
    rng = np.random.default_rng(0)
    synthid = SynthId(keys=KEYS)
    marked, plain = say(synthid, 300, rng), say(None, 300, rng)
    detector = SynthIdDetector(synthid)
    found = detector.detect(marked)
    assert found.z_score > 6
    assert found.p_value < 1e-8
    assert found.weighted_mean > found.mean > 0.52
    assert abs(detector.detect(plain).z_score) < 4
    assert abs(SynthIdDetector(SynthId(keys=range(9))).detect(marked).z_score) < 4


def test_scores_are_the_mean_and_the_weighted_mean_of_the_coins():
    synthid = SynthId(keys=KEYS, ngram_len=3)
    ids = np.random.default_rng(2).integers(0, 5, 120).tolist()
    coins, fresh = synthid.g_values(ids).astype(float), synthid.is_fresh(ids)
    weights = np.linspace(10, 1, len(KEYS))
    result = SynthIdDetector(synthid).detect(ids)
    assert result.num_tokens == fresh.sum() < len(fresh)
    assert result.mean == pytest.approx(coins[fresh].mean())
    assert result.weighted_mean == pytest.approx((coins[fresh] * weights / weights.mean()).mean())


def test_on_average_no_token_becomes_likelier():
    """The coins of many keys cancel out."""
    scores = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    history, scratch = History.of([1], [2, 3], vocab_size=4), Scratch(4)
    total = np.zeros(4)
    for key in range(3_000):
        marked = SynthId(keys=(key,)).apply(Candidates(None, scores), history, scratch).scores
        total += np.exp(marked)
    np.testing.assert_allclose(total / 3_000, np.exp(scores), atol=0.02)


def test_a_text_shorter_than_an_ngram_is_refused():
    with pytest.raises(ValueError, match="too few"):
        SynthIdDetector(SynthId(keys=KEYS)).detect([1, 2, 3])


@pytest.mark.parametrize(
    "settings",
    [{}, {"keys": []}, {"keys": ["a"]}, {"keys": [2**63]}, {"keys": [1], "ngram_len": 1}, {"keys": [1], "depth": 3}, 7]
    + [{"keys": [1], name: value} for name, value in (("context_history_size", 0), ("sampling_table_size", 2**25))]
    + [{"keys": [1], "skip_first_ngram_calls": 1}, {"keys": [1], "sampling_table_seed": -1}],
    ids=str,
)
def test_impossible_settings_are_refused_by_name(settings):
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(synthid=settings)
    assert caught.value.param == "synthid"
