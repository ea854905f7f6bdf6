"""Small traces, made up: conversations with turns and tool calls over a shared system prompt."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

__all__ = ["mooncake_lines", "session_lines", "write"]


def session_lines(num_sessions: int, seed: int = 0) -> list[dict[str, Any]]:
    """Agents: bursts of tool calls a few seconds apart, then minutes until a person answers, if ever."""
    rng = random.Random(seed)
    sessions = []
    for number in range(num_sessions):
        requests: list[list[Any]] = []
        t_s, num_ids, next_id = 0.0, 0, 1
        for _ in range(rng.randrange(1, 5)):  # turns
            for call in reversed(range(rng.randrange(1, 8))):
                num_new = rng.randrange(2, 12) if num_ids else 25
                keep = num_ids
                stop = "tool_use" if call else "end_turn"
                requests.append([t_s, 64 * (keep + num_new) - 10, 40, stop, 1.0, 1.0, [keep, [[next_id, num_new]]]])
                next_id += num_new
                num_ids = keep + num_new
                t_s += rng.uniform(2, 20)
            t_s += rng.expovariate(1 / 900)
        sessions.append(
            {"id": f"s{number}", "block": 64, "tool_tokens": 900, "system_tokens": 400, "requests": requests}
        )
    return sessions


def mooncake_lines(num_requests: int, seed: int = 0) -> list[dict[str, Any]]:
    """Chats: most come once, some go on, and a few prompts are popular."""
    rng = random.Random(seed)
    chats: list[list[int]] = [[0]]
    lines = []
    num_ids = 1
    for number in range(num_requests):
        base = rng.choice(chats[-40:]) if rng.random() < 0.5 else chats[0]
        ids = [*base, *range(num_ids, num_ids + rng.randrange(1, 9))]
        num_ids = ids[-1] + 1
        chats.append(ids)
        lines.append(
            {"timestamp": 700 * number, "input_length": 512 * len(ids) - 100, "output_length": 90, "hash_ids": ids}
        )
    return lines


def write(path: Path, lines: list[dict[str, Any]]) -> Path:
    text = "".join(json.dumps(line) + "\n" for line in lines)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path
