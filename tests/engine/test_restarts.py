"""Restarts of the whole engine on a small model from a file: what is found again, and what must not be."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.tiny import LLAMA, llama_tensors, write_gguf
from spolia.engine import LLM, MissReason, RequestOutput, SamplingParams
from spolia.kernels.cpu import levels


def tokens(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(count)]


PROMPT = tokens(200, seed=0)
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", LLAMA, llama_tensors("Q8_0"))


def ask(model: Path, folder: Path, prompt=PROMPT, *, cache_salt: str = "", **settings: Any) -> RequestOutput:
    """The answer of an engine that is made for it and closed after it."""
    fields: dict[str, Any] = {"kv_memory": 4 << 20, "num_threads": 1, "kv_disk": folder, **settings}
    with LLM(model, **fields) as llm:
        return llm.generate(prompt, PARAMS, cache_salt=cache_salt)


@pytest.mark.parametrize("kv_dtype", ["bf16", "f16", "f32"])
def test_the_next_turn_after_a_restart_is_warm_and_equal_to_the_bit(model, tmp_path, kv_dtype):
    first = ask(model, tmp_path / "kv", kv_dtype=kv_dtype)
    turn = [*PROMPT, *first.token_ids, 1, 2, 3]
    warm = ask(model, tmp_path / "kv", turn, kv_dtype=kv_dtype)
    cold = ask(model, tmp_path / "elsewhere", turn, kv_dtype=kv_dtype)
    assert warm.num_restored_tokens == {"disk": (len(PROMPT) + 11) // 16 * 16}
    assert cold.num_cached_tokens == 0
    assert warm.token_ids == cold.token_ids


def test_after_a_restart_what_filled_no_block_was_too_short_and_new_text_is_new(model, tmp_path):
    ask(model, tmp_path)
    again = ask(model, tmp_path)
    assert again.ranges == ((0, 192, "disk", None), (192, 200, "computed", MissReason.TOO_SHORT))
    assert again.explanation is not None
    assert again.explanation.reason is MissReason.TOO_SHORT
    turn = ask(model, tmp_path, [*PROMPT[:192], *tokens(40, seed=1)])
    assert turn.ranges == ((0, 192, "disk", None), (192, 232, "computed", MissReason.NEVER_SEEN))


def test_a_restart_with_another_thread_count_budget_and_memory_finds_it_too(model, tmp_path):
    first = ask(model, tmp_path)
    again = ask(model, tmp_path, num_threads=3, max_batch_tokens=64, kv_memory=8 << 20)
    assert again.num_restored_tokens == {"disk": 192}
    assert again.token_ids == first.token_ids


@pytest.mark.parametrize("change", [{"kv_dtype": "f32"}, {"backend": "reference"}, {"cache_salt": "engine"}], ids=str)
def test_another_kv_type_arithmetic_or_engine_salt_never_finds_it(model, tmp_path, change):
    ask(model, tmp_path)
    with LLM(model, **{"kv_memory": 4 << 20, "num_threads": 1, "kv_disk": tmp_path, **change}) as llm:
        assert llm.generate(PROMPT, PARAMS).num_cached_tokens == 0


def test_another_tenant_never_finds_it(model, tmp_path):
    ask(model, tmp_path)
    assert ask(model, tmp_path, cache_salt="tenant").num_cached_tokens == 0


@pytest.mark.skipif(len(levels()) < 2, reason="this machine has one instruction set level only")
def test_another_instruction_set_never_finds_it(model, tmp_path, monkeypatch):
    ask(model, tmp_path)
    monkeypatch.setenv("SPOLIA_ISA", levels()[-1])
    assert ask(model, tmp_path).num_cached_tokens == 0


def test_weights_that_changed_under_the_same_name_never_find_it(tmp_path):
    tensors = llama_tensors("Q8_0")
    path = write_gguf(tmp_path / "tiny.gguf", LLAMA, tensors)
    ask(path, tmp_path / "kv")
    weight = tensors["blk.1.ffn_down.weight"]
    data = weight.data.copy()
    data.view(np.uint8).reshape(-1)[100] ^= 1
    write_gguf(path, LLAMA, {**tensors, weight.name: replace(weight, data=data)})
    assert ask(path, tmp_path / "kv").num_cached_tokens == 0


def test_a_quota_holds_over_restarts_and_the_newest_conversation_is_kept_whole(model, tmp_path):
    quota = 500_000
    for seed in range(4):
        ask(model, tmp_path, tokens(200, seed), kv_disk_size=quota)
        assert sum(path.stat().st_size for path in tmp_path.rglob("*.kv")) <= quota
    newest = ask(model, tmp_path, tokens(200, 3), kv_disk_size=quota)
    assert newest.num_restored_tokens == {"disk": 192}


def test_all_tiers_at_once_give_the_same_answers(model, tmp_path):
    settings = {"kv_host": 150_000, "kv_write": "write_back", "kv_memory": 200_000, "max_context": 400}
    prompts = [tokens(200, seed) for seed in range(6)]
    cold = [ask(model, tmp_path / f"cold{index}", prompt) for index, prompt in enumerate(prompts)]
    with LLM(model, num_threads=1, kv_disk=tmp_path / "kv", **settings) as llm:
        for order in (1, -1, 1, -1):  # back and forth: what was used last lies higher
            for prompt, expected in list(zip(prompts, cold, strict=True))[::order]:
                assert llm.generate(prompt, PARAMS).token_ids == expected.token_ids
        restored = llm.stats.counters.num_restored_tokens
    assert restored["host"] > 0
    assert restored["disk"] > 0


def test_measuring_at_the_start_leaves_the_cache_empty_and_tells_how_fast_prompts_are_computed(model, tmp_path):
    with LLM(model, kv_memory=1 << 20, num_threads=1, kv_disk=tmp_path) as llm:
        core = llm._engine.core
        assert core.tiering.planner.wait_s(1) < 1.0  # two seconds if nothing is known
        (ledger,) = core.cache.ledger()
        assert (ledger.free, ledger.leased) == (ledger.total, 0)
        core.cache.check()
        assert core.cache.stats.num_opened == 0
