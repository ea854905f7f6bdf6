"""At which speed of a tier is it better to restore, to recompute, or to meet in the middle; and is that what happens?

Workload: a prompt of --tokens random token ids whose KV is in a tier that gives so many bytes a second, kept in memory
and throttled. For each speed, in turns, --repeats times: restore only (`--kv-fetch wait`), recompute only (no tier) and
planned (the default), each in an engine that has just been made.

Prints a table of seconds to the first token (the least of the repeats), and one JSON line. Asserts that all give the
same tokens, and that planned is within 15 % of the better of the two others at each speed.

    python benchmarks/planner.py smollm2 --tokens 2000
"""

from __future__ import annotations

import argparse
import json
import random
import threading
import time
from collections.abc import Sequence

from spolia.engine import LLM, EngineConfig, RequestOutput, SamplingParams, build_engine
from spolia.models import Model, load
from spolia.tiers import Health, Tier, TierUse

SPEEDS_MB = (10, 20, 40, 80, 160, 320, 640, 2_000)
SLACK_S = 0.03
"""Starting threads and the like, which does not grow with the prompt."""


class Throttled:
    """Extents in memory, read at so many bytes a second by all readers together."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.bytes_per_s: float | None = None
        self._lock = threading.Lock()
        self._free_s = 0.0

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        return [key in self.values for key in keys]

    def get_into(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[int | None]:
        sizes: list[int | None] = []
        for key, buffer in zip(keys, buffers, strict=True):
            value = self.values.get(key)
            sizes.append(None if value is None else len(value))
            if value is not None:
                buffer[: len(value)] = value
        if self.bytes_per_s is not None:
            with self._lock:
                now_s = time.monotonic()
                self._free_s = max(self._free_s, now_s) + sum(size or 0 for size in sizes) / self.bytes_per_s
                wait_s = self._free_s - now_s
            time.sleep(wait_s)
        return sizes

    def put(self, keys: Sequence[bytes], values: Sequence[memoryview]) -> list[bool]:
        self.values.update((key, bytes(value)) for key, value in zip(keys, values, strict=True))
        return [True] * len(keys)

    def delete(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self.values.pop(key, None)

    def touch(self, keys: Sequence[bytes]) -> list[bool]:
        return self.exists(keys)

    def health(self) -> Health:
        return Health(len(self.values), None, None)

    def close(self) -> None:
        return


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
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--speeds", type=int, nargs="+", default=SPEEDS_MB, help="MB/s")
    arguments = parser.parse_args()
    model = load(arguments.model)
    rng = random.Random(0)
    prompt = [rng.randrange(1_000, 40_000) for _ in range(arguments.tokens)]
    settings = {"num_threads": arguments.threads}
    full = Throttled()
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
        restore, recompute, planned = (min(times[name]) for name in ("restore", "recompute", "planned"))
        share = planned / min(restore, recompute)
        share_read = num_restored / arguments.tokens
        print(f"{speed:>6} {restore:>9.3f} {recompute:>10.3f} {planned:>9.3f} {share:>13.0%}   {share_read:.0%}")
        rows.append({"mb_per_s": speed, "restore_s": restore, "recompute_s": recompute, "planned_s": planned})
    print(json.dumps({"model": arguments.model, "tokens": arguments.tokens, "rows": rows}, default=float))
    assert len(answers) == 1, "a restored prefix changed the answer"
    for row in rows:
        better_s = min(row["restore_s"], row["recompute_s"])
        assert row["planned_s"] <= 1.15 * better_s + SLACK_S, row


if __name__ == "__main__":
    main()
