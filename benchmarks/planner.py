"""At which speed of a tier is it better to restore, to recompute, or to meet in the middle; and is that what happens?

Workload: a prompt of --tokens random token ids whose KV is in a folder, written by an engine as to any disk tier, and
read through a throttle of so many bytes a second: whatever reading takes counts, and what is missing to the budget is
slept. What was written just now is likely in the system's page cache, so without the throttle it is faster than a disk.
For each speed, in turns, --repeats times: restore only (`--kv-fetch wait`), recompute only (no tier) and planned (the
default), each in an engine that has just been made.

Prints a table of seconds to the first token (medians of the repeats), and one JSON line. Asserts that all give the same
tokens, and that planned is within 15 % of the better of the two others at each speed.

    python benchmarks/planner.py smollm2 --tokens 2000 --folder /a/disk
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from spolia.engine import LLM, EngineConfig, RequestOutput, SamplingParams, build_engine
from spolia.models import Model, load
from spolia.tiers import FolderBackend, Health, StorageBackend, Tier, TierUse

SPEEDS_MB = (10, 20, 40, 80, 160, 320, 640, 2_000)
SLACK_S = 0.03
"""Starting threads and the like, which does not grow with the prompt."""


class Throttled:
    """Another backend, read at so many bytes a second at most by all readers together."""

    def __init__(self, inner: StorageBackend) -> None:
        self._inner = inner
        self.bytes_per_s: float | None = None
        self._lock = threading.Lock()
        self._free_s = 0.0

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        return self._inner.exists(keys)

    def get_into(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[int | None]:
        began_s = time.monotonic()
        sizes = self._inner.get_into(keys, buffers)
        if self.bytes_per_s is not None:
            with self._lock:
                self._free_s = max(self._free_s, began_s) + sum(size or 0 for size in sizes) / self.bytes_per_s
                wait_s = self._free_s - time.monotonic()
            time.sleep(max(0.0, wait_s))
        return sizes

    def put(self, keys: Sequence[bytes], values: Sequence[memoryview]) -> list[bool]:
        return self._inner.put(keys, values)

    def delete(self, keys: Sequence[bytes]) -> None:
        self._inner.delete(keys)

    def touch(self, keys: Sequence[bytes]) -> list[bool]:
        return self._inner.touch(keys)

    def health(self) -> Health:
        return self._inner.health()

    def close(self) -> None:
        """The next engine uses it, too."""


def ask(model: Model, prompt: list[int], backend: Throttled | None, **settings: object) -> RequestOutput:
    """The answer of an engine that is made for it."""
    config = EngineConfig(kv_memory=1 << 30, **settings)  # type: ignore[arg-type]
    with LLM(build_engine(model, config)) as llm:
        warm_up = [random.Random(1).randrange(1_000, 40_000) for _ in range(300)]
        llm.generate(warm_up, SamplingParams(temperature=0.0, max_tokens=1))  # tells how fast prompts are computed
        if backend is not None:
            llm.attach_tier(TierUse(Tier("slow", backend)))
        output = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
        if backend is not None:
            llm.detach_tier("slow", timeout_s=60)
        return output


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--tokens", type=int, default=2_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=None, help="where to make a folder for KV, removed at the end")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--speeds", type=int, nargs="+", default=SPEEDS_MB, help="MB/s")
    arguments = parser.parse_args()
    model = load(arguments.model)
    rng = random.Random(0)
    prompt = [rng.randrange(1_000, 40_000) for _ in range(arguments.tokens)]
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        rows = measure(model, prompt, Throttled(FolderBackend(Path(folder))), arguments)
    print(json.dumps({"model": arguments.model, "tokens": arguments.tokens, "rows": rows}, default=float))
    for row in rows:
        better_s = min(row["restore_s"], row["recompute_s"])
        assert row["planned_s"] <= 1.15 * better_s + SLACK_S, row


def measure(model: Model, prompt: list[int], full: Throttled, arguments: argparse.Namespace) -> list[dict[str, float]]:
    """Medians of the seconds to the first token, by speed."""
    settings = {"num_threads": arguments.threads}
    answers = {ask(model, prompt, full, **settings).token_ids}
    rows = []
    print(f"{'MB/s':>6} {'restore':>9} {'recompute':>10} {'planned':>9} {'of the better':>14}   from the tier")
    for speed in arguments.speeds:
        times: dict[str, list[float]] = {"restore": [], "recompute": [], "planned": []}
        num_restored = 0
        for _ in range(arguments.repeats):
            full.bytes_per_s = speed * 1e6
            for name, backend, fetch in (
                ("restore", full, "wait"),
                ("recompute", None, "planned"),
                ("planned", full, "planned"),
            ):
                output = ask(model, prompt, backend, kv_fetch=fetch, **settings)
                answers.add(output.token_ids)
                times[name].append(output.timings.first_token_s or 0.0)
                if name == "planned":
                    num_restored = output.num_restored_tokens.get("slow", 0)
        restore, recompute, planned = (median(times[name]) for name in ("restore", "recompute", "planned"))
        share = planned / min(restore, recompute)
        share_read = num_restored / arguments.tokens
        print(f"{speed:>6} {restore:>9.3f} {recompute:>10.3f} {planned:>9.3f} {share:>13.0%}   {share_read:.0%}")
        rows.append(
            {
                "mb_per_s": speed,
                "restore_s": restore,
                "recompute_s": recompute,
                "planned_s": planned,
                "of_the_better": share,
            }
        )
    assert len(answers) == 1, "a restored prefix changed the answer"
    return rows


if __name__ == "__main__":
    main()
