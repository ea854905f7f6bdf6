"""Guidance: a pair of sequences, in the batch of everybody else, draws what the two rows of logits say together."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_outputs import CausalLMOutputWithPast

from spolia.engine import SamplingParams
from spolia.errors import InvalidRequest
from spolia.generation import History
from spolia.generation.processors.guidance import Guidance

from .toy import EOS, answer, run, submit, toy_answer, toy_engine, toy_logits

PROMPT, NEGATIVE = list(range(40)), [7, 8, 9, 7]


def log_softmax(row):
    shifted = row - row.max()
    return shifted - np.float32(np.log(np.exp(shifted).sum(dtype=np.float64)))


def naive(prompt, negative, scale, num_tokens):
    """Greedy guidance on bare logits, token by token."""
    said = []
    for _ in range(num_tokens):
        with_, without = log_softmax(toy_logits(prompt + said)), log_softmax(toy_logits(negative + said))
        said.append(int(((with_ - without) * np.float32(scale) + without).argmax()))
    return tuple(said)


def test_the_rows_are_put_together_as_transformers_does():
    rng = np.random.default_rng(0)
    with_, without = (rng.standard_normal(300).astype(np.float32) * 3 for _ in range(2))

    def model(input_ids, **_):
        return CausalLMOutputWithPast(logits=torch.from_numpy(without)[None, None])

    theirs = transformers.UnbatchedClassifierFreeGuidanceLogitsProcessor(1.7, model, torch.tensor([[1]]))
    expected = theirs(torch.tensor([[1, 2]]), torch.from_numpy(with_.copy())[None]).numpy()
    ours = Guidance(1.7)
    ours.take(without)
    row = with_[None].copy()
    ours.process(row, [History.of([1], [], vocab_size=300)])
    np.testing.assert_allclose(row, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("speculation", ["off", "auto"])
@pytest.mark.parametrize(("num_blocks", "max_batch_tokens"), [(90, 32), (17, 8), (21, 12)])
def test_pairs_in_a_crowded_batch_answer_as_on_bare_logits(num_blocks, max_batch_tokens, speculation):
    """Prompts come in pieces, pairs are preempted, and plain requests run between them."""
    engine = toy_engine(num_blocks=num_blocks, max_batch_tokens=max_batch_tokens, speculation=speculation)
    expected = {}
    for index in range(9):
        prompt, negative, scale = PROMPT[index:], NEGATIVE * (1 + index % 3), 1.5 + index % 4
        if index % 3 == 2:
            request = submit(engine, prompt, SamplingParams(temperature=0.0, max_tokens=70))
            expected[request.request_id] = tuple(toy_answer(prompt, 70))
        else:
            params = SamplingParams(
                temperature=0.0, max_tokens=70, guidance_scale=scale, negative_prompt=negative, ignore_eos=True
            )
            request = submit(engine, prompt, params)
            expected[request.request_id] = naive(prompt, negative, scale, 70)
    outputs = run(engine)
    assert {id_: output.token_ids for id_, output in outputs.items()} == expected
    assert engine.core.stats.num_running == 0
    assert all(ledger.leased == 0 for ledger in engine.core.cache.ledger())
    if num_blocks < 90:
        assert engine.core.stats.counters.num_preemptions > 0


def test_without_a_negative_prompt_the_other_is_the_last_token():
    engine = toy_engine()
    request = submit(engine, PROMPT, SamplingParams(temperature=0.0, max_tokens=9, guidance_scale=2.0))
    assert run(engine)[request.request_id].token_ids == naive(PROMPT, PROMPT[-1:], 2.0, 9)


def test_drawn_answers_stop_report_and_explain_as_others_do():
    params = SamplingParams(
        seed=3,
        max_tokens=12,
        guidance_scale=1.5,
        negative_prompt="no",
        logprobs=1,
        prompt_logprobs=0,
        explain_candidates=1,
        repetition_penalty=1.1,
        stop_token_ids=[EOS],
    )
    outputs = []
    for num_neighbours in (0, 5):
        engine = toy_engine(max_batch_tokens=16)
        request = submit(engine, PROMPT, params)
        for index in range(num_neighbours):
            submit(engine, PROMPT[index:], SamplingParams(seed=index, max_tokens=9))
        outputs.append(run(engine)[request.request_id])
    alone, crowded = outputs
    assert (alone.token_ids, alone.logprobs, alone.prompt_logprobs) == (
        crowded.token_ids,
        crowded.logprobs,
        crowded.prompt_logprobs,
    )
    first = log_softmax(toy_logits(PROMPT))
    assert alone.logprobs[0].logprob == pytest.approx(float(first[alone.token_ids[0]]), rel=1e-5)  # the model's own
    assert [stage.name for stage in alone.decisions[0]] == ["model", "guidance_scale", "repetition_penalty"]
    other = log_softmax(toy_logits([*b"no"]))
    (without,) = alone.decisions[0][1].told["without"]
    assert without["token_id"] == int(other.argmax())
    assert without["probability"] == pytest.approx(float(np.exp(other.max())), rel=1e-5)


def test_a_pair_that_is_aborted_leaves_nothing_behind():
    engine = toy_engine(max_batch_tokens=16)
    request = submit(engine, PROMPT, SamplingParams(max_tokens=50, guidance_scale=2.0, negative_prompt=[1] * 90))
    for _ in range(4):
        engine.core.step()
    engine.core.abort(request.request_id)
    assert run(engine)[request.request_id].finish_reason == "abort"
    assert engine.core.stats.num_running == 0
    assert all(ledger.leased == 0 for ledger in engine.core.cache.ledger())


@pytest.mark.parametrize("negative", [NEGATIVE, [9] * 50, [9] * 63])
def test_an_answer_ends_where_the_context_of_either_prompt_does(negative):
    """And not a token sooner or later; without max_tokens it is as long as both have room for."""
    prompt = PROMPT[:10]
    most = 64 - max(len(prompt), len(negative))
    for max_tokens in (None, most):
        engine = toy_engine(max_context=64, num_blocks=40)
        params = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, guidance_scale=2.0, negative_prompt=negative, ignore_eos=True
        )
        output = answer(engine, prompt, params)
        assert output.token_ids == naive(prompt, negative, 2.0, most)
        assert output.finish_reason == "length"
        assert all(ledger.leased == 0 for ledger in engine.core.cache.ledger())
    with pytest.raises(InvalidRequest, match="64") as caught:
        submit(engine, prompt, replace(params, max_tokens=most + 1))
    assert caught.value.param == ("guidance_scale" if len(negative) > len(prompt) else "prompt")


def test_a_negative_prompt_that_fills_the_context_is_refused():
    engine = toy_engine(max_context=64)
    with pytest.raises(InvalidRequest, match="a context of 64") as caught:
        submit(engine, PROMPT[:10], SamplingParams(guidance_scale=2.0, negative_prompt=[9] * 64))
    assert caught.value.param == "guidance_scale"


@pytest.mark.parametrize(
    ("options", "engine", "param", "word"),
    [
        ({"negative_prompt": "x"}, {}, "negative_prompt", "guidance_scale is 1"),
        ({"guidance_scale": 2.0, "negative_prompt": ""}, {}, "negative_prompt", "not empty"),
        ({"guidance_scale": 2.0, "negative_prompt": [999]}, {}, "negative_prompt", "999"),
        ({"guidance_scale": 1000.0}, {}, "guidance_scale", "100"),
        ({"guidance_scale": 2.0}, {"max_sequences": 1}, "guidance_scale", "1 lanes"),
        ({"guidance_scale": 2.0, "max_tokens": 60}, {"num_blocks": 9}, "guidance_scale", "beside"),
    ],
)
def test_guidance_that_cannot_be_is_refused(options, engine, param, word):
    with pytest.raises(InvalidRequest, match=word) as caught:
        submit(toy_engine(**engine), PROMPT, SamplingParams(**{"max_tokens": 4, **options}))
    assert caught.value.param == param
