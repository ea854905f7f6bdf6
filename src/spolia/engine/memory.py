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
    limit, used = _read_int(_CGROUP / "memory.max"), _read_int(_CGROUP / "memory.current")
    if limit is not None and used is not None:
        available = min(available, max(limit - used, 0))
    return available


def default_num_threads() -> int:
    """One thread per physical core that this process may run on, and no more than its control group's CPU quota."""
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = {_read_text(_CPU / f"cpu{cpu}/topology/thread_siblings_list") or str(cpu) for cpu in cpus}
    return max(1, min(len(cores), _cpu_quota()))


_CGROUP = Path("/sys/fs/cgroup")
_CPU = Path("/sys/devices/system/cpu")


def _meminfo(field: str) -> int:
    for line in (_read_text(Path("/proc/meminfo")) or "").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2  # no such file: macOS, BSD


def _cpu_quota() -> int:
    quota, _, period = (_read_text(_CGROUP / "cpu.max") or "max 100000").partition(" ")
    return 1_000_000 if quota == "max" else math.ceil(int(quota) / int(period))


def _read_int(path: Path) -> int | None:
    text = _read_text(path)
    return int(text) if text is not None and text.isdigit() else None


def _read_text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
