"""`spolia sim` and `spolia serve --record`."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import httpx
import pytest

from server.process import server_process
from spolia.cli.sim import parse_tokens
from spolia.errors import InvalidRequest
from spolia.sim import load_trace
from spolia.sim.chart import curve_text

from .traces import session_lines, write


def sim(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "spolia", "sim", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_sim_prints_figures_a_table_a_curve_and_draws_it(tmp_path):
    path = write(tmp_path / "agents.jsonl", session_lines(20))
    png = tmp_path / "curve.png"
    done = sim(path, "--policy", "lru,lifecycle", "--sizes", "8k,64k", "--png", png)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["size_tokens"] == [8_000, 64_000]
    assert set(figures["hit_percent"]) == {"lru", "lifecycle"}
    assert figures["bound_percent"][0] >= figures["hit_percent"]["lifecycle"][0]
    assert "no policy can pass" in done.stderr
    assert "100% |" in done.stderr
    assert png.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.jsonl"], "cannot be read"),
        (["{trace}", "--policy", "mru"], "there are lru"),
        (["{trace}", "--sizes", "5G"], "'5G' is no size"),
        (["{trace}", "--sizes", "10"], "at least 1"),
        (["{trace}", "--policy", "lru", "--png", "/no/such/folder/x.png"], "cannot be written"),
    ],
)
def test_what_is_impossible_is_refused_in_words(tmp_path, arguments, message):
    path = write(tmp_path / "agents.jsonl", session_lines(2))
    done = sim(*(str(argument).format(trace=path) for argument in arguments))
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("text", "tokens"), [("4096", 4096), ("64k", 64_000), ("1.5M", 1_500_000)])
def test_sizes_are_tokens(text, tokens):
    assert parse_tokens(text) == tokens


def test_no_tokens_are_no_size():
    with pytest.raises(InvalidRequest):
        parse_tokens("0")


def test_the_curve_falls_from_left_to_right():
    text = curve_text([1_000, 10_000], {"lru": [0.0, 1.0]}, [0.5, 1.0], width=20, height=5)
    rows = [line.partition("|")[2] for line in text.splitlines()[:5]]
    assert rows[0].startswith("o")
    assert rows[-1].rstrip().endswith("o")
    assert ".." in rows[2]


def test_a_served_model_records_its_requests(smollm2_path, tmp_path):
    path = tmp_path / "trace.jsonl"
    with server_process(smollm2_path, "--record", path, "--kv-memory", "64MiB", "--max-context", "512") as process:
        process.await_ready()
        prompt = "The capital of France is"
        for _ in range(2):
            body = {"prompt": prompt, "max_tokens": 3, "temperature": 0}
            assert httpx.post(f"{process.url}/v1/completions", json=body, timeout=60).status_code == 200
        process.signal(signal.SIGTERM)
        assert process.wait() == 0
    first, second = load_trace(path).requests
    assert first.unit_ids.tolist() == second.unit_ids.tolist()
    assert 0 < first.num_input_tokens < len(first.unit_ids)
    assert prompt not in path.read_text()
