"""What KV in fewer bits costs: perplexity and KL of text that follows a context which a tier kept in 8 or 4 bits.

Each of `--windows` pieces of Python's manual and of the source of its library is cut in two. The first part's KV is
computed, then goes through the product's own codec block by block, as through a tier; the second part is computed over
it, and scored, beside the same part over KV as it was. So all of the context is rounded, and what is scored is not.

A perplexity's change has a standard error, which is printed with it: with the CPU's kernels, which round activations to
8 bits, any change at all, however small, moves single tokens by some per cent. `--backend reference` does not round and
so sees smaller effects; it is slow.

    python benchmarks/kv_quality.py smollm2 qwen2.5-coder:0.5b --backend reference
"""

from __future__ import annotations

import argparse
import inspect
import json
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pydoc_data.topics import topics

import numpy as np
from numpy.typing import NDArray

from spolia.engine.memory import default_num_threads
from spolia.kernels import BLOCK_SIZE, Executable, KvCodec, Program, StepInputs, allocate_pool, get_backend
from spolia.models import load, pull

CHUNK = 256


@dataclass
class Arm:
    """Log-probabilities of the same tokens over one kind of KV."""

    losses: list[NDArray[np.float64]] = field(default_factory=list)
    divergences: list[NDArray[np.float64]] = field(default_factory=list)


class Window:
    """One text in blocks of its own."""

    def __init__(self, executable: Executable, program: Program, token_ids: NDArray[np.int32]) -> None:
        self.token_ids = token_ids
        self._executable = executable
        num_blocks = -(-len(token_ids) // BLOCK_SIZE)
        self.pools = [allocate_pool(num_blocks, executable.block_bytes(g)) for g in range(len(program.cache_groups))]
        executable.bind_kv(self.pools)

    def run(self, start: int, stop: int) -> NDArray[np.float64]:
        """Compute tokens [start, stop); log-probabilities of what follows each, float64 `[tokens, vocab]`."""
        blocks = np.arange(self.pools[0].shape[0], dtype=np.int32)[None]
        found = []
        for begin in range(start, stop, CHUNK):
            end = min(begin + CHUNK, stop)
            positions = np.arange(begin, end, dtype=np.int32)
            step = StepInputs(
                token_ids=self.token_ids[begin:end],
                positions=positions,
                row_starts=np.array([0, end - begin], np.int32),
                block_tables=tuple(blocks for _ in self.pools),
                logit_rows=positions - begin,
            )
            logits = np.empty((end - begin, self._executable.vocab_size), np.float32)
            self._executable.run(step, logits)
            wide = logits.astype(np.float64)
            wide -= wide.max(-1, keepdims=True)
            found.append(wide - np.log(np.exp(wide).sum(-1, keepdims=True)))
        return np.concatenate(found)


def texts(num_windows: int) -> Iterator[str]:
    """Prose and code in turn, from different places."""
    prose = "\n\n".join(topics[name] for name in sorted(topics) if len(topics[name]) > 2_000)
    code = "\n".join(inspect.getsource(module) for module in (textwrap, json, inspect, argparse))
    for index in range(num_windows):
        text = (prose, code)[index % 2]
        begin = index // 2 * (len(text) // (num_windows // 2 + 1))
        yield text[begin : begin + 12_000]


def measure(model_name: str, args: argparse.Namespace) -> None:
    model = load(pull(model_name))
    program = model.program
    executable = get_backend(args.backend)(program, kv_dtype="bf16", num_threads=default_num_threads())
    codecs = {kind: KvCodec(program, executable, kind) for kind in ("int8", "int4")}
    arms = {kind: Arm() for kind in ("exact", *codecs)}
    for text in texts(args.windows):
        ids = np.array(model.tokenizer.encode(text)[: args.context + args.scored + 1], np.int32)
        window = Window(executable, program, ids)
        window.run(0, args.context)
        before = [pool.copy() for pool in window.pools]
        stop, targets = len(ids) - 1, ids[args.context + 1 :, None]
        expected = None
        for kind, arm in arms.items():
            for group, (pool, blocks) in enumerate(zip(window.pools, before, strict=True)):
                pool[:] = blocks
                for block in pool[: args.context // BLOCK_SIZE] if kind != "exact" else ():
                    payload = codecs[kind].encode(group, block)
                    assert payload is not None
                    codecs[kind].decode(group, payload, block)
            found = window.run(args.context, stop)
            expected = found if expected is None else expected
            arm.losses.append(-np.take_along_axis(found, targets, axis=1)[:, 0])
            arm.divergences.append((np.exp(expected) * (expected - found)).sum(-1))
    block_bytes = sum(executable.block_bytes(group) for group in range(len(program.cache_groups)))
    exact = np.concatenate(arms["exact"].losses)
    for kind, arm in arms.items():
        losses = np.concatenate(arm.losses)
        kept_bytes = block_bytes if kind == "exact" else sum(map(codecs[kind].payload_bytes, range(len(before))))
        figures = {
            "model": model_name,
            "backend": args.backend,
            "kv": kind,
            "tokens": len(losses),
            "bytes_saved": round(block_bytes / kept_bytes, 2),
            "perplexity": round(float(np.exp(losses.mean())), 4),
            "change_percent": round(100 * float(np.expm1((losses - exact).mean())), 3),
            "standard_error_percent": round(100 * float((losses - exact).std() / np.sqrt(len(losses))), 3),
            "kl": float(f"{np.concatenate(arm.divergences).mean():.2e}"),
        }
        print(json.dumps(figures), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--backend", default="cpu", choices=["cpu", "reference"])
    parser.add_argument("--windows", type=int, default=8, help="texts (8)")
    parser.add_argument("--context", type=int, default=512, help="tokens of each whose KV is rounded (512)")
    parser.add_argument("--scored", type=int, default=256, help="tokens after them that are scored (256)")
    args = parser.parse_args()
    for model in args.models:
        measure(model, args)


if __name__ == "__main__":
    main()
