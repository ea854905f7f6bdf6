"""What logits processors cost: time to sample 64 rows of a vocabulary of 151,936, by what the rows ask for.

Every row is a sequence of 1,000 prompt tokens and 200 of its answer, with a pipeline of its own. Prints a JSON line a
setting: milliseconds for all rows (best of twenty, all settings in turn), and that less the greedy batch's; with a
MODEL of that vocabulary also what share that is of a step of 64 of its streams at 256 tokens, sampling not counted.

    python benchmarks/processors.py [MODEL]
"""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spolia import models
from spolia.generation import RowSampling, Sampler, SamplingParams, Vocabulary, build_pipeline
from spolia.kernels.cpu import CpuExecutable
from spolia.kernels.cpu.roofline import StepShape, measure_step

NUM_ROWS, VOCAB_SIZE = 64, 151_936
VOCABULARY = Vocabulary(
    VOCAB_SIZE,
    eos_token_ids=(1,),
    encode=lambda text: list(text.encode()),
    token_bytes=lambda token_id: bytes([token_id % 256]),
    is_special=lambda _: False,
)
FIVE = {
    "repetition_penalty": 1.1,
    "presence_penalty": 0.5,
    "no_repeat_ngram_size": 3,
    "logit_bias": {5: 1.0},
    "suppress_tokens": [7],
}
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    **{f"greedy, {name}": {"temperature": 0.0, name: value} for name, value in FIVE.items()},
    "greedy, five processors": {"temperature": 0.0, **FIVE},
    "top-k and top-p": {"temperature": 0.7, "top_k": 50, "top_p": 0.9},
    "top-k and top-p, five processors": {"temperature": 0.7, "top_k": 50, "top_p": 0.9, **FIVE},
    "DRY and XTC": {"min_p": 0.05, "xtc_probability": 0.5, "dry_multiplier": 0.8},
    "top-p": {"top_p": 0.9},
    "typical": {"typical_p": 0.9},
    "epsilon": {"epsilon_cutoff": 1e-3},
    "eta": {"eta_cutoff": 1e-3},
    "top-h": {"top_h": 0.4},
    "dynamic temperature": {"dynatemp_range": 0.5},
    "top-n-sigma": {"top_n_sigma": 1.0},
    "mirostat": {"mirostat": 2},
    "watermark": {"watermark": {}},
}


def rows_of(options: dict[str, Any], rng: np.random.Generator) -> list[RowSampling]:
    params = SamplingParams(**options)
    rows = []
    for seed in range(NUM_ROWS):
        pipeline = build_pipeline(params, VOCABULARY, max_tokens=1_000)
        if pipeline is not None:
            pipeline.follow(rng.integers(0, VOCAB_SIZE, 1_300).astype(np.int32), 1_000, seed=seed)
        rows.append(RowSampling(params, seed, 1_200, np.empty(0, np.int32), pipeline))
    return rows


def logits_of(kind: str, rng: np.random.Generator) -> NDArray[np.float32]:
    """`[NUM_ROWS, VOCAB_SIZE]`. Peaked: some hundred tokens stand out, as in what models say. Flat: the worst case."""
    logits = rng.standard_normal((NUM_ROWS, VOCAB_SIZE)) * 3
    if kind == "peaked":
        for row in logits:
            row[rng.integers(0, VOCAB_SIZE, 300)] += rng.exponential(6.0, 300) + 4
    return logits.astype(np.float32)


def step_s(source: str) -> float:
    """Seconds of a step of a model that computes a token of each row."""
    program = models.load(source).program
    if program.vocab_size != VOCAB_SIZE:
        raise SystemExit(f"{source} has a vocabulary of {program.vocab_size}; the rows here have {VOCAB_SIZE}")
    executable = CpuExecutable(program, kv_dtype="bf16", num_threads=os.cpu_count() or 1)
    return measure_step(executable, program, StepShape("", NUM_ROWS, 1, 256), seconds=2.0).seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("model", nargs="?")
    model = parser.parse_args().model
    of_step_s = None if model is None else step_s(model)
    rng = np.random.default_rng(0)
    sampler = Sampler(VOCAB_SIZE)
    rows = {name: rows_of(options, rng) for name, options in SETTINGS.items()}
    for kind in ("peaked", "flat"):
        logits = logits_of(kind, rng)
        best = dict.fromkeys(SETTINGS, float("inf"))
        for _ in range(20):
            for name in SETTINGS:
                copy = logits.copy()
                started_s = time.perf_counter()
                sampler.sample(copy, rows[name])
                best[name] = min(best[name], time.perf_counter() - started_s)
        for name, seconds in best.items():
            more = 1e3 * (seconds - best["greedy"])
            line: dict[str, Any] = {
                "logits": kind,
                "setting": name,
                "ms": round(1e3 * seconds, 1),
                "ms_more_than_greedy": round(more, 1),
            }
            if of_step_s is not None:
                line["percent_of_step"] = round(0.1 * more / of_step_s, 1)
            print(json.dumps(line))


if __name__ == "__main__":
    main()
