"""Beam search finds what transformers' finds on the same logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from spolia.errors import InvalidRequest
from spolia.generation import BeamParams, BeamSearch

VOCAB_SIZE = 60
PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        initializer_range=0.4,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def log_probs(model, beams):
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT + list(beam.token_ids) for beam in beams])).logits[:, -1]
    return torch.log_softmax(logits.float(), dim=-1).numpy()


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.5, -1.0])
@pytest.mark.parametrize("eos", [[2], [2, 9, 33], []])
@pytest.mark.parametrize("num_beams", [2, 5])
def test_sequences_and_scores_are_transformers(model, num_beams, eos, length_penalty, early_stopping):
    expected = model.generate(
        torch.tensor([PROMPT]),
        attention_mask=torch.ones(1, len(PROMPT)),
        num_beams=num_beams,
        num_return_sequences=num_beams,
        max_new_tokens=12,
        do_sample=False,
        eos_token_id=eos or None,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        output_scores=True,
        return_dict_in_generate=True,
    )
    params = BeamParams(
        num_beams=num_beams, max_tokens=12, length_penalty=length_penalty, early_stopping=early_stopping
    )
    search = BeamSearch(params, eos)
    while not search.is_over:
        search.advance(log_probs(model, search.running))
    for beam, ids, score in zip(search.answers, expected.sequences, expected.sequences_scores, strict=True):
        theirs = ids[len(PROMPT) :].tolist()
        assert list(beam.token_ids) == theirs[: len(beam.token_ids)]
        assert all(token_id in (0, *eos[:1]) for token_id in theirs[len(beam.token_ids) :])  # padding
        assert beam.score == pytest.approx(score.item(), rel=1e-4)


def test_one_beam_is_greedy(model):
    search = BeamSearch(BeamParams(num_beams=1, max_tokens=8), [])
    greedy = []
    while not search.is_over:
        row = log_probs(model, search.running)
        greedy.append(int(row[0].argmax()))
        search.advance(row)
    assert list(search.answers[0].token_ids) == greedy


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_beams", 0), ("max_tokens", 0), ("num_return_sequences", 5), ("length_penalty", "x"), ("early_stopping", 3)],
)
def test_an_impossible_search_is_refused_by_name(name, value):
    with pytest.raises(InvalidRequest) as caught:
        BeamParams(**{name: value})
    assert caught.value.param == name


def test_scores_that_are_equal_are_taken_in_the_order_of_beams_and_ids():
    search = BeamSearch(BeamParams(num_beams=3, max_tokens=2), [])
    search.advance(np.zeros((3, 10), np.float32))
    assert [beam.token_ids for beam in search.running] == [(0,), (1,), (2,)]
