"""A server that is killed and started again answers the next turn as if nothing had happened."""

from __future__ import annotations

import random
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from spolia.tiers import AesGcm, FolderBackend, verify_folder

from .harness import eventually, metric
from .process import ServerProcess, server_process

NUM_TOKENS = 4_000
OPTIONS = ["--name", "m", "--kv-memory", "256MiB"]


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1_000, 40_000) for _ in range(num_tokens)]


def complete(process: ServerProcess, ids: list[int], max_tokens: int = 12) -> dict[str, Any]:
    body = {"model": "m", "prompt": ids, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
            "explain": True, "return_token_ids": True}  # fmt: skip
    reply = httpx.post(f"{process.url}/v1/completions", json=body, timeout=600)
    assert reply.status_code == 200, reply.text
    return reply.json()


def ids_of(reply: dict[str, Any]) -> list[int]:
    return reply["choices"][0]["token_ids"]


def why(reply: dict[str, Any]) -> dict[str, Any]:
    return reply["spolia"]["choices"][0]


@pytest.mark.timeout(900)
def test_after_a_kill_the_next_turn_of_a_long_conversation_is_warm_with_the_same_tokens(smollm2_path, tmp_path):
    options = [*OPTIONS, "--kv-disk", str(tmp_path)]
    with server_process(smollm2_path, *options) as process:
        process.await_ready()
        first = complete(process, prompt(NUM_TOKENS))
        whole = (NUM_TOKENS + 11) // 16 * 16
        block_bytes = 16 * 23_040  # 30 layers, 3 heads of 64, keys and values, 2 bytes
        eventually(lambda: metric(process.url, "spolia_tier_bytes", tier="disk") > whole // 16 * block_bytes)
        process.signal(signal.SIGKILL)
        process.wait()
    turn = [*prompt(NUM_TOKENS), *ids_of(first), *prompt(20, seed=1)]

    waits_s = []
    for _ in range(2):
        with server_process(smollm2_path, *options) as process:
            process.await_ready()
            warm = complete(process, turn)
            num_restored = why(warm)["num_restored_tokens"]["disk"]
            assert num_restored >= whole
            assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] == num_restored
            assert metric(process.url, "spolia_prompt_tokens_total", source="disk") == num_restored
            waits_s.append(why(warm)["timings"]["first_token_s"])
            process.signal(signal.SIGKILL)
            process.wait()

    with server_process(smollm2_path, *OPTIONS) as process:
        process.await_ready()
        cold = complete(process, turn)
    assert ids_of(warm) == ids_of(cold)
    # By how much is `benchmarks/restart.py`'s to say, on an idle machine; here anything may run beside it.
    assert why(cold)["timings"]["first_token_s"] > 3 * min(waits_s)


@pytest.mark.timeout(900)
def test_a_server_killed_while_it_computes_and_writes_is_right_and_warm_after_it(smollm2_path, tmp_path):
    ids = prompt(600, seed=2)
    rng = random.Random(3)
    answers = []
    for kill in range(3):
        with server_process(smollm2_path, *OPTIONS, "--kv-disk", str(tmp_path)) as process:
            process.await_ready()
            if kill < 2:
                body = {"model": "m", "prompt": ids, "max_tokens": 400, "ignore_eos": True, "stream": True}
                with httpx.stream("POST", f"{process.url}/v1/completions", json=body, timeout=600) as response:
                    for _, _ in zip(range(rng.randrange(2, 60)), response.iter_lines(), strict=False):
                        pass
                    process.signal(signal.SIGKILL)
                process.wait()
                continue
            reply = complete(process, ids)
            assert why(reply)["num_restored_tokens"]["disk"] >= 512
            answers.append(ids_of(reply))
    with server_process(smollm2_path, *OPTIONS) as process:
        process.await_ready()
        answers.append(ids_of(complete(process, ids)))
    assert answers[0] == answers[1]
    report = verify_folder(FolderBackend(Path(tmp_path)))
    assert report.refused == ()
    assert {path.suffix for path in tmp_path.rglob("*") if path.is_file()} == {".kv"}


def test_an_orderly_end_writes_what_is_left(smollm2_path, tmp_path):
    (tmp_path / "key").write_text("ab" * 32)
    options = ["--kv-disk", str(tmp_path / "kv"), "--kv-disk-size", "1GiB", "--kv-host", "16MiB"]
    options += ["--kv-encrypt", f"file:{tmp_path}/key", "--kv-write", "write_through", "--kv-fetch", "wait"]
    with server_process(smollm2_path, *OPTIONS, *options) as process:
        process.await_ready()
        complete(process, prompt(100, seed=4))
        assert metric(process.url, "spolia_tier_state", tier="host", state="up") == 1
        process.signal(signal.SIGTERM)
        assert process.wait() == 0
    assert verify_folder(FolderBackend(tmp_path / "kv"), AesGcm(b"\xab" * 32)).num_good == 111 // 16
