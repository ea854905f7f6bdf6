"""The workloads of `spolia bench` inside a process, without a server and a client's share: `peers.py` starts this.

    python in_process.py spolia|openvino FILE VOCAB_SIZE [WORKLOAD ...]

Prints the same JSON lines. For a peer that has no server (OpenVINO GenAI), and for Spolia beside it. `multiturn` runs
the turns of all clients in step, on token ids. Imports nothing of Spolia unless told to run it: peers have
environments of their own.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable

Request = tuple[list[int], int]
Engine = Callable[[list[Request]], list[list[int]]]  # greedy, exactly so many tokens each; what was generated


def openvino_engine(file: str) -> Engine:
    import numpy as np
    import openvino
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = 4  # GiB
    scheduler.enable_prefix_caching = True
    scheduler.max_num_batched_tokens = 2048
    scheduler.dynamic_split_fuse = True
    threads = {"INFERENCE_NUM_THREADS": len(os.sched_getaffinity(0))}
    pipeline = openvino_genai.ContinuousBatchingPipeline(file, scheduler, "CPU", threads)

    def run(requests: list[Request]) -> list[list[int]]:
        configs = []
        for _, num_tokens in requests:
            config = openvino_genai.GenerationConfig()
            config.max_new_tokens = config.min_new_tokens = num_tokens
            config.ignore_eos = True
            config.do_sample = False
            configs.append(config)
        prompts = [openvino.Tensor(np.array([ids], dtype=np.int64)) for ids, _ in requests]
        return [list(result.m_generation_ids[0]) for result in pipeline.generate(prompts, configs)]

    return run


def spolia_engine(file: str) -> Engine:
    from spolia import LLM, SamplingParams

    llm = LLM(file)

    def run(requests: list[Request]) -> list[list[int]]:
        params = [SamplingParams(max_tokens=n, min_tokens=n, temperature=0, ignore_eos=True) for _, n in requests]
        return [list(output.token_ids) for output in llm.generate([ids for ids, _ in requests], params)]

    return run


ENGINES = {"openvino": openvino_engine, "spolia": spolia_engine}

engine_name, file, vocab_size, only = sys.argv[1], sys.argv[2], int(sys.argv[3]), tuple(sys.argv[4:])
run = ENGINES[engine_name](file)


def generate(requests: list[Request]) -> tuple[float, list[list[int]]]:
    """Seconds, and what was generated."""
    start = time.perf_counter()
    answers = run(requests)
    return time.perf_counter() - start, answers


def tokens(rng: random.Random, n: int) -> list[int]:
    margin = min(1000, vocab_size // 4)
    return [rng.randrange(margin, vocab_size - margin) for _ in range(n)]


def one_by_one(requests: list[Request]) -> list[float]:
    return [generate([request])[0] for request in requests]


def report(workload: str, seconds: float, num_in: int, num_out: int, first_s: list[float] | None = None) -> None:
    ttft = None if first_s is None else {"p50": round(1e3 * sorted(first_s)[len(first_s) // 2], 1)}
    print(
        json.dumps(
            {
                "label": engine_name,
                "workload": workload,
                "wall_s": round(seconds, 3),
                "out_tok_s": round(num_out / seconds, 1),
                "total_tok_s": round((num_in + num_out) / seconds, 1),
                "ttft_ms": ttft,
            }
        ),
        flush=True,
    )


def decode_b1(rng: random.Random) -> None:
    report("decode_b1", sum(one_by_one([(tokens(rng, 16), 128) for _ in range(3)])), 48, 384)


def prefill_1024(rng: random.Random) -> None:
    seconds = one_by_one([(tokens(rng, 1024), 1) for _ in range(4)])
    report("prefill_1024", sum(seconds), 4096, 4, seconds)


def warm_2048(rng: random.Random) -> None:
    base = tokens(rng, 2048)
    generate([(base, 1)])
    seconds = one_by_one([(base + tokens(rng, 8), 1) for _ in range(6)])
    report("warm_2048", sum(seconds), 6 * 2056, 6, seconds)


def decode_4000(rng: random.Random) -> None:
    base = tokens(rng, 4000)
    generate([(base, 1)])
    report("decode_4000", sum(one_by_one([(base, 64) for _ in range(3)])), 3 * 4000, 3 * 64)


def batch_128_64(rng: random.Random) -> None:
    requests = [(tokens(rng, 128), 64) for _ in range(32)]
    seconds = sum(generate(requests[i : i + 16])[0] for i in (0, 16))  # 16 at once
    report("batch_128_64", seconds, 32 * 128, 32 * 64)


def shared_prefix(rng: random.Random) -> None:
    prefixes = [tokens(rng, 512) for _ in range(8)]
    requests = [(prefix + tokens(rng, 64), 32) for prefix in prefixes for _ in range(8)]
    rng.shuffle(requests)
    report("shared_prefix", generate(requests)[0], 64 * 576, 64 * 32)


def multiturn(rng: random.Random) -> None:
    histories = [tokens(rng, 120) for _ in range(12)]
    total = num_in = 0.0
    for _ in range(5):
        seconds, answers = generate([(history, 32) for history in histories])
        total += seconds
        num_in += sum(map(len, histories))
        histories = [[*history, *answer, *tokens(rng, 121)] for history, answer in zip(histories, answers, strict=True)]
    report("multiturn", total, int(num_in), 12 * 5 * 32)


WORKLOADS: list[Callable[[random.Random], None]] = [
    decode_b1,
    prefill_1024,
    warm_2048,
    decode_4000,
    batch_128_64,
    shared_prefix,
    multiturn,
]

generate([(tokens(random.Random(0), 32), 8)])
for workload in WORKLOADS:
    if not only or workload.__name__.startswith(only):
        workload(random.Random(f"7/{workload.__name__}"))
