"""What people deploy with names only flags, keys and metrics that are there."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from server.harness import chatty_engine, serving
from spolia.cli.app import app
from spolia.server import read_keys

DEPLOY = Path(__file__).parents[1] / "deploy"


def test_every_metric_of_the_dashboard_is_exposed():
    dashboard = (DEPLOY / "grafana" / "spolia.json").read_text()
    used = set(re.findall(r"\bspolia_\w+", "".join(
        target["expr"] for panel in json.loads(dashboard)["panels"] for target in panel["targets"]
    )))  # fmt: skip
    engine = chatty_engine()
    with serving({"toy": engine}) as url:
        httpx.post(f"{url}/v1/completions", json={"prompt": "abc", "max_tokens": 3}).raise_for_status()
        exposed = set(re.findall(r"^(?:# TYPE )?(spolia_\w+)", httpx.get(f"{url}/metrics").text, re.MULTILINE))
    asyncio.run(engine.aclose())
    assert len(used) > 10
    assert used - exposed == set()


def test_how_long_kv_was_kept_and_came_back_is_told():
    engine = chatty_engine(num_blocks=8, max_context=100)
    with serving({"toy": engine}) as url:
        for prompt in ("a", "a", "b", "c"):
            body = {"prompt": prompt * 60, "max_tokens": 2}
            httpx.post(f"{url}/v1/completions", json=body).raise_for_status()
        samples = dict(line.rsplit(" ", 1) for line in httpx.get(f"{url}/metrics").text.splitlines() if line[0] != "#")
    asyncio.run(engine.aclose())
    evicted = float(samples['spolia_evicted_tokens_total{model="toy"}'])
    assert evicted > 0
    for name in ("spolia_kv_lifetime_seconds", "spolia_kv_idle_before_evict_seconds"):
        assert float(samples[f'{name}_count{{model="toy"}}']) == evicted
        assert float(samples[f'{name}_sum{{model="toy"}}']) > 0
    assert float(samples['spolia_kv_reuse_gap_seconds_count{model="toy"}']) >= 59
    assert float(samples['spolia_decode_seconds_count{model="toy"}']) == 4
    assert float(samples['spolia_prefill_seconds_count{model="toy"}']) == 4


def test_what_gateways_read_from_vllm_is_there_under_its_names():
    engine = chatty_engine()
    with serving({"toy": engine}) as url:
        for _ in range(2):
            httpx.post(f"{url}/v1/completions", json={"prompt": "a" * 33, "max_tokens": 2}).raise_for_status()
        samples = dict(line.rsplit(" ", 1) for line in httpx.get(f"{url}/metrics").text.splitlines() if line[0] != "#")
    asyncio.run(engine.aclose())
    names = {name.partition("{")[0]: float(value) for name, value in samples.items() if name.startswith("vllm:")}
    assert names == {
        "vllm:num_requests_running": 0,
        "vllm:num_requests_waiting": 0,
        "vllm:kv_cache_usage_perc": 0,
        "vllm:generation_tokens_total": 4,
        "vllm:num_preemptions_total": 0,
        "vllm:prefix_cache_queries_total": 66,
        "vllm:prefix_cache_hits_total": 32,
        "vllm:prompt_tokens_total": 66,
    }


def test_what_dashboards_read_from_sglang_is_there_under_its_names():
    engine = chatty_engine()
    with serving({"toy": engine}) as url:
        for _ in range(2):
            httpx.post(f"{url}/v1/completions", json={"prompt": "a" * 33, "max_tokens": 2}).raise_for_status()
        lines = [line for line in httpx.get(f"{url}/metrics").text.splitlines() if line.startswith("sglang:")]
    asyncio.run(engine.aclose())
    samples = {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}
    assert samples == {
        f'sglang:{name}{{model_name="toy"}}': value
        for name, value in {
            "num_running_reqs": 0,
            "num_queue_reqs": 0,
            "num_used_tokens": 0,
            "token_usage": 0,
            "cache_hit_rate": 32 / 66,
            "prompt_tokens_total": 66,
            "generation_tokens_total": 4,
            "cached_tokens_total": 32,
        }.items()
    }


def test_evictions_are_counted():
    engine = chatty_engine(num_blocks=8, max_context=100)
    with serving({"toy": engine}) as url:
        for prompt in ("a", "b", "c"):
            body = {"prompt": prompt * 60, "max_tokens": 2}
            httpx.post(f"{url}/v1/completions", json=body).raise_for_status()
        samples = dict(line.rsplit(" ", 1) for line in httpx.get(f"{url}/metrics").text.splitlines() if line[0] != "#")
    asyncio.run(engine.aclose())
    assert float(samples['spolia_evictions_total{model="toy"}']) >= 4
    assert float(samples['spolia_prefix_cache_queries_total{model="toy"}']) == 180
    missed = sum(
        float(value) for name, value in samples.items() if name.startswith("spolia_missed_prompt_tokens_total")
    )
    assert missed + float(samples['spolia_prefix_cache_hits_total{model="toy"}']) == 180


def test_the_example_of_a_key_file_is_one():
    assert [key.tenant for key in read_keys(DEPLOY / "keys.example.toml")] == ["alice", "operator"]


def test_the_container_is_set_by_variables_that_are_settings(monkeypatch: pytest.MonkeyPatch):
    said = (DEPLOY / "Containerfile").read_text()
    (line,) = re.findall(r"^ENV (.*)$", said, re.MULTILINE)
    variables = dict(pair.split("=", 1) for pair in line.split())
    assert set(variables) == {"SPOLIA_CACHE", "SPOLIA_KV_DISK", "SPOLIA_HOST", "SPOLIA_MODELS", "SPOLIA_LOG_FORMAT"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    shown = CliRunner().invoke(app, ["config", "show", "--json"], catch_exceptions=False)
    origins = [setting["from"] for setting in json.loads(shown.stdout).values()]
    assert {origin.removeprefix("environment ") for origin in origins} == {*variables, "default"} - {"SPOLIA_CACHE"}
    assert json.loads(re.findall(r"^ENTRYPOINT (.*)$", said, re.MULTILINE)[0]) == ["spolia"]
    assert json.loads(re.findall(r"^CMD (.*)$", said, re.MULTILINE)[0]) == ["serve"]


def test_the_containers_health_check_tells_health():
    said = (DEPLOY / "Containerfile").read_text()
    command = re.search(r"^HEALTHCHECK .*?CMD ((?:.*\\\n)*.*)$", said, re.MULTILINE)
    assert command is not None
    words = shlex.split(command[1].replace("\\\n", "").replace("python", sys.executable, 1))
    engine = chatty_engine()
    loading: Future[Any] = Future()
    with serving({"toy": loading}) as url:
        environment = {**os.environ, "SPOLIA_PORT": url.rpartition(":")[2]}
        for outcome in (1, 0):
            assert subprocess.run(words, env=environment, capture_output=True, check=False).returncode == outcome
            if outcome:
                loading.set_result(engine)
    asyncio.run(engine.aclose())


def test_the_unit_is_one_that_systemd_takes(tmp_path: Path):
    unit = (DEPLOY / "spolia.service").read_text()
    assert "ExecStart=/opt/spolia/bin/spolia serve " in unit
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    copy = tmp_path / "spolia.service"
    copy.write_text(unit.replace("/opt/spolia/bin/spolia", "/bin/true"))
    said = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, check=False).stderr
    assert "spolia.service" not in said
