"""DoLa is the published one on transformers' model, and through the engine in any batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from models.tiny import write_tokenizer
from spolia.engine import LLM, SamplingParams
from spolia.errors import InvalidRequest
from spolia.generation import Depth, History
from spolia.generation.processors.dola import Dola

from .toy import EOS, ToyExecutable, run, submit, toy_answer, toy_engine, toy_logits

PROMPT = list(range(40))


def published(last, early):
    """Logits of one token, `[vocab]` and `[num_layers, vocab]`: equations 1 to 4 of the paper, in double precision.

    As in transformers the divergences are those of the average from each of the two.
    """
    last, early = torch.as_tensor(last).double(), torch.as_tensor(early).double()
    divergences = []
    for one in early:
        average = 0.5 * (last.softmax(-1) + one.softmax(-1))
        both = [F.kl_div(x.log_softmax(-1), average, reduction="sum") for x in (last, one)]
        divergences.append(0.5 * (both[0] + both[1]))
    base = early[int(torch.stack(divergences).argmax())].log_softmax(-1)
    scores = last.log_softmax(-1)
    unlikely = scores < scores.max() + np.log(0.1)
    base[unlikely], scores[unlikely] = -1e-3, -torch.inf
    return (scores - base).numpy()


def naive_toy(prompt, layers, num_tokens):
    said = []
    for _ in range(num_tokens):
        last = toy_logits(prompt + said)
        hidden = [np.roll(last[: ToyExecutable.hidden_size], layer + 1) for layer in layers]
        early = np.empty((len(layers), len(last)), np.float32)
        ToyExecutable().head(np.array(hidden), early)
        said.append(int(published(last, early).argmax()))
    return tuple(said)


@pytest.mark.parametrize("num_layers", [1, 2, 5])
def test_a_row_is_that_of_the_published_formula(num_layers):
    rng = np.random.default_rng(num_layers)
    for _ in range(20):
        last, *early = rng.standard_normal((num_layers + 1, 300)).astype(np.float32) * 4
        early = np.array(early)
        dola = Dola(tuple(range(num_layers)), Depth(8, has_tied_head=False))
        dola.take(early)
        row = last[None].copy()
        dola.process(row, [History.of([1], [], vocab_size=300)])
        np.testing.assert_allclose(row[0], published(last, early), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "num_layers", "is_tied", "expected"),
    [
        ("low", 32, False, range(0, 16, 2)),
        ("low", 32, True, range(2, 16, 2)),
        ("high", 32, True, range(16, 32, 2)),
        ("low", 48, False, range(0, 20, 2)),
        ("high", 48, False, range(28, 48, 2)),
        ("low", 2, True, [1]),
        ("low", 1, True, [0]),
        ("low", 4, True, [2]),
        ("low", 3, True, [2]),
        ((3, 1), 4, True, [3, 1]),
    ],
)
def test_named_layers_are_those_of_transformers(name, num_layers, is_tied, expected):
    assert Dola(name, Depth(num_layers, is_tied)).layers == tuple(expected)


@pytest.mark.parametrize("tied", [False, True])
def test_answers_are_those_of_the_formula_on_transformers_model(tmp_path, tied):
    """The whole way: prompts in pieces, layers out of the native step, the head once more."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=258,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=6,
        num_attention_heads=4,
        initializer_range=0.3,
        tie_word_embeddings=tied,
        eos_token_id=257,
        max_position_embeddings=256,
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    layers = {"low": [2] if tied else [0, 2], "high": [3, 5], (1, 4): [1, 4]}
    with LLM(tmp_path, kv_dtype="f32", max_batch_tokens=32, max_sequences=4) as llm:
        for named, numbers in layers.items():
            ids = list(PROMPT)
            for _ in range(8):
                with torch.no_grad():
                    out = model(torch.tensor([ids]), output_hidden_states=True)
                    early = [model.lm_head(out.hidden_states[layer][0, -1]) for layer in numbers]
                ids.append(int(published(out.logits[0, -1], torch.stack(early)).argmax()))
            params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, dola_layers=named)
            assert llm.generate(PROMPT, params).token_ids == tuple(ids[len(PROMPT) :]), named


@pytest.mark.parametrize("speculation", ["off", "auto"])
@pytest.mark.parametrize(("num_blocks", "max_batch_tokens"), [(90, 32), (17, 8)])
def test_in_a_crowded_batch_answers_are_those_of_bare_logits(num_blocks, max_batch_tokens, speculation):
    """Prompts come in pieces, sequences are preempted, and others contrast other layers, or none."""
    engine = toy_engine(num_blocks=num_blocks, max_batch_tokens=max_batch_tokens, speculation=speculation)
    expected = {}
    for index in range(9):
        prompt, layers = PROMPT[index:], ((), (1, 3), (0, 2, 4), (5,))[index % 4]
        params = SamplingParams(
            temperature=0.0, max_tokens=50, ignore_eos=True, dola_layers=layers or None, prediction=[1, 2, 3]
        )
        request = submit(engine, prompt, params)
        if layers:
            expected[request.request_id] = naive_toy(prompt, layers, 50)
        else:
            expected[request.request_id] = tuple(toy_answer(prompt, 50))
    outputs = run(engine)
    assert {id_: output.token_ids for id_, output in outputs.items()} == expected
    if num_blocks < 90:
        assert engine.core.stats.counters.num_preemptions > 0


def test_log_probabilities_stay_the_models_own_and_the_stage_is_explained():
    engine = toy_engine(eos_token_ids=[EOS])
    params = SamplingParams(temperature=0.0, max_tokens=3, dola_layers="high", logprobs=2, explain_candidates=3)
    request = submit(engine, PROMPT, params)
    output = run(engine)[request.request_id]
    row = toy_logits(PROMPT)
    log_probs = row - row.max() - np.log(np.exp(row - row.max()).sum())
    assert output.logprobs[0].logprob == pytest.approx(log_probs[output.token_ids[0]], abs=1e-5)
    model, dola = output.decisions[0]
    assert (model.name, dola.name) == ("model", "dola_layers")
    assert dola.num_left < model.num_left
    assert dola.top[0][0] == output.token_ids[0]
    assert [one["layer"] for one in dola.told["divergences"]] == [3, 5]
    assert dola.told["layer"] == max(dola.told["divergences"], key=lambda one: one["divergence"])["layer"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dola_layers": "middle"}, "'low', 'high' or a list"),
        ({"dola_layers": []}, "at least one"),
        ({"dola_layers": [-1]}, "from 0"),
        ({"dola_layers": [6]}, "0 to 5"),
        ({"dola_layers": "low", "guidance_scale": 2.0}, "guidance_scale"),
    ],
)
def test_layers_that_cannot_be_contrasted_are_refused(fields, message):
    with pytest.raises(InvalidRequest, match=message) as caught:
        submit(toy_engine(), PROMPT, SamplingParams(**fields))
    assert caught.value.param == "dola_layers"
