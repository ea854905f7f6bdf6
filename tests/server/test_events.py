"""A follower of the cache's events, over HTTP or ZMQ, early or late, knows exactly what is cached."""

from __future__ import annotations

import asyncio
import json
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
import zmq

from spolia.engine import AsyncEngine, CacheMirror, Cleared, Removed, Stored
from spolia.errors import SpoliaError
from spolia.server import ServerConfig
from spolia.server.events import EventPublisher

from .harness import chatty_engine, eventually, serving
from .process import server_process

BLOCK = 16


@pytest.fixture
def engine() -> Iterator[AsyncEngine]:
    """One whose cache is too small for what is asked, so that things come and go."""
    engine = chatty_engine(num_blocks=24, max_context=128)
    yield engine
    asyncio.run(engine.aclose())


def ask(url: str, rng: random.Random, num_requests: int) -> None:
    """Prompts over two letters, which share beginnings."""
    with httpx.Client(timeout=120) as http:
        for _ in range(num_requests):
            prompt = "".join(rng.choice("ab") for _ in range(rng.randrange(2, 90)))
            body = {"prompt": prompt, "max_tokens": rng.randrange(1, 12), "cache_salt": rng.choice(["", "other"])}
            http.post(f"{url}/v1/completions", json=body).raise_for_status()


def stored_in(engine: AsyncEngine) -> set[tuple[bytes, tuple[int, ...]]]:
    """What the tree really holds: the tokens down to each of its ends."""

    def look(core: Any) -> set[tuple[bytes, tuple[int, ...]]]:
        return {
            (node.namespace, tuple(np.concatenate([each.token_ids for each in [*node.ancestry()][::-1]]).tolist()))
            for node in core.cache._tree.nodes()
        }

    return asyncio.run(engine.call(look))


def prefixes(sequences: Any, step: int = 1) -> set[tuple[bytes, tuple[int, ...]]]:
    return {
        (namespace, tokens[:stop]) for namespace, tokens in sequences for stop in range(step, len(tokens) + 1, step)
    }


class HttpFollower:
    """Reads `/v1/cache/events` for as long as it is asked to."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.mirror = CacheMirror(BLOCK)
        self.last_id = ""
        self.num_snapshots = 0

    def follow(self, until: int) -> None:
        """Read on until event number `until` is the next."""
        headers = {"last-event-id": self.last_id} if self.last_id else {}
        kind = ""
        with httpx.stream("GET", f"{self._url}/v1/cache/events", headers=headers, timeout=120) as reply:
            assert reply.headers["content-type"].startswith("text/event-stream")
            for line in reply.iter_lines():
                name, _, value = line.partition(": ")
                if name == "event":
                    kind = value
                elif name == "id":
                    self.last_id = value
                elif name == "data":
                    self._take(kind, json.loads(value))
                if not line and int(self.last_id.partition(":")[2] or -1) >= until:
                    return

    def _take(self, kind: str, data: dict[str, Any]) -> None:
        if kind == "snapshot":
            self.num_snapshots += 1
            self.mirror.reset(map(_stored, data["stored"]))
            return
        namespace, number = bytes.fromhex(data["namespace"]), data["sequence_number"]
        match kind:
            case "stored":
                self.mirror.apply(_stored(data))
            case "removed":
                gone = data["branch"], data["start"], data["num_tokens"], data["cause"]
                self.mirror.apply(Removed(number, namespace, *gone))
            case "cleared":
                self.mirror.apply(Cleared(number, namespace))


def _stored(data: dict[str, Any]) -> Stored:
    ids = np.array(data["token_ids"], np.int32)
    namespace = bytes.fromhex(data["namespace"])
    return Stored(data["sequence_number"], namespace, data["branch"], data["parent"], data["start"], ids)


def test_a_follower_over_http_knows_what_is_cached_whenever_it_comes(engine: AsyncEngine):
    rng = random.Random(5)
    with serving({"toy": engine}) as url:
        early = HttpFollower(url)
        early.follow(0)
        for round_ in range(4):
            ask(url, rng, 9)
            if round_ == 2:
                asyncio.run(engine.call(lambda core: core.cache.clear()))
            late = HttpFollower(url)
            for follower in (early, late):
                follower.follow(engine.next_event_number)
                assert prefixes(follower.mirror.sequences()) == prefixes(stored_in(engine))
        assert (early.num_snapshots, late.num_snapshots) == (1, 1)
        assert httpx.get(f"{url}/metrics").text.count('spolia_evictions_total{model="toy"} 0.0') == 0


def test_who_comes_back_with_another_lifes_number_gets_a_snapshot(engine: AsyncEngine):
    with serving({"toy": engine}) as url:
        ask(url, random.Random(6), 3)
        follower = HttpFollower(url)
        follower.last_id = "another:2"
        follower.follow(engine.next_event_number)
        assert follower.num_snapshots == 1
        assert prefixes(follower.mirror.sequences()) == prefixes(stored_in(engine))


class ZmqFollower:
    """As vLLM's example does it: subscribe, and ask for what was missed."""

    def __init__(self, publisher: EventPublisher) -> None:
        self._context = zmq.Context.instance()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.connect(publisher.endpoint)
        self._sub.subscribe(b"kv@")
        self._dealer = self._context.socket(zmq.DEALER)
        self._dealer.connect(publisher.replay)
        self.blocks: dict[int, tuple[int | None, tuple[int, ...], str]] = {}
        self.last = -1

    def close(self) -> None:
        self._sub.close(linger=0)
        self._dealer.close(linger=0)

    def drop(self) -> None:
        """Lose what has arrived, as a subscriber does that was too slow."""
        while self._sub.poll(100):
            self._sub.recv_multipart()

    def replay(self) -> None:
        self._dealer.send((self.last + 1).to_bytes(8, "big", signed=True))
        while True:
            assert self._dealer.poll(20_000)
            number, payload = self._dealer.recv_multipart()
            if int.from_bytes(number, "big", signed=True) == -1:
                return
            self._take(number, payload)

    def receive(self) -> bool:
        """One batch, if it comes within a while."""
        if not self._sub.poll(200):
            return False
        topic, number, payload = self._sub.recv_multipart()
        assert topic == b"kv@toy"
        if int.from_bytes(number, "big") > self.last + 1:
            self.replay()
        self._take(number, payload)
        return True

    def _take(self, number: bytes, payload: bytes) -> None:
        if int.from_bytes(number, "big") <= self.last:
            return
        self.last = int.from_bytes(number, "big")
        _, events, _ = msgspec.msgpack.decode(payload)
        for event in events:
            match event[0]:
                case "AllBlocksCleared":
                    self.blocks.clear()
                case "BlockRemoved":
                    for name in event[1]:
                        del self.blocks[name]
                case "BlockStored":
                    _, names, parent, tokens, size, _, _, _, namespace = event
                    assert len(tokens) == size * len(names) == BLOCK * len(names)
                    for index, name in enumerate(names):
                        assert parent is None or parent in self.blocks
                        self.blocks[name] = parent, tuple(tokens[size * index : size * (index + 1)]), namespace
                        parent = name

    def sequences(self) -> set[tuple[bytes, tuple[int, ...]]]:
        """The tokens up to the end of each block."""

        def whole(name: int | None) -> tuple[int, ...]:
            return () if name is None else whole(self.blocks[name][0]) + self.blocks[name][1]

        return {(bytes.fromhex(self.blocks[name][2]), whole(name)) for name in self.blocks}


@pytest.mark.parametrize("num_kept", [4_096, 2])
def test_a_follower_over_zmq_knows_the_blocks_that_are_cached_whatever_it_missed(engine: AsyncEngine, num_kept: int):
    rng = random.Random(7)
    publisher = EventPublisher(lambda: {"toy": engine}, "tcp://127.0.0.1:*", "tcp://127.0.0.1:*", num_kept=num_kept)
    follower = ZmqFollower(publisher)
    try:
        with serving({"toy": engine}) as url:
            for round_ in range(4):
                ask(url, rng, 9)
                if round_ == 0:
                    follower.replay()  # it takes a moment until it is subscribed
                if round_ == 2:
                    follower.drop()  # which the next batch will tell
                    continue
                expected = prefixes(stored_in(engine), BLOCK)
                eventually(lambda: not follower.receive() and follower.sequences() == expected)  # noqa: B023
                late = ZmqFollower(publisher)
                late.replay()
                assert late.sequences() == expected
                assert late.blocks == follower.blocks
                late.close()
    finally:
        follower.close()
        publisher.close()


def test_an_endpoint_that_cannot_be_had_is_an_error(tmp_path: Path):
    with pytest.raises(SpoliaError, match=r"KV events cannot be published at ipc://.*No such file"):
        EventPublisher(dict, f"ipc://{tmp_path}/none/events")
    for wrong in ({"kv_events": "5557"}, {"kv_events_replay": "tcp://127.0.0.1:1"}):
        with pytest.raises(ValueError, match="kv_events"):
            ServerConfig(**wrong)


def test_a_server_publishes_where_it_is_told_and_ends_though_somebody_follows(smollm2_path: Path, tmp_path: Path):
    endpoints = [f"ipc://{tmp_path}/{name}" for name in ("events", "replay")]
    flags = ["--kv-events", endpoints[0], "--kv-events-replay", endpoints[1], "--kv-memory", "32MiB"]
    with server_process(smollm2_path, *flags, "--name", "toy", "--max-context", "512") as process:
        process.await_ready()
        body = {"prompt": "A river is a river is a river, and so on until it meets the sea.", "max_tokens": 20}
        httpx.post(f"{process.url}/v1/completions", json=body, timeout=60).raise_for_status()
        dealer = zmq.Context.instance().socket(zmq.DEALER)
        dealer.connect(endpoints[1])
        batches = []

        def asked() -> bool:
            dealer.send(bytes(8))
            while (batch := dealer.recv_multipart())[1]:
                batches.append(batch[1])
            return b"BlockStored" in b"".join(batches)

        dealer.setsockopt(zmq.RCVTIMEO, 30_000)
        eventually(asked)
        dealer.close(linger=0)
        with httpx.stream("GET", f"{process.url}/v1/cache/events", timeout=120) as reply:
            lines = reply.iter_lines()
            assert any(line == "event: snapshot" for line in lines)
            process.signal(signal.SIGTERM)
            assert process.wait() == 0
