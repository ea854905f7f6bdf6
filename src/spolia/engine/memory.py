"""How much memory and how many threads there are, and how KV memory is split over cache groups."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

from spolia.errors import InvalidRequest
from spolia.kernels import BLOCK_SIZE

__all__ = ["KV_SHARE", "available_bytes", "default_num_threads", "split_blocks"]

KV_SHARE = 0.25
"""Part of the available memory that KV takes if nobody says how much."""

_KEPT_WINDOWS = 4
"""Windows that a window group can keep for each sequence that may run: one in use, the others of ended sequences."""


def split_blocks(
    kv_bytes: int | None,
    block_bytes: Sequence[int],
    windows: Sequence[int | None],
    *,
    max_context: int,
    max_sequences: int,
    max_batch_tokens: int,
) -> tuple[int, ...]:
    """Number of blocks of each group's pool.

    All groups get the same number of blocks, so that a conversation is reusable from any point for which there is
    memory at all; but a window group never more than four windows a running sequence, and no group more than
    `max_sequences` sequences of `max_context` tokens could fill. What one group leaves goes to the others.

    Args:
        kv_bytes: for all pools together; None: as much as could be filled, within `KV_SHARE` of what is available.

    Raises:
        InvalidRequest: not even one block a group and its slack fit.
    """
    budget = int(available_bytes() * KV_SHARE) if kv_bytes is None else kv_bytes
    whole = -(-max_context // BLOCK_SIZE)
    caps = [
        max_sequences * whole
        if window is None
        else max_sequences * _KEPT_WINDOWS * min(whole, (window + max_batch_tokens) // BLOCK_SIZE + 2)
        for window in windows
    ]
    counts = [0] * len(caps)
    open_groups = list(range(len(caps)))
    while open_groups:
        share = budget // sum(block_bytes[g] for g in open_groups)
        capped = [g for g in open_groups if caps[g] <= share]
        for g in capped or open_groups:
            counts[g] = min(caps[g], share)
            budget -= counts[g] * block_bytes[g]
        open_groups = [g for g in open_groups if g not in capped] if capped else []
    if min(counts) < 1:
        raise InvalidRequest(
            f"kv_memory is {kv_bytes} bytes, but one block of {BLOCK_SIZE} tokens takes {sum(block_bytes)}; raise it"
            if kv_bytes is not None
            else f"{available_bytes()} bytes of memory are available, too few for KV; set kv_memory, or free some",
            param="kv_memory",
        )
    return tuple(counts)


def available_bytes() -> int:
    """Memory that this process may still take: what the system has available, or less if its cgroup allows less."""
    available = _meminfo("MemAvailable")
    for folder, limit_name, used_name, idle_name in _LIMITS:
        limit, used = _read_int(CGROUP / folder / limit_name), _read_int(CGROUP / folder / used_name)
        if limit is not None and used is not None:
            idle = _field(
                CGROUP / folder / "memory.stat", idle_name
            )  # pages of files, which the system takes back if need be
            available = min(available, max(limit - used + idle, 0))
    return available


def default_num_threads() -> int:
    """One thread per physical core that this process may run on, and no more than its control group's CPU quota."""
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = {_read_text(_CPU / f"cpu{cpu}/topology/thread_siblings_list") or str(cpu) for cpu in cpus}
    return max(1, min(len(cores), _cpu_quota()))


CGROUP = Path("/sys/fs/cgroup")
_LIMITS = (
    ("", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),  # version 1
)
_CPU = Path("/sys/devices/system/cpu")


def _meminfo(field: str) -> int:
    if kib := _field(Path("/proc/meminfo"), field + ":"):
        return kib * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2  # no such file: macOS, BSD


def _cpu_quota() -> int:
    quota, _, period = (_read_text(CGROUP / "cpu.max") or "max 100000").partition(" ")
    if version_1 := _read_int(CGROUP / "cpu" / "cpu.cfs_quota_us"):  # -1, which is no number here, where there is none
        quota, period = str(version_1), _read_text(CGROUP / "cpu" / "cpu.cfs_period_us") or "100000"
    return 1_000_000 if quota == "max" else math.ceil(int(quota) / int(period))


def _field(path: Path, name: str) -> int:
    """The number after `name`, on a line of its own; 0 where there is none."""
    lines = (line.split() for line in (_read_text(path) or "").splitlines())
    return next((int(words[1]) for words in lines if words[:1] == [name]), 0)


def _read_int(path: Path) -> int | None:
    text = _read_text(path)
    return int(text) if text is not None and text.isdigit() else None


def _read_text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
