"""How KV memory is split over groups, and what the machine offers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from spolia.engine import EngineConfig, memory
from spolia.engine.memory import available_bytes, default_num_threads, split_blocks
from spolia.errors import InvalidRequest

LIMITS = {"max_context": 4096, "max_sequences": 16, "max_batch_tokens": 256}


def test_one_group_takes_all_that_it_is_given():
    assert split_blocks(1_000_000, [1_000], [None], **LIMITS) == (1_000,)


def test_groups_get_the_same_number_of_blocks_when_memory_is_short():
    assert split_blocks(1_200_000, [1_000, 5_000], [None, 512], **LIMITS) == (200, 200)


def test_a_window_group_leaves_what_it_cannot_use_to_the_others():
    full, window = split_blocks(19_900_000, [1_000, 5_000], [None, 512], **LIMITS)
    assert window == 16 * 4 * (768 // 16 + 2)
    assert full * 1_000 + window * 5_000 <= 19_900_000 < (full + 1) * 1_000 + window * 5_000


def test_no_group_gets_more_than_could_be_filled():
    assert split_blocks(10**12, [1_000], [None], **LIMITS) == (16 * 256,)
    assert split_blocks(10**12, [1_000, 1_000], [None, 100_000], **LIMITS)[0] == 16 * 256


@pytest.mark.parametrize("kv_bytes", [1, 10**5, 10**6, 10**7, 10**8, 10**10])
@pytest.mark.parametrize("windows", [[None], [None, 100], [None, 100, 1_000], [30]])
def test_the_limit_in_bytes_holds(kv_bytes, windows):
    sizes = [3_000 * (i + 1) for i in range(len(windows))]
    if kv_bytes < sum(sizes):
        with pytest.raises(InvalidRequest, match=f"{sum(sizes)}") as caught:
            split_blocks(kv_bytes, sizes, windows, **LIMITS)
        assert caught.value.param == "kv_memory"
    else:
        counts = split_blocks(kv_bytes, sizes, windows, **LIMITS)
        assert sum(n * size for n, size in zip(counts, sizes, strict=True)) <= kv_bytes
        assert min(counts) >= 1


def test_by_default_a_quarter_of_the_available_memory_is_taken_at_most():
    (count,) = split_blocks(None, [1_000], [None], max_context=2**20, max_sequences=2**20, max_batch_tokens=2**20)
    assert 0.1 * available_bytes() < count * 1_000 < 0.5 * available_bytes()


LIMIT_FILES = {
    2: {"memory.max": 5000, "memory.current": 3000, "memory.stat": "anon 9\n\ninactive_file 400", "cpu.max": "100 100"},
    1: {
        "memory/memory.limit_in_bytes": 5000,
        "memory/memory.usage_in_bytes": 3000,
        "memory/memory.stat": "inactive_file 9\ntotal_inactive_file 400",
        "cpu/cpu.cfs_quota_us": 100,
        "cpu/cpu.cfs_period_us": 100,
    },
}


@pytest.mark.parametrize("files", LIMIT_FILES.values(), ids=LIMIT_FILES)
def test_a_control_groups_limits_hold(files: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{content}\n")
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    assert available_bytes() == 2400
    assert default_num_threads() == 1


def test_there_is_a_thread_for_each_core_at_most():
    assert 1 <= default_num_threads() <= len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kv_dtype", "int3"),
        ("backend", "abacus"),
        ("kv_memory", 0),
        ("kv_memory", "2GiB"),
        ("num_threads", -1),
        ("num_threads", 1.5),
        ("num_threads", 100_000),
        ("max_context", 0),
        ("max_batch_tokens", 0),
        ("max_sequences", 0),
    ],
)
def test_an_impossible_setting_is_refused_by_name(name, value):
    with pytest.raises(InvalidRequest, match=name) as caught:
        EngineConfig(**{name: value})
    assert caught.value.param == name
