"""What does it cost that every miss has a reason?

Workload: conversations of --tokens random token ids whose beginnings (all but 200 tokens) are cached, so that each
diverges: the dearest kind to explain. For each request: the time to its first token; what the cache's look-up takes
with its reasons, and without; and what attributing each token, finding the text around and the conversation log (at
submission and at the end), the counters of `/metrics` and the log line of the request, as JSON, take. All but the
look-ups is done after the answer, but it is counted here as if the first token had waited for it.

Prints one JSON line: medians in microseconds, and their share of the time to first token. Asserts that it is below 1 %.

    python benchmarks/explain_cost.py smollm2 --tokens 2000
"""

from __future__ import annotations

import argparse
import io
import json
import logging
import random
import statistics
import time
from collections.abc import Callable

from spolia.engine import LLM, EngineConfig, SamplingParams, build_engine
from spolia.kvcache import attribute
from spolia.models import load
from spolia.server.conversations import Conversation, ConversationLog, history
from spolia.server.explaining import ExplainLog, explain
from spolia.server.logs import JsonFormatter, log_fields

NUM_TIMES = 200


def median_us(act: Callable[[], object]) -> float:
    times = []
    for _ in range(NUM_TIMES):
        begun_s = time.perf_counter()
        act()
        times.append(1e6 * (time.perf_counter() - begun_s))
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--tokens", type=int, default=2_000)
    parser.add_argument("--requests", type=int, default=5)
    parser.add_argument("--threads", type=int, default=None)
    arguments = parser.parse_args()
    model = load(arguments.model)
    rng = random.Random(0)
    ids = [rng.randrange(1_000, 40_000) for _ in range(arguments.tokens)]
    engine = build_engine(model, EngineConfig(kv_memory=1 << 30, num_threads=arguments.threads))
    cache = engine.core.cache
    params = SamplingParams(temperature=0.0, max_tokens=1)
    namespace = engine.admission.namespace("")
    messages = history([{"role": "user", "content": str(number)} for number in range(20)])
    with LLM(engine) as llm:
        llm.generate(ids, params)
        first_us, outputs = [], []
        for _ in range(arguments.requests):
            turn = ids[:-200] + [rng.randrange(1_000, 40_000) for _ in range(200)]
            output = llm.generate(turn, params)
            assert output.num_cached_tokens == len(ids) - 200
            assert output.explanation is not None
            outputs.append(output)
            first_us.append(1e6 * (output.timings.first_token_s or 0.0))
        turn = ids[:-200] + [rng.randrange(1_000, 40_000) for _ in range(200)]
        plain = median_us(lambda: cache.probe(namespace, turn))
        reasoned = median_us(lambda: cache.explain(namespace, turn))
    output = outputs[-1]
    why = output.explanation
    assert why is not None
    log, explained = ConversationLog(), ExplainLog()
    log.add(Conversation("before", namespace, messages[:-1], 100, ""))
    core, logger = engine.core, logging.getLogger("spolia.requests")
    logger.propagate = False
    handler = logging.StreamHandler(io.StringIO())
    handler.setFormatter(JsonFormatter())
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    fields = {"request": output.request_id, "model": model.name, "cached_tokens": output.num_cached_tokens}
    costs = {
        "look_up": max(0.0, reasoned - plain),
        "attribute": median_us(
            lambda: attribute(
                why, num_shared=0, num_reused=output.num_cached_tokens, num_prompt_tokens=len(output.prompt_token_ids)
            )
        ),
        "in_words": median_us(lambda: explain(output, model.tokenizer, messages=messages, log=log)),
        "kept": median_us(
            lambda: explained.add("x", 0, explain(output, model.tokenizer, messages=messages, log=log), None)
        ),
    }
    costs["history"] = median_us(lambda: log.continued(namespace, messages))
    costs["counted"] = median_us(lambda: core.count_prompt(why, output.ranges))
    costs["logged"] = median_us(lambda: log_fields(logger, "answered", {**fields, "reason": why.reason.value}))
    costs["kept"] = max(0.0, costs["kept"] - costs["in_words"])
    first = statistics.median(first_us)
    share = sum(costs.values()) / first
    shown = {f"{name}_us": round(value, 1) for name, value in costs.items()}
    print(json.dumps({"model": arguments.model, "tokens": len(ids), "first_token_us": round(first), **shown,
                      "share_percent": round(100 * share, 3)}))  # fmt: skip
    assert share < 0.01, f"explaining takes {share:.2%} of the time to first token"


if __name__ == "__main__":
    main()
