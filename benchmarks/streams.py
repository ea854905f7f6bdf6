"""Hundreds of streams at once, some of which behave badly: what do the others notice?

A server of its own gets two phases of the same length. In the calm one all clients read what they asked for. In the
storm one of ten goes away at a random moment, one of twenty reads a little at a time, one of twenty sends what is no
request. Clients that are answered 429 come back after as long as `Retry-After` says. Prompts come from a few groups
that share a beginning, and each answer is checked against what the same prompt was answered alone.

    python benchmarks/streams.py smollm2 --streams 500 --seconds 300

It fails if an answer is wrong or cut off, if blocks stay leased, or if the server's memory has grown by more than a
tenth from the middle of the storm to its end. The line of JSON has the 50th and 99th percentile of the time between
tokens, as clients of good behaviour saw them, and their ratio.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import httpx

NUM_TOKENS = 24
GROUPS = [f"Chapter {number} of a long book about rivers, stones and the houses that people build of them. " * 4
          for number in range(8)]  # fmt: skip
ENDS = ["It begins", "The first", "Nobody", "In winter", "A stone"]
PROMPTS = [group + end for group in GROUPS for end in ENDS]


@dataclass
class Seen:
    """What one phase's clients saw."""

    gaps_s: list[float] = field(default_factory=list)
    num_answers: int = 0
    num_refused: int = 0
    num_left: int = 0
    num_bad: int = 0
    wrong: list[str] = field(default_factory=list)

    def percentile_ms(self, share: float) -> float:
        gaps = sorted(self.gaps_s)
        return round(1e3 * gaps[min(len(gaps) - 1, int(share * len(gaps)))], 1)


def asked(prompt: str, *, stream: bool) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, "stream": stream}


async def client(http: httpx.AsyncClient, seen: Seen, rng: random.Random, until_s: float, *, storm: bool,
                 alone: dict[str, str]) -> None:  # fmt: skip
    while time.monotonic() < until_s:
        kind = rng.choices(["good", "leaves", "slow", "bad"], [16, 2, 1, 1])[0] if storm else "good"
        prompt = rng.choice(PROMPTS)
        if kind == "bad":
            body = rng.choice([b"{", b"[]", b'{"prompt": 1}', b"\xff" * 100, b"[" * 50_000])
            reply = await http.post("/v1/completions", content=body)
            assert reply.status_code == 400, reply.text
            seen.num_bad += 1
            continue
        async with http.stream("POST", "/v1/completions", json=asked(prompt, stream=True)) as reply:
            if reply.status_code == 429:
                seen.num_refused += 1
                wait_s = float(reply.headers["retry-after"])
            else:
                reply.raise_for_status()
                wait_s = 0.0
                await read(reply, seen, rng, kind, prompt, alone)
        await asyncio.sleep(wait_s)


async def read(
    reply: httpx.Response, seen: Seen, rng: random.Random, kind: str, prompt: str, alone: dict[str, str]
) -> None:
    text, last_s, leaves_at = "", 0.0, rng.randrange(NUM_TOKENS)
    num_events = 0
    async for line in reply.aiter_lines():
        if line == "data: [DONE]":
            seen.num_answers += 1
            if text != alone[prompt]:
                seen.wrong.append(f"{prompt[-20:]!r}: {text!r}")
            return
        if not line.startswith("data: "):
            continue
        now_s = time.monotonic()
        text += json.loads(line[6:])["choices"][0]["text"]
        if last_s and kind == "good":
            seen.gaps_s.append(now_s - last_s)
        last_s = now_s
        num_events += 1
        if kind == "leaves" and num_events > leaves_at:
            seen.num_left += 1
            return
        if kind == "slow":
            await asyncio.sleep(0.5)
    if kind != "leaves":
        seen.wrong.append(f"{prompt[-20:]!r} was cut off after {text!r}")


async def phase(url: str, num_streams: int, seconds: float, alone: dict[str, str], *, storm: bool) -> Seen:
    seen = Seen()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=num_streams)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits, trust_env=False) as http:
        until_s = time.monotonic() + seconds
        clients = [
            client(http, seen, random.Random(number), until_s, storm=storm, alone=alone)
            for number in range(num_streams)
        ]
        await asyncio.gather(*clients)
    return seen


def leased(url: str) -> float:
    text = httpx.get(f"{url}/metrics", timeout=60).text
    return sum(map(float, re.findall(r'^spolia_kv_blocks\{.*state="leased"\} (\S+)', text, re.MULTILINE)))


def memory_mb(pid: int) -> float:
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=300, help="of each phase")
    options = parser.parse_args()
    command = [
        sys.executable,
        "-m",
        "spolia",
        "serve",
        options.model,
        "--port",
        "0",
        "--name",
        "model",
        "--max-context",
        "1024",
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        url = ""
        for line in server.stderr:
            if found := re.search(r"url=(\S+)/v1", line):
                url = found[1]
            if "ready model=" in line:
                break
        drain = subprocess.Popen(["cat"], stdin=server.stderr, stdout=subprocess.DEVNULL)
        try:
            report(url, server.pid, options)
        finally:
            server.terminate()
            server.wait()
            drain.wait()
        assert server.returncode == 0, f"the server ended with {server.returncode}"


def report(url: str, pid: int, options: argparse.Namespace) -> None:
    alone = {}
    for prompt in PROMPTS:
        reply = httpx.post(f"{url}/v1/completions", json=asked(prompt, stream=False), timeout=600).raise_for_status()
        alone[prompt] = reply.json()["choices"][0]["text"]
    calm = asyncio.run(phase(url, options.streams, options.seconds, alone, storm=False))
    first = asyncio.run(phase(url, options.streams, options.seconds / 2, alone, storm=True))
    middle_mb = memory_mb(pid)
    second = asyncio.run(phase(url, options.streams, options.seconds / 2, alone, storm=True))
    end_mb = memory_mb(pid)
    for seen in (calm, first, second):
        assert not seen.wrong, seen.wrong[:3]
    deadline_s = time.monotonic() + 60
    while leased(url) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert leased(url) == 0, "blocks are still leased"
    assert end_mb < 1.1 * middle_mb, f"memory grew from {middle_mb:.0f} to {end_mb:.0f} MB"
    p99 = calm.percentile_ms(0.99), second.percentile_ms(0.99)
    print(json.dumps({
        "benchmark": "streams", "model": options.model, "streams": options.streams, "seconds": options.seconds,
        "calm_p50_ms": calm.percentile_ms(0.5), "calm_p99_ms": p99[0],
        "storm_p50_ms": second.percentile_ms(0.5), "storm_p99_ms": p99[1], "p99_ratio": round(p99[1] / p99[0], 2),
        "answers": calm.num_answers + first.num_answers + second.num_answers,
        "left": first.num_left + second.num_left, "bad": first.num_bad + second.num_bad,
        "refused": calm.num_refused + first.num_refused + second.num_refused,
        "memory_mb": [round(middle_mb), round(end_mb)], "cpus": os.cpu_count(), "machine": platform.machine(),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
