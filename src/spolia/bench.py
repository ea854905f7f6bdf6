"""KV-cache workloads against any server that speaks OpenAI's `/v1/completions`, Spolia or not.

Prompts are token ids, uniform over the vocabulary and seeded, except in `multiturn`, which sends text and appends the
reply's own text, as a chat client does. Greedy, `ignore_eos`. The client streams and takes its times at its own end of
the socket, so HTTP, JSON and the server's queue are all in the figures. It may run on the server's own cores, so
it takes as little of them as it can: its HTTP is parsed by httptools, not by Python.

Imports nothing of Spolia: what is measured is what any client sees.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import httptools
import httpx
import msgspec

__all__ = ["WORKLOADS", "BenchError", "Measurement", "run", "served_model"]

Prompt: TypeAlias = "str | list[int]"

# Frequent English nouns: text that every tokenizer splits into about one token a word.
_NOUNS = """
time year people way day man thing woman life child world school state family student group country problem hand part
place case week company system program question work government number night point home water room mother area money
story fact month lot right study book eye job word business issue side kind head house service friend father power hour
game line end member law car city community name president team minute idea body information back parent face others
level office door health person art war history party result change morning reason research girl guy moment air teacher
force education
"""
_WORDS = tuple(_NOUNS.split())


_TIMEOUT_S = 600
_READ_BYTES = 1 << 16


class BenchError(Exception):
    """The server did not answer as a completions server does; the message has its status and first bytes."""


@dataclass(frozen=True, slots=True)
class Completion:
    """What one streamed completion looked like from the client. Times count from the request's first byte."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    ttft_s: float
    latency_s: float
    text: str

    @property
    def inter_token_s(self) -> float | None:
        """Mean time between output tokens; None where there is only one."""
        return (self.latency_s - self.ttft_s) / (self.num_output_tokens - 1) if self.num_output_tokens > 1 else None


@dataclass(frozen=True, slots=True)
class Measurement:
    """One workload's figures, of which one JSON line is made.

    `hit` is cached over prompt tokens, as the server reports them in `usage.prompt_tokens_details`, or 0.
    """

    workload: str
    n: int
    wall_s: float
    out_tok_s: float
    total_tok_s: float
    ttft_ms: dict[str, float]
    tpot_ms: float | None
    hit: float

    @classmethod
    def of(cls, workload: str, completions: Sequence[Completion], wall_s: float) -> Measurement:
        ttft = sorted(c.ttft_s for c in completions)
        between = [c.inter_token_s for c in completions if c.inter_token_s is not None]
        num_prompt = sum(c.num_prompt_tokens for c in completions)
        num_output = sum(c.num_output_tokens for c in completions)
        p99 = ttft[min(len(ttft) - 1, int(0.99 * len(ttft)))]
        return cls(
            workload=workload,
            n=len(completions),
            wall_s=round(wall_s, 3),
            out_tok_s=round(num_output / wall_s, 1),
            total_tok_s=round((num_output + num_prompt) / wall_s, 1),
            ttft_ms={"p50": round(1e3 * statistics.median(ttft), 1), "p99": round(1e3 * p99, 1)},
            tpot_ms=round(1e3 * statistics.median(between), 2) if between else None,
            hit=round(sum(c.num_cached_tokens for c in completions) / max(1, num_prompt), 4),
        )

    def json_line(self, label: str) -> str:
        return json.dumps({"label": label, **asdict(self)})


@dataclass(frozen=True, slots=True)
class Driver:
    """One workload's client: its HTTP connections and its own seeded randomness."""

    http: _Connections
    model: str
    vocab_size: int
    concurrency: int
    rng: random.Random

    def tokens(self, n: int) -> list[int]:
        """`n` random ids, away from the vocabulary's ends, where special tokens live."""
        margin = min(1000, self.vocab_size // 4)
        return [self.rng.randrange(margin, self.vocab_size - margin) for _ in range(n)]

    def words(self, n: int) -> str:
        return " ".join(self.rng.choice(_WORDS) for _ in range(n))

    async def complete(self, prompt: Prompt, num_tokens: int) -> Completion:
        """Stream exactly `num_tokens` greedy tokens.

        Raises:
            BenchError: any status but 200, or an error event in the stream.
        """
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": num_tokens,
            "min_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        start = time.perf_counter()
        first: float | None = None
        last = start
        usage: dict[str, Any] = {}
        num_chunks = 0
        text: list[str] = []
        async with aclosing(self.http.events("/v1/completions", body)) as events:
            async for event in events:
                if "error" in event:
                    raise BenchError(f"{self.http.url} failed in mid-stream: {event['error']}")
                usage = event.get("usage") or usage
                for choice in event.get("choices") or ():
                    if choice.get("text") or choice.get("token_ids"):
                        last = time.perf_counter()
                        first = first or last
                        num_chunks += 1
                        text.append(choice.get("text") or "")
        details = usage.get("prompt_tokens_details") or {}
        return Completion(
            num_prompt_tokens=usage.get("prompt_tokens") or len(prompt if isinstance(prompt, list) else prompt.split()),
            num_cached_tokens=details.get("cached_tokens") or 0,
            num_output_tokens=usage.get("completion_tokens", num_chunks),
            ttft_s=(first or time.perf_counter()) - start,
            latency_s=last - start,
            text="".join(text),
        )

    async def gather(self, requests: Sequence[tuple[Prompt, int]], concurrency: int) -> list[Completion]:
        """All of `requests`, at most `concurrency` at once, started in order."""
        room = asyncio.Semaphore(concurrency)

        async def one(prompt: Prompt, num_tokens: int) -> Completion:
            async with room:
                return await self.complete(prompt, num_tokens)

        return await asyncio.gather(*(one(prompt, n) for prompt, n in requests))


class _Reply:
    """A response as it comes in, for httptools' parser to fill."""

    def __init__(self) -> None:
        self.parser = httptools.HttpResponseParser(self)
        self.body = bytearray()
        self.is_whole = False
        self.is_last = True  # of its connection

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.is_whole = True
        self.is_last = not self.parser.should_keep_alive()  # the parser forgets it

    def take_lines(self) -> list[bytes]:
        """The whole lines that have come and were not taken yet."""
        end = self.body.rfind(b"\n") + 1
        lines = bytes(self.body[:end]).splitlines()
        del self.body[:end]
        return lines


class _Connections:
    """To one server, each used by one request after another. Close them at the end."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or parts.hostname is None:
            raise BenchError(f"{url!r} is no http:// or https:// address of a server")
        self._host, self._port = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
        self._is_tls = parts.scheme == "https"
        self._head = f"Host: {parts.netloc}\r\nContent-Type: application/json\r\n"
        self._path = parts.path
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def events(self, path: str, body: object) -> AsyncGenerator[dict[str, Any], None]:
        """POST, and the server-sent events of the response, until `[DONE]`.

        Raises:
            BenchError: the server cannot be reached, goes away, or answers anything but 200.
        """
        content = msgspec.json.encode(body)
        head = f"POST {self._path}{path} HTTP/1.1\r\n{self._head}Content-Length: {len(content)}\r\n\r\n"
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                reader, writer, received = await self._ask(head.encode() + content)
                reply = _Reply()
                try:
                    while not reply.is_whole:
                        if not received:
                            raise BenchError(f"{self.url} closed the connection before its answer's end")
                        reply.parser.feed_data(received)
                        if reply.parser.get_status_code() == 200:
                            for line in reply.take_lines():
                                if line.startswith(b"data:") and line[5:].strip() != b"[DONE]":
                                    yield msgspec.json.decode(line[5:])
                        received = b"" if reply.is_whole else await reader.read(_READ_BYTES)
                    status = reply.parser.get_status_code()
                    if status != 200:
                        raise BenchError(f"{self.url}{path} answered {status}: {bytes(reply.body[:300])!r}")
                finally:
                    if reply.is_last:
                        writer.close()
                    else:
                        self._idle.append((reader, writer))
        except TimeoutError as error:
            raise BenchError(f"{self.url}{path} took longer than {_TIMEOUT_S} s") from error
        except (OSError, httptools.HttpParserError, msgspec.DecodeError) as error:
            raise BenchError(f"{self.url}{path}: {error}") from error

    async def _ask(self, message: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, bytes]:
        """Send it on a connection; that, and the first bytes that come back. The server may have closed idle ones."""
        while True:
            is_new = not self._idle
            if is_new:
                reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._is_tls or None)
            else:
                reader, writer = self._idle.pop()
            received = b""
            try:
                writer.write(message)
                received = await reader.read(_READ_BYTES)
            except ConnectionError:
                if is_new:
                    raise
            finally:
                if not received:
                    writer.close()
            if received or is_new:
                return reader, writer, received

    def close(self) -> None:
        for _, writer in self._idle:
            writer.close()


# Each workload prepares outside the clock and returns the coroutine that is timed.
Timed: TypeAlias = "Awaitable[list[Completion]]"


async def decode_b1(driver: Driver) -> Timed:
    """One stream at a time: 16 tokens in, 128 out, three times."""
    return driver.gather([(driver.tokens(16), 128) for _ in range(3)], concurrency=1)


async def prefill_1024(driver: Driver) -> Timed:
    """Cold prompts of 1,024 tokens, one at a time, one token out."""
    return driver.gather([(driver.tokens(1024), 1) for _ in range(4)], concurrency=1)


async def warm_2048(driver: Driver) -> Timed:
    """A 2,048-token prefix that the server has just seen, with 8 new tokens: time to first token."""
    base = driver.tokens(2048)
    await driver.complete(base, 1)
    return driver.gather([(base + driver.tokens(8), 1) for _ in range(6)], concurrency=1)


async def decode_4000(driver: Driver) -> Timed:
    """One stream at 4,000 tokens of context, which the server has just seen: 64 out, three times."""
    base = driver.tokens(4000)
    await driver.complete(base, 1)
    return driver.gather([(base, 64) for _ in range(3)], concurrency=1)


async def batch_128_64(driver: Driver) -> Timed:
    """Nothing shared: 32 requests, 128 in, 64 out."""
    return driver.gather([(driver.tokens(128), 64) for _ in range(32)], driver.concurrency)


async def shared_prefix(driver: Driver) -> Timed:
    """8 groups of 8 requests: 512 shared and 64 own tokens in, 32 out, shuffled."""
    prefixes = [driver.tokens(512) for _ in range(8)]
    requests: list[tuple[Prompt, int]] = [(prefix + driver.tokens(64), 32) for prefix in prefixes for _ in range(8)]
    driver.rng.shuffle(requests)
    return driver.gather(requests, driver.concurrency)


async def multiturn(driver: Driver) -> Timed:
    """12 clients with 5 turns each of text: about 130 new tokens in and 32 out a turn."""

    async def client() -> list[Completion]:
        history, turns = driver.words(120), []
        for _ in range(5):
            turns.append(await driver.complete(history, 32))
            history += turns[-1].text + " " + driver.words(120)
        return turns

    async def timed() -> list[Completion]:
        return [turn for turns in await asyncio.gather(*(client() for _ in range(12))) for turn in turns]

    return timed()


WORKLOADS: dict[str, Callable[[Driver], Awaitable[Timed]]] = {
    workload.__name__: workload
    for workload in (decode_b1, prefill_1024, warm_2048, decode_4000, batch_128_64, shared_prefix, multiturn)
}


async def served_model(url: str) -> tuple[str, int | None]:
    """Name and vocabulary size (None where the server does not tell) of the first model at `url`."""
    async with httpx.AsyncClient(timeout=_TIMEOUT_S, trust_env=False) as http:
        response = await http.get(f"{url.rstrip('/')}/v1/models")
        if response.status_code != 200:
            raise BenchError(f"{url}/v1/models answered {response.status_code}; name the model with --model")
        model = response.json()["data"][0]
        return model["id"], model.get("vocab_size")


async def run(
    url: str, model: str, *, vocab_size: int, seed: int = 7, concurrency: int = 16, only: Sequence[str] = ()
) -> AsyncIterator[Measurement]:
    """Measure the workloads whose names begin with one of `only`, or all, in `WORKLOADS`' order.

    Raises:
        BenchError: a workload that does not exist, or a server that fails.
    """
    if unknown := [prefix for prefix in only if not any(name.startswith(prefix) for name in WORKLOADS)]:
        raise BenchError(f"no workload named {', '.join(unknown)}; there are {', '.join(WORKLOADS)}")
    http = _Connections(url)
    try:
        for name, workload in WORKLOADS.items():
            if only and not name.startswith(tuple(only)):
                continue
            # Seeded by name, so that a workload asks the same with and without the others before it.
            driver = Driver(http, model, vocab_size, concurrency, random.Random(f"{seed}/{name}"))
            await driver.complete(driver.tokens(32), 8)  # opens the connection and warms what is lazy on either side
            timed = await workload(driver)
            start = time.perf_counter()
            completions = await timed
            yield Measurement.of(name, completions, time.perf_counter() - start)
    finally:
        http.close()
