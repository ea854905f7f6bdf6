"""Contrastive search is the published one, on transformers' logits and states and through the engine."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from spolia.engine import LLM, ContrastiveParams
from spolia.errors import InvalidRequest
from spolia.generation import ContrastiveSearch

from .toy import EOS, ToyExecutable, toy_answer, toy_engine, toy_logits

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
    search = ContrastiveSearch(params, [], run(prompt)[1])
    while not search.is_over:
        ids = prompt + search.token_ids
        candidates = search.propose(run(ids)[0])
        search.choose(np.array([run([*ids, candidate])[1][-1] for candidate in candidates]))
    assert search.token_ids == naive(model, prompt, top_k, alpha, 12)


def naive_toy(params, final_ids):
    def states(ids):
        return np.array([toy_logits(ids[:stop])[: ToyExecutable.hidden_size] for stop in range(1, len(ids) + 1)])

    search = ContrastiveSearch(params, final_ids, states(PROMPT))
    while not search.is_over:
        ids = PROMPT + search.token_ids
        candidates = search.propose(log_softmax(toy_logits(ids)))
        search.choose(np.array([states([*ids, candidate])[-1] for candidate in candidates]))
    return tuple(search.token_ids)


@pytest.mark.parametrize("num_blocks", [9, 64])
def test_the_engine_finds_what_bare_logits_and_states_give(num_blocks):
    params = ContrastiveParams(top_k=5, penalty_alpha=0.4, max_tokens=14)
    with LLM(toy_engine(num_blocks=num_blocks, eos_token_ids=[EOS], max_batch_tokens=16)) as llm:
        found = llm.contrastive_search(PROMPT, params)
        assert llm.contrastive_search(PROMPT, params) == found  # all of it cached now
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


@pytest.mark.parametrize(
    ("name", "value"), [("top_k", 0), ("penalty_alpha", 1.5), ("max_tokens", 0), ("stop_token_ids", [-1])]
)
def test_an_impossible_search_is_refused_by_name(name, value):
    with pytest.raises(InvalidRequest) as caught:
        ContrastiveParams(**{name: value})
    assert caught.value.param == name
