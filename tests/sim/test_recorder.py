"""Recording: what an engine did, replayed, is what it did."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from engine.toy import answer, toy_engine
from spolia.generation import SamplingParams
from spolia.kvcache import Outcome
from spolia.sim import Recorder, TraceWriter, load_trace, replay


def record(recorder: Recorder, prompt: list[int], output: list[int], namespace: bytes = b"ns") -> list[list[int]]:
    return recorder.line(
        start_s=0, duration_s=0.5, namespace=namespace, prompt_ids=prompt, output_ids=output, outcome=Outcome.TURN
    )["runs"]


def test_the_same_beginning_has_the_same_numbers_and_a_new_one_new_ones():
    recorder = Recorder()
    assert record(recorder, [5, 6, 7], [8, 9]) == [[0, 4]]  # the last token of the answer has no KV
    assert record(recorder, [5, 6, 7, 8, 9], [1]) == [[0, 5]]
    assert record(recorder, [5, 6, 8], [9]) == [[0, 2], [5, 1]]
    assert record(recorder, [5, 6, 7], [], b"other") == [[6, 3]]


def test_numbers_tell_nothing_of_the_tokens():
    runs = [record(Recorder(), [rng.randrange(50_000) for _ in range(99)], [0]) for rng in map(random.Random, range(3))]
    assert runs == [[[0, 99]]] * 3


def test_what_was_forgotten_counts_as_new():
    recorder = Recorder(memory_tokens=64)
    assert record(recorder, list(range(40)), []) == [[0, 40]]
    assert record(recorder, list(range(100, 160)), []) == [[40, 60]]
    assert record(recorder, list(range(40)), []) == [[0, 4], [100, 36]]
    assert record(recorder, list(range(1_000, 1_200)), [1]) == [[136, 64]]  # what it cannot hold is left out


def test_replaying_what_was_recorded_hits_what_was_hit(tmp_path):
    """An engine under pressure, and its trace at the engine's own size: the same hits, token for token."""
    rng = random.Random(1)
    engine = toy_engine(num_blocks=24)
    writer = TraceWriter(tmp_path / "trace.jsonl")
    talks: list[list[int]] = [[7] * 30]
    num_prompt = num_cached = 0
    for number in range(150):
        talk = rng.choice(talks[-8:]) + [rng.randrange(256) for _ in range(rng.randrange(1, 20))]
        if len(talk) > 200:
            talk = talks[0]
        params = SamplingParams(temperature=0, max_tokens=rng.randrange(1, 12))
        output = answer(engine, talk, params)
        talks.append([*talk, *output.token_ids])
        num_prompt += len(talk)
        num_cached += output.num_cached_tokens
        writer.write(
            start_s=number,
            duration_s=0.1,
            namespace=output.namespace,
            prompt_ids=output.prompt_token_ids,
            output_ids=output.token_ids,
            outcome=output.outcome,
        )
    writer.close()
    trace = load_trace(tmp_path / "trace.jsonl")
    assert trace.num_input_tokens == num_prompt
    assert 0.2 < num_cached / num_prompt < 0.95
    assert replay(trace, "lru", 24 * 16).hit_rate == pytest.approx(num_cached / num_prompt, abs=0.005)


def test_a_line_is_json_and_whole(tmp_path):
    writer = TraceWriter(tmp_path / "t.jsonl")
    request = {"start_s": 1.5, "duration_s": 0.25, "namespace": b"", "prompt_ids": (1, 2), "output_ids": (3,)}
    writer.write(**request, outcome=Outcome.TOOL_CALL)
    writer.close()
    (line,) = (tmp_path / "t.jsonl").read_text().splitlines()
    assert json.loads(line) == {
        "timestamp": 1500.0,
        "duration": 250.0,
        "input_length": 2,
        "output_length": 1,
        "block": 1,
        "tenant": 0,
        "stop_reason": "tool_call",
        "runs": [[0, 2]],
    }
    (request,) = load_trace(tmp_path / "t.jsonl").requests
    assert request.outcome is Outcome.TOOL_CALL
    assert request.unit_ids.dtype == np.int32
