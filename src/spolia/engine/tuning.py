"""How many threads are quickest for a model on this machine: measured at its first start here, and remembered.

More threads are not always quicker: a small model's ops are over before many threads have met, memory is busy with
fewer, and some cores may be slow. Nothing but speed depends on it.

While others have a part of the cores, be it other programs or this one's own threads that still import a web framework,
fewer threads look quicker, and would still be taken when the cores are free again. So a measurement counts only if no
thread had to wait long for a core.
"""

from __future__ import annotations

import json
import logging
import os
import platform
from collections.abc import Callable
from hashlib import blake2b
from itertools import islice
from pathlib import Path

from spolia.engine.calibration import measure_step_s
from spolia.kernels import Executable
from spolia.kvcache import KVCache
from spolia.models.cache_folder import cache_folder, write_atomically

__all__ = ["machine_key", "quickest_num_threads", "waited_for_cores_s"]

log = logging.getLogger(__name__)

_PROMPT_STEP, _NUM_PROMPT_STEPS, _NUM_TOKENS = 8, 32, 192
"""What is to be quick: a request of 256 new tokens of prompt, in steps that are quick to measure, and 192 of answer."""
_MAX_NOTES = 256
_WORTHWHILE = 0.9
"""Fewer threads than there may be must take less than this share of the time: a busy moment is not to decide."""
_DISTURBED = 0.05
"""Of a measurement, times the threads that it had: who waited longer than this for cores was not measured alone."""


def machine_key(model_digest: bytes, numerics: str, most: int) -> str:
    """What the quickest number of threads may depend on, in short."""
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    facts = repr((model_digest, numerics, most, cpus, platform.node(), platform.machine()))
    return blake2b(facts.encode(), digest_size=16).hexdigest()


def quickest_num_threads(
    executable: Executable,
    cache: KVCache,
    most: int,
    clock: Callable[[], float],
    waited: Callable[[], float],
    *,
    key: str,
    notes: Path | None = None,
) -> int:
    """The number of threads, `most` at most, that `executable` has from now on.

    `most`, half of it, a quarter, and so on as long as that is no slower; `most`, for this time, where others
    had the cores meanwhile.

    Args:
        clock: seconds.
        waited: seconds that threads have waited for a core so far, see `waited_for_cores_s`.
        key: under which it is remembered, see `machine_key`.
        notes: the file that remembers, in the cache folder by default; what is unreadable there is measured anew.
    """
    notes = notes or cache_folder() / "threads.json"
    known = _read(notes)
    remembered = 1 if most == 1 else known.get(key, 0)
    if 1 <= remembered <= most:
        executable.set_num_threads(remembered)
        return remembered
    times_s: dict[int, float] = {}
    count = most
    while count:
        executable.set_num_threads(count)
        begun_s, waited_s = clock(), waited()
        seconds = _request_s(executable, cache, clock)
        if seconds is None:
            break
        waited_s, taken_s = waited() - waited_s, clock() - begun_s
        if waited_s > _DISTURBED * count * taken_s:
            log.info(
                "%d threads: the cores are busy, %d waited %.3f s in %.3f s for them", most, count, waited_s, taken_s
            )
            executable.set_num_threads(most)
            return most
        times_s[count] = seconds
        if seconds > min(times_s.values()):
            break
        count //= 2
    best = min(times_s, key=times_s.__getitem__, default=most)
    if best != most and times_s[best] > _WORTHWHILE * times_s[most]:
        best = most
    executable.set_num_threads(best)
    if times_s:
        log.info("%d threads of %s", best, {count: f"{seconds:.3f} s" for count, seconds in times_s.items()})
        known = {**{other: count for other, count in known.items() if other != key}, key: best}
        last = dict(islice(known.items(), max(0, len(known) - _MAX_NOTES), None))
        try:
            write_atomically(notes, json.dumps(last).encode())
        except OSError as error:
            log.warning("the best number of threads, %d, cannot be remembered in %s: %s", best, notes, error)
    return best


def waited_for_cores_s() -> float:
    """Seconds that threads of this process could run and had no core for it; 0 where the system does not tell."""
    total_ns = 0
    for task in Path("/proc/self/task").glob("*/schedstat"):
        try:
            total_ns += int(task.read_bytes().split()[1])
        except (OSError, ValueError, IndexError):  # it has ended, or this kernel does not count
            continue
    return total_ns * 1e-9


def _request_s(executable: Executable, cache: KVCache, clock: Callable[[], float]) -> float | None:
    prompt_s = measure_step_s(executable, cache, clock, num_tokens=_PROMPT_STEP)
    token_s = measure_step_s(executable, cache, clock, num_tokens=1)
    return None if prompt_s is None or token_s is None else prompt_s * _NUM_PROMPT_STEPS + token_s * _NUM_TOKENS


def _read(notes: Path) -> dict[str, int]:
    try:
        found = json.loads(notes.read_bytes())
    except (OSError, ValueError):
        return {}
    return {key: count for key, count in found.items() if isinstance(count, int)} if isinstance(found, dict) else {}
