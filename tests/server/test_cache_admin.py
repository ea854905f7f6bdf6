"""What operators do to a cache while it is used: look, warm, move, compress, clear, carry away, change."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from engine.toy import ToyCodec
from spolia.engine import AsyncEngine, CacheAdmin
from spolia.errors import InvalidRequest
from spolia.kvcache.policies import Lru
from spolia.server import ServerConfig
from spolia.server.hot_changes import AttachTier, ConfigChange, HotChanges
from spolia.tiers import FolderBackend, HostBackend, Tier, TierUse

from .harness import chatty_engine, eventually, serving
from .test_access import ADMIN, ALICE, BOB, KEYS


def prompt(seed: int, count: int = 100) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(250) for _ in range(count)]


class Server:
    engine: AsyncEngine

    def __init__(self, url: str) -> None:
        self.url = url

    def post(self, path: str, status: int = 200, headers: dict[str, str] | None = None, **body: Any) -> dict[str, Any]:
        reply = httpx.post(f"{self.url}/v1/cache/{path}", json=body, timeout=60, headers=headers)
        assert reply.status_code == status, reply.text
        return reply.json()

    def cached(self, ids: list[int], **fields: Any) -> int:
        """What a request with these tokens reuses now; it is computed by that."""
        body = {"prompt": ids, "max_tokens": 2, "temperature": 0, **fields}
        usage = httpx.post(f"{self.url}/v1/completions", json=body, timeout=60).json()["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    def lookup(self, ids: list[int], **fields: Any) -> tuple[int, dict[str, int]]:
        found = self.post("lookup", prompt=ids, **fields)
        return found["num_cached_tokens"], found["tiers"]


@pytest.fixture
def server(tmp_path):
    tiers = [
        TierUse(Tier("host", HostBackend(1 << 20)), "write_back", is_exclusive=True),
        TierUse(Tier("disk", FolderBackend(tmp_path / "kv"))),
    ]
    engine = chatty_engine(num_blocks=64, tiers=tiers)
    with serving({"toy": engine}) as url:
        one = Server(url)
        one.engine = engine
        yield one
    asyncio.run(engine.aclose())


def test_a_prompt_that_was_warmed_is_found_and_lookup_says_where(server):
    assert server.lookup(prompt(0)) == (0, {"host": 0, "disk": 0})
    warmed = server.post("warm", prompt=prompt(0))
    assert (warmed["num_tokens"], warmed["num_cached_tokens"], warmed["num_computed_tokens"]) == (100, 0, 100)
    eventually(lambda: server.lookup(prompt(0)) == (99, {"host": 0, "disk": 96}))
    assert server.cached(prompt(0)) == 99
    assert server.post("warm", prompt=prompt(0))["num_computed_tokens"] == 1


def test_what_is_warmed_and_pinned_stays_whatever_comes(server):
    pin = server.post("warm", prompt=prompt(0, 96), pin=True)["pin"]
    for seed in range(1, 12):
        server.cached(prompt(seed))
    assert server.lookup(prompt(0, 96))[0] == 95
    assert httpx.delete(f"{server.url}/v1/cache/pins/{pin}").status_code == 200


def test_kv_moves_down_to_a_tier_and_up_again(server):
    server.cached(prompt(0))
    assert server.post("move", prompt=prompt(0), to="host")["num_tokens"] == 96
    found = server.post("lookup", prompt=prompt(0))
    assert (found["num_cached_tokens"], found["tiers"]["host"]) == (0, 96)
    assert found["reason"] == "in_host"
    assert found["ranges"] == [{"start": 0, "stop": 96, "source": "host"}]
    assert server.post("move", prompt=prompt(0), to="device")["num_tokens"] == 96
    assert server.lookup(prompt(0)) == (96, {"host": 0, "disk": 96})
    assert server.post("move", prompt=prompt(0), to="host", keep=True)["num_tokens"] == 96
    assert server.lookup(prompt(0)) == (96, {"host": 96, "disk": 96})
    assert "no tier 'cellar'" in server.post("move", 400, prompt=prompt(0), to="cellar")["error"]["message"]


def test_clearing_a_prefix_takes_what_goes_on_from_it_and_nothing_else(server):
    base, other = prompt(0, 64), prompt(9)
    for ids in ([*base, *prompt(1, 40)], [*base, *prompt(2, 40)], other):
        server.cached(ids)
    eventually(lambda: server.lookup([*base, *prompt(2, 40)])[1]["disk"] == 96)
    cleared = server.post("clear", prompt=base)
    assert cleared["num_tokens"] == 64 + 2 * 41
    assert cleared["unlisted_tiers"] == []
    for ids in ([*base, *prompt(1, 40)], [*base, *prompt(2, 40)]):
        assert server.lookup(ids) == (0, {"host": 0, "disk": 0})
    assert server.lookup(other) == (99, {"host": 0, "disk": 96})


def test_what_lies_in_a_tier_only_is_cleared_too(server):
    """As after a restart: the device knows nothing of it."""
    base, ways = prompt(0, 64), [prompt(1, 40), prompt(2, 40)]
    session = httpx.post(f"{server.url}/v1/sessions", json={"ttl": 100}).json()["id"]
    server.cached([*base, *ways[0]], session=session)
    server.cached([*base, *ways[1]])
    eventually(lambda: all(server.lookup([*base, *way])[1]["disk"] == 96 for way in ways))
    server.post("clear", all=True, tiers=False)
    assert server.lookup([*base, *ways[0]]) == (0, {"host": 0, "disk": 96})
    server.post("clear", session=session)
    assert server.lookup([*base, *ways[0]]) == (0, {"host": 0, "disk": 64})
    assert server.lookup([*base, *ways[1]]) == (0, {"host": 0, "disk": 96})
    server.post("clear", prompt=base)
    assert server.lookup([*base, *ways[1]]) == (0, {"host": 0, "disk": 0})


@pytest.mark.parametrize("way", [{"all": True}, {"namespace": True}, {"prompt": prompt(0, 64)}])
@pytest.mark.parametrize("where", ["device", "evicted", "tiers"])
def test_whoever_misses_what_was_cleared_is_told_so_wherever_it_lay(tmp_path, way, where):
    def engine() -> AsyncEngine:
        return chatty_engine(num_blocks=24, tiers=[Tier("disk", FolderBackend(tmp_path), stall_s=60)])

    def clear_and_ask(server: Server) -> None:
        assert server.post("clear", **way)["num_tier_blocks"]["disk"] >= 6
        assert server.post("lookup", prompt=prompt(0))["reason"] == "cleared"
        assert server.post("lookup", prompt=prompt(50))["reason"] == "never_seen"
        body = {"prompt": prompt(0), "max_tokens": 2, "temperature": 0, "explain": True}
        for _ in range(2):  # once it has been computed, it has not been cleared
            reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
            (choice,) = reply["spolia"]["choices"]
            told.append([(part["stop"], part.get("reason")) for part in choice["ranges"]])

    told: list[list[tuple[int, str | None]]] = []
    first, second = engine(), engine()
    with serving({"toy": first}) as url:
        server = Server(url)
        server.cached(prompt(0))
        eventually(lambda: server.lookup(prompt(0))[1]["disk"] == 96)
        for seed in range(1, 12 if where == "evicted" else 1):
            server.cached(prompt(seed))
        if where != "tiers":
            clear_and_ask(server)
    if where == "tiers":  # another process, which has seen none of it
        with serving({"toy": second}) as url:
            clear_and_ask(Server(url))
    for each in (first, second):
        asyncio.run(each.aclose())
    # What filled no block no tier had.
    assert told[0] == ([(96, "cleared"), (100, "never_seen")] if where == "tiers" else [(100, "cleared")])
    assert told[1] == [(99, None), (100, "full")]


class SlowToWrite(HostBackend):
    """Takes nothing before it is told to."""

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.go_on = threading.Event()

    def put(self, keys, values):
        assert self.go_on.wait(60)
        return super().put(keys, values)


@pytest.mark.parametrize("way", [{"all": True}, {"namespace": True}, {"prompt": prompt(0, 64)}])
def test_what_is_on_its_way_to_a_tier_is_cleared_too(way):
    """The device has it no more, and no tier has it yet."""
    backend = SlowToWrite()
    engine = chatty_engine(num_blocks=24, tiers=[Tier("disk", backend, stall_s=600)])
    with serving({"toy": engine}) as url, ThreadPoolExecutor(1) as threads:
        server = Server(url)
        for seed in range(4):  # more than the pools hold
            server.cached(prompt(seed))
        server.post("clear", all=True, tiers=False)
        (lane,) = engine._engine.core.tiering.tiers.mover._lanes.values()
        num_jobs = lane.queue.qsize()
        cleared = threads.submit(server.post, "clear", **way)
        eventually(lambda: lane.queue.qsize() > num_jobs or cleared.done())
        backend.go_on.set()
        cleared = cleared.result(60)
        assert cleared["num_tier_blocks"]["disk"] >= 6
        assert cleared["unlisted_tiers"] == []
        assert server.lookup(prompt(0))[1]["disk"] == 0
        assert server.lookup(prompt(1))[1]["disk"] == (96 if "prompt" in way else 0)
        engine._engine.core.tiering.tiers.mover.flush(20)
        assert len(backend.entries()) >= 18 if "prompt" in way else not backend.entries()
    asyncio.run(engine.aclose())


@pytest.mark.parametrize("way", [{"all": True}, {"prompt": prompt(0)}])
def test_what_is_on_its_way_up_is_not_brought_after_it_was_cleared(way):
    entered, go_on = threading.Event(), threading.Event()

    class SlowToRead(HostBackend):
        def get_into(self, keys, buffers):
            sizes = super().get_into(keys, buffers)
            entered.set()
            assert go_on.wait(60)
            return sizes

    engine = chatty_engine(num_blocks=24, tiers=[Tier("disk", SlowToRead(1 << 20), stall_s=600)])
    with serving({"toy": engine}) as url, ThreadPoolExecutor(1) as threads:
        server = Server(url)
        server.cached(prompt(0))
        eventually(lambda: server.lookup(prompt(0))[1]["disk"] == 96)
        server.post("clear", all=True, tiers=False)
        moved = threads.submit(server.post, "move", prompt=prompt(0), to="device")
        assert entered.wait(60)
        server.post("clear", **way)
        assert moved.result(60)["num_tokens"] == 0
        go_on.set()
        assert server.cached(prompt(1)) == 0  # whatever arrived has been seen to
        assert server.lookup(prompt(0)) == (0, {"disk": 0})
    asyncio.run(engine.aclose())


def test_a_tier_that_hangs_is_named_and_drops_what_was_cleared_when_it_comes_back():
    backend = SlowToWrite()
    engine = chatty_engine(num_blocks=24, tiers=[Tier("disk", backend, stall_s=0.2)])
    with serving({"toy": engine}) as url:
        server = Server(url)
        server.cached(prompt(0))
        assert server.post("clear", all=True)["unlisted_tiers"] == ["disk"]
        backend.go_on.set()
        assert engine._engine.core.tiering.tiers.mover.flush(20)
        eventually(lambda: not backend.entries())
        assert server.lookup(prompt(0)) == (0, {"disk": 0})
    asyncio.run(engine.aclose())


@pytest.mark.parametrize("way", [{"all": True}, {"namespace": True}, {"prompt": prompt(0, 64)}])
def test_what_is_pinned_is_cleared_only_if_that_is_said(server, way):
    pin = server.post("warm", prompt=prompt(0, 96), pin=True)["pin"]
    server.cached([*prompt(0, 64), *prompt(1, 40)])
    eventually(lambda: server.lookup([*prompt(0, 64), *prompt(1, 40)])[1]["disk"] == 96)
    assert server.post("clear", **way)["kept_pins"] == [pin]
    assert server.lookup(prompt(0, 96)) == (95, {"host": 0, "disk": 96})
    assert server.lookup([*prompt(0, 64), *prompt(1, 40)])[1]["disk"] == 64
    assert server.post("clear", **way, pinned=True)["kept_pins"] == []
    assert server.lookup(prompt(0, 96)) == (0, {"host": 0, "disk": 0})


def test_clearing_a_session_leaves_what_it_shares_with_others(server):
    session = httpx.post(f"{server.url}/v1/sessions", json={"ttl": 100}).json()["id"]
    base = prompt(0, 64)
    server.cached([*base, *prompt(1, 40)], session=session)
    server.cached([*base, *prompt(2, 40)])
    assert server.post("clear", session=session)["num_tokens"] == 41
    assert server.lookup([*base, *prompt(1, 40)])[0] == 64
    assert server.lookup([*base, *prompt(2, 40)])[0] == 103


def test_namespaces_are_cleared_one_by_one_and_all_at_once(server):
    for salt in ("", "mine"):
        server.cached(prompt(0), cache_salt=salt)
    eventually(lambda: server.lookup(prompt(0), cache_salt="mine")[1]["disk"] == 96)
    server.post("clear", namespace=True, cache_salt="mine")
    eventually(lambda: server.lookup(prompt(0), cache_salt="mine") == (0, {"host": 0, "disk": 0}))
    assert server.lookup(prompt(0))[0] == 99
    server.post("clear", all=True)
    eventually(lambda: server.lookup(prompt(0)) == (0, {"host": 0, "disk": 0}))
    assert "send one of" in server.post("clear", 400)["error"]["message"]
    assert "send one of" in server.post("clear", 400, all=True, prompt=prompt(0))["error"]["message"]


def test_a_conversation_is_carried_to_another_server_which_refuses_what_is_not_its_own(server):
    server.cached(prompt(0))
    body = {"prompt": prompt(0)}
    file = httpx.post(f"{server.url}/v1/cache/export", json=body, timeout=60)
    assert file.status_code == 200
    engine = chatty_engine(num_blocks=64)
    with serving({"toy": engine}) as url:
        other = Server(url)
        torn = httpx.post(f"{url}/v1/cache/import", content=file.content[:-1])
        assert torn.status_code == 400
        strange = httpx.post(f"{url}/v1/cache/import", params={"cache_salt": "x"}, content=file.content)
        assert "another model, KV type, cache salt" in strange.json()["error"]["message"]
        assert other.lookup(prompt(0))[0] == 0
        done = httpx.post(f"{url}/v1/cache/import", content=file.content)
        assert done.json()["num_tokens"] == 96
        assert other.cached(prompt(0)) == 96
    asyncio.run(engine.aclose())
    empty = httpx.post(f"{server.url}/v1/cache/export", json={"prompt": prompt(77)}, timeout=60)
    assert "not one block" in empty.json()["error"]["message"]


def test_what_a_window_has_passed_is_needed_by_no_tier_no_file_and_no_restore(tmp_path):
    """Memory has given it up; all that is left is looked up, moved, exported, imported and restored all the same."""
    windows, ids = (None, 40), prompt(0, 300)
    one, other = (
        chatty_engine(
            windows=windows, num_blocks=[64, 22], tiers=[TierUse(Tier(name, backend), "selective", min_uses=99)]
        )
        for name, backend in (("disk", FolderBackend(tmp_path)), ("host", HostBackend(1 << 20)))
    )
    with serving({"toy": one}) as url, serving({"toy": other}) as other_url:
        server, another = Server(url), Server(other_url)
        said = answer(server, ids)[0]
        answer(server, prompt(1, 150))  # the window's pool has not room for both
        assert server.post("move", prompt=ids, to="disk")["num_tokens"] == 288
        assert len(list(tmp_path.rglob("*.kv"))) < 2 * 288 // 16
        assert server.lookup(ids) == (0, {"disk": 288})
        assert server.post("lookup", prompt=ids)["ranges"] == [{"start": 0, "stop": 288, "source": "disk"}]
        assert answer(server, ids)[:2] == (said, 288)
        server.post("clear", all=True, tiers=False)
        carried = httpx.post(f"{url}/v1/cache/export", json={"prompt": ids}, timeout=60).content
        imported = httpx.post(f"{other_url}/v1/cache/import", content=carried, timeout=60).json()
        assert imported["num_tokens"] == 288
        assert another.post("move", prompt=ids, to="host")["num_tokens"] == 288
        assert another.lookup(ids) == (0, {"host": 288})
        assert answer(another, ids)[:2] == (said, 288)
    for each in (one, other):
        asyncio.run(each.aclose())


def test_size_and_policy_change_while_it_is_used_and_answers_stay(server):
    before = httpx.get(f"{server.url}/v1/cache/config").json()
    assert (before["kv_policy"], [tier["name"] for tier in before["tiers"]]) == ("lru", ["host", "disk"])
    block_bytes = before["kv_memory"] // 64
    server.cached(prompt(0))
    done = server.post("config", kv_memory=16 * block_bytes, kv_policy="slru")
    assert [(change["change"], change["outcome"]) for change in done["changes"]] == [
        ("kv_policy", "done"),
        ("kv_memory", "done"),
    ]
    assert (done["config"]["kv_memory"], done["config"]["kv_policy"]) == (16 * block_bytes, "slru")
    assert server.cached(prompt(0)) == 99
    too_long = httpx.post(f"{server.url}/v1/completions", json={"prompt": prompt(1, 500), "max_tokens": 2})
    assert f"the context holds {16 * 16 + 1}" in too_long.json()["error"]["message"]
    assert server.post("config", kv_memory=64 * block_bytes)["outcome"] == "done"
    assert server.cached(prompt(1, 500)) == 0


def test_if_one_change_fails_all_are_undone_and_each_is_reported(server, tmp_path):
    server.cached(prompt(0))
    assert server.post("move", prompt=prompt(0), to="host")["num_tokens"] == 96
    eventually(lambda: server.lookup(prompt(0))[1]["disk"] == 96)
    before = httpx.get(f"{server.url}/v1/cache/config").json()
    block_bytes = before["kv_memory"] // 64
    (tmp_path / "file").write_text("no folder")
    report = server.post(
        "config", 409, kv_policy="lfu", kv_memory=16 * block_bytes, detach=["host"],
        attach=[{"name": "more", "disk": str(tmp_path / "file")}],
    )  # fmt: skip
    assert report["outcome"] == "rolled_back"
    assert [(change["change"], change["outcome"]) for change in report["changes"]] == [
        ("kv_policy", "undone"),
        ("kv_memory", "undone"),
        ("detach", "undone"),
        ("attach", "failed"),
    ]
    assert "cannot be used" in report["error"]["message"]
    assert httpx.get(f"{server.url}/v1/cache/config").json() == before
    assert server.lookup(prompt(0))[1]["host"] == 96
    server.post("clear", all=True, tiers=False)
    assert server.cached(prompt(0)) == 96


class Newest(Lru):
    """A policy of one's own: no name finds it."""

    name = "newest"


def test_a_policy_of_ones_own_is_back_when_a_change_is_undone(server, tmp_path):
    (tmp_path / "file").write_text("no folder")
    server.engine._thread.call(lambda core: core.cache.use_policy(Newest())).result(10)
    report = server.post("config", 409, kv_policy="lfu", attach=[{"disk": str(tmp_path / "file")}])
    assert [change["outcome"] for change in report["changes"]] == ["undone", "failed"]
    assert report["changes"][0]["before"] == "newest"
    assert httpx.get(f"{server.url}/v1/cache/config").json()["kv_policy"] == "newest"


def test_a_change_that_fails_as_nobody_foresaw_is_undone_too(server, monkeypatch):
    def broken(*args: Any, **options: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("spolia.server.hot_changes.open_remote", broken)
    before = httpx.get(f"{server.url}/v1/cache/config").json()
    report = server.post(
        "config", 409, kv_policy="lfu", detach=["host"], attach=[{"host": 1000}, {"remote": "valkey://nowhere"}]
    )
    assert [change["outcome"] for change in report["changes"]] == ["undone", "undone", "undone", "failed"]
    assert report["error"]["message"] == "RuntimeError: a bug"
    assert httpx.get(f"{server.url}/v1/cache/config").json() == before


def test_whoever_is_cancelled_while_changes_are_made_leaves_all_or_none_and_the_next_waits_for_that(monkeypatch):
    entered, go_on = threading.Event(), threading.Event()

    def slow(*args: Any, **options: Any) -> None:
        entered.set()
        assert go_on.wait(60)
        raise InvalidRequest("no such place")

    monkeypatch.setattr("spolia.server.hot_changes.open_remote", slow)

    async def main() -> None:
        async with chatty_engine(num_blocks=64) as engine:
            served: Any = type("Served", (), {"engine": engine})()
            admin, changes = CacheAdmin(engine, engine.sealer), HotChanges(lambda: None)
            wanted = ConfigChange(kv_policy="lfu", attach=[AttachTier(remote="valkey://nowhere")])
            first = asyncio.create_task(changes.make(served, admin, wanted))
            await asyncio.to_thread(entered.wait, 60)
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
            assert await engine.call(lambda core: core.cache.policy.name) == "lfu"
            following = asyncio.create_task(changes.make(served, admin, ConfigChange(kv_policy="slru")))
            for _ in range(20):  # were it let in, these turns of the loop and of the engine would be enough
                await engine.call(lambda core: None)
            assert not following.done()
            go_on.set()
            (change,) = await following
            assert (change.before, change.after) == ("lru", "slru")  # the one before was undone by then
            assert await engine.call(lambda core: core.cache.policy.name) == "slru"

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_tier_is_attached_and_detached(server, tmp_path):
    done = server.post("config", attach=[{"name": "more", "disk": str(tmp_path / "more"), "size": 1 << 20}])
    assert [tier["name"] for tier in done["config"]["tiers"]] == ["host", "disk", "more"]
    server.cached(prompt(0))
    eventually(lambda: server.lookup(prompt(0))[1]["more"] == 96)
    done = server.post("config", detach=["more"])
    assert [tier["name"] for tier in done["config"]["tiers"]] == ["host", "disk"]


@pytest.mark.parametrize("order", [["host"], ["disk", "host"]])
def test_what_memory_alone_holds_goes_to_the_folder_when_it_is_detached_or_is_told_as_dropped(server, order):
    server.cached(prompt(0))
    server.post("move", prompt=prompt(0), to="host")
    done = server.post("config", detach=order)
    (told,) = [change["handed_down"] for change in done["changes"] if change["before"] == "host"]
    counts = (told["to"], told["num_blocks"], told["num_dropped_blocks"])
    assert counts == (("disk", 6, 0) if order == ["host"] else (None, 0, 6))
    assert (told["num_bytes"] > 0, told["num_dropped_bytes"] > 0) == (order == ["host"], order != ["host"])
    assert server.cached(prompt(0)) == (96 if order == ["host"] else 0)


@pytest.mark.parametrize("size", [1 << 19, 2_000])
def test_memory_that_takes_the_place_of_memory_keeps_what_fits(size):
    """So a host tier is resized, with no tier below it."""
    engine = chatty_engine(
        num_blocks=64, tiers=[TierUse(Tier("host", HostBackend(1 << 20)), "write_back", is_exclusive=True)]
    )
    with serving({"toy": engine}) as url:
        server = Server(url)
        server.cached(prompt(0))
        assert server.post("move", prompt=prompt(0), to="host")["num_tokens"] == 96
        changed = server.post("config", detach=["host"], attach=[{"host": size}])
        (detach, _) = changed["changes"]
        told = detach["handed_down"]
        assert told["to"] == "host"
        assert told["num_blocks"] + told["num_dropped_blocks"] == 6
        assert changed["config"]["tiers"][0]["capacity_bytes"] == size
        assert changed["config"]["tiers"][0]["num_bytes"] == told["num_bytes"] <= size
        assert (told["num_dropped_blocks"] == 0) == (size > 2_000)
        if size > 2_000:
            assert server.cached(prompt(0)) == 96
        else:
            assert 0 < told["num_blocks"] < 6
    asyncio.run(engine.aclose())


def test_a_folder_takes_the_place_of_memory_beside_the_folder_that_there_is(server, tmp_path):
    """As `--attach /fast/kv --detach host`."""
    done = server.post("config", attach=[{"disk": str(tmp_path / "fast"), "size": "1MiB"}], detach=["host"])
    assert [(change["change"], change["after"]) for change in done["changes"]] == [
        ("detach", None),
        ("attach", "disk2"),
    ]
    assert [tier["name"] for tier in done["config"]["tiers"]] == ["disk", "disk2"]
    assert done["config"]["tiers"][1]["capacity_bytes"] == 1 << 20


def test_a_size_is_text_or_a_number_and_what_truly_holds_is_told():
    engine = chatty_engine(num_blocks=16, max_context=128, max_sequences=2)
    with serving({"toy": engine}) as url:
        done = Server(url).post("config", kv_memory="1000B")
        assert done["changes"][0]["after"] == done["config"]["kv_memory"] == 7 * 128
        most = done["config"]["kv_memory_max"]
        assert most == 16 * 128
        refused = Server(url).post("config", 409, kv_memory=most + 1)
        assert f"can grow to {most}" in refused["error"]["message"]
        assert Server(url).post("config", kv_memory=most)["config"]["kv_memory"] == most


def test_the_context_is_as_long_as_there_is_memory_for():
    engine = chatty_engine(num_blocks=16, max_context=512)
    with serving({"toy": engine}) as url:
        server, long = Server(url), {"prompt": prompt(0, 200), "max_tokens": 2}
        for num_blocks, status in ((8, 400), (16, 200), (4, 400)):
            config = server.post("config", kv_memory=num_blocks * 128)["config"]
            assert config["max_model_len"] == 16 * num_blocks + 1  # the last token has no KV
            assert httpx.get(f"{url}/v1/models").json()["data"][0]["max_model_len"] == config["max_model_len"]
            assert httpx.post(f"{url}/v1/completions", json=long, timeout=60).status_code == status
    asyncio.run(engine.aclose())


def test_a_cache_grows_within_the_memory_of_all_models():
    engine = chatty_engine(num_blocks=64)
    weights = engine.weights_bytes
    with serving({"toy": engine}, ServerConfig(memory_bytes=weights + 40 * 128)) as url:
        assert Server(url).post("config", kv_memory=30 * 128)["outcome"] == "done"
        assert Server(url).post("config", kv_memory=40 * 128)["outcome"] == "done"
        refused = Server(url).post("config", 409, kv_memory=41 * 128)
        assert f"of the server's --memory 0 are free; ask for {40 * 128} at most" in refused["error"]["message"]
        assert refused["config"]["kv_memory"] == 40 * 128
    asyncio.run(engine.aclose())


@pytest.mark.parametrize("ttl", [-1, 0])
def test_what_is_warmed_for_no_time_at_all_is_refused(server, ttl):
    reply = server.post("warm", 400, prompt=prompt(0), pin=True, ttl=ttl)
    assert "positive number of seconds" in reply["error"]["message"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, "nothing to change"),
        ({"kv_policy": "os:System"}, "must be one of"),
        ({"kv_memory": 1}, "raise it"),
        ({"kv_memory": 1 << 50}, "reserved at its start"),
        ({"detach": ["cellar"]}, "there is no tier"),
        ({"attach": [{"remote": "package.module:Class"}]}, "give a URL"),
        ({"attach": [{"disk": "here"}]}, "absolute path"),
        ({"attach": [{"host": 0}]}, "above 0"),
        ({"attach": [{}]}, "one of disk, host and remote"),
        ({"attach": [{"name": "device", "host": 1000}]}, "cannot be called 'device'"),
        ({"attach": [{"name": "", "host": 1000}]}, "cannot be called ''"),
        ({"attach": [{"host": "much"}]}, "'much' is not a size"),
        ({"kv_memory": "4 parsecs"}, "'4 parsecs' is not a size"),
    ],
)
def test_changes_that_are_impossible_are_told(server, change, words):
    reply = httpx.post(f"{server.url}/v1/cache/config", json=change, timeout=60)
    assert reply.status_code in (400, 409)
    assert words in reply.json()["error"]["message"]


def test_pages_of_other_sites_change_nothing(server):
    headers = {"sec-fetch-site": "cross-site", "content-type": "text/plain"}
    server.cached(prompt(0))
    server.post("clear", 403, headers=headers, all=True)
    server.post("config", 403, headers=headers, kv_policy="lfu")
    assert server.lookup(prompt(0))[0] == 99


def test_an_admin_clears_a_tenant_and_others_may_nothing(tmp_path):
    (tmp_path / "keys.toml").write_text(KEYS)
    engine = chatty_engine(num_blocks=64)

    def ask(key: str, **fields: Any) -> int:
        body = {"prompt": prompt(0), "max_tokens": 2, "temperature": 0, **fields}
        reply = httpx.post(f"{url}/v1/completions", json=body, timeout=60, headers={"x-api-key": key})
        return reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    with serving({"toy": engine}, ServerConfig(keys=tmp_path / "keys.toml")) as url:
        server = Server(url)
        for key in (ALICE, BOB):
            assert [ask(key), ask(key), ask(key, cache_salt="x")] == [0, 99, 0]
        server.post("clear", 403, headers={"x-api-key": ALICE}, tenant="alice")
        assert server.post("clear", headers={"x-api-key": ADMIN}, tenant="alice")["num_tokens"] == 2 * 101
        assert [ask(ALICE), ask(ALICE, cache_salt="x"), ask(BOB), ask(BOB, cache_salt="x")] == [0, 0, 99, 99]
    asyncio.run(engine.aclose())


@pytest.fixture
def rounding(tmp_path):
    """A server that keeps KV in fewer bits, but that of requests for exact KV."""
    tiers = [
        TierUse(Tier("host", HostBackend(1 << 20)), "write_back", is_exclusive=True),
        TierUse(Tier("disk", FolderBackend(tmp_path / "kv"))),
    ]
    engine = chatty_engine(num_blocks=24, tiers=tiers, codec=ToyCodec())
    with serving({"toy": engine}) as url:
        yield Server(url)
    asyncio.run(engine.aclose())


def evicted(server: Server, ids: list[int], **fields: Any) -> str:
    """Compute KV that is exact, drive it out of the pools, and what was said."""
    said = answer(server, ids, exact_kv=True, **fields)[0]
    for seed in range(1000, 1004):  # more than the pools hold
        answer(server, prompt(seed), exact_kv=True)
    return said


def answer(server: Server, ids: list[int], **fields: Any) -> tuple[str, int, Any]:
    """The text, how many tokens were found, and which of these were rounded."""
    body = {"prompt": ids, "max_tokens": 8, "temperature": 0, **fields}
    reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
    told = reply["usage"]["prompt_tokens_details"]
    return reply["choices"][0]["text"], told["cached_tokens"], told.get("rounded_tokens")


@pytest.mark.parametrize("way", ["prompt", "session", "namespace", "all"])
def test_exact_kv_is_compressed_and_is_then_told_as_rounded_and_never_taken_for_exact(rounding, way):
    session = httpx.post(f"{rounding.url}/v1/sessions", json={"ttl": 100}).json()["id"]
    said = evicted(rounding, prompt(0), session=session)
    chosen = {"prompt": prompt(0)} if way == "prompt" else {"session": session} if way == "session" else {way: True}
    done = rounding.post("compress", **chosen)
    host, disk = done["tiers"]["host"], done["tiers"]["disk"]
    assert host["num_blocks"] >= 6 <= disk["num_blocks"]
    assert host["num_skipped"] == disk["num_skipped"] == 0
    for tier in (host, disk):
        assert 0 < tier["num_bytes_after"] < tier["num_bytes_before"]
    assert rounding.post("compress", **chosen)["tiers"]["host"]["num_blocks"] == 0
    assert rounding.lookup(prompt(0))[1] == {"host": 96, "disk": 96}
    assert answer(rounding, prompt(0)) == (said, 96, {"int8": 96})
    assert answer(rounding, prompt(0), exact_kv=True) == (said, 0, None)


def test_exact_kv_is_looked_up_moved_and_carried_away_apart_from_the_other(rounding):
    session = httpx.post(f"{rounding.url}/v1/sessions", json={"ttl": 100}).json()["id"]
    said = evicted(rounding, prompt(0), session=session)
    exact = {"exact_kv": True}
    assert rounding.lookup(prompt(0)) == (0, {"host": 0, "disk": 0})
    assert rounding.lookup(prompt(0), **exact) == (0, {"host": 96, "disk": 96})
    assert rounding.post("move", prompt=prompt(0), to="device")["num_tokens"] == 0
    assert rounding.post("move", prompt=prompt(0), to="device", **exact)["num_tokens"] == 96
    # The host tier lets go of it on its writer's thread.
    eventually(lambda: rounding.lookup(prompt(0), **exact) == (96, {"host": 0, "disk": 96}))
    assert rounding.post("move", session=session, to="host", **exact)["num_tokens"] == 96
    assert rounding.lookup(prompt(0), **exact) == (0, {"host": 96, "disk": 96})
    assert "not one block" in rounding.post("export", 400, session=session)["error"]["message"]
    carried = httpx.post(f"{rounding.url}/v1/cache/export", json={"session": session, **exact}, timeout=60).content
    rounding.post("clear", all=True)
    assert rounding.lookup(prompt(0), **exact) == (0, {"host": 0, "disk": 0})
    imported = httpx.post(f"{rounding.url}/v1/cache/import", content=carried, timeout=60).json()
    assert (imported["num_tokens"], imported["exact_kv"]) == (96, True)
    assert rounding.lookup(prompt(0)) == (0, {"host": 0, "disk": 0})
    assert rounding.lookup(prompt(0), **exact)[0] == 96
    eventually(lambda: rounding.lookup(prompt(0), **exact)[1]["disk"] == 96)
    rounding.post("clear", all=True, tiers=False)  # what went down after the import is as exact as what was computed
    assert answer(rounding, prompt(0), **exact) == (said, 96, None)


@pytest.mark.parametrize("is_exact", [False, True])
def test_what_is_warmed_is_for_those_who_want_its_kind(rounding, is_exact):
    ways = {"exact_kv": is_exact}, {"exact_kv": not is_exact}
    assert rounding.post("warm", prompt=prompt(0), **ways[0])["num_computed_tokens"] == 100
    assert [rounding.lookup(prompt(0), **way)[0] for way in ways] == [99, 0]
    assert rounding.post("warm", prompt=prompt(0), **ways[0])["num_computed_tokens"] == 1
    assert answer(rounding, prompt(0), **ways[0])[1:] == (99, None)


@pytest.mark.parametrize("is_exact", [False, True])
@pytest.mark.parametrize("way", ["warm", "pins"])
def test_a_pin_holds_the_kv_of_its_kind_and_is_listed_and_lifted_as_any(rounding, way, is_exact):
    kind, other = {"exact_kv": is_exact}, {"exact_kv": not is_exact}

    def crowd() -> None:
        for seed in range(1000, 1004):  # more than the pools hold
            answer(rounding, prompt(seed), **kind)

    ids = prompt(0, 96)
    rounding.cached(ids, **other)
    if way == "pins":
        rounding.cached(ids, **kind)
        pin = rounding.post("pins", prompt=ids, **kind)["id"]
    else:
        pin = rounding.post("warm", prompt=ids, pin=True, **kind)["pin"]
    crowd()
    assert [rounding.lookup(ids, **each)[0] for each in (kind, other)] == [95, 0]
    (listed,) = httpx.get(f"{rounding.url}/v1/cache/pins").json()["data"]
    assert listed == {"id": pin, "object": "cache.pin", "num_tokens": 96, "exact_kv": is_exact}
    assert httpx.delete(f"{rounding.url}/v1/cache/pins/{pin}").json()["deleted"]
    crowd()
    assert rounding.lookup(ids, **kind)[0] == 0


@pytest.mark.parametrize("is_exact", [False, True])
def test_looking_at_a_session_brings_up_the_kv_of_its_kind(rounding, is_exact):
    kind, other = {"exact_kv": is_exact}, {"exact_kv": not is_exact}
    session = httpx.post(f"{rounding.url}/v1/sessions", json={"ttl": 100}).json()["id"]
    answer(rounding, prompt(0), session=session, **kind)
    eventually(lambda: rounding.lookup(prompt(0), **kind)[1]["disk"] == 96)
    rounding.post("clear", all=True, tiers=False)
    assert rounding.lookup(prompt(0), **kind)[0] == 0
    httpx.get(f"{rounding.url}/v1/sessions/{session}").raise_for_status()
    eventually(lambda: rounding.lookup(prompt(0), **kind)[0] == 96)
    assert rounding.lookup(prompt(0), **other)[0] == 0


def test_what_is_rounded_goes_away_and_comes_back_as_rounded(rounding):
    said = answer(rounding, prompt(0))[0]
    carried = httpx.post(f"{rounding.url}/v1/cache/export", json={"prompt": prompt(0)}, timeout=60).content
    rounding.post("clear", all=True)
    imported = httpx.post(f"{rounding.url}/v1/cache/import", content=carried, timeout=60).json()
    assert (imported["num_tokens"], imported["exact_kv"]) == (96, False)
    assert rounding.lookup(prompt(0), exact_kv=True)[0] == 0
    assert answer(rounding, prompt(0)) == (said, 96, {"int8": 96})


def test_a_server_that_does_not_round_takes_exact_kv_for_the_usual(server):
    server.cached(prompt(0))
    for exact_kv in (False, True):
        assert server.lookup(prompt(0), exact_kv=exact_kv)[0] == 99
        assert server.post("warm", prompt=prompt(0), exact_kv=exact_kv)["num_computed_tokens"] == 1
        assert server.post("pins", prompt=prompt(0), exact_kv=exact_kv)["exact_kv"] is False


@pytest.mark.parametrize("way", ["prompt", "session", "namespace"])
def test_clearing_takes_exact_kv_too(rounding, way):
    session = httpx.post(f"{rounding.url}/v1/sessions", json={"ttl": 100}).json()["id"]
    said = evicted(rounding, prompt(0), session=session)
    here = answer(rounding, prompt(1), exact_kv=True)[0]
    chosen = {"prompt": prompt(0)} if way == "prompt" else {"session": session} if way == "session" else {way: True}
    assert rounding.post("clear", **chosen)["num_tier_blocks"]["disk"] >= 6
    assert answer(rounding, prompt(0), exact_kv=True) == (said, 0, None)
    assert answer(rounding, prompt(1), exact_kv=True) == (here, 0 if way == "namespace" else 99, None)


def test_what_others_go_on_from_is_there_in_both_ways(rounding):
    base, ways = prompt(0, 64), [prompt(1, 40), prompt(2, 40)]
    answer(rounding, [*base, *ways[0]], exact_kv=True)
    said = evicted(rounding, [*base, *ways[1]])
    assert rounding.post("compress", prompt=[*base, *ways[0]])["tiers"]["disk"]["num_blocks"] == 6
    assert answer(rounding, [*base, *ways[0]])[1:] == (96, {"int8": 96})
    assert answer(rounding, [*base, *ways[0]], exact_kv=True)[1:] == (64, None)
    assert answer(rounding, [*base, *ways[1]], exact_kv=True) == (said, 96, None)


def test_each_salt_is_compressed_under_its_own_name(rounding):
    evicted(rounding, prompt(0), cache_salt="mine")
    rounding.post("compress", namespace=True)
    assert rounding.lookup(prompt(0), cache_salt="mine")[1]["disk"] == 0
    rounding.post("compress", all=True)
    assert rounding.lookup(prompt(0), cache_salt="mine")[1]["disk"] == 96
    assert rounding.lookup(prompt(0))[1]["disk"] == 0


def test_a_server_that_could_not_read_it_compresses_nothing(server, rounding):
    evicted(server, prompt(0))
    assert "--kv-offload-dtype int8 or int4" in server.post("compress", 400, all=True)["error"]["message"]
    assert server.lookup(prompt(0))[1]["disk"] == 96
    assert "send one of" in rounding.post("compress", 400)["error"]["message"]
    assert "send one of" in rounding.post("compress", 400, all=True, tenant="x")["error"]["message"]


def test_an_admin_compresses_what_a_tenant_has(tmp_path):
    (tmp_path / "keys.toml").write_text(KEYS)
    engine = chatty_engine(tiers=[Tier("disk", FolderBackend(tmp_path / "kv"))], codec=ToyCodec())

    def ask(key: str, **fields: Any) -> dict[str, Any]:
        body = {"prompt": prompt(0), "max_tokens": 2, "temperature": 0, **fields}
        reply = httpx.post(f"{url}/v1/completions", json=body, timeout=60, headers={"x-api-key": key})
        return reply.json()["usage"]["prompt_tokens_details"]

    def compress(tenant: str) -> int:
        done = server.post("compress", headers={"x-api-key": ADMIN}, tenant=tenant)
        return done["tiers"]["disk"]["num_blocks"]

    with serving({"toy": engine}, ServerConfig(keys=tmp_path / "keys.toml")) as url:
        server = Server(url)
        for salt in ("", "x"):
            ask(ALICE, exact_kv=True, cache_salt=salt)
        server.post("compress", 403, headers={"x-api-key": ALICE}, tenant="alice")
        assert compress("bob") == 0
        num_blocks = 0

        def is_done() -> bool:  # what is committed goes down after its request has ended
            nonlocal num_blocks
            num_blocks += compress("alice")
            return num_blocks >= 2 * 6

        eventually(is_done)
        for salt in ("", "x"):
            assert ask(ALICE, cache_salt=salt) == {"cached_tokens": 96, "rounded_tokens": {"int8": 96}}
            assert ask(BOB, cache_salt=salt)["cached_tokens"] == 0
    asyncio.run(engine.aclose())


def test_a_folder_is_one_tiers_alone(server, tmp_path):
    for folder in (tmp_path / "kv", tmp_path / "kv" / "inside", tmp_path):
        answered = httpx.post(f"{server.url}/v1/cache/config", json={"attach": [{"disk": str(folder)}]}).json()
        assert "tier disk is in" in json.dumps(answered), answered
    assert [tier["name"] for tier in httpx.get(f"{server.url}/v1/cache/config").json()["tiers"]] == ["host", "disk"]
