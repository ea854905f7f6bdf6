"""Reading traces."""

from __future__ import annotations

import pytest

from spolia.kvcache import Outcome
from spolia.sim import load_trace

from .traces import mooncake_lines, session_lines, write


def test_a_mooncake_trace_is_read_zipped_or_not(tmp_path):
    lines = mooncake_lines(20)
    for name in ("t.jsonl", "t.jsonl.gz"):
        trace = load_trace(write(tmp_path / name, lines))
        assert trace.unit_tokens == 512
        assert len(trace.requests) == 20
        assert trace.requests[3].unit_ids.tolist() == lines[3]["hash_ids"]
        assert trace.requests[3].time_s == pytest.approx(2.1)
        assert trace.num_input_tokens == sum(line["input_length"] for line in lines)


def test_sessions_share_their_system_prompt_and_nothing_else(tmp_path):
    trace = load_trace(write(tmp_path / "s.jsonl", session_lines(5)), spread_s=100)
    num_common = 1300 // 64
    firsts = [request.unit_ids for request in trace.requests if len(request.unit_ids) == 25]
    assert len(firsts) == 5
    assert all((ids[:num_common] == firsts[0][:num_common]).all() for ids in firsts)
    assert len({id_ for ids in firsts for id_ in ids[num_common:].tolist()}) == 5 * (25 - num_common)
    assert [request.time_s for request in trace.requests] == sorted(request.time_s for request in trace.requests)
    assert {request.outcome for request in trace.requests} == {Outcome.TOOL_CALL, Outcome.TURN}


def test_a_request_of_a_session_goes_on_from_the_one_before(tmp_path):
    (session,) = session_lines(1, seed=4)
    trace = load_trace(write(tmp_path / "s.jsonl", [session]))
    for earlier, later in zip(trace.requests, trace.requests[1:], strict=False):
        assert later.unit_ids[: len(earlier.unit_ids)].tolist() == earlier.unit_ids.tolist()


def test_distinct_tokens_are_counted_once_and_by_tenant(tmp_path):
    line = {"timestamp": 0, "duration": 1, "input_length": 3, "output_length": 1, "block": 1, "stop_reason": "turn"}
    lines = [
        line | {"tenant": tenant, "runs": runs}
        for tenant, runs in ((0, [[0, 3]]), (0, [[0, 2], [9, 1]]), (1, [[0, 3]]))
    ]
    assert load_trace(write(tmp_path / "t.jsonl", lines)).num_distinct_tokens == 4 + 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("{", "line 1 is not JSON"),
        ("[1]", "line 1 is no JSON object"),
        ('{"a": 1}', "none of hash_ids, requests and runs"),
        ('{"hash_ids": [1]}', "unlike its first: KeyError: 'timestamp'"),
        ('{"timestamp": 0, "input_length": 5, "hash_ids": [1]}\n{"timestamp": "x"', "line 2 is not JSON"),
        ('{"timestamp": 0, "input_length": 5, "hash_ids": [99999999999]}', "OverflowError"),
    ],
)
def test_what_is_no_trace_is_refused_with_its_line(tmp_path, text, message):
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_trace(path)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        load_trace(tmp_path / "none.jsonl")
