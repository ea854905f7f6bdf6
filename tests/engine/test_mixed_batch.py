"""A batch in which every request does something else gives each the answer that it gets alone, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from spolia.engine import RequestOutput, SamplingParams
from spolia.errors import InvalidRequest

from .toy import EOS, VOCAB_SIZE, submit, toy_engine

NUM_REQUESTS = 32
BATCHES = settings(
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],  # not shrunk: the assertion names the request at fault
    suppress_health_check=list(HealthCheck),
)
ids = st.integers(0, VOCAB_SIZE - 1)
few_ids = st.lists(ids, min_size=1, max_size=6)

# Every parameter that changes a draw, with values at which it does something.
SETTINGS: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.sampled_from([0.0, 0.4, 1.0, 1.7]),
    "top_k": st.integers(0, 40),
    "top_p": st.floats(0.1, 1.0),
    "min_p": st.floats(0.0, 0.3),
    "seed": st.integers(0, 2**64 - 1),
    "min_tokens": st.integers(0, 4),
    "logprobs": st.integers(0, 5),
    "guidance_scale": st.sampled_from([1.0, 1.5, 3.0]),
    "dola_layers": st.sampled_from(["low", "high", (1, 3), (5,)]),
    "repetition_penalty": st.floats(0.5, 2.0),
    "presence_penalty": st.floats(-2.0, 2.0),
    "frequency_penalty": st.floats(-2.0, 2.0),
    "repeat_last_n": st.integers(-1, 20),
    "encoder_repetition_penalty": st.floats(0.5, 2.0),
    "no_repeat_ngram_size": st.integers(0, 4),
    "encoder_no_repeat_ngram_size": st.integers(0, 4),
    "dry_multiplier": st.floats(0.0, 3.0),
    "dry_allowed_length": st.integers(0, 3),
    "logit_bias": st.dictionaries(ids, st.floats(-10, 10), max_size=5),
    "sequence_bias": st.lists(st.tuples(few_ids, st.floats(-10, 10)), max_size=3),
    "bad_words": st.lists(st.text("abc ", min_size=1, max_size=3), max_size=3),
    "allowed_token_ids": st.lists(ids, min_size=20, max_size=200),
    "suppress_tokens": few_ids,
    "begin_suppress_tokens": few_ids,
    "min_length": st.integers(0, 20),
    "forced_bos_token_id": ids,
    "forced_eos_token_id": ids,
    "exponential_decay_length_penalty": st.tuples(st.integers(0, 4), st.floats(1.0, 3.0)),
    "typical_p": st.floats(0.1, 1.0),
    "epsilon_cutoff": st.floats(0.0, 0.05),
    "eta_cutoff": st.floats(0.0, 0.05),
    "top_h": st.floats(0.1, 1.0),
    "top_n_sigma": st.floats(0.5, 3.0),
    "xtc_probability": st.floats(0.0, 1.0),
    "xtc_threshold": st.floats(0.0, 0.5),
    "dynatemp_range": st.floats(0.0, 1.0),
    "mirostat": st.sampled_from([0, 2]),
    "mirostat_tau": st.floats(1.0, 6.0),
    "watermark": st.fixed_dictionaries({"key": st.integers(0, 99)}),
    "watermarking_config": st.sampled_from([{}, {"seeding_scheme": "selfhash", "greenlist_ratio": 0.5, "bias": 4.0}]),
    "synthid": st.fixed_dictionaries({"keys": st.lists(st.integers(0, 99), min_size=1, max_size=6)}),
    "remove_invalid_values": st.booleans(),
    "renormalize_logits": st.booleans(),
    "filter_order": st.permutations(["top_p", "temperature", "typical_p"]),
    "dry_base": st.floats(1.0, 3.0),
    "dry_penalty_last_n": st.integers(-1, 9),
    "dry_sequence_breakers": st.just(["a", "bc"]),
    "dynatemp_exponent": st.floats(0.5, 2.0),
    "mirostat_eta": st.floats(0.05, 0.5),
    "skip_special_tokens": st.booleans(),
    "exact_kv": st.booleans(),
    "truncate": st.sampled_from(["head", "middle"]),
    "truncate_prompt_tokens": st.integers(1, 12),
}


def only_even(_row, ids):
    return range(int(ids[-1]) % 2, VOCAB_SIZE, 2)


def said_enough(ids):
    return int(ids[-1]) % 5 == 0


# What HTTP does not have, or has under other names.
IN_PYTHON: dict[str, st.SearchStrategy[Any]] = {
    "prefix_allowed_tokens_fn": st.just(only_even),
    "stopping_criteria": st.just((said_enough,)),
    "structured_outputs": st.sampled_from([{"regex": "[ab]{3}|c+"}, {"choice": ["yes", "yellow", "no"]}]),
}
EVERYTHING = SETTINGS | IN_PYTHON


@st.composite
def requests(draw: st.DrawFn) -> tuple[list[int], SamplingParams]:
    prompt = draw(st.lists(st.integers(0, 3), min_size=1, max_size=20))  # few tokens, so that prompts share beginnings
    names = draw(st.lists(st.sampled_from(sorted(EVERYTHING)), max_size=6, unique=True))
    chosen = {name: draw(EVERYTHING[name]) for name in names}
    if "dola_layers" in chosen:
        chosen.pop("guidance_scale", None)
    if chosen.get("guidance_scale", 1.0) != 1.0:
        chosen["negative_prompt"] = draw(st.lists(ids, min_size=1, max_size=5))
    return prompt, SamplingParams(max_tokens=draw(st.integers(4, 8)), **({"seed": 0} | chosen))


def answers(batch: list[tuple[list[int], SamplingParams]], **options: Any) -> list[RequestOutput | str]:
    """By request: its output, or what it was refused with."""
    engine = toy_engine(eos_token_ids=[EOS], num_blocks=200, **options)
    indices = {submit(engine, prompt, params).request_id: index for index, (prompt, params) in enumerate(batch)}
    ended: dict[int, RequestOutput | str] = {}
    while engine.core.has_work:
        for request_id, delta in engine.core.step():
            if isinstance(delta, InvalidRequest):
                ended[indices[request_id]] = str(delta)
            elif delta.output is not None:
                ended[indices[request_id]] = delta.output
    return [ended[index] for index in range(len(batch))]


def essence(answer: RequestOutput | str) -> Any:
    """What must not depend on the batch: logprobs compare as floats do, bit for bit."""
    if isinstance(answer, str):
        return answer
    return answer.token_ids, answer.text, answer.logprobs, answer.finish_reason, answer.stop_reason


@pytest.mark.filterwarnings("ignore::hypothesis.errors.HypothesisWarning")
@settings(BATCHES, max_examples=40)
@given(st.lists(requests(), min_size=NUM_REQUESTS, max_size=NUM_REQUESTS), st.integers(8, 64))
def test_each_of_32_requests_is_answered_as_if_it_were_alone(batch, max_batch_tokens):
    together = answers(batch, max_sequences=8, max_batch_tokens=max_batch_tokens)
    for request, answer in zip(batch, together, strict=True):
        (alone,) = answers([request])
        assert essence(alone) == essence(answer), request


def test_a_request_that_forbids_every_token_fails_alone_and_says_why():
    impossible = SamplingParams(allowed_token_ids=[5], suppress_tokens=[5], max_tokens=4)
    fine = SamplingParams(temperature=0.0, max_tokens=4)
    refused, answered = answers([([1], impossible), ([1], fine)])
    assert "leaves no token" in refused
    assert answered.token_ids == answers([([1], fine)])[0].token_ids


@pytest.mark.parametrize("speculation", ["off", "auto"])
def test_explaining_decisions_changes_no_answer_and_names_each_stage(speculation):
    """A filter that the draw has built in is noted like any other; a processor by the parameter that asked for it."""
    kinds = [
        {"temperature": 0.0, "logit_bias": {5: 3.0}},
        {"temperature": 0.7, "top_k": 9, "top_p": 0.9},
        {"typical_p": 0.8, "suppress_tokens": [3, 4], "min_p": 0.01},
        {"structured_outputs": {"regex": "[ab]{6}"}, "logits_processors": [Quiet]},
    ]
    names = [
        ["model", "logit_bias"],
        ["model", "temperature", "top_k", "top_p"],
        ["model", "suppress_tokens", "min_p", "typical_p"],
        ["model", "Quiet", "structured_outputs"],
    ]
    plain = [([1, 2], SamplingParams(max_tokens=6, seed=7, **kind)) for kind in kinds]
    noted = [([1, 2], SamplingParams(max_tokens=6, seed=7, explain_candidates=2, **kind)) for kind in kinds]
    expected_ones = answers(plain + plain, speculation=speculation)
    noted_ones = answers(noted + noted, speculation=speculation)
    for expected, output, stages in zip(expected_ones, noted_ones, names * 2, strict=True):
        assert essence(output) == essence(expected)
        assert expected.decisions is None
        assert len(output.decisions) == len(output.token_ids)
        for token_id, decision in zip(output.token_ids, output.decisions, strict=True):
            assert [stage.name for stage in decision] == stages
            assert decision[0].num_left == VOCAB_SIZE
            assert all(len(stage.top) == min(2, stage.num_left) for stage in decision)
            left = [stage.num_left for stage in decision]
            assert left == sorted(left, reverse=True)
            if stages[-1] == "structured_outputs":
                assert left[-1] <= 2
            if stages[-1] == "logit_bias":
                assert decision[-1].top[0][0] == token_id


def test_what_the_model_says_is_explained_before_ends_that_must_not_come_yet():
    likeliest = answers([([1, 2], SamplingParams(temperature=0.0, max_tokens=1))])[0].token_ids[0]
    asked = {"temperature": 0.0, "max_tokens": 2, "min_tokens": 1, "stop_token_ids": [likeliest]}
    plain, noted = answers([([1, 2], SamplingParams(**asked)), ([1, 2], SamplingParams(**asked, explain_candidates=2))])
    assert essence(noted) == essence(plain)
    first, second = noted.decisions
    assert [stage.name for stage in first] == ["model", "min_tokens"]
    assert first[0].top[0][0] == likeliest
    assert first[1].top[0][0] == noted.token_ids[0] == first[0].top[1][0]
    assert first[1].num_left < first[0].num_left == VOCAB_SIZE
    assert [stage.name for stage in second] == ["model"]


class Quiet:
    """A processor that changes nothing."""

    def process(self, logits, rows):
        return


class Failing:
    """A user's processor with a mistake in it."""

    def process(self, logits, rows):
        if rows[0].num_generated_tokens == 2:
            raise IndexError("no such token")


def test_a_processor_that_raises_fails_its_own_request():
    failing = SamplingParams(logits_processors=[Failing()], max_tokens=4)
    fine = SamplingParams(temperature=0.0, max_tokens=4)
    refused, answered = answers([([1], failing), ([1], fine)])
    assert refused == "after 2 tokens of the answer: Failing failed: IndexError: no such token"
    assert answered.token_ids == answers([([1], fine)])[0].token_ids


def test_logprobs_are_the_models_own_whatever_the_processors_do():
    plain = answers([([1, 2], SamplingParams(temperature=0.0, max_tokens=1, logprobs=20))])[0]
    second_id, second = plain.logprobs[0].top[1]
    biased = SamplingParams(temperature=0.0, max_tokens=1, logprobs=20, logit_bias={second_id: 100})
    (entry,) = answers([([1, 2], biased)])[0].logprobs
    assert entry.token_id == second_id
    assert entry.logprob == second
    assert entry.top == plain.logprobs[0].top
