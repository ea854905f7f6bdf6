"""Hundreds of streams at once, some of which behave badly: what do the others notice?

A server of its own gets a calm and then a storm, with as many clients. In the calm all read what they asked for. In the
storm one of ten goes away at a random moment, one of twenty reads a little at a time, one of twenty sends what is no
request. Clients that are answered 429 come back after as long as `Retry-After` says. Prompts come from a few groups
that share a beginning, and each answer is checked against what the same prompt was answered alone.

    python benchmarks/storm.py smollm2 --streams 500 --seconds 300

It says how far it is, then a line for each of the claims with what it found, and last all figures as JSON. It fails if
a claim is false:

* nothing is lost: each request was answered in full and right, refused with 429 or 400, or left by its client;
* pools are balanced: afterwards no block is leased, and those that are free and cached are all there are;
* memory is flat: its median in the storm's last quarter is at most 5% above that of the second, when all is warm;
* others do not notice: the 99th percentile of the time between tokens, as clients of good behaviour saw it, is at
  most 1.5 times that of the calm.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import httpx

NUM_TOKENS = 24
GROUPS = [f"Chapter {number} of a long book about rivers, stones and the houses that people build of them. " * 4
          for number in range(8)]  # fmt: skip
ENDS = ["It begins", "The first", "Nobody", "In winter", "A stone"]
PROMPTS = [group + end for group in GROUPS for end in ENDS]


class Server(NamedTuple):
    url: str
    pid: int


@dataclass
class Seen:
    """What one phase's clients saw."""

    gaps_s: list[float] = field(default_factory=list)
    num_sent: int = 0
    num_answers: int = 0
    num_refused: int = 0
    num_left: int = 0
    num_bad: int = 0
    wrong: list[str] = field(default_factory=list)
    memory_mb: list[float] = field(default_factory=list)

    @property
    def num_lost(self) -> int:
        return self.num_sent - self.num_answers - self.num_refused - self.num_left - self.num_bad

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
        seen.num_sent += 1
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


async def phase(server: Server, name: str, num_streams: int, seconds: float, alone: dict[str, str]) -> Seen:
    """Until every client has had its last answer; new ones are asked for during `seconds`."""
    seen = Seen()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=num_streams)
    async with httpx.AsyncClient(base_url=server.url, timeout=600, limits=limits, trust_env=False) as http:
        begun_s = time.monotonic()
        watching = asyncio.ensure_future(watch(server.pid, name, seen, begun_s))
        clients = [
            client(http, seen, random.Random(number), begun_s + seconds, storm=name == "storm", alone=alone)
            for number in range(num_streams)
        ]
        try:
            await asyncio.gather(*clients)
        finally:
            watching.cancel()
    return seen


async def watch(pid: int, name: str, seen: Seen, begun_s: float) -> None:
    """The server's memory, once a second, and a word of progress every ten."""
    while True:
        seen.memory_mb.append(memory_mb(pid))
        if len(seen.memory_mb) % 10 == 0:
            print(
                f"{name} {time.monotonic() - begun_s:.0f} s: {seen.num_answers} answers, {seen.num_left} left, "
                f"{seen.num_bad} bad, {seen.num_refused} refused, {len(seen.wrong)} wrong, "
                f"{seen.memory_mb[-1]:.0f} MB",
                flush=True,
            )
        await asyncio.sleep(1)


def blocks(url: str) -> dict[str, float]:
    """KV blocks by state, of all groups."""
    text = httpx.get(f"{url}/metrics", timeout=60).text
    found: dict[str, float] = {}
    for state, count in re.findall(r'^spolia_kv_blocks\{.*state="(\w+)"\} (\S+)', text, re.MULTILINE):
        found[state] = found.get(state, 0) + float(count)
    return found


def memory_mb(pid: int) -> float:
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=300, help="of the storm")
    parser.add_argument("--calm", type=float, default=60, help="seconds of the calm")
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
            failed = report(Server(url, server.pid), options)
        finally:
            server.terminate()
            server.wait()
            drain.wait()
    if server.returncode:
        print(f"FALSE  the server ends cleanly: status {server.returncode}")
    sys.exit(failed or server.returncode != 0)


def report(server: Server, options: argparse.Namespace) -> bool:
    """Whether a claim is false."""
    alone = {}
    for prompt in PROMPTS:
        body = asked(prompt, stream=False)
        reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=600).raise_for_status()
        alone[prompt] = reply.json()["choices"][0]["text"]
    at_rest = blocks(server.url)
    calm = asyncio.run(phase(server, "calm", options.streams, options.calm, alone))
    storm = asyncio.run(phase(server, "storm", options.streams, options.seconds, alone))
    deadline_s = time.monotonic() + 60
    while (left := blocks(server.url))["leased"] and time.monotonic() < deadline_s:
        time.sleep(0.1)

    failed = False
    for claim, holds, found in claims(calm, storm, at_rest, left):
        print(f"{'true ' if holds else 'FALSE'}  {claim}: {found}")
        failed = failed or not holds
    print(json.dumps({
        "benchmark": "storm", "model": options.model, "streams": options.streams,
        "calm_s": options.calm, "storm_s": options.seconds,
        "calm_p50_ms": calm.percentile_ms(0.5), "calm_p99_ms": calm.percentile_ms(0.99),
        "storm_p50_ms": storm.percentile_ms(0.5), "storm_p99_ms": storm.percentile_ms(0.99),
        "answers": calm.num_answers + storm.num_answers, "left": storm.num_left, "bad": storm.num_bad,
        "refused": calm.num_refused + storm.num_refused,
        "memory_mb": [round(mb) for mb in storm.memory_mb[:: max(1, len(storm.memory_mb) // 10)]],
        "cpus": os.cpu_count(), "machine": platform.machine(),
    }))  # fmt: skip
    return failed


def claims(
    calm: Seen, storm: Seen, at_rest: dict[str, float], left: dict[str, float]
) -> Iterator[tuple[str, bool, str]]:
    """What is claimed, whether it holds, and what was found."""
    wrong = [*calm.wrong, *storm.wrong]
    lost = calm.num_lost + storm.num_lost
    yield (
        "nothing is lost",
        not wrong and not lost,
        f"of {calm.num_sent + storm.num_sent} requests {lost} have no outcome, {len(wrong)} a wrong one {wrong[:2]}",
    )
    total = sum(at_rest.values())
    yield "pools are balanced", not left["leased"] and sum(left.values()) == total, f"{left} of {total:.0f} blocks"
    quarter = max(1, len(storm.memory_mb) // 4)
    warm = statistics.median(storm.memory_mb[quarter : 2 * quarter] or storm.memory_mb)
    last = statistics.median(storm.memory_mb[-quarter:])
    yield "memory is flat", last <= 1.05 * warm, f"{warm:.0f} MB in the second quarter, {last:.0f} MB in the last"
    p99 = calm.percentile_ms(0.99), storm.percentile_ms(0.99)
    yield (
        "others do not notice",
        p99[1] <= 1.5 * p99[0],
        f"99th percentile {p99[0]} ms in the calm, {p99[1]} ms in the storm: {p99[1] / p99[0]:.2f}x",
    )


if __name__ == "__main__":
    main()
