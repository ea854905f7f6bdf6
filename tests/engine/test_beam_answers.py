"""Beam search through the engine: the same beams as on bare logits, sharing blocks."""

from __future__ import annotations

import json
import warnings

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from models.tiny import write_tokenizer
from spolia.engine import LLM, BeamParams, SamplingParams
from spolia.errors import InvalidRequest
from spolia.generation import BeamSearch

from .toy import EOS, toy_engine, toy_logits

PROMPT = list(range(40))


def naive(params, final_ids):
    search = BeamSearch(params, final_ids)
    while not search.is_over:
        rows = []
        for beam in search.running:
            x = toy_logits(PROMPT + list(beam.token_ids))
            shifted = x - x.max()
            rows.append(shifted - np.float32(np.log(np.exp(shifted).sum(dtype=np.float64))))
        search.advance(np.array(rows))
    return search.answers


@pytest.mark.parametrize("num_blocks", [12, 64])
@pytest.mark.parametrize("params", [BeamParams(num_beams=4, max_tokens=20), BeamParams(num_beams=7, max_tokens=9)])
def test_beams_are_those_of_the_bare_logits(params, num_blocks):
    engine = toy_engine(eos_token_ids=[EOS], num_blocks=num_blocks)
    with LLM(engine) as llm:
        found = llm.beam_search(PROMPT, params)
    expected = naive(params, [EOS])
    assert [(beam.token_ids, beam.score) for beam in found] == [beam[:2] for beam in expected]
    assert found[0].text == bytes(t for t in found[0].token_ids if t < 256).decode(errors="replace")


def test_beams_share_what_they_have_in_common():
    engine = toy_engine(num_blocks=64)
    with LLM(engine) as llm:
        llm.beam_search(PROMPT, BeamParams(num_beams=4, max_tokens=20))
        num_computed = llm.stats.counters.num_computed_tokens
    assert num_computed <= len(PROMPT) + 4 * 20  # a token a beam and step


def test_a_search_that_does_not_fit_is_refused():
    with LLM(toy_engine(max_context=64)) as llm, pytest.raises(InvalidRequest, match="context"):
        llm.beam_search([1] * 60, BeamParams(max_tokens=10))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A model of transformers, and the same one here."""
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=258,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.25,
        eos_token_id=256,
        pad_token_id=0,
        max_position_embeddings=256,
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    write_tokenizer(folder)
    with LLM(folder, kv_dtype="f32", max_batch_tokens=64) as llm:
        yield model, llm


PROCESSORS = {
    "repetition_penalty": ({"repetition_penalty": 1.8}, {}),
    "no_repeat_ngram_size": ({"no_repeat_ngram_size": 1}, {}),
    "bad_words_ids": ({"bad_words_ids": [[10, 232], [238, 242]]}, {}),
    "suppress_tokens": ({"suppress_tokens": list(range(0, 200, 3))}, {}),
    "begin_suppress_tokens": ({"begin_suppress_tokens": [10]}, {}),
    "forced_eos_token_id": ({"forced_eos_token_id": 256}, {}),
    "exponential_decay_length_penalty": ({"exponential_decay_length_penalty": (3, 1.5)}, {}),
    "min_new_tokens": (
        {"min_tokens": 6, "logit_bias": {256: 6.0}},
        {"min_new_tokens": 6, "sequence_bias": {(256,): 6.0}},
    ),
    "renormalize_logits": ({"suppress_tokens": [232, 10], "renormalize_logits": True}, {}),
    "encoder_repetition_penalty": ({"encoder_repetition_penalty": 3.0}, {}),
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_processors_act_on_beams_as_in_transformers(tiny, name):
    model, llm = tiny
    ours, theirs = PROCESSORS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = model.generate(
            torch.tensor([PROMPT]),
            attention_mask=torch.ones(1, len(PROMPT)),
            num_beams=4,
            num_return_sequences=4,
            max_new_tokens=10,
            do_sample=False,
            output_scores=True,
            return_dict_in_generate=True,
            **(theirs or ours),
        )
    found = llm.beam_search(PROMPT, BeamParams(num_beams=4, max_tokens=10, processing=SamplingParams(**ours)))
    plain = llm.beam_search(PROMPT, BeamParams(num_beams=4, max_tokens=10))
    assert [beam.token_ids for beam in found] != [beam.token_ids for beam in plain]
    for beam, ids, score in zip(found, expected.sequences, expected.sequences_scores, strict=True):
        assert list(beam.token_ids) == ids[len(PROMPT) : len(PROMPT) + len(beam.token_ids)].tolist()
        assert beam.score == pytest.approx(score.item(), rel=1e-3)


def test_a_stop_string_ends_beams_as_in_transformers(tiny):
    """The text is cut before it, and the beam competes as what it was."""
    model, llm = tiny
    (first, *_) = llm.beam_search(PROMPT, BeamParams(num_beams=4, max_tokens=10))
    pieces = [llm.model.tokenizer.token_bytes(token_id) for token_id in first.token_ids]
    stop = next(piece.decode() for piece in pieces[2:] if piece.isascii())

    class Stop:
        """transformers' own criterion needs a tokenizer of its own."""

        def __call__(self, input_ids, scores, **_):
            texts = [b"".join(map(llm.model.tokenizer.token_bytes, row[len(PROMPT) :])) for row in input_ids.tolist()]
            return torch.tensor([stop in text.decode(errors="replace") for text in texts])

    expected = model.generate(
        torch.tensor([PROMPT]),
        attention_mask=torch.ones(1, len(PROMPT)),
        num_beams=4,
        num_return_sequences=4,
        max_new_tokens=10,
        do_sample=False,
        stopping_criteria=[Stop()],
        output_scores=True,
        return_dict_in_generate=True,
    )
    params = BeamParams(num_beams=4, max_tokens=10, processing=SamplingParams(stop=stop))
    found = llm.beam_search(PROMPT, params)
    assert any(beam.stop_reason == stop for beam in found)
    for beam, ids, score in zip(found, expected.sequences, expected.sequences_scores, strict=True):
        assert list(beam.token_ids) == ids[len(PROMPT) : len(PROMPT) + len(beam.token_ids)].tolist()
        assert beam.score == pytest.approx(score.item(), rel=1e-3)
        assert stop not in beam.text
        assert (beam.finish_reason == "stop") == (beam.stop_reason is not None or beam.token_ids[-1] == 256)


def test_every_beam_has_the_form_and_the_best_is_the_best_that_has():
    """Few enough texts have the form that all can be scored."""
    with LLM(toy_engine(eos_token_ids=[EOS], num_blocks=64)) as llm:
        form = {"regex": "[ab]{3}|[xy]{2}"}
        params = BeamParams(num_beams=12, max_tokens=8, processing=SamplingParams(structured_outputs=form))
        found = llm.beam_search(PROMPT, params)

    def score(text):
        ids = PROMPT + list(text.encode())
        total = 0.0
        for stop in range(len(PROMPT), len(ids)):
            row = toy_logits(ids[:stop]).astype(float)
            total += row[ids[stop]] - row.max() - np.log(np.exp(row - row.max()).sum())
        return total / (len(ids) - len(PROMPT))

    all_texts = [a + b + c for a in "ab" for b in "ab" for c in "ab"] + [a + b for a in "xy" for b in "xy"]
    expected = sorted(all_texts, key=score, reverse=True)
    assert [beam.text for beam in found] == expected
    assert [beam.score for beam in found] == pytest.approx([score(text) for text in expected], rel=1e-5)
    assert all(beam.finish_reason == "stop" for beam in found)


def test_beams_of_a_schema_are_documents():
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"enum": [1, 2]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    with LLM(toy_engine(eos_token_ids=[EOS], num_blocks=64)) as llm:
        options = SamplingParams(structured_outputs={"json": schema, "whitespace_pattern": "( )?"})
        found = llm.beam_search(PROMPT, BeamParams(num_beams=4, max_tokens=40, processing=options))
    assert len({beam.token_ids for beam in found}) == 4
    for beam in found:
        assert set(json.loads(beam.text)) == {"a", "b"}


def test_log_probabilities_of_beams_are_the_models_own():
    with LLM(toy_engine(eos_token_ids=[EOS], num_blocks=64)) as llm:
        options = SamplingParams(logprobs=2, suppress_tokens=[1, 2, 3], temperature=0.0)
        found = llm.beam_search(PROMPT, BeamParams(num_beams=3, max_tokens=6, processing=options))
        for beam in found:
            assert beam.score == pytest.approx(sum(token.logprob for token in beam.logprobs) / len(beam.token_ids))
            for index, token in enumerate(beam.logprobs):
                alone = llm.generate(
                    PROMPT + list(beam.token_ids[:index]), SamplingParams(max_tokens=1, temperature=0.0, logprobs=2)
                )
                assert token.token_id == beam.token_ids[index]
                assert [id_ for id_, _ in token.top] == [id_ for id_, _ in alone.logprobs[0].top]
                assert token.top[0][1] == pytest.approx(alone.logprobs[0].top[0][1], abs=1e-5)


def test_beams_that_are_forbidden_every_token_are_refused():
    options = SamplingParams(allowed_token_ids=[5], suppress_tokens=[5])
    with LLM(toy_engine()) as llm, pytest.raises(InvalidRequest, match="no token for any beam"):
        llm.beam_search(PROMPT, BeamParams(processing=options))


@pytest.mark.parametrize(
    "kind",
    [
        {"processing": {"presence_penalty": 1.0}},
        {"sampling": {"temperature": 0.8, "top_k": 30, "seed": 4}},
        {"processing": {"structured_outputs": {"regex": "[ab]{3}c*"}}},
        {"processing": {}, "num_beam_groups": 2, "diversity_penalty": 2.0},
    ],
    ids=str,
)
def test_explaining_beams_changes_none_and_says_what_each_token_competed_with(kind):
    def search(**more):
        made = {
            name: SamplingParams(**value, **more) if isinstance(value, dict) else value for name, value in kind.items()
        }
        with LLM(toy_engine(eos_token_ids=[EOS], num_blocks=200)) as llm:
            return llm.beam_search(PROMPT, BeamParams(num_beams=4, max_tokens=6, length_penalty=0.0, **made))

    plain, noted = search(), search(explain_candidates=20)
    assert [(beam.token_ids, beam.score) for beam in noted] == [(beam.token_ids, beam.score) for beam in plain]
    assert all(beam.decisions is None and beam.choices == () for beam in plain)
    names = {"presence_penalty": ["presence_frequency_penalty"], "temperature": ["temperature", "top_k"]}
    asked = next(iter(kind.get("processing", kind.get("sampling", {}))), "")
    stages = ["model", *names.get(asked, [asked] if asked else [])]
    for beam in noted:
        before = 0.0
        for token_id, decision, choice in zip(beam.token_ids, beam.decisions, beam.choices, strict=True):
            assert [stage.name for stage in decision] == stages
            taken = choice.options[choice.rank]
            assert (taken.token_id, taken.score, taken.is_kept) == (token_id, choice.score, True)
            assert taken.parts["before"] == pytest.approx(before, abs=1e-5)
            assert all(0 <= option.parts["beam"] < 4 // kind.get("num_beam_groups", 1) for option in choice.options)
            before = taken.score
        assert before == pytest.approx(beam.score, abs=1e-5)  # no length penalty


def test_a_text_that_two_groups_found_is_explained_of_each():
    """With a penalty too small to part them, both groups find the same texts, and the second pays for each token."""
    options = SamplingParams(explain_candidates=4)
    with LLM(toy_engine(eos_token_ids=[EOS], num_blocks=200)) as llm:
        params = BeamParams(
            num_beams=4,
            num_beam_groups=2,
            diversity_penalty=1e-3,
            max_tokens=6,
            length_penalty=0.0,
            processing=options,
        )
        found = llm.beam_search(PROMPT, params)
    by_group = [{beam.token_ids: beam for beam in found if beam.group == group} for group in range(2)]
    shared = by_group[0].keys() & by_group[1].keys()
    assert shared
    for token_ids in shared:
        first, second = (group[token_ids] for group in by_group)
        penalties = []
        for mine, theirs in zip(first.choices, second.choices, strict=True):
            taken = theirs.options[theirs.rank]
            assert mine.options[mine.rank].parts["penalty"] == 0.0
            assert taken.token_id == mine.options[mine.rank].token_id
            penalties.append(taken.parts["penalty"])
            assert theirs.score == pytest.approx(mine.score - sum(penalties), abs=1e-5)
        assert sum(penalties) > 0
        assert first.score - second.score == pytest.approx(sum(penalties), abs=1e-5)
