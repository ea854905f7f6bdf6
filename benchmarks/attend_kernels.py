"""How long does attention take, level by level?

Workload: the attention of one SmolLM2-135M step (30 layers, 9 query heads on 3 KV heads of 64), KV in bf16 unless
--kv-dtype says otherwise, each layer with KV of its own, blocks of a sequence in random order:

    prefill   one sequence of 1,024 tokens, in one step
    chunk     256 more tokens of a sequence that has 1,792
    decode    one more token of a sequence that has 4,000
    batch     one more token of each of 16 sequences of 300
    sharers   one more token of each of 16 sequences whose first 4,000 of 4,016 tokens are the same blocks
    strangers the same 16 sequences with blocks of their own (what `sharers` would cost without sharing)

Prints one JSON line for each: milliseconds of a step (the best of --repeats), GB/s of KV as if each sequence read its
own, and GMAC/s of both products. Asserts that the outputs are the same bits as with one thread.

    python benchmarks/attend_kernels.py --threads 2
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spolia.kernels.cpu import _cpu

BLOCK = 16
NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 30, 9, 3, 64
KV_TYPES = {"f32": 0, "f16": 1, "bf16": 2}
KV_BYTES = {"f32": 4, "f16": 2, "bf16": 2}


@dataclass(frozen=True)
class Workload:
    """`num_rows` new tokens of each of `num_seqs` sequences that end at `length` and share their first `shared`."""

    name: str
    num_seqs: int
    num_rows: int
    length: int
    shared: int = 0

    def block_table(self, rng: np.random.Generator) -> NDArray[np.int32]:
        blocks, common = -(-self.length // BLOCK), self.shared // BLOCK
        own = blocks - common
        ids = rng.permutation(common + own * self.num_seqs).astype(np.int32)
        table = np.empty((self.num_seqs, blocks), np.int32)
        table[:, :common] = ids[:common]
        table[:, common:] = ids[common:].reshape(self.num_seqs, own)
        return table

    @property
    def num_scores(self) -> int:
        return self.num_seqs * sum(range(self.length - self.num_rows + 1, self.length + 1))


WORKLOADS = [
    Workload("prefill", 1, 1024, 1024),
    Workload("chunk", 1, 256, 2048),
    Workload("decode", 1, 1, 4001),
    Workload("batch", 16, 1, 300),
    Workload("sharers", 16, 1, 4016, shared=4000),
    Workload("strangers", 16, 1, 4016),
]


def measure(workload: Workload, level: str, kv_dtype: str, num_threads: int, repeats: int) -> dict[str, object]:
    rng = np.random.default_rng(0)
    shape = _cpu.AttendShape(KV_TYPES[kv_dtype], NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, 0, HEAD_DIM**-0.5, 0.0)
    layer_bytes = _cpu.raw_attend_layer_bytes(level, shape)
    table = workload.block_table(rng)
    pool = np.full(
        (int(table.max()) + 1, NUM_LAYERS * layer_bytes), 0x3C, np.uint8
    )  # small positive numbers in every type
    num_rows = workload.num_seqs * workload.num_rows
    row_starts = np.arange(0, num_rows + 1, workload.num_rows, dtype=np.int32)
    positions = np.tile(
        np.arange(workload.length - workload.num_rows, workload.length, dtype=np.int32), workload.num_seqs
    )
    q = rng.standard_normal((num_rows, NUM_HEADS * HEAD_DIM), np.float32)
    k, v = rng.standard_normal((2, num_rows, NUM_KV_HEADS * HEAD_DIM), np.float32)
    out, alone = np.empty_like(q), np.empty_like(q)
    offsets = [layer * layer_bytes for layer in range(NUM_LAYERS)]

    def run(num_threads: int, out: NDArray[np.float32]) -> float:
        start = time.perf_counter()
        _cpu.raw_attend(level, shape, pool, offsets, table, row_starts, positions, q, k, v, out, num_threads)
        return time.perf_counter() - start

    run(1, alone)
    best = min(run(num_threads, out) for _ in range(repeats))
    assert out.tobytes() == alone.tobytes()
    kv_bytes = 2 * NUM_LAYERS * NUM_KV_HEADS * HEAD_DIM * KV_BYTES[kv_dtype] * workload.num_seqs * workload.length
    macs = 2 * NUM_LAYERS * NUM_HEADS * HEAD_DIM * workload.num_scores
    return {
        "workload": workload.name,
        "level": level,
        "kv_dtype": kv_dtype,
        "threads": num_threads,
        "ms": round(best * 1e3, 2),
        "kv_GB_per_s": round(kv_bytes / best / 1e9, 1),
        "GMAC_per_s": round(macs / best / 1e9, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--levels", nargs="+", default=_cpu.levels())
    parser.add_argument("--kv-dtype", choices=KV_TYPES, default="bf16")
    parser.add_argument("--workloads", nargs="+", default=[w.name for w in WORKLOADS])
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    for level in args.levels:
        for workload in WORKLOADS:
            if workload.name in args.workloads:
                print(json.dumps(measure(workload, level, args.kv_dtype, args.threads, args.repeats)), flush=True)


if __name__ == "__main__":
    main()
