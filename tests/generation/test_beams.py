"""Beam search finds what transformers' finds on the same logits."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from spolia.errors import InvalidRequest
from spolia.generation import Beam, BeamParams, BeamSearch, SamplingParams

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


@pytest.mark.parametrize("num_beams", [2, 4])
@pytest.mark.parametrize("options", [{}, {"temperature": 1.7}, {"top_k": 30, "top_p": 0.95}], ids=str)
@pytest.mark.parametrize("eos", [[2], []])
def test_drawn_beams_are_transformers_given_the_same_random_numbers(model, monkeypatch, num_beams, options, eos):
    steps = iter(range(100))

    def multinomial(probs, num_samples):
        noise = np.random.default_rng([7, next(steps)]).gumbel(size=probs.shape[1])
        with np.errstate(divide="ignore"):
            noisy = (np.log(probs[0].double().numpy()) + noise).astype(np.float32)
        return torch.from_numpy(np.argsort(-noisy, kind="stable")[:num_samples].copy())[None]

    monkeypatch.setattr(torch, "multinomial", multinomial)
    expected = model.generate(
        torch.tensor([PROMPT]),
        attention_mask=torch.ones(1, len(PROMPT)),
        num_beams=num_beams,
        num_return_sequences=num_beams,
        max_new_tokens=8,
        do_sample=True,
        eos_token_id=eos or None,
        output_scores=True,
        return_dict_in_generate=True,
        **{"top_k": 0, **options},
    )
    search = BeamSearch(BeamParams(num_beams=num_beams, max_tokens=8, sampling=SamplingParams(**options)), eos, seed=7)
    while not search.is_over:
        search.advance(log_probs(model, search.running))
    for beam, ids, score in zip(search.answers, expected.sequences, expected.sequences_scores, strict=True):
        assert list(beam.token_ids) == ids[len(PROMPT) :].tolist()[: len(beam.token_ids)]
        assert beam.score == pytest.approx(score.item(), rel=1e-3)


def naive_diverse(model, num_groups, size, penalty, num_tokens):
    """Diverse beam search as published, without ends: each group in turn, each candidate looked at."""
    groups = [[((), 0.0)] for _ in range(num_groups)]
    for _ in range(num_tokens):
        taken = []
        for index, group in enumerate(groups):
            candidates = []
            for ids, score in group:
                (row,) = log_probs(model, [Beam(ids, 0.0)])
                for token_id in range(VOCAB_SIZE):
                    value = float(row[token_id]) - penalty * taken.count(token_id)
                    candidates.append(((*ids, token_id), score + value))
            candidates.sort(key=lambda candidate: -candidate[1])
            groups[index] = candidates[:size]
            taken += [ids[-1] for ids, _ in groups[index]]
    return groups


@pytest.mark.parametrize(("num_groups", "size", "penalty"), [(2, 2, 0.0), (2, 2, 1.5), (3, 1, 2.0), (2, 3, 50.0)])
def test_diverse_beams_are_those_of_the_published_algorithm(model, num_groups, size, penalty):
    params = BeamParams(
        num_beams=num_groups * size,
        num_beam_groups=num_groups,
        diversity_penalty=penalty,
        max_tokens=5,
        length_penalty=0.0,
    )
    search = BeamSearch(params, [])
    while not search.is_over:
        search.advance(log_probs(model, search.running))
    expected = naive_diverse(model, num_groups, size, penalty, 5)
    flat = sorted((beam for group in expected for beam in group), key=lambda beam: -beam[1])
    assert [beam.token_ids for beam in search.answers] == [ids for ids, _ in flat]
    np.testing.assert_allclose([beam.score for beam in search.answers], [score for _, score in flat], rtol=1e-4)
    if penalty == 50.0:  # no two groups agree on a token at any place
        for place in range(5):
            first, second = ({ids[place] for ids, _ in group} for group in expected)
            assert not first & second


def contains(ids, phrase):
    return any(tuple(ids[i : i + len(phrase)]) == phrase for i in range(len(ids)))


@pytest.mark.parametrize("seed", range(4))
def test_constrained_beams_that_see_everything_find_the_best_answer_with_the_phrase(seed):
    """A vocabulary of 4 and answers of up to 3: 64 beams are all there are, so the truth can be enumerated."""
    rng = np.random.default_rng(seed)
    table = rng.standard_normal((4, 5, 4)) * 2  # by length and last token

    def rows(beams):
        x = np.array([table[len(beam.token_ids), beam.token_ids[-1] if beam.token_ids else 4] for beam in beams])
        return (x - np.log(np.exp(x).sum(axis=1, keepdims=True))).astype(np.float32)

    phrase, eos = (1, 2), 0
    search = BeamSearch(BeamParams(num_beams=64, max_tokens=3, force_words_ids=((phrase,),)), [eos])
    while not search.is_over:
        search.advance(rows(search.running))
    best = []
    for ids in itertools.product(range(4), repeat=3):
        cut = ids[: ids.index(eos) + 1] if eos in ids else ids
        if contains(cut, phrase):
            score = sum(float(rows([Beam(cut[:i], 0.0)])[0, cut[i]]) for i in range(len(cut))) / len(cut)
            best.append((score, cut))
    assert search.answers[0].token_ids == max(best)[1]
    assert search.answers[0].score == pytest.approx(max(best)[0], rel=1e-4)


@pytest.mark.parametrize("num_beams", [1, 2, 6])
def test_every_answer_of_constrained_beams_has_all_phrases(model, num_beams):
    words = (((50, 51, 52),), ((7, 8), (9,)), ((51,),))
    for eos in ([], [2, 9, 33], [40]):
        for max_tokens in (6, 12):
            params = BeamParams(num_beams=num_beams, max_tokens=max_tokens, force_words_ids=words)
            search = BeamSearch(params, eos)
            while not search.is_over:
                search.advance(log_probs(model, search.running))
            assert search.answers
            for beam in search.answers:
                assert contains(beam.token_ids, (50, 51, 52))
                assert contains(beam.token_ids, (7, 8)) or 9 in beam.token_ids
                assert beam.token_ids.count(51) >= 2  # one of its own, beside that within the first phrase


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"num_beam_groups": 3}, "num_beam_groups"),
        ({"num_beam_groups": 0}, "num_beam_groups"),
        ({"diversity_penalty": 1.0}, "diversity_penalty"),
        ({"num_beam_groups": 2, "sampling": SamplingParams()}, "num_beam_groups"),
        ({"force_words_ids": [[[1, 2]], [[3]]], "max_tokens": 2}, "force_words_ids"),
        ({"force_words_ids": [[]]}, "force_words_ids"),
        ({"force_words_ids": [[[]]]}, "force_words_ids"),
        ({"force_words_ids": [[[1]]], "sampling": SamplingParams()}, "force_words_ids"),
        ({"sampling": SamplingParams(mirostat=2)}, "mirostat"),
        ({"processing": SamplingParams(guidance_scale=2.0)}, "guidance_scale"),
        ({"processing": SamplingParams(), "sampling": SamplingParams()}, "processing"),
    ],
    ids=str,
)
def test_variants_that_mean_nothing_are_refused_by_name(options, name):
    with pytest.raises(InvalidRequest) as caught:
        BeamParams(**options)
    assert caught.value.param == name
