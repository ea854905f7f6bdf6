"""How does cost grow: with the batch, the context, the cache, and the queue?

    batch     a decode step of 1 to 64 streams, 128 tokens of context each
    context   a decode step of one stream after 0 to 8,000 tokens
    tree      the cache core's operations on a 4,000-token prompt, in trees of 10 to 100,000 nodes (`cache_core.py`)
    waiting   all that the engine does around a step of 64 streams, while 0 to 10,000 requests wait

Prints a JSON line a point, and draws all four into docs/growth.svg (`pip install spolia[plot]`). The model's steps are
medians on random tokens; the model is absent from `tree` and `waiting`. Run it on an idle machine:

    python benchmarks/growth.py smollm2
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import cache_core
import numpy as np
from numpy.typing import NDArray

from spolia import models
from spolia.engine import SamplingParams
from spolia.engine.core import EngineCore
from spolia.engine.memory import default_num_threads
from spolia.engine.request import Request
from spolia.engine.storage import build_cache
from spolia.kernels import StepInputs
from spolia.kernels.cpu import CpuExecutable
from spolia.kernels.cpu.roofline import StepShape, measure_step
from spolia.kvcache import GroupSpec

PICTURE = Path(__file__).parent.parent / "docs" / "growth.svg"
BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (0, 500, 1_000, 2_000, 4_000, 8_000)
NODES = (10, 100, 1_000, 10_000, 100_000)
WAITING = (0, 10, 100, 1_000, 10_000)

Points = list[tuple[int, float]]


class NoModel:
    """An executable that computes nothing: what is left of a step is the engine."""

    vocab_size, num_threads, numerics = 64, 1, "none"

    def set_num_threads(self, num_threads: int) -> None: ...

    def block_bytes(self, group: int) -> int:
        return 0

    def argmax(self, rows: NDArray[np.float32]) -> NDArray[np.int64]:
        return rows.argmax(axis=1)

    def bind_kv(self, pools: Sequence[NDArray[np.uint8]]) -> None: ...

    def run(self, step: StepInputs, logits: NDArray[np.float32]) -> None:
        logits[:, 7] = 1.0


def around_a_step(num_waiting: int) -> float:
    """Median seconds of `EngineCore.step` with 64 streams running and so many requests waiting."""
    pools = [np.empty((64 * 64, 0), np.uint8)]
    cache, tiering = build_cache([GroupSpec(len(pools[0]))], pools, [], layout="none", clock=time.monotonic)
    core = EngineCore(
        NoModel(),
        cache,
        tiering=tiering,
        token_bytes=lambda token_id: b"x",
        max_batch_tokens=256,
        max_sequences=64,
        max_context=1_000,
        clock=time.monotonic,
    )
    params = SamplingParams(temperature=0.0, max_tokens=800, ignore_eos=True)
    rng = np.random.default_rng(0)
    for number in range(64 + num_waiting):
        core.submit(
            Request(
                request_id=str(number),
                prompt_token_ids=rng.integers(0, 64, 16, dtype=np.int32),
                params=params,
                max_tokens=800,
                seed=0,
                namespace=b"",
                final_ids=frozenset(),
                arrival_s=0.0,
            )
        )
    seconds = []
    for turn in itertools.count():
        start_s = time.perf_counter()
        core.step()
        if turn >= 100:  # all 64 decode by now
            seconds.append(time.perf_counter() - start_s)
        if turn == 400:
            return statistics.median(seconds)
    raise AssertionError


def report(what: str, x: int, **figures: float) -> None:
    print(json.dumps({"what": what, "x": x, **figures}), flush=True)


def steps(model_name: str) -> tuple[Points, Points]:
    """Milliseconds by batch and by context."""
    model = models.load(models.pull(model_name))
    executable = CpuExecutable(model.program, kv_dtype="bf16", num_threads=default_num_threads())
    by_batch, by_context = [], []
    for batch in BATCHES:
        cost = measure_step(executable, model.program, StepShape("", batch, 1, 128))
        by_batch.append((batch, 1e3 * cost.seconds))
        report("batch", batch, ms=by_batch[-1][1], tokens_per_s=batch / cost.seconds)
    for context in CONTEXTS:
        if context < model.context_length:
            cost = measure_step(executable, model.program, StepShape("", 1, 1, context))
            by_context.append((context, 1e3 * cost.seconds))
            report("context", context, ms=by_context[-1][1])
    return by_batch, by_context


def draw(by_batch: Points, by_context: Points, tree: dict[str, Points], waiting: Points, title: str) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "growth"  # the same picture from the same figures
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(9, 6.5), constrained_layout=True)
    batch, context, nodes, queue = axes.flat
    batch.plot(*zip(*by_batch, strict=True), marker="o")
    batch.set(title="decode step by streams", xlabel="streams", ylabel="ms", ylim=(0, None))
    context.plot(*zip(*by_context, strict=True), marker="o")
    context.set(title="decode step by context, one stream", xlabel="tokens", ylabel="ms", ylim=(0, None))
    for name, points in tree.items():
        nodes.plot(*zip(*points, strict=True), marker="o", label=name)
    nodes.set(title="cache operations by nodes in the tree", xlabel="nodes", ylabel="µs", xscale="log", ylim=(0, None))
    nodes.legend()
    queue.plot([max(x, 1) for x, _ in waiting], [y for _, y in waiting], marker="o")
    queue.set(
        title="engine around a step of 64 streams", xlabel="requests waiting", ylabel="ms", xscale="log", ylim=(0, None)
    )
    for axis in axes.flat:
        axis.grid(alpha=0.3)
    figure.suptitle(title)
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--no-picture", action="store_true", help="only print")
    arguments = parser.parse_args()
    by_batch, by_context = steps(arguments.model)
    tree: dict[str, Points] = {}
    for num_nodes in NODES:
        measured = cache_core.measure(num_nodes)
        report("tree", num_nodes, **{key: value for key, value in measured.items() if isinstance(value, float)})
        for key, value in measured.items():
            if isinstance(value, float) and "_us" in key:
                tree.setdefault(key.replace("_us", "").replace("_", " "), []).append((num_nodes, value))
    waiting = []
    for num_waiting in WAITING:
        waiting.append((num_waiting, 1e3 * around_a_step(num_waiting)))
        report("waiting", num_waiting, ms=waiting[-1][1])
    if not arguments.no_picture:
        draw(by_batch, by_context, tree, waiting, f"{arguments.model}, {default_num_threads()} threads")
        print(PICTURE)


if __name__ == "__main__":
    main()
