"""Contrastive search is the published one, on transformers' logits and states and through the engine."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from spolia.engine import LLM, ContrastiveParams, SamplingParams
from spolia.errors import InvalidRequest
from spolia.generation import NOT_WITH_CONTRASTIVE, ContrastiveSearch

from .toy import EOS, ToyExecutable, ToyModel, toy_answer, toy_engine, toy_logits

PROMPT = list(range(40))


def log_softmax(row):
    shifted = row - row.max()
    return shifted - np.float32(np.log(np.exp(shifted).sum(dtype=np.float64)))


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=60,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        initializer_range=0.4,
    )
    return LlamaForCausalLM(config).eval()


@torch.no_grad()
def naive(model, prompt, top_k, alpha, num_tokens):
    """Equation 5 of the paper, each candidate's text computed whole, in torch."""
    ids = list(prompt)
    for _ in range(num_tokens):
        p = torch.softmax(model(torch.tensor([ids])).logits[0, -1], -1)
        values, candidates = p.topk(top_k)
        scores = []
        for value, candidate in zip(values, candidates, strict=True):
            states = model(torch.tensor([[*ids, int(candidate)]]), output_hidden_states=True).hidden_states[-1][0]
            alike = torch.cosine_similarity(states[:-1], states[-1:], dim=-1).max()
            scores.append(float((1 - alpha) * value - alpha * alike))
        ids.append(int(candidates[int(np.argmax(scores))]))
    return ids[len(prompt) :]


@pytest.mark.parametrize(("top_k", "alpha"), [(4, 0.6), (8, 0.3), (5, 1.0), (3, 0.0), (1, 0.6)])
def test_answers_are_those_of_the_paper_on_transformers_model(model, top_k, alpha):
    prompt = [5, 6, 7, 8]

    def run(ids):
        with torch.no_grad():
            out = model(torch.tensor([ids]), output_hidden_states=True)
        return log_softmax(out.logits[0, -1].numpy()), out.hidden_states[-1][0].numpy()

    params = ContrastiveParams(top_k=top_k, penalty_alpha=alpha, max_tokens=12)
    search = ContrastiveSearch(params, run(prompt)[1])
    said = []
    for _ in range(12):
        ids = prompt + said
        candidates = search.propose(run(ids)[0])
        choice = search.choose(np.array([run([*ids, candidate])[1][-1] for candidate in candidates]))
        said.append(choice.options[0].token_id)
        for option in choice.options:
            score = (1 - alpha) * option.parts["probability"] - alpha * option.parts["likeness"]
            assert option.score == pytest.approx(score, abs=1e-6)
    assert said == naive(model, prompt, top_k, alpha, 12)


def naive_toy(params, final_ids, process=lambda log_probs, said: log_probs):
    def states(ids):
        return np.array([toy_logits(ids[:stop])[: ToyExecutable.hidden_size] for stop in range(1, len(ids) + 1)])

    search = ContrastiveSearch(params, states(PROMPT))
    said = []
    while len(said) < params.max_tokens and not (said and said[-1] in final_ids):
        ids = PROMPT + said
        candidates = search.propose(process(log_softmax(toy_logits(ids)), said))
        said.append(search.choose(np.array([states([*ids, each])[-1] for each in candidates])).options[0].token_id)
    return tuple(said)


@pytest.mark.parametrize("num_blocks", [9, 64])
def test_the_engine_finds_what_bare_logits_and_states_give(num_blocks):
    params = ContrastiveParams(top_k=5, penalty_alpha=0.4, max_tokens=14)
    with LLM(toy_engine(num_blocks=num_blocks, eos_token_ids=[EOS], max_batch_tokens=16)) as llm:
        found = llm.contrastive_search(PROMPT, params)
        assert llm.contrastive_search(PROMPT, params).token_ids == found.token_ids  # all of it cached now
    assert found.token_ids == naive_toy(params, [EOS])
    assert found.token_ids != tuple(toy_answer(PROMPT, 14))
    assert found.finish_reason == "length"


def test_a_final_id_ends_the_answer():
    params = ContrastiveParams(max_tokens=14)
    third = naive_toy(params, [])[2]
    with LLM(toy_engine()) as llm:
        found = llm.contrastive_search(PROMPT, ContrastiveParams(max_tokens=14, stop_token_ids=(third,)))
    assert found.token_ids[-1] == third
    assert len(found.token_ids) <= 3
    assert found.finish_reason == "stop"


def search(params):
    with LLM(replace(toy_engine(eos_token_ids=[EOS], num_blocks=200), model=ToyModel())) as llm:
        return llm.contrastive_search(PROMPT, params)


def test_processors_act_before_candidates_are_chosen_and_their_probabilities_are_of_what_is_left():
    """As in transformers: the softmax is that of the processed scores."""
    best = naive_toy(ContrastiveParams(max_tokens=3), [EOS])

    def process(log_probs, said):
        row = log_probs.copy()
        row[list(best)] = -np.inf
        for token_id in set(said):
            row[token_id] -= np.float32(1.5)
        return log_softmax(row)

    params = ContrastiveParams(
        max_tokens=12, processing=SamplingParams(suppress_tokens=best, presence_penalty=1.5, logprobs=2)
    )
    found = search(params)
    assert found.token_ids == naive_toy(params, [EOS], process)
    assert not set(best) & set(found.token_ids)
    for index, token in enumerate(found.logprobs):  # the model's own, whatever processors do
        row = log_softmax(toy_logits([*PROMPT, *found.token_ids[:index]]))
        assert token.token_id == found.token_ids[index]
        assert token.logprob == pytest.approx(float(row[token.token_id]), abs=1e-6)
        assert token.top[0][0] == int(row.argmax())


def test_a_stop_string_ends_the_answer_and_is_not_in_its_text():
    whole = search(ContrastiveParams(max_tokens=12, processing=SamplingParams(allowed_token_ids=range(97, 123))))
    assert len(whole.text) == 12
    stop = whole.text[3:5]
    asked = {"allowed_token_ids": range(97, 123), "stop": stop}
    cut = search(ContrastiveParams(max_tokens=12, processing=SamplingParams(**asked)))
    assert (cut.text, cut.finish_reason, cut.stop_reason) == (whole.text[: whole.text.find(stop)], "stop", stop)
    later = search(ContrastiveParams(max_tokens=12, processing=SamplingParams(min_tokens=9, **asked)))
    assert later.token_ids == whole.token_ids[: len(later.token_ids)]
    assert len(later.token_ids) > 9


def test_an_answer_has_its_form_and_ends_where_that_does():
    form = {"regex": "[a-f]{3}-[0-9]{2,4}"}
    found = search(ContrastiveParams(max_tokens=20, processing=SamplingParams(structured_outputs=form)))
    assert re.fullmatch("[a-f]{3}-[0-9]{2,4}", found.text)
    assert found.finish_reason == "stop"


def test_each_choice_is_explained_and_the_answer_is_what_it_is_without():
    plain = search(ContrastiveParams(max_tokens=6, top_k=5))
    assert plain.decisions is None
    assert plain.choices == ()
    noted = search(
        ContrastiveParams(
            max_tokens=6, top_k=5, processing=SamplingParams(explain_candidates=3, suppress_tokens=[EOS], seed=1)
        )
    )
    assert noted.token_ids == plain.token_ids
    assert noted.strategy == "contrastive search"
    for token_id, stages, choice in zip(noted.token_ids, noted.decisions, noted.choices, strict=True):
        assert [stage.name for stage in stages] == ["model", "suppress_tokens"]
        assert choice.options[0].token_id == token_id
        assert [option.is_kept for option in choice.options] == [True, False, False]
        scores = [option.score for option in choice.options]
        assert scores == sorted(scores, reverse=True)
        likely = dict(stages[-1].top)
        for option in choice.options:
            if option.token_id in likely:
                assert option.parts["probability"] == pytest.approx(likely[option.token_id], rel=1e-5)


def test_a_text_that_nothing_may_follow_is_refused_and_says_why():
    with pytest.raises(InvalidRequest, match="leaves no token"):
        search(ContrastiveParams(processing=SamplingParams(allowed_token_ids=[5], suppress_tokens=[5])))


@pytest.mark.parametrize(
    ("name", "value"), [("top_k", 0), ("penalty_alpha", 1.5), ("max_tokens", 0), ("stop_token_ids", [-1])]
)
def test_an_impossible_search_is_refused_by_name(name, value):
    with pytest.raises(InvalidRequest) as caught:
        ContrastiveParams(**{name: value})
    assert caught.value.param == name


@pytest.mark.parametrize("name", NOT_WITH_CONTRASTIVE)
def test_what_does_not_go_with_it_is_refused_by_name(name):
    values = {
        **dict.fromkeys(NOT_WITH_CONTRASTIVE, 0.5),
        "mirostat": 2,
        "filter_order": ["top_p"],
        "dola_layers": "low",
        "token_healing": True,
        "synthid": {"keys": [1]},
        "context_shift": {"sinks": 1},
        "prompt_logprobs": 1,
        "stopping_criteria": [len],
        "prediction": "x",
    }
    with pytest.raises(InvalidRequest) as caught:
        ContrastiveParams(processing=SamplingParams(max_tokens=4, **{name: values[name]}))
    assert caught.value.param == name
