"""Sessions of a server that is killed: there again when it is started, of each of several models, from one folder."""

from __future__ import annotations

import random
import signal
from typing import Any

import httpx
import pytest

from models.tiny import LLAMA, llama_tensors, write_gguf
from spolia.tiers import AesGcm, FolderBackend, verify_folder

from .harness import eventually
from .process import ServerProcess, server_process


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> list[str]:
    """Two of one architecture and tokenizer, with other weights."""
    folder = tmp_path_factory.mktemp("models")
    tensors = llama_tensors("F16")
    one = write_gguf(folder / "one.gguf", LLAMA, tensors)
    tensors["blk.0.attn_k.weight"], tensors["blk.1.attn_k.weight"] = (
        tensors["blk.1.attn_k.weight"],
        tensors["blk.0.attn_k.weight"],
    )
    return [str(one), str(write_gguf(folder / "two.gguf", LLAMA, tensors))]


def prompt(seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(100)]


def say(process: ServerProcess, model: str, ids: list[int], session: str | None = None) -> tuple[list[int], int]:
    """The answer's ids and how many tokens of the prompt were reused: from the disk, or from memory, fetched ahead."""
    body = {"model": model, "prompt": ids, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "explain": True,
            "return_token_ids": True, **({} if session is None else {"session": session})}  # fmt: skip
    reply = httpx.post(f"{process.url}/v1/completions", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["token_ids"], reply.json()["spolia"]["choices"][0]["num_cached_tokens"]


def card(process: ServerProcess, model: str, session: str) -> dict[str, Any]:
    listed = httpx.get(f"{process.url}/v1/sessions", params={"model": model}).json()["data"]
    return next(one for one in listed if one["id"] == session)


@pytest.mark.parametrize("is_sealed", [False, True], ids=["plain", "encrypted"])
def test_after_a_kill_every_models_sessions_are_listed_and_go_on_from_what_was_computed(models, tmp_path, is_sealed):
    (tmp_path / "key").write_text("ab" * 32)
    options = ["--kv-memory", "16MiB", "--kv-disk", str(tmp_path / "kv")]
    options += ["--kv-encrypt", f"file:{tmp_path}/key"] if is_sealed else []
    sessions, answers = {}, {}
    with server_process(models[0], models[1], *options) as process:
        for name in ("one", "two"):
            eventually(lambda name=name: process.find(f"ready model={name}") is not None, timeout_s=60)
            opened = httpx.post(f"{process.url}/v1/sessions", json={"model": name, "ttl": 600})
            sessions[name] = opened.json()["id"]
            answers[name], _ = say(process, name, prompt(0), sessions[name])
        blocks = FolderBackend(tmp_path / "kv", sweep=False)
        eventually(lambda: len(list(blocks.entries())) == 12)  # 111 tokens each: 6 whole blocks, and nothing shared
        process.signal(signal.SIGKILL)
        process.wait()

    with server_process(models[0], models[1], *options) as process:
        turns = {}
        for name in ("one", "two"):
            eventually(lambda name=name: process.find(f"ready model={name}") is not None, timeout_s=60)
            found = card(process, name, sessions[name])
            assert (found["model"], found["num_tokens"], found["num_turns"], found["ttl"]) == (name, 112, 1, 600)
            turns[name], num_reused = say(process, name, prompt(1), sessions[name])
            assert num_reused == 96
        process.signal(signal.SIGTERM)
        assert process.wait() == 0

    with server_process(models[0], models[1], "--kv-memory", "16MiB") as process:
        for name in ("one", "two"):
            eventually(lambda name=name: process.find(f"ready model={name}") is not None, timeout_s=60)
            cold, num_reused = say(process, name, [*prompt(0), *answers[name], *prompt(1)])
            assert (cold, num_reused) == (turns[name], 0)
    sealer = AesGcm(b"\xab" * 32) if is_sealed else None
    assert verify_folder(FolderBackend(tmp_path / "kv"), sealer).refused == ()
