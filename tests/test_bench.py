"""The benchmark's own client: what it makes of servers that answer oddly, or not to the end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from spolia.bench import BenchError, Measurement, run

CHUNK = {"choices": [{"text": "é ", "token_ids": [7]}]}
USAGE = {
    "choices": [],
    "usage": {"prompt_tokens": 16, "completion_tokens": 128, "prompt_tokens_details": {"cached_tokens": 4}},
}


def events(*each: object) -> bytes:
    return b"".join(b"data: %b\n\n" % json.dumps(event).encode() for event in each) + b"data: [DONE]\n\n"


def response(body: bytes, *, status: str = "200 OK", more: str = "") -> bytes:
    """In chunks of seven bytes, which cut events, lines and characters anywhere."""
    parts = [body[i : i + 7] for i in range(0, len(body), 7)]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
    return f"HTTP/1.1 {status}\r\nTransfer-Encoding: chunked\r\n{more}\r\n".encode() + chunks


@asynccontextmanager
async def server(answer: bytes, *, closes: bool = False) -> AsyncIterator[tuple[str, list[int]]]:
    """Answers every request with the same bytes, some at a time; its URL, and how many each connection had."""
    counts: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        counts.append(0)
        mine = len(counts) - 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = next(line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length"))
                await reader.readexactly(int(length.split(b":")[1]))
                counts[mine] += 1
                for i in range(0, len(answer), 50):
                    writer.write(answer[i : i + 50])
                    await writer.drain()
                if closes or not answer.endswith(b"0\r\n\r\n"):
                    break
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}", counts
    finally:
        listening.close()


def measured(answer: bytes, *, closes: bool = False) -> tuple[list[Measurement], list[int]]:
    async def measure() -> tuple[list[Measurement], list[int]]:
        async with server(answer, closes=closes) as (url, counts):
            return [line async for line in run(url, "m", vocab_size=10_000, only=["decode_b1"])], counts

    return asyncio.run(measure())


def test_events_that_come_in_pieces_are_read_whole_and_connections_are_used_again():
    (line,), counts = measured(response(events(CHUNK, CHUNK, USAGE)))
    assert (line.workload, line.n, line.hit) == ("decode_b1", 3, 0.25)
    assert line.total_tok_s == pytest.approx(line.out_tok_s * (16 + 128) / 128, rel=1e-3)
    assert counts == [4]


@pytest.mark.parametrize("more", ["Connection: close\r\n", ""], ids=["says so", "says nothing"])
def test_a_server_that_closes_gets_a_new_connection_for_every_request(more):
    _, counts = measured(response(events(CHUNK, USAGE), more=more), closes=True)
    assert counts == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (response(b'{"error": "no such model"}', status="404 Not Found"), ["404", "no such model"]),
        (response(events(CHUNK, {"error": {"message": "out of luck"}})), ["in mid-stream", "out of luck"]),
        (response(events(CHUNK, USAGE))[:-30], ["closed the connection"]),
        (response(b"data: {oops}\n\n"), ["/v1/completions", "malformed"]),
        (b"SMTP ready\r\n\r\n", ["/v1/completions"]),
    ],
    ids=["status", "error event", "cut off", "no JSON", "no HTTP"],
)
def test_a_server_that_fails_ends_the_benchmark_and_says_how(answer, words):
    with pytest.raises(BenchError) as error:
        measured(answer)
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize("url", ["127.0.0.1:80", "ftp://example.org", "http://"])
def test_an_address_that_is_none_is_refused(url):
    async def measure() -> None:
        async for _ in run(url, "m", vocab_size=100):
            pass

    with pytest.raises(BenchError, match="is no http:// or https:// address"):
        asyncio.run(measure())
