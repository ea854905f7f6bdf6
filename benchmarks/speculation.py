"""Whether speculation pays: time a generated token with speculation beside the same without, by kind of prompt.

Two engines answer each prompt greedily, one with `speculation` off and one with `auto`; the answers must be the same
tokens. They take turns step by step, the one that has fewer tokens next, so whatever else the machine does slows both.
Only the time after the first token counts: prefill is not what speculation changes. Kinds are

    edited         a file of code is to be written again with a name changed, --edits; once more with the old file as
    predicted      OpenAI's `prediction`
    CATEGORY       of the prompts in --prompts FILE: JSON lines with `category` and `turns`, as Spec-Bench has them
    replayed       the dialogues in --replay FILE: JSON lines with `messages`; each reply of the assistant as it was
                   recorded, calls of tools too, whatever this model would have said: it is forced to
    regenerated    each edit is asked for once more

Prints a JSON line a kind: tokens/s without and with, their ratio (more than 1 is better), what was drafted and how much
of it was right; and last the worst ratio.

    python benchmarks/speculation.py MODEL [--edits] [--prompts FILE] [--replay FILE] [--limit N] [--tokens N]
        [--draft-model MODEL] [--seconds S] [--threads N | --cpu-time]
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import platform
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from spolia.engine import Engine, EngineConfig, RequestOutput, SamplingParams, build_engine
from spolia.errors import SpoliaError
from spolia.models import Model, load

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


def cheapest(prices, rate):
    """The lowest price, tax included."""
    result = None
    for price in prices:
        if result is None or price * (1 + rate) < result:
            result = price * (1 + rate)
    return result
'''
ROOM = 4_096  # tokens of a prompt and its answer
MEMORY = 1 << 30  # bytes of KV of each engine
IDS = itertools.count()


@dataclass
class Arm:
    """What one way of answering did with one kind of prompt."""

    num_tokens: int = 0
    seconds: float = 0.0
    num_drafted: int = 0
    num_accepted: int = 0

    @property
    def speed(self) -> float:
        return self.num_tokens / self.seconds if self.seconds else 0.0


class Task(NamedTuple):
    """A prompt, and how it is answered; `said`: the answer that is forced, if one is."""

    kind: str
    ids: list[int]
    params: SamplingParams
    said: tuple[int, ...] = ()


class Run:
    """An answer on its way, alone on its engine."""

    def __init__(self, engine: Engine, task: Task) -> None:
        params = task.params
        if task.said:
            start, said = len(task.ids), task.said
            params = replace(params, prefix_allowed_tokens_fn=lambda _, ids: [said[len(ids) - start]], ignore_eos=True)
        self.core = engine.core
        self.output: RequestOutput | None = None
        self.num_tokens = 0
        self.core.submit(engine.admission.admit(task.ids, params, request_id=f"r{next(IDS)}"))
        while not self.num_tokens:
            self.step()

    def step(self) -> None:
        for _, delta in self.core.step():
            if isinstance(delta, SpoliaError):
                raise delta
            self.num_tokens += len(delta.token_ids)
            self.output = delta.output


def answer(engines: Sequence[Engine], task: Task, arms: Sequence[Arm], clock: Callable[[], float]) -> None:
    """Answer a task with each engine, one step of one of them at a time."""
    runs = [Run(engine, task) for engine in engines]
    while going := [index for index, run in enumerate(runs) if run.output is None]:
        index = min(going, key=lambda index: runs[index].num_tokens)
        begun_s = clock()
        runs[index].step()
        arms[index].seconds += clock() - begun_s
    outputs = [run.output for run in runs if run.output is not None]
    if len({output.token_ids for output in outputs}) > 1:
        raise SystemExit(f"{task.kind}: the answers differ")
    for arm, output in zip(arms, outputs, strict=True):
        arm.num_tokens += len(output.token_ids) - 1
        arm.num_drafted += output.num_drafted_tokens
        arm.num_accepted += output.num_accepted_tokens


def lines(path: str) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rt") if path.endswith(".gz") else open(path) as file:
        yield from map(json.loads, file)


def chat_prompt(model: Model, messages: list[dict[str, str]]) -> list[int]:
    if model.chat_template is None:
        raise SystemExit(f"{model.name} has no chat template")
    return model.tokenizer.encode(model.chat_template.render(messages), add_special=False)


def edits(model: Model, num_tokens: int) -> Iterator[Task]:
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens)
    for old, new in (("price", "cost"), ("rate", "tax"), ("result", "amount"), ("average", "mean")):
        text = f"Write this file again, with `{new}` in place of `{old}`, and nothing else.\n\n```python\n{CODE}```"
        ids = chat_prompt(model, [{"role": "user", "content": text}])
        yield Task("edited", ids, params)
        yield Task("predicted", ids, replace(params, prediction=CODE))


def categories(model: Model, path: str, limit: int, num_tokens: int) -> Iterator[Task]:
    """`limit` prompts of each category, the categories in turn."""
    by_kind: dict[str, list[str]] = defaultdict(list)
    for item in lines(path):
        by_kind[item["category"]].append(item["turns"][0])
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    for index in range(limit):
        for kind, texts in by_kind.items():
            if index < len(texts):
                ids = chat_prompt(model, [{"role": "user", "content": texts[index]}])
                yield Task(kind, ids[: ROOM - num_tokens], params)


def replays(model: Model, path: str, num_tokens: int) -> Iterator[Task]:
    for item in lines(path):
        messages: list[dict[str, str]] = []
        for message in item["messages"]:
            calls = [call["function"] for call in message.get("tool_calls") or ()]
            text = {"role": message["role"], "content": json.dumps(calls) if calls else message.get("content") or ""}
            if message["role"] == "assistant" and messages and text["content"]:
                ids = chat_prompt(model, messages)
                said = tuple(model.tokenizer.encode(text["content"], add_special=False)[:num_tokens])
                if len(ids) + len(said) > ROOM:
                    break
                if len(said) > 8:
                    yield Task("replayed", ids, SamplingParams(temperature=0.0, max_tokens=len(said)), said)
            messages.append(text if text["role"] != "tool" else {"role": "user", "content": text["content"]})


def tasks(model: Model, given: argparse.Namespace) -> Iterator[Task]:
    if given.edits:
        yield from edits(model, given.tokens)
    if given.prompts:
        yield from categories(model, given.prompts, given.limit, given.tokens)
    if given.replay:
        yield from replays(model, given.replay, given.tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("model")
    parser.add_argument("--edits", action="store_true")
    parser.add_argument("--prompts")
    parser.add_argument("--replay")
    parser.add_argument("--limit", type=int, default=5, help="prompts of each category")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no prompt after so long")
    parser.add_argument("--draft-model")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--cpu-time", action="store_true", help="for a busy machine: one thread, by its CPU's clock")
    given = parser.parse_args()
    begun_s = time.perf_counter()
    arms: dict[str, tuple[Arm, Arm]] = defaultdict(lambda: (Arm(), Arm()))
    clock = time.process_time if given.cpu_time else time.perf_counter
    threads = 1 if given.cpu_time else given.threads
    plain = EngineConfig(max_context=ROOM, num_threads=threads, kv_memory=MEMORY)
    model = load(given.model)
    engines = [
        build_engine(model, config, clock=clock)
        for config in (plain, replace(plain, speculation="auto", draft_model=given.draft_model))
    ]
    warm = Task("", chat_prompt(model, [{"role": "user", "content": "Hello"}]), SamplingParams(max_tokens=16, seed=0))
    answer(engines, warm, (Arm(), Arm()), clock)
    for task in tasks(model, given):
        if time.perf_counter() - begun_s > given.seconds:
            break
        for kind in [task.kind, "regenerated"] if task.kind == "edited" else [task.kind]:
            answer(engines, task, arms[kind], clock)
    for kind, (without, fast) in sorted(arms.items()):
        figures = {
            "kind": kind,
            "model": given.model,
            "clock": "cpu, 1 thread" if given.cpu_time else "wall",
            "tokens": without.num_tokens,
            "without_tokens_per_s": round(without.speed, 1),
            "with_tokens_per_s": round(fast.speed, 1),
            "ratio": round(fast.speed / without.speed, 3) if without.speed else None,
            "drafted": fast.num_drafted,
            "accepted": fast.num_accepted,
            "machine": platform.processor() or platform.machine(),
        }
        print(json.dumps(figures))
    print(json.dumps({"worst": min(fast.speed / without.speed for without, fast in arms.values() if without.speed)}))


if __name__ == "__main__":
    main()
