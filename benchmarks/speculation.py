"""Whether speculation pays: time a generated token with `speculation="auto"` beside "off", by kind of prompt.

Each prompt is answered greedily by both engines in turn, the order changing from prompt to prompt, so that both see the
same machine; the answers must be the same tokens. Only the time after the first token counts: prefill is not what
speculation changes. Kinds are

    regenerated    an answer that was given before is asked for again
    edited         a file of code is to be written again with a name changed
    CATEGORY       of the prompts in FILE: JSON lines with `category` and `turns`, as Spec-Bench has them
    dialogue       of the prompts in FILE: JSON lines with `messages`, each answered where its last agent's turn begins

Prints a JSON line a kind: tokens/s of both, their ratio (more than 1 is better), the share of guesses that were right.

    python benchmarks/speculation.py MODEL [--prompts FILE ...] [--limit N] [--tokens N]
"""

from __future__ import annotations

import argparse
import gzip
import json
import platform
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from spolia import LLM, SamplingParams

CODE = '''\
def total(prices, rate):
    """The sum of all prices, tax included."""
    result = 0
    for price in prices:
        result = result + price * (1 + rate)
    return result


def average(prices, rate):
    """The mean price, tax included."""
    if not prices:
        return 0
    return total(prices, rate) / len(prices)
'''


@dataclass
class Arm:
    """What one engine did with one kind of prompt."""

    num_tokens: int = 0
    seconds: float = 0.0
    num_drafted: int = 0
    num_accepted: int = 0

    @property
    def speed(self) -> float:
        return self.num_tokens / self.seconds if self.seconds else 0.0


def answer(llm: LLM, ids: list[int], num_tokens: int, arm: Arm | None) -> tuple[int, ...]:
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens)
    first_s = None
    for delta in llm.stream(ids, params):
        now_s = time.perf_counter()
        first_s = first_s or now_s
        if delta.output is not None:
            output = delta.output
    if arm is not None and len(output.token_ids) > 1:
        arm.num_tokens += len(output.token_ids) - 1
        arm.seconds += now_s - (first_s or now_s)
        arm.num_drafted += output.num_drafted_tokens
        arm.num_accepted += output.num_accepted_tokens
    return output.token_ids


def chat_ids(llm: LLM, messages: list[dict[str, str]]) -> list[int]:
    return llm.chat_prompt(messages)


def prompts(llm: LLM, path: str, limit: int) -> Iterator[tuple[str, list[int]]]:
    """Kind and token ids of each prompt of a file, `limit` of each kind."""
    taken: dict[str, int] = defaultdict(int)
    with gzip.open(path, "rt") if path.endswith(".gz") else open(path) as file:
        for line in file:
            item = json.loads(line)
            if "turns" in item:
                kind, messages = item["category"], [{"role": "user", "content": item["turns"][0]}]
            else:
                kind, messages = "dialogue", _before_last_answer(item["messages"])
            if messages and taken[kind] < limit:
                taken[kind] += 1
                yield kind, chat_ids(llm, messages)


def _before_last_answer(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    texts = [{"role": m["role"], "content": m["content"]} for m in messages if m.get("content") and m["role"] != "tool"]
    while texts and texts[-1]["role"] != "user":
        texts.pop()
    return texts


def workload(llm: LLM, files: list[str], limit: int) -> Iterator[tuple[str, list[int]]]:
    for old, new in (("price", "cost"), ("rate", "tax"), ("result", "amount")):
        text = f"Write this file again, with `{new}` in place of `{old}`, and nothing else.\n\n```python\n{CODE}```"
        yield "edited", chat_ids(llm, [{"role": "user", "content": text}])
    for path in files:
        yield from prompts(llm, path, limit)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("model")
    parser.add_argument("--prompts", action="append", default=[])
    parser.add_argument("--limit", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    given = parser.parse_args()
    arms: dict[str, tuple[Arm, Arm]] = defaultdict(lambda: (Arm(), Arm()))
    with LLM(given.model) as off, LLM(given.model, speculation="auto") as auto:
        room = min(off.config.max_context or 0, 4_096) - given.tokens
        for index, (kind, ids) in enumerate(workload(off, given.prompts, given.limit)):
            kept = ids[-room:]
            order = (0, 1) if index % 2 else (1, 0)
            for asked_before, name in ((False, kind), (True, "regenerated")):
                answers = {}
                for arm in order:
                    answers[arm] = answer((off, auto)[arm], kept, given.tokens, arms[name][arm])
                if answers[0] != answers[1]:
                    raise SystemExit(f"{name}: the answers differ; asked before: {asked_before}")
    for kind, (plain, fast) in sorted(arms.items()):
        figures = {
            "kind": kind,
            "model": given.model,
            "off_tokens_per_s": round(plain.speed, 1),
            "auto_tokens_per_s": round(fast.speed, 1),
            "ratio": round(fast.speed / plain.speed, 3) if plain.speed else None,
            "guesses_right": round(fast.num_accepted / fast.num_drafted, 3) if fast.num_drafted else None,
            "machine": platform.processor() or platform.machine(),
        }
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
