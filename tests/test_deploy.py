"""What people deploy with names only flags, keys and metrics that are there."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest

from server.harness import chatty_engine, serving
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
        exposed = set(re.findall(r"^(spolia_\w+)", httpx.get(f"{url}/metrics").text, re.MULTILINE))
    asyncio.run(engine.aclose())
    assert len(used) > 10
    assert used - exposed == set()


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
    missed = sum(float(value) for name, value in samples.items() if name.startswith("spolia_missed_tokens_total"))
    assert missed + float(samples['spolia_prefix_cache_hits_total{model="toy"}']) == 180


def test_the_example_of_a_key_file_is_one():
    assert [key.tenant for key in read_keys(DEPLOY / "keys.example.toml")] == ["alice", "operator"]


def test_the_unit_is_one_that_systemd_takes(tmp_path: Path):
    unit = (DEPLOY / "spolia.service").read_text()
    assert "ExecStart=/opt/spolia/bin/spolia serve " in unit
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    copy = tmp_path / "spolia.service"
    copy.write_text(unit.replace("/opt/spolia/bin/spolia", "/bin/true"))
    said = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, check=False).stderr
    assert "spolia.service" not in said
