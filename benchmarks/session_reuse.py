"""How much of a conversation's history is reused at each turn: in sessions, and in plain chat.

Dialogues of an agent with tools (tau-bench's, OpenAI's chat format) are replayed turn by turn: what user and tools said
comes from the file, each reply is generated anew, and the next turn goes on from it. Two arms in turn, on one engine,
with a cache salt of their own:

    session   `"session": id`, only the new messages are sent
    chat      the whole history is sent, replies as the text that came back

Counts, over all turns but each dialogue's first, the prompt tokens that the turn before had (prompt and answer, but the
answer's last token, whose KV nobody computed), and how many of them were reused. Asserts that sessions reuse them all.
Prints one JSON line, and how far it is on standard error.

    python benchmarks/session_reuse.py MODEL DIALOGUES.jsonl.gz [number of dialogues, or all]
"""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from spolia.engine import AsyncEngine, EngineConfig
from spolia.server import ServerConfig, create_app

MAX_CONTEXT = 6_144
REPLY_TOKENS = 12


async def ask(client: httpx.AsyncClient, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    body = {"messages": messages, "max_tokens": REPLY_TOKENS, "temperature": 0, "return_token_ids": True, **fields}
    reply = await client.post("/v1/chat/completions", json=body)
    return reply.json() if reply.status_code == 200 else {}


async def replay(client: httpx.AsyncClient, dialogue: list[dict[str, Any]], arm: str) -> tuple[int, int]:
    """Tokens of history, and how many of them were reused."""
    fields: dict[str, Any] = {"cache_salt": arm}
    if arm == "session":
        opened = await client.post("/v1/sessions", json={"cache_salt": arm})
        fields["session"] = opened.json()["id"]
    said: list[dict[str, Any]] = []
    new: list[dict[str, Any]] = []
    num_history = num_reused = known = 0
    for message in dialogue:
        if message["role"] != "assistant":
            new.append(
                {"role": "user" if message["role"] == "tool" else message["role"], "content": message["content"]}
            )
            continue
        answer = await ask(client, new if arm == "session" else [*said, *new], **fields)
        if not answer:  # longer than the context
            break
        (choice,) = answer["choices"]
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        if known:
            num_history += known
            num_reused += min(known, cached)
        known = len(choice["prompt_token_ids"]) + len(choice["token_ids"]) - 1
        said += [*new, {"role": "assistant", "content": choice["message"]["content"]}]
        new = []
    return num_history, num_reused


async def measure(model: str, path: Path, count: int | None) -> dict[str, object]:
    with gzip.open(path, "rt") as file:
        dialogues = [json.loads(line)["messages"] for line in itertools.islice(file, count)]
    engine = AsyncEngine(model, EngineConfig(max_context=MAX_CONTEXT))
    app = create_app({"model": engine}, ServerConfig())
    totals = {"session": [0, 0], "chat": [0, 0]}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://it", timeout=None) as client:
        begun_s = time.perf_counter()
        for number, dialogue in enumerate(dialogues, start=1):
            for arm, total in totals.items():
                history, reused = await replay(client, dialogue, arm)
                total[0] += history
                total[1] += reused
            shares = ", ".join(f"{arm} {100 * reused / max(1, all_):.2f} %" for arm, (all_, reused) in totals.items())
            left_s = (time.perf_counter() - begun_s) / number * (len(dialogues) - number)
            print(
                f"{number} of {len(dialogues)} dialogues: {shares}; {left_s:.0f} s to go", file=sys.stderr, flush=True
            )
    await engine.aclose()
    assert totals["session"][0] == totals["session"][1], "a session did not reuse all of its history"
    reuse = {f"{arm}_percent": round(100 * reused / history, 2) for arm, (history, reused) in totals.items()}
    return {"model": model, "dialogues": len(dialogues), "history_tokens": totals["session"][0], **reuse}


if __name__ == "__main__":
    asked = sys.argv[3] if len(sys.argv) > 3 else "10"
    how_many = None if asked == "all" else int(asked)
    print(json.dumps(asyncio.run(measure(sys.argv[1], Path(sys.argv[2]), how_many))))
