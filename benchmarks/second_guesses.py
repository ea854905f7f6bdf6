"""Whether drafts that branch would pay: how often the second guess is right where the first is wrong.

Reads recorded dialogues as one tenant's and guesses each token of the assistant's replies by what followed the longest
run of 16, 8, 4, 2 or 1 tokens before: the latest such place first, then the next one that says something else. No model
runs. A branch is worth its row if it is right more often than (tokens a step) times (a row's part of a step's time).

    python benchmarks/second_guesses.py MODEL FILE [--tokens N]
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict

from speculation import replays

from spolia.models import load

SIZES = (16, 8, 4, 2, 1)
KEPT = 12  # places of each run of tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("model")
    parser.add_argument("file")
    parser.add_argument("--tokens", type=int, default=20_000)
    given = parser.parse_args()
    followers: dict[tuple[int, ...], list[int]] = defaultdict(list)

    def enter(ids: list[int], position: int) -> None:
        for size in SIZES:
            if position >= size:
                known = followers[tuple(ids[position - size : position])]
                known.append(ids[position])
                del known[:-KEPT]

    def guesses(ids: list[int], position: int) -> list[int]:
        runs = (tuple(ids[position - size : position]) for size in SIZES if position >= size)
        return list(dict.fromkeys(token_id for run in runs for token_id in reversed(followers.get(run, ()))))

    num_tokens = num_guessed = num_first = num_second = 0
    before: list[int] = []
    for task in replays(load(given.model), given.file, num_tokens=200):
        if num_tokens >= given.tokens:
            break
        start = next((i for i, pair in enumerate(zip(before, task.ids, strict=False)) if pair[0] != pair[1]), None)
        start = min(len(before), len(task.ids)) if start is None else start
        for position in range(start, len(task.ids)):
            enter(task.ids, position)
        before = [*task.ids, *task.said]
        for position in range(len(task.ids), len(before)):
            ranked = guesses(before, position)
            num_tokens += 1
            num_guessed += bool(ranked)
            num_first += ranked[:1] == [before[position]]
            num_second += ranked[1:2] == [before[position]]
            enter(before, position)
    figures = {"tokens": num_tokens, "guessed": num_guessed, "first_right": num_first, "second_right": num_second}
    print(json.dumps({**figures, "second_share": round(num_second / num_guessed, 3)}))


if __name__ == "__main__":
    main()
