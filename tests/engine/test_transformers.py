"""On one model's logits, answers are those of transformers' `generate`, and its own objects are taken as they are."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter

import numpy as np
import pytest
import torch
import transformers as T
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from models.tiny import write_tokenizer
from spolia.engine import LLM, SamplingParams
from spolia.errors import InvalidRequest

PROMPT = [5, 6, 7, 5, 6]
BATCH = [[5, 6, 7, 5, 6], [40, 41, 40, 41, 40], [99, 98, 97, 96, 95], [7, 7, 7, 7, 7], [200, 3, 150, 3, 200]]
EOS = 256


def save_random(path, seed, num_layers=2):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        initializer_range=0.3,
        eos_token_id=EOS,
        max_position_embeddings=512,
    )
    model = LlamaForCausalLM(config).eval()
    model.generation_config.pad_token_id = 0
    model.save_pretrained(path)
    write_tokenizer(path)
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="module")
def model(folder):
    return save_random(folder, 0)


@pytest.fixture(scope="module")
def tokenizer(folder, model):
    return PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def llm(folder, model):
    with LLM(folder, kv_dtype="f32", max_batch_tokens=64) as llm:
        yield llm


def theirs(model, prompts, max_new_tokens=30, **options):
    """What `generate` says after each prompt, up to its end."""
    with torch.no_grad():
        rows = model.generate(
            torch.tensor(prompts), max_new_tokens=max_new_tokens, **{"do_sample": False, **options}
        ).tolist()
    said = [row[len(prompt) :] for row, prompt in zip(rows, prompts, strict=True)]
    return [ids[: ids.index(EOS) + 1] if EOS in ids else ids for ids in said]


def ours(llm, prompts, max_tokens=30, **options):
    outputs = llm.generate(prompts, SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens} | options))
    return [list(output.token_ids) for output in outputs]


def greedy(**options):
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 30} | options)


SEVERAL = {
    "plain": {},
    "penalties": {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2, "encoder_repetition_penalty": 1.3},
    "bans": {"bad_words_ids": [[5], [6, 7]], "suppress_tokens": [9, 40], "begin_suppress_tokens": [17, 30, 31]},
    "lengths": {"exponential_decay_length_penalty": (4, 1.6), "min_new_tokens": 9, "forced_eos_token_id": EOS},
    "all of them": {
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 3,
        "encoder_no_repeat_ngram_size": 2,
        "sequence_bias": [[[30], 2.0], [[5, 6], -4.0], [[7, 8], 3.0]],
        "bad_words_ids": [[11], [12, 13]],
        "suppress_tokens": [2, 3],
        "exponential_decay_length_penalty": (20, 1.1),
        "renormalize_logits": True,
        "remove_invalid_values": True,
    },
}


@pytest.mark.parametrize("name", SEVERAL)
def test_a_batch_is_answered_as_transformers_answers_it(model, llm, name):
    """Rows that differ, at once, in both; each with what it said itself."""
    options = dict(SEVERAL[name])
    expected = theirs(model, BATCH, **options)
    if "min_new_tokens" in options:
        options["min_tokens"] = options.pop("min_new_tokens")
    assert ours(llm, BATCH, **options) == expected
    assert len({tuple(ids) for ids in expected}) == len(BATCH)
    assert name == "plain" or expected != theirs(model, BATCH)


DRAWS = [
    {"temperature": 0.8, "top_k": 5},
    {"temperature": 2.5, "top_p": 0.6, "repetition_penalty": 1.3},
    {"temperature": 3.0, "top_k": 12, "min_p": 0.05, "typical_p": 0.9, "no_repeat_ngram_size": 1},
]


@pytest.mark.parametrize("options", DRAWS, ids=str)
def test_two_drawn_tokens_are_as_likely_as_transformers_has_them(model, llm, options):
    """Pairs that are drawn with 3000 seeds, against the products of the probabilities that `generate` draws with."""
    expected = {
        (first, second): p * q
        for first, p in chances(model, PROMPT, options).items()
        for second, q in chances(model, [*PROMPT, first], options).items()
    }
    assert sum(expected.values()) == pytest.approx(1)
    number = 3_000
    params = [SamplingParams(max_tokens=2, seed=seed, ignore_eos=True, **options) for seed in range(number)]
    drawn = Counter(output.token_ids for output in llm.generate([PROMPT] * number, params))
    assert drawn.keys() <= expected.keys()
    common = [pair for pair, p in expected.items() if p * number >= 5]
    assert len(common) > 4
    distance = sum((drawn[pair] - expected[pair] * number) ** 2 / (expected[pair] * number) for pair in common)
    assert distance < len(common) + 4 * math.sqrt(2 * len(common))  # chi-squared: its mean and four deviations


def chances(model, ids, options):
    """The distribution that transformers draws the next token from."""
    with torch.no_grad():
        result = model.generate(
            torch.tensor([ids]),
            max_new_tokens=1,
            do_sample=True,
            output_scores=True,
            return_dict_in_generate=True,
            **{"top_k": 0, **options},
        )
    p = torch.softmax(result.scores[0][0].double(), -1).numpy()
    return {int(id_): float(p[id_]) for id_ in np.flatnonzero(p)}


@pytest.mark.parametrize("processing", ["plain", "penalties"])
def test_assisted_answers_are_the_greedy_ones_in_both(model, folder, tmp_path, processing):
    """With a small model that drafts, and with the prompt as a draft."""
    assistant = save_random(tmp_path, 1, num_layers=1)
    prompt = BATCH[1] * 4
    options = SEVERAL[processing]
    (expected,) = theirs(model, [prompt], 24, **options)
    assert theirs(model, [prompt], 24, assistant_model=assistant, **options) == [expected]
    assert theirs(model, [prompt], 24, prompt_lookup_num_tokens=4, **options) == [expected]
    for settings in (
        {"draft_model": str(tmp_path), "speculation": "auto"},
        {"speculation": "prompt"},
        {"speculation": "tree"},
    ):
        with LLM(folder, kv_dtype="f32", **settings) as llm:
            assert ours(llm, [prompt, prompt], 24, **options) == [expected] * 2


def test_a_criterion_of_transformers_ends_the_answer_where_it_ends_theirs(model, llm, tokenizer):
    (plain,) = ours(llm, [PROMPT])
    text = tokenizer.decode(plain[7:9])
    for criteria in (
        [T.StopStringCriteria(tokenizer, [text, "never said"])],
        [T.generation.stopping_criteria.EosTokenCriteria([plain[11]])],
        [T.MaxLengthCriteria(len(PROMPT) + 6)],
        [T.MaxTimeCriteria(1.0, initial_timestamp=time.time() - 2)],  # its time is up
        [T.MaxTimeCriteria(3_600.0)],
        [T.MaxLengthCriteria(25), T.generation.stopping_criteria.EosTokenCriteria(plain[11])],
    ):
        listed = T.StoppingCriteriaList(criteria)
        expected = theirs(model, [PROMPT], stopping_criteria=listed)
        assert ours(llm, [PROMPT], stopping_criteria=listed) == expected
        assert ours(llm, [PROMPT], stopping_criteria=[listed]) == expected
        output = llm.generate(PROMPT, greedy(stopping_criteria=criteria))
        assert output.stop_reason in (*(type(each).__name__ for each in criteria), None)
        assert (output.stop_reason is None) == (len(expected[0]) == 30)


def test_a_criterion_may_return_a_plain_bool_and_one_that_needs_scores_says_so(llm):
    class Fifth(T.StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return input_ids.shape[1] == len(PROMPT) + 5

    assert len(llm.generate(PROMPT, greedy(stopping_criteria=[Fifth()])).token_ids) == 5
    needy = T.generation.stopping_criteria.ConfidenceCriteria(0.4)
    assert "ConfidenceCriteria failed: TypeError" in llm.generate(PROMPT, greedy(stopping_criteria=[needy])).stop_reason


def test_processors_of_transformers_are_taken_as_they_are(model, llm):
    listed = T.LogitsProcessorList(
        [
            T.RepetitionPenaltyLogitsProcessor(1.4),
            T.NoRepeatNGramLogitsProcessor(2),
            T.WatermarkLogitsProcessor(257, "cpu", bias=3.0),
            T.SuppressTokensLogitsProcessor([9, 40]),
        ]
    )
    expected = theirs(model, BATCH, logits_processor=listed)
    assert ours(llm, BATCH, logits_processors=listed) == expected
    assert ours(llm, BATCH, logits_processors=[listed]) == expected != theirs(model, BATCH)


@pytest.mark.parametrize("skip_prompt", [False, True])
def test_a_text_streamer_prints_what_it_prints_for_transformers(model, llm, tokenizer, capsys, skip_prompt):
    theirs(model, [PROMPT], streamer=T.TextStreamer(tokenizer, skip_prompt=skip_prompt))
    expected = capsys.readouterr().out
    output = llm.stream_to(T.TextStreamer(tokenizer, skip_prompt=skip_prompt), PROMPT, greedy())
    assert capsys.readouterr().out == expected
    assert len(expected) > len(output.text) / 2


def test_a_text_iterator_streamer_is_read_in_another_thread(model, llm, tokenizer):
    theirs_, ours_ = (T.TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60) for _ in range(2))
    theirs(model, [PROMPT], streamer=theirs_)
    pieces = []
    reader = threading.Thread(target=lambda: pieces.extend(ours_))
    reader.start()
    llm.stream_to(ours_, PROMPT, greedy())
    reader.join(60)
    assert pieces == list(theirs_)
    assert len(pieces) > 5


def test_whoever_reads_a_streamer_is_told_of_the_end_also_when_the_answer_fails(llm, tokenizer):
    class Failing:
        def process(self, logits, rows):
            raise RuntimeError("no")

    streamer = T.TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    with pytest.raises(InvalidRequest, match="Failing failed: RuntimeError: no"):
        llm.stream_to(streamer, PROMPT, greedy(logits_processors=[Failing()]))
    assert list(streamer) == [""]
