"""Gemma 3, whose layers mostly look back over a window, behind a server: its KV goes without what they have passed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from spolia.engine import AsyncEngine, EngineConfig
from spolia.tiers import FolderBackend
from spolia.tiers.archive import headers

from .harness import eventually, serving

_WORDS = ["river", "stone", "arch", "column", "lintel", "door", "roof", "mason", "quarry", "lime", "wall", "court"]
PROMPT = " ".join(random.Random(0).choices(_WORDS, k=900))


@pytest.fixture
def engine(gemma3_path: Path):
    made: list[AsyncEngine] = []

    def make(folder: Path | None) -> AsyncEngine:
        config = EngineConfig(kv_memory=32 << 20, max_context=1200, kv_disk=folder, kv_fetch="wait")
        made.append(AsyncEngine(gemma3_path, config))
        return made[-1]

    yield make
    for each in made:
        asyncio.run(each.aclose())


def ask(url: str, **fields: Any) -> tuple[str, list[float], dict[str, Any]]:
    """The text, its tokens' log-probabilities, and where its prompt came from."""
    body = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "logprobs": 1, "explain": True, **fields}
    reply = httpx.post(f"{url}/v1/completions", json=body, timeout=300)
    assert reply.status_code == 200, reply.text
    (choice,) = reply.json()["choices"]
    return choice["text"], choice["logprobs"]["token_logprobs"], reply.json()


def test_what_the_window_has_passed_is_neither_restored_nor_carried_and_answers_stay(
    engine: Callable[[Path | None], AsyncEngine], tmp_path: Path
):
    with serving({"gemma": engine(tmp_path)}) as url:
        said, logprobs, reply = ask(url)
        num_tokens = reply["usage"]["prompt_tokens"]
        whole = num_tokens // 16 * 16
        assert num_tokens > 800  # beyond the window of 512
        eventually(lambda: lookup(url)["tiers"] == {"disk": whole})
    folder = FolderBackend(tmp_path)
    passed = [header.key for header, _, _ in headers(folder) if header.group == 1 and header.start < whole - 512 - 16]
    assert len(passed) > 15
    folder.delete(passed)

    with serving({"gemma": engine(tmp_path)}) as url:
        assert lookup(url)["tiers"] == {"disk": whole}
        again, same, reply = ask(url)
        assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == whole
        assert (again, same) == (said, logprobs)
        httpx.post(f"{url}/v1/cache/clear", json={"all": True, "tiers": False}, timeout=60)
        assert lookup(url)["num_cached_tokens"] == 0
        carried = httpx.post(f"{url}/v1/cache/export", json={"prompt": PROMPT}, timeout=60).content

    with serving({"gemma": engine(None)}) as url:
        imported = httpx.post(f"{url}/v1/cache/import", content=carried, timeout=60).json()
        assert imported["num_tokens"] == whole
        again, same, reply = ask(url)
        assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == whole
        assert (again, same) == (said, logprobs)


def lookup(url: str) -> dict[str, Any]:
    return httpx.post(f"{url}/v1/cache/lookup", json={"prompt": PROMPT}, timeout=60).json()
