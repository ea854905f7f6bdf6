"""`spolia serve --kv-dtype int8`: what it answers, what it says of itself, and which models it will not serve."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.test_kv_int8 import write_hostile
from models.tiny import LLAMA, llama_tensors, write_gguf
from spolia.engine.kv_gate import REFUSE_ABOVE, WARN_ABOVE

from .harness import eventually, metric
from .process import ServerProcess, server_process

PROMPT = random.Random(0).choices(range(256), k=200)
WHOLE = len(PROMPT) // 16 * 16
INT8 = ["--kv-dtype", "int8", "--kv-memory", "4MiB"]


def ask(url: str, status: int = 200, **fields: Any) -> dict[str, Any]:
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "logprobs": 1, **fields}
    reply = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert reply.status_code == status, reply.text
    return reply.json()


def said(reply: dict[str, Any]) -> tuple[str, list[float]]:
    (choice,) = reply["choices"]
    return choice["text"], choice["logprobs"]["token_logprobs"]


def num_cached(reply: dict[str, Any]) -> int:
    return reply["usage"]["prompt_tokens_details"]["cached_tokens"]


def config(url: str) -> dict[str, Any]:
    return httpx.get(f"{url}/v1/cache/config").json()


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", LLAMA, llama_tensors("Q8_0"))


def test_answers_are_the_same_bits_cold_cached_restored_and_after_a_restart(model, tmp_path):
    options = [*INT8, "--kv-disk", str(tmp_path)]
    with server_process(model, *options) as process:
        process.await_ready()
        cold = ask(process.url)
        cached = ask(process.url)
        assert (num_cached(cold), num_cached(cached)) == (0, len(PROMPT) - 1)
        assert "rounded_tokens" not in cached["usage"]["prompt_tokens_details"]  # nothing was rounded since
        eventually(lambda: metric(process.url, "spolia_tier_bytes", tier="disk") > 0)
        lookup = {"prompt": PROMPT}
        eventually(lambda: httpx.post(f"{process.url}/v1/cache/lookup", json=lookup).json()["tiers"] == {"disk": WHOLE})
        httpx.post(f"{process.url}/v1/cache/clear", json={"all": True, "tiers": False})
        restored = ask(process.url)
    with server_process(model, *options) as process:
        process.await_ready()
        after = ask(process.url)
    assert num_cached(restored) == num_cached(after) == WHOLE
    assert said(cold) == said(cached) == said(restored) == said(after)
    assert cold["system_fingerprint"] == after["system_fingerprint"]


def test_it_says_so_and_has_no_exact_kv(model):
    with server_process(model, *INT8) as process, server_process(model, "--kv-memory", "4MiB") as other:
        process.await_ready()
        assert process.find(r"INFO kv_dtype int8: KL divergence \S+ nats a token: fine")
        assert config(process.url)["kv_dtype"] == "int8"
        error = ask(process.url, 400, exact_kv=True)["error"]
        assert "kv_dtype int8" in error["message"]
        assert error["param"] == "exact_kv"
        for path in ("lookup", "warm", "pins", "export"):
            reply = httpx.post(f"{process.url}/v1/cache/{path}", json={"prompt": PROMPT, "exact_kv": True})
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, "exact_kv")
        rounding, usual = ask(process.url), ask(other.url)
        assert rounding["system_fingerprint"] != usual["system_fingerprint"]
        assert config(other.url)["kv_dtype"] == "bf16"


def test_a_model_that_it_harms_is_served_with_a_warning(tmp_path):
    with server_process(write_hostile(tmp_path / "harmed.gguf", 300.0), *INT8) as process:
        process.await_ready()
        found = process.find(r"WARNING kv_dtype int8: KL divergence (\S+) nats a token: more than (\S+): (.*)")
        assert found is not None
        assert WARN_ABOVE < float(found[1]) < REFUSE_ABOVE
        assert (float(found[2]), found[3]) == (WARN_ABOVE, "answers may suffer; kv_dtype bf16 is safe")
        assert said(ask(process.url)) == said(ask(process.url))


def test_a_model_that_it_would_ruin_is_not_served_and_the_way_out_is_told(tmp_path):
    process = ServerProcess(str(write_hostile(tmp_path / "ruined.gguf")), *INT8)
    assert process.wait() == 2
    error = process.log[-1]
    for words in ("kv_dtype is int8", "nats", f"more than the {REFUSE_ABOVE:g}", "bf16", "kv_offload_dtype"):
        assert words in error
