"""How much sooner does the first token come after a restart, if KV was kept on disk?

Workload: a conversation of --tokens random token ids and 16 generated ones; then its next turn, 20 ids longer. In
turns, --repeats times: an engine with an empty folder (cold), and one with the folder that the first engine left
(warm). Every engine is new, as after a restart; loading the model is not counted.

Prints one JSON line: seconds to the first token of both (the least of the repeats), and their ratio. Asserts that all
give the same tokens.

    python benchmarks/restart.py smollm2 --tokens 4000
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from pathlib import Path

from spolia.engine import LLM, RequestOutput, SamplingParams
from spolia.models import load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--tokens", type=int, default=4_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=None)
    arguments = parser.parse_args()
    model = load(arguments.model)
    rng = random.Random(0)
    prompt = [rng.randrange(1_000, 40_000) for _ in range(arguments.tokens)]
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)

    def ask(folder: Path, ids: list[int]) -> RequestOutput:
        with LLM(model, kv_disk=folder, kv_memory=1 << 30, num_threads=arguments.threads) as llm:
            return llm.generate(ids, params)

    with tempfile.TemporaryDirectory() as kept:
        turn = [*prompt, *ask(Path(kept), prompt).token_ids, *(rng.randrange(1_000, 40_000) for _ in range(20))]
        cold, warm = [], []
        for _ in range(arguments.repeats):
            with tempfile.TemporaryDirectory() as empty:
                cold.append(ask(Path(empty), turn))
            warm.append(ask(Path(kept), turn))
    assert len({output.token_ids for output in cold + warm}) == 1, "a restored prefix changed the answer"
    assert all(output.num_cached_tokens >= arguments.tokens // 16 * 16 for output in warm)
    cold_s, warm_s = (min(output.timings.first_token_s or 0.0 for output in outputs) for outputs in (cold, warm))
    result = {
        "model": arguments.model,
        "tokens": len(turn),
        "cold_s": cold_s,
        "warm_s": warm_s,
        "ratio": cold_s / warm_s,
    }
    print(json.dumps({name: round(value, 3) if isinstance(value, float) else value for name, value in result.items()}))


if __name__ == "__main__":
    main()
