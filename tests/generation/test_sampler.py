"""A row's token depends on the row alone, and draws follow the distribution that the parameters describe."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from spolia.generation import RowSampling, Sampler, SamplingParams, uniform

NO_IDS = np.empty(0, np.int32)
KINDS = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.6},
    {"top_k": 5},
    {"top_k": 300},
    {"top_p": 0.8},
    {"top_p": 0.999},
    {"min_p": 0.1},
    {"temperature": 1.3, "top_k": 50, "top_p": 0.9, "min_p": 0.02},
]


def row(seed=0, position=0, banned=NO_IDS, **params):
    return RowSampling(SamplingParams(**params), seed, position, banned)


def logits_of(num_rows, vocab_size, seed=0, scale=3.0):
    return (np.random.default_rng(seed).standard_normal((num_rows, vocab_size)) * scale).astype(np.float32)


def allowed(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The slow truth: ids that pass the filters, with their probabilities."""
    x = logits.astype(np.float64) / temperature
    p = np.exp(x - x.max())
    if top_k > 0:
        p[x < np.sort(x)[-min(top_k, len(x))]] = 0
    p /= p.sum()
    if top_p < 1:
        order = np.argsort(-p, kind="stable")
        num_kept = int(np.searchsorted(np.cumsum(p[order]), top_p)) + 1
        p[order[num_kept:]] = 0
    p[p < min_p * p.max()] = 0
    return p / p.sum()


def test_greedy_takes_the_lowest_id_of_equals():
    logits = np.zeros((1, 100), np.float32)
    logits[0, [20, 30]] = 1.0
    assert Sampler(100).sample(logits, [row(temperature=0.0)]).token_ids == [20]


@pytest.mark.parametrize("vocab_size", [1, 7, 256, 257, 5_000])
def test_a_rows_token_does_not_depend_on_its_neighbours(vocab_size):
    logits = logits_of(len(KINDS) * 3, vocab_size)
    rows = [row(seed=i, position=9 * i, **KINDS[i % len(KINDS)], logprobs=i % 4) for i in range(len(logits))]
    sampler = Sampler(vocab_size)
    together = sampler.sample(logits.copy(), rows)
    for i, one in enumerate(rows):
        alone = Sampler(vocab_size).sample(logits[i : i + 1].copy(), [one])
        assert alone.token_ids[0] == together.token_ids[i]
        assert alone.logprobs[0] == together.logprobs[i]
    backwards = sampler.sample(logits[::-1].copy(), rows[::-1])
    assert backwards.token_ids == together.token_ids[::-1]
    assert backwards.logprobs == together.logprobs[::-1]


@pytest.mark.parametrize("kind", KINDS[1:], ids=str)
def test_draws_follow_the_filtered_distribution(kind):
    """Chi-squared over 4,000 draws, at six standard deviations, and nothing that the filters exclude."""
    num_draws, vocab_size = 4_000, 400
    logits = logits_of(1, vocab_size, scale=2.0)
    expected = allowed(logits[0], **kind)
    sampler = Sampler(vocab_size)
    drawn = Counter(sampler.sample(logits, [row(seed=7, position=i, **kind)]).token_ids[0] for i in range(num_draws))
    assert all(expected[token_id] > 0 for token_id in drawn)
    frequent = np.flatnonzero(expected * num_draws >= 5)
    observed = np.array([drawn[i] for i in frequent])
    chi2 = float((((observed - expected[frequent] * num_draws) ** 2) / (expected[frequent] * num_draws)).sum())
    assert chi2 < len(frequent) + 6 * math.sqrt(2 * len(frequent))


@pytest.mark.parametrize("kind", KINDS[1:], ids=str)
def test_every_draw_is_the_inverse_of_its_uniform_number(kind):
    """Ties, flat and peaked rows: always an id that the slow truth allows."""
    sampler = Sampler(600)
    for seed, scale in enumerate([0.0, 1e-3, 1.0, 30.0]):
        logits = np.round(logits_of(1, 600, seed=seed, scale=scale), 1)
        expected = allowed(logits[0], **kind)
        for position in range(50):
            assert expected[sampler.sample(logits, [row(seed=seed, position=position, **kind)]).token_ids[0]] > 0


def test_top_p_of_zero_keeps_the_best_token():
    logits = logits_of(1, 100)
    assert Sampler(100).sample(logits, [row(top_p=0.0)]).token_ids == [int(logits.argmax())]


def test_banned_ids_are_never_drawn():
    logits = logits_of(1, 50)
    best = np.argsort(-logits[0])[:10].astype(np.int32)
    sampler = Sampler(50)
    for kind in KINDS:
        for position in range(30):
            taken = sampler.sample(logits.copy(), [row(position=position, banned=best, **kind)]).token_ids[0]
            assert taken not in best


def test_a_seed_draws_the_same_at_a_position_and_otherwise_elsewhere():
    logits = np.zeros((1, 1000), np.float32)
    sampler = Sampler(1000)
    draws = [sampler.sample(logits, [row(seed=3, position=p)]).token_ids[0] for p in [*range(50), *range(50)]]
    assert draws[:50] == draws[50:]
    assert len(set(draws)) > 40
    others = [sampler.sample(logits, [row(seed=4, position=p)]).token_ids[0] for p in range(50)]
    assert sum(a == b for a, b in zip(draws, others, strict=False)) < 5


def test_uniform_numbers_are_uniform_over_positions_and_over_seeds():
    for numbers in ([uniform(5, i) for i in range(20_000)], [uniform(i, 5) for i in range(-10_000, 10_000)]):
        counts = np.bincount((np.array(numbers) * 20).astype(int), minlength=20)
        assert len(counts) == 20
        assert abs(counts - 1000).max() < 200
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.05


def test_uniform_numbers_are_the_same_everywhere():
    assert uniform(0, 0) == uniform(2**64, 0)
    assert [round(uniform(42, position), 12) for position in range(3)] == [
        0.59611887183,
        0.160365387599,
        0.166397803981,
    ]


def test_logprobs_are_those_of_the_model_before_temperature_and_filters():
    logits = logits_of(1, 5_000)
    exact = logits[0] - np.log(np.exp(logits[0].astype(np.float64)).sum())
    (result,) = Sampler(5_000).sample(logits, [row(temperature=0.3, top_k=3, logprobs=5)]).logprobs
    assert result is not None
    assert result.logprob == pytest.approx(exact[result.token_id], abs=1e-5)
    best = np.argsort(-logits[0], kind="stable")[:5]
    assert [token_id for token_id, _ in result.top] == best.tolist()
    assert [logprob for _, logprob in result.top] == pytest.approx(exact[best].tolist(), abs=1e-5)


def test_logprobs_count_banned_ids_too():
    """The model's distribution is what it is, whatever may be drawn from it."""
    logits = logits_of(1, 100)
    best = int(logits.argmax())
    (free,) = Sampler(100).sample(logits.copy(), [row(temperature=0.0, logprobs=3)]).logprobs
    (banned,) = (
        Sampler(100)
        .sample(logits.copy(), [row(temperature=0.0, logprobs=3, banned=np.array([best], np.int32))])
        .logprobs
    )
    assert free is not None
    assert banned is not None
    assert banned.top == free.top
    assert banned.token_id != best
    assert banned.logprob == free.top[1][1]


def test_zero_alternatives_still_report_the_tokens_own_logprob():
    (result,) = Sampler(10).sample(logits_of(1, 10), [row(temperature=0.0, logprobs=0)]).logprobs
    assert result is not None
    assert result.top == ()
    assert result.logprob < 0


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_row_whose_logits_are_no_numbers_gets_no_token_and_the_others_do(value):
    logits = logits_of(2, 10)
    logits[0, 3] = value
    expected = int(logits[1].argmax())
    samples = Sampler(10).sample(logits, [row(logprobs=2), row(temperature=0.0, logprobs=2)])
    assert samples.token_ids == [None, expected]
    assert samples.logprobs[0] is None
    assert samples.logprobs[1] is not None
