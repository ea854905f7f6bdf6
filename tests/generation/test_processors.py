"""Each processor changes logits as transformers' own does; those it lacks are checked against a naive model."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import transformers

from spolia.generation import FILTERS, PROCESSORS, History, SamplingParams, Vocabulary, Watermark, WatermarkDetector
from spolia.generation.pipeline import Asked, build_pipeline, filters_of
from spolia.generation.processors import Depth, TransformersProcessor
from spolia.generation.processors.candidates import Candidates, Scratch, Softmax, at_least, largest
from spolia.generation.processors.filters import Renormalise

VOCAB_SIZE = 300
PROMPT = [5, 6, 7, 5, 6, 9, 40, 41]
GENERATED = [5, 6, 7, 8, 5, 6]
IDS = [*PROMPT, *GENERATED]
EOS = (1, 2)


def vocabulary(**options):
    return Vocabulary(
        VOCAB_SIZE,
        **{
            "eos_token_ids": EOS,
            "encode": lambda text: list(text.encode()),
            "token_bytes": lambda token_id: bytes([token_id]) if token_id < 256 else b"",
            "is_special": lambda token_id: token_id in EOS,
        }
        | options,
    )


def logits(seed=0, scale=3.0):
    return (np.random.default_rng(seed).standard_normal((1, VOCAB_SIZE)) * scale).astype(np.float32)


def ours(row, prompt=PROMPT, generated=GENERATED, max_tokens=100, seed=0, **params):
    """The row after the processors that `params` ask for."""
    pipeline = build_pipeline(SamplingParams(**params), vocabulary(), max_tokens=max_tokens)
    assert pipeline is not None
    ids = np.array([*prompt, *generated], np.int32)
    pipeline.follow(ids, len(prompt), seed=seed)
    changed = row.copy()
    pipeline.process(changed, len(ids))
    return filtered(pipeline, changed)


def filtered(pipeline, row):
    """What a pipeline's filters leave of a row, as a row."""
    ids, scores = pipeline.candidates(row[0], Scratch(VOCAB_SIZE))
    left = np.full_like(row, -np.inf)
    left[0, slice(None) if ids is None else ids] = scores
    return left


def theirs(processor, row, ids=IDS):
    return processor(torch.tensor([ids]), torch.from_numpy(row.copy())).numpy()


T = transformers
IDS_2D = torch.tensor([PROMPT])
CASES = {
    "repetition_penalty": ({"repetition_penalty": 1.3}, lambda: T.RepetitionPenaltyLogitsProcessor(1.3)),
    "encoder_repetition_penalty": (
        {"encoder_repetition_penalty": 1.5},
        lambda: T.EncoderRepetitionPenaltyLogitsProcessor(1.5, IDS_2D),
    ),
    "no_repeat_ngram_1": ({"no_repeat_ngram_size": 1}, lambda: T.NoRepeatNGramLogitsProcessor(1)),
    "no_repeat_ngram_2": ({"no_repeat_ngram_size": 2}, lambda: T.NoRepeatNGramLogitsProcessor(2)),
    "no_repeat_ngram_3": ({"no_repeat_ngram_size": 3}, lambda: T.NoRepeatNGramLogitsProcessor(3)),
    "no_repeat_ngram_longer_than_the_text": (
        {"no_repeat_ngram_size": 30},
        lambda: T.NoRepeatNGramLogitsProcessor(30),
    ),
    "encoder_no_repeat_ngram": (
        {"encoder_no_repeat_ngram_size": 3},
        lambda: T.EncoderNoRepeatNGramLogitsProcessor(3, IDS_2D),
    ),
    "sequence_bias": (
        {"sequence_bias": {(30,): 2.0, (5, 6, 99): 4.0, (6, 100): -3.0, (7, 7): 9.0, (5, 6, 100): 1.5}},
        lambda: T.SequenceBiasLogitsProcessor(
            {(30,): 2.0, (5, 6, 99): 4.0, (6, 100): -3.0, (7, 7): 9.0, (5, 6, 100): 1.5}
        ),
    ),
    "bad_words_ids": (
        {"bad_words_ids": [[50], [6, 51], [5, 6, 52], [9, 53]]},
        lambda: T.NoBadWordsLogitsProcessor([[50], [6, 51], [5, 6, 52], [9, 53]], eos_token_id=1),
    ),
    "min_length_not_reached": ({"min_length": 20}, lambda: T.MinLengthLogitsProcessor(20, list(EOS))),
    "min_length_reached": ({"min_length": 14}, lambda: T.MinLengthLogitsProcessor(14, list(EOS))),
    "forced_eos": (
        {"forced_eos_token_id": 2, "max_tokens": 7},
        lambda: T.ForcedEOSTokenLogitsProcessor(len(PROMPT) + 7, 2),
    ),
    "forced_eos_of_several": (
        {"forced_eos_token_id": (1, 2), "max_tokens": 7},
        lambda: T.ForcedEOSTokenLogitsProcessor(len(PROMPT) + 7, [1, 2]),
    ),
    "forced_eos_too_early": (
        {"forced_eos_token_id": 2, "max_tokens": 8},
        lambda: T.ForcedEOSTokenLogitsProcessor(len(PROMPT) + 8, 2),
    ),
    "exponential_decay": (
        {"exponential_decay_length_penalty": (2, 1.5)},
        lambda: T.ExponentialDecayLengthPenalty((2, 1.5), list(EOS), len(PROMPT)),
    ),
    "exponential_decay_not_yet": (
        {"exponential_decay_length_penalty": (6, 1.5)},
        lambda: T.ExponentialDecayLengthPenalty((6, 1.5), list(EOS), len(PROMPT)),
    ),
    "suppress_tokens": ({"suppress_tokens": [3, 9]}, lambda: T.SuppressTokensLogitsProcessor([3, 9])),
    "begin_suppress_later": (
        {"begin_suppress_tokens": [3, 9]},
        lambda: T.SuppressTokensAtBeginLogitsProcessor([3, 9], len(PROMPT)),
    ),
    "prefix_constrained": (
        {"prefix_allowed_tokens_fn": lambda _, ids: [10, int(ids[-1]) + 1]},
        lambda: T.PrefixConstrainedLogitsProcessor(lambda _, ids: [10, int(ids[-1]) + 1], 1),
    ),
    "renormalize": ({"renormalize_logits": True}, lambda: T.LogitNormalization()),
    "typical": ({"typical_p": 0.6}, lambda: T.TypicalLogitsWarper(0.6)),
    "epsilon": ({"epsilon_cutoff": 0.01}, lambda: T.EpsilonLogitsWarper(0.01)),
    "eta": ({"eta_cutoff": 0.02}, lambda: T.EtaLogitsWarper(0.02)),
    "top_h": ({"top_h": 0.4}, lambda: T.TopHLogitsWarper(0.4)),
    "temperature_and_top_h": (
        {"temperature": 0.7, "top_h": 0.5},
        lambda: T.LogitsProcessorList([T.TemperatureLogitsWarper(0.7), T.TopHLogitsWarper(0.5)]),
    ),
    "every_filter": (
        {"temperature": 1.4, "top_k": 80, "top_p": 0.93, "min_p": 0.003, "typical_p": 0.9, "epsilon_cutoff": 0.004},
        lambda: T.LogitsProcessorList(
            [
                T.TemperatureLogitsWarper(1.4),
                T.TopKLogitsWarper(80),
                T.TopPLogitsWarper(0.93),
                T.MinPLogitsWarper(0.003),
                T.TypicalLogitsWarper(0.9),
                T.EpsilonLogitsWarper(0.004),
            ]
        ),
    ),
    "another_order": (
        {"temperature": 2.0, "top_p": 0.8, "filter_order": ["top_p", "temperature"]},
        lambda: T.LogitsProcessorList([T.TopPLogitsWarper(0.8), T.TemperatureLogitsWarper(2.0)]),
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", range(4))
def test_a_processor_does_what_transformers_does(name, seed):
    params, reference = CASES[name]
    row = logits(seed)
    expected = theirs(reference(), row)
    changed = ours(row, **params)
    assert (np.isneginf(changed) == np.isneginf(expected)).all()
    finite = ~np.isneginf(expected)
    np.testing.assert_allclose(changed[finite], expected[finite], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", CASES)
def test_rows_that_differ_are_changed_at_once_as_transformers_changes_them(monkeypatch, name):
    """Six answers to one prompt, as a request's beams are: their tokens and logits have nothing in common."""
    rng = np.random.default_rng(len(name))
    ids = np.stack([rng.choice(rng.integers(3, VOCAB_SIZE, 5), len(IDS)) for _ in range(6)])
    ids[0, len(PROMPT) :] = GENERATED
    ids[:, : len(PROMPT)] = PROMPT
    monkeypatch.setattr(f"{__name__}.IDS_2D", torch.from_numpy(ids[:, : len(PROMPT)]))
    params, reference = CASES[name]
    rows = np.concatenate([logits(seed) for seed in range(6)])
    expected = reference()(torch.from_numpy(ids), torch.from_numpy(rows.copy())).numpy()

    asked = Asked(SamplingParams(**params), vocabulary(), params.get("max_tokens", 100), Depth(0, has_tied_head=False))
    histories = [History.of(row[: len(PROMPT)], row[len(PROMPT) :], vocab_size=VOCAB_SIZE) for row in ids.tolist()]
    changed = rows.copy()
    for factory in PROCESSORS.values():
        if (processor := factory(asked)) is not None:
            processor.process(changed, histories)
    if asked.params.renormalize_logits:
        Renormalise().process(changed, histories)
    for row, history in zip(changed, histories, strict=True):
        left, scratch = Candidates.of(row), Scratch(VOCAB_SIZE)
        for _, filter_ in filters_of(asked.params):
            left = filter_.apply(left, history, scratch)
        kept = slice(None) if left.ids is None else left.ids
        scores = left.scores.copy()
        row[:] = -np.inf
        row[kept] = scores
    assert (np.isneginf(changed) == np.isneginf(expected)).all()
    finite = ~np.isneginf(expected)
    np.testing.assert_allclose(changed[finite], expected[finite], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("field", ["temperature", "top_k", "top_p", "min_p"])
def test_built_in_filters_are_the_same_in_a_pipeline(field):
    """Those that usually run inside the draw; another filter that does nothing here brings them into the pipeline."""
    value, reference = {
        "temperature": (0.6, lambda: T.TemperatureLogitsWarper(0.6)),
        "top_k": (20, lambda: T.TopKLogitsWarper(20)),
        "top_p": (0.8, lambda: T.TopPLogitsWarper(0.8)),
        "min_p": (0.05, lambda: T.MinPLogitsWarper(0.05)),
    }[field]
    row = logits(1)
    expected = theirs(reference(), row)
    changed = ours(row, **{field: value}, filter_order=[field])
    assert (np.isneginf(changed) == np.isneginf(expected)).all()
    finite = ~np.isneginf(expected)
    np.testing.assert_allclose(changed[finite], expected[finite], rtol=1e-6)


def test_the_first_token_is_forced_and_only_the_first():
    row = logits()
    expected = theirs(T.ForcedBOSTokenLogitsProcessor(7), row, ids=[3])
    assert (ours(row, prompt=[3], generated=[], forced_bos_token_id=7) == expected).all()
    assert (ours(row, prompt=[3], generated=[7], forced_bos_token_id=7) == row).all()


def test_tokens_are_suppressed_at_the_beginning_only():
    row = logits()
    expected = theirs(T.SuppressTokensAtBeginLogitsProcessor([3, 9], len(PROMPT)), row, ids=PROMPT)
    assert (ours(row, generated=[], begin_suppress_tokens=[3, 9]) == expected).all()
    assert np.isneginf(expected).sum() == 2


def test_numbers_that_are_none_are_replaced():
    row = logits()
    row[0, :3] = [np.nan, np.inf, -np.inf]
    changed = ours(row, remove_invalid_values=True)
    assert (changed[0, :2] == theirs(T.InfNanRemoveLogitsProcessor(), row)[0, :2]).all()
    assert (changed[0, 2:] == row[0, 2:]).all()  # theirs would make -inf, which forbids a token, a number


def test_presence_and_frequency_penalties_are_openais():
    """logit[j] -= count[j] * frequency + (count[j] > 0) * presence, over the answer."""
    row = logits()
    expected = row.copy()
    for token_id in set(GENERATED):
        expected[0, token_id] -= 0.7 + 0.3 * GENERATED.count(token_id)
    np.testing.assert_allclose(ours(row, presence_penalty=0.7, frequency_penalty=0.3), expected, rtol=1e-6)


def test_penalties_look_back_as_far_as_they_are_told():
    row = logits()
    expected = row.copy()
    for token_id in (8, 5, 6):
        expected[0, token_id] -= 1.0
    np.testing.assert_allclose(ours(row, presence_penalty=1.0, repeat_last_n=3), expected, rtol=1e-6)
    changed = ours(row, repetition_penalty=2.0, repeat_last_n=3)
    assert np.flatnonzero(changed != row).tolist() == [5, 6, 8]
    far = ours(row, prompt=[200, *PROMPT], generated=[*GENERATED, 201], presence_penalty=1.0, repeat_last_n=100)
    assert {200, 201} <= set(np.flatnonzero(far != row).tolist())


def test_counts_follow_a_sequence_that_grows_and_one_that_is_rolled_back():
    rng = np.random.default_rng(0)
    buffer = rng.integers(0, 20, 400).astype(np.int32)
    history = History(buffer, 50, vocab_size=30)
    length = 50
    for _ in range(200):
        length = int(rng.integers(50, 400)) if rng.random() < 0.2 else min(length + int(rng.integers(0, 3)), 400)
        history.num_tokens = length
        for counts, tokens in (
            (history.all_counts(), buffer[:length]),
            (history.generated_counts(), buffer[50:length]),
        ):
            assert (counts.counts == np.bincount(tokens, minlength=30)).all()
            assert sorted(counts.ids.tolist()) == np.unique(tokens).tolist()


def naive_dry(ids, multiplier, base, allowed_length, breakers):
    """Penalty by token, by trying every token and every length."""
    penalties = {}
    for token_id in set(ids):
        longest = 0
        for end in range(len(ids)):  # the repetition's earlier copy would end with this token
            if ids[end] != token_id:
                continue
            length = 0
            while length < end and ids[end - 1 - length] == ids[-1 - length] and ids[-1 - length] not in breakers:
                length += 1
            longest = max(longest, length)
        if longest >= max(allowed_length, 1) and token_id not in breakers:
            penalties[token_id] = multiplier * base ** (longest - allowed_length)
    return penalties


@pytest.mark.parametrize("seed", range(30))
def test_dry_penalises_the_longest_repetition_that_a_token_would_prolong(seed):
    rng = np.random.default_rng(seed)
    ids = rng.integers(97, 100 + seed % 3, 60).tolist()
    row = logits(seed)
    changed = ours(
        row, prompt=ids[:30], generated=ids[30:], dry_multiplier=0.8, dry_allowed_length=2, dry_sequence_breakers=["c"]
    )
    expected = row.copy()
    for token_id, penalty in naive_dry(ids, 0.8, 1.75, 2, {ord("c")}).items():
        expected[0, token_id] -= penalty
    np.testing.assert_allclose(changed, expected, rtol=1e-5, atol=1e-4)


def test_dry_does_not_reach_across_a_breaker_of_several_tokens():
    ids = [*b"abc##abcd", *b"abc##abc"]
    row = logits()
    without = ours(row, prompt=ids, generated=[], dry_multiplier=1.0, dry_sequence_breakers=["|"])
    within = ours(row, prompt=ids, generated=[], dry_multiplier=1.0, dry_sequence_breakers=["##"])
    assert row[0, ord("d")] - without[0, ord("d")] > 8
    np.testing.assert_allclose(row[0, ord("d")] - within[0, ord("d")], 1.75, rtol=1e-4)


def test_dry_survives_a_text_of_one_token():
    changed = ours(logits(), prompt=[70] * 3_000, generated=[], dry_multiplier=1.0)
    assert np.isfinite(changed).all()
    assert changed[0, 70] < -1e20


def test_bad_words_are_kept_out_with_a_space_and_without():
    changed = ours(logits(), generated=[*b"say no"], bad_words=["now", " nor"])
    assert np.isneginf(changed[0]).sum() == 2
    assert np.isneginf(changed[0, [ord("w"), ord("r")]]).all()


def test_only_allowed_tokens_are_left():
    row = logits()
    changed = ours(row, allowed_token_ids=[7, 3, 7])
    assert np.flatnonzero(changed > -np.inf).tolist() == [3, 7]
    assert (changed[0, [3, 7]] == row[0, [3, 7]]).all()


def test_logit_bias_adds_and_forbids():
    row = logits()
    changed = ours(row, logit_bias={"5": 2.5, 6: -100})
    assert changed[0, 5] == row[0, 5] + np.float32(2.5)
    assert np.isneginf(ours(row, logit_bias=[[8, False]])[0, 8])


def test_top_n_sigma_ignores_the_temperature():
    row = logits()
    cold, hot = (ours(row, top_n_sigma=1.5, temperature=t) for t in (0.3, 3.0))
    assert (np.isneginf(cold) == np.isneginf(hot)).all()
    expected = row >= row.max() - 1.5 * row.astype(np.float64).std()
    assert ((cold > -np.inf) == expected).all()


def test_xtc_leaves_the_least_likely_of_the_top_choices_as_often_as_asked():
    row = np.full((1, VOCAB_SIZE), -20, np.float32)
    row[0, [4, 5, 6, 7]] = np.log([0.4, 0.3, 0.2, 0.05])
    times = 0
    for seed in range(400):
        left = np.flatnonzero(ours(row, seed=seed, xtc_probability=0.4, xtc_threshold=0.1) > -np.inf)
        times += 4 not in left
        assert 6 in left
        assert 7 in left
        assert (4 in left) == (5 in left)
    assert 120 < times < 200
    alone = ours(row, xtc_probability=1.0, xtc_threshold=0.35)
    assert (alone == row).all()  # one top choice is no choice


def test_dynamic_temperature_follows_the_entropy():
    sure = np.full((1, VOCAB_SIZE), -50, np.float32)
    sure[0, 3] = 50
    flat = np.zeros((1, VOCAB_SIZE), np.float32)
    flat[0, 0] = 1e-3
    settings = {"temperature": 1.0, "dynatemp_range": 0.5}
    np.testing.assert_allclose(ours(sure, **settings), sure / 0.5, rtol=1e-4)
    np.testing.assert_allclose(ours(flat, **settings), flat / 1.5, rtol=1e-4)


def test_mirostat_holds_the_surprise():
    """Over random distributions, the mean surprise of what is drawn approaches tau, from either side."""
    rng = np.random.default_rng(0)
    for tau in (2.0, 4.0):
        params = SamplingParams(mirostat=2, mirostat_tau=tau, mirostat_eta=0.1)
        pipeline = build_pipeline(params, vocabulary(), max_tokens=2_000)
        ids = np.zeros(1_501, np.int32)
        pipeline.follow(ids, 1, seed=0)
        surprises = []
        for position in range(1, 1_501):
            row = (rng.standard_normal((1, VOCAB_SIZE)) * 2).astype(np.float32)
            pipeline.process(row, position)
            row = filtered(pipeline, row)
            p = np.exp(row[0].astype(np.float64))
            p /= p.sum()
            ids[position] = rng.choice(VOCAB_SIZE, p=p)
            surprises.append(-math.log2(p[ids[position]]))
        assert abs(np.mean(surprises[500:]) - tau) < 0.15


def test_a_watermark_is_found_by_its_key_and_by_no_other():
    mark = Watermark(ratio=0.25, bias=4.0, key=99)
    rng = np.random.default_rng(1)
    ids = [3]
    for _ in range(300):
        row = rng.standard_normal((1, VOCAB_SIZE)).astype(np.float32)
        mark.process(row, [History.of(ids, [], vocab_size=VOCAB_SIZE)])
        p = np.exp(row[0].astype(np.float64))
        ids.append(int(rng.choice(VOCAB_SIZE, p=p / p.sum())))
    found = WatermarkDetector(mark).detect(ids)
    assert found.z_score > 10
    assert found.p_value < 1e-20
    assert abs(WatermarkDetector(Watermark(ratio=0.25, key=98)).detect(ids).z_score) < 4
    plain = rng.integers(0, VOCAB_SIZE, 300).tolist()
    assert abs(WatermarkDetector(mark).detect(plain).z_score) < 4
    green = sum(mark.is_green([7], token_id) for token_id in range(VOCAB_SIZE))
    assert 45 < green < 105


def test_a_watermark_needs_a_context_and_a_token():
    with pytest.raises(ValueError, match="too few"):
        WatermarkDetector(Watermark(context_width=2)).detect([1, 2])


def test_transformers_processors_are_taken_as_they_are():
    row = logits()
    theirs_ = T.NoRepeatNGramLogitsProcessor(2)
    assert (ours(row, logits_processors=[theirs_]) == theirs(theirs_, row)).all()
    assert isinstance(TransformersProcessor(theirs_), TransformersProcessor)


def test_the_order_is_that_of_the_tables():
    """Forced tokens come last of all that forbids, and own processors see what all others have done."""
    assert list(PROCESSORS)[-1] == "forced_eos_token_id"
    assert next(iter(FILTERS)) == "temperature"
    seen = []

    class Spy:
        def process(self, logits, rows):
            seen.append(logits.copy())

    ours(logits(), suppress_tokens=[3], logits_processors=[Spy], temperature=0.5, typical_p=0.9)
    assert np.isneginf(seen[0]).sum() == 1


def test_no_processors_is_no_pipeline():
    assert (
        build_pipeline(SamplingParams(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1), vocabulary(), max_tokens=9)
        is None
    )
    assert build_pipeline(SamplingParams(temperature=0.0, typical_p=0.9), vocabulary(), max_tokens=9) is None


def test_a_watermark_favours_in_a_row_what_it_calls_green_token_by_token():
    """For ratios whose limit has low bits and those that have none, across the pieces that a row is worked on in."""
    for ratio in (0.25, 0.3):
        mark = Watermark(ratio=ratio, bias=1.0, key=7, context_width=2)
        row = np.zeros((1, 20_000), np.float32)
        mark.process(row, [History.of([5, 9_000, 11], [], vocab_size=20_000)])
        sampled = [0, 1, 8_191, 8_192, 16_383, 16_384, 19_999, *range(500, 900)]
        assert [bool(row[0, i]) for i in sampled] == [mark.is_green([9_000, 11], i) for i in sampled]
        assert abs(row.mean() - ratio) < 0.02


@pytest.mark.parametrize("scale", [0.0, 0.01, 1.0, 6.0, 40.0])
def test_selections_without_sorting_are_those_of_sorting(scale):
    """Rows longer than a bucket and a slice, from flat to peaked: the fewest tokens with the mass, and no others."""
    rng = np.random.default_rng(int(scale))
    scores = (rng.standard_normal(5_003) * scale).astype(np.float32)
    softmax = Softmax(scores, Scratch(5_003))
    p = np.exp(scores.astype(np.float64) - scores.max())
    p /= p.sum()
    entropy = -float((p * np.log(np.maximum(p, 1e-300))).sum())
    assert softmax.entropy == pytest.approx(entropy, rel=1e-4, abs=1e-5)
    assert softmax.deviation == pytest.approx(float(scores.std(dtype=np.float64)), rel=1e-4, abs=1e-6)
    for k in (1, 7, 256, 257, 5_002, 6_000):
        assert largest(scores, k).tolist() == np.flatnonzero(scores >= np.sort(scores)[-min(k, 5_003)]).tolist()
    for mass in (0.1, 0.5, 0.93):
        kept = softmax.likeliest(mass)
        order = np.argsort(-scores, kind="stable")
        assert sorted(kept) == sorted(order[: len(kept)])
        assert p[kept].sum() >= mass - 1e-5
        assert p[order[: len(kept) - 1]].sum() < mass + 1e-5
        near = softmax.nearest(entropy, mass)
        distance = np.abs(-np.log(np.maximum(p, 1e-300)) - entropy)
        outside = np.delete(distance, near)
        assert p[near].sum() >= mass - 1e-5
        assert not len(outside) or outside.min() >= distance[near].max() - 1e-3


@pytest.mark.parametrize("size", [1, 63, 64, 65, 129, 4_096, 49_153, 151_936])
@pytest.mark.parametrize("values", ["all different", "many equal", "half forbidden"])
def test_the_largest_are_found_however_their_columns_are_put_together(size, values):
    rng = np.random.default_rng(size)
    scores = (rng.standard_normal(size) * 3).astype(np.float32)
    if values == "many equal":
        scores = np.round(scores)
    elif values == "half forbidden":
        scores[rng.random(size) < 0.5] = -np.inf
    ordered = np.sort(scores)
    num_columns = size // 64
    for k in {1, 2, 50, num_columns // 16, num_columns // 8, num_columns, num_columns + 1, size - 1, size} - {0}:
        expected = np.flatnonzero(scores >= ordered[-min(k, size)])
        np.testing.assert_array_equal(largest(scores, k), expected)
    for threshold in (*ordered[[0, size // 2, -1]], np.float32(1e30)):
        np.testing.assert_array_equal(at_least(scores, threshold), np.flatnonzero(scores >= threshold))


@pytest.mark.parametrize("text", ["a", "aa", "ab", "b|", "é", "aba"])
def test_tokens_that_contain_a_text_are_found(text):
    texts = ["", "a", "b", "aab", "baab", "é", "\xff", "xéy", "aaa", "b|b", "ababab", "aba", "|", "<aab>"]
    tokens = [each.encode() if each != "\xff" else b"\xff" for each in texts]
    found = vocabulary(
        token_bytes=lambda id_: tokens[id_] if id_ < len(tokens) else b"", is_special=lambda id_: id_ == 13
    ).ids_containing(text)
    assert found.tolist() == [id_ for id_, token in enumerate(tokens) if text.encode() in token and id_ != 13]
    assert len(found)
