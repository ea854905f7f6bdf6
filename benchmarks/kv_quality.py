"""What KV in fewer bits costs: perplexity and KL of text, token by token beside the same text over KV as it was.

Pieces of Python's manual and of the source of its library are cut in two: a context, and what is scored after it.

    offload int8, int4   the context's KV goes through the product's own codec block by block, as through a tier, and
                         the rest is computed over it: what a restored prefix costs
    pool int8            all KV, of the context and of what is scored, is kept by the pool in int8 (--kv-dtype int8)

A change is a paired one: each token's loss less the same token's over bf16 KV, which differs far less from token to
token than a loss does. Its 95 % interval is of the means of runs of 32 tokens. Products are computed from the model's
own weights, widened to float32: with the quantised ones, activations are rounded to 8 bits, and then any change at all,
however small, moves single tokens by some per cent, at random. `--as-served` does that.

    python benchmarks/kv_quality.py smollm2 qwen2.5-coder:0.5b
"""

from __future__ import annotations

import argparse
import inspect
import json
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pydoc_data.topics import topics

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress

from spolia.engine.memory import default_num_threads
from spolia.kernels import (
    BLOCK_SIZE,
    Executable,
    KvCodec,
    KvDtype,
    Linear,
    Logits,
    Program,
    StepInputs,
    Weight,
    allocate_pool,
    get_backend,
    quants,
)
from spolia.models import load, pull

CHUNK = 256
RUN = 32
ARMS: dict[str, tuple[KvDtype, str | None]] = {  # how the pool keeps KV, and the context's way through a tier
    "exact": ("bf16", None),
    "offload int8": ("bf16", "int8"),
    "offload int4": ("bf16", "int4"),
    "pool int8": ("int8", None),
}


@dataclass
class Arm:
    """Log-probabilities of the same tokens over one kind of KV."""

    losses: list[NDArray[np.float64]] = field(default_factory=list)
    divergences: list[NDArray[np.float64]] = field(default_factory=list)


class Window:
    """One text in blocks of its own."""

    def __init__(
        self, executable: Executable, program: Program, token_ids: NDArray[np.int32], kv_dtype: KvDtype
    ) -> None:
        self.token_ids = token_ids
        executable.set_kv_dtype(kv_dtype)
        self._executable = executable
        num_blocks = -(-len(token_ids) // BLOCK_SIZE)
        self.pools = [allocate_pool(num_blocks, executable.block_bytes(g)) for g in range(len(program.cache_groups))]
        executable.bind_kv(self.pools)

    def fill(self, stop: int) -> None:
        """Compute the first tokens."""
        for begin in range(0, stop, CHUNK):
            self._step(begin, min(begin + CHUNK, stop), None)

    def score(self, start: int, stop: int) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """Compute tokens [start, stop); for each part, where it begins and log-probabilities of what follows each of
        its tokens, `[tokens, vocab]`."""
        for begin in range(start, stop, RUN):
            end = min(begin + RUN, stop)
            logits = np.empty((end - begin, self._executable.vocab_size), np.float32)
            self._step(begin, end, logits)
            logits -= logits.max(-1, keepdims=True)
            logits -= np.log(np.exp(logits).sum(-1, dtype=np.float64, keepdims=True)).astype(np.float32)
            yield begin, logits

    def _step(self, begin: int, end: int, logits: NDArray[np.float32] | None) -> None:
        blocks = np.arange(self.pools[0].shape[0], dtype=np.int32)[None]
        positions = np.arange(begin, end, dtype=np.int32)
        step = StepInputs(
            token_ids=self.token_ids[begin:end],
            positions=positions,
            row_starts=np.array([0, end - begin], np.int32),
            block_tables=tuple(blocks for _ in self.pools),
            logit_rows=positions - begin,
        )
        self._executable.run(step, logits)


def texts(num_windows: int) -> Iterator[str]:
    """Prose and code in turn, from different places."""
    prose = "\n\n".join(topics[name] for name in sorted(topics) if len(topics[name]) > 2_000)
    code = "\n".join(inspect.getsource(module) for module in (textwrap, json, inspect, argparse))
    for index in range(num_windows):
        text = (prose, code)[index % 2]
        begin = index // 2 * (len(text) // (num_windows // 2 + 1))
        yield text[begin : begin + 12_000]


def widened(program: Program) -> Program:
    """The same program with its matrices in float32."""
    known: dict[int, Weight] = {}

    def wide(weight: Weight) -> Weight:
        if id(weight) not in known:
            known[id(weight)] = quants.quantize(quants.dequantize(weight), "F32", weight.name)
        return known[id(weight)]

    ops = tuple(replace(op, weight=wide(op.weight)) if isinstance(op, Linear | Logits) else op for op in program.ops)
    return replace(program, ops=ops)


def measure(model_name: str, args: argparse.Namespace) -> None:
    model = load(pull(model_name))
    program = model.program if args.as_served else widened(model.program)
    executable = get_backend("cpu")(program, kv_dtype="bf16", num_threads=default_num_threads())
    codecs = {kind: KvCodec(program, executable, kind) for kind in ("int8", "int4")}
    arms = {name: Arm() for name in ARMS}
    bytes_a_block = {}
    groups = range(len(program.cache_groups))
    pieces = [
        np.array(model.tokenizer.encode(text)[: args.context + args.scored + 1], np.int32)
        for text in texts(args.windows)
    ]
    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task(model_name, total=len(pieces) * len(ARMS))
        for ids in pieces:
            expected: list[NDArray[np.float32]] = []
            before: list[NDArray[np.uint8]] = []
            for name, (kv_dtype, kind) in ARMS.items():
                window = Window(executable, program, ids, kv_dtype)
                bytes_a_block[name] = sum(map(executable.block_bytes, groups))
                if before and kv_dtype == "bf16":
                    for pool, blocks in zip(window.pools, before, strict=True):
                        pool[:] = blocks
                else:
                    window.fill(args.context)
                    before = before or [pool.copy() for pool in window.pools]
                if kind is not None:
                    bytes_a_block[name] = sum(map(codecs[kind].payload_bytes, groups))
                    for group, pool in enumerate(window.pools):
                        for block in pool[: args.context // BLOCK_SIZE]:
                            payload = codecs[kind].encode(group, block)
                            assert payload is not None
                            codecs[kind].decode(group, payload, block)
                for part, (begin, found) in enumerate(window.score(args.context, len(ids) - 1)):
                    if name == "exact":
                        expected.append(found)
                    targets = ids[begin + 1 : begin + 1 + len(found), None]
                    arms[name].losses.append(-np.take_along_axis(found, targets, axis=1)[:, 0].astype(np.float64))
                    wanted = expected[part]
                    arms[name].divergences.append((np.exp(wanted) * (wanted - found)).sum(-1, dtype=np.float64))
                bar.advance(task)
    for name, arm in arms.items():
        losses = np.concatenate(arm.losses)
        changes = [ours - exact for ours, exact in zip(arm.losses, arms["exact"].losses, strict=True)]
        means = np.array([change.mean() for change in changes if len(change) == RUN])
        margin = 1.96 * means.std(ddof=1) / np.sqrt(len(means))
        figures = {
            "model": model_name,
            "kv": name,
            "tokens": len(losses),
            "bytes_saved": round(bytes_a_block["exact"] / bytes_a_block[name], 2),
            "perplexity": round(float(np.exp(losses.mean())), 4),
            "change_percent": round(100 * float(np.expm1(means.mean())), 4),
            "interval_percent": [round(100 * float(np.expm1(means.mean() + side * margin)), 4) for side in (-1, 1)],
            "kl": float(f"{np.concatenate(arm.divergences).mean():.2e}"),
        }
        print(json.dumps(figures), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--as-served", action="store_true", help="with the model's quantised weights")
    parser.add_argument("--windows", type=int, default=8, help="texts (8)")
    parser.add_argument("--context", type=int, default=256, help="tokens of each before those that are scored (256)")
    parser.add_argument("--scored", type=int, default=256, help="tokens of each that are scored (256)")
    args = parser.parse_args()
    for model in args.models:
        measure(model, args)


if __name__ == "__main__":
    main()
