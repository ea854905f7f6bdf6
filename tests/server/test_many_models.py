"""Several models in less memory than they need: who is loaded, who has to go, and that no request notices."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import ollama
import pytest

from engine.toy import ToyCodec, ToyExecutable
from spolia.cli.ps import report
from spolia.engine import AsyncEngine, EngineConfig
from spolia.errors import ModelError
from spolia.server import ModelSource, ServerConfig, parse_duration
from spolia.tiers import FolderBackend, Tier

from .harness import Pace, chatty_engine, eventually, metric, serving

MB = 1 << 20
ROOM_FOR_ONE = ServerConfig(memory_bytes=100 * MB)


def toy(size_bytes: int = 60 * MB, **settings: Any) -> ModelSource:
    """A model that takes so much memory."""

    def load(_: int | None) -> AsyncEngine:
        executable = ToyExecutable()
        executable.packed_bytes = size_bytes
        return chatty_engine(executable=executable, num_blocks=64, **settings)

    return ModelSource(load=load, size_bytes=lambda: size_bytes)


def pinned(source: ModelSource) -> ModelSource:
    return ModelSource(load=source.load, size_bytes=source.size_bytes, is_pinned=True)


def complete(url: str, model: str, prompt: str = "hello", **fields: Any) -> httpx.Response:
    body = {"model": model, "prompt": prompt, "max_tokens": 4, "temperature": 0, **fields}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=60)


def cards(url: str) -> dict[str, dict[str, Any]]:
    return {card["id"]: card for card in httpx.get(f"{url}/v1/models").json()["data"]}


def states(url: str) -> dict[str, str]:
    return {name: card["status"] for name, card in cards(url).items()}


def test_a_model_is_loaded_by_its_first_request_and_goes_when_another_needs_its_room():
    with serving({"a": toy(), "b": toy(), "small": toy(MB)}, ROOM_FOR_ONE) as url:
        assert states(url) == {"a": "unloaded", "b": "unloaded", "small": "unloaded"}
        assert httpx.get(f"{url}/health").status_code == 200
        expected = complete(url, "a").json()["choices"]
        assert states(url) == {"a": "ready", "b": "unloaded", "small": "unloaded"}
        assert complete(url, "b").json()["model"] == "b"
        assert states(url) == {"a": "unloaded", "b": "ready", "small": "unloaded"}
        assert complete(url, "small").json()["model"] == "small"  # there is room beside it
        assert states(url) == {"a": "unloaded", "b": "ready", "small": "ready"}
        assert complete(url, "a").json()["choices"] == expected
        assert states(url) == {"a": "ready", "b": "unloaded", "small": "ready"}


def test_the_one_that_was_asked_for_longest_ago_goes():
    with serving({name: toy() for name in "abc"}, ServerConfig(memory_bytes=180 * MB)) as url:
        for name in "aba":
            assert complete(url, name).status_code == 200
        assert complete(url, "c").status_code == 200
        assert states(url) == {"a": "ready", "b": "unloaded", "c": "ready"}


def test_no_request_is_dropped_and_who_waits_is_told_for_what():
    pace = Pace()
    with serving({"a": toy(observer=pace), "b": toy()}, ROOM_FOR_ONE) as url, ThreadPoolExecutor() as pool:
        with pace.held():
            running = pool.submit(complete, url, "a", max_tokens=30, ignore_eos=True)
            eventually(lambda: states(url)["a"] == "ready")
            waiting = [pool.submit(complete, url, "b") for _ in range(3)]
            eventually(lambda: cards(url)["b"]["num_queued"] == 3)
            eventually(lambda: "it waits for a, in whose room" in (cards(url)["b"]["reason"] or ""))
            assert httpx.get(f"{url}/health").status_code == 200
        assert running.result().json()["usage"]["completion_tokens"] == 30
        assert [each.result().json()["model"] for each in waiting] == ["b"] * 3
        assert states(url) == {"a": "unloaded", "b": "ready"}


def test_a_stream_that_is_being_read_holds_its_model():
    with serving({"a": toy(observer=Pace(step_s=0.02)), "b": toy()}, ROOM_FOR_ONE) as url:
        body = {"model": "a", "prompt": "x", "max_tokens": 40, "ignore_eos": True, "stream": True}
        with (
            ThreadPoolExecutor() as pool,
            httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as reply,
        ):
            lines = reply.iter_lines()
            next(lines)
            waiting = pool.submit(complete, url, "b")
            assert "data: [DONE]" in list(lines)
            assert waiting.result().status_code == 200


def test_a_pinned_model_stays_and_whoever_needs_its_room_is_told():
    with serving({"a": pinned(toy()), "b": toy()}, ROOM_FOR_ONE) as url:
        assert complete(url, "a").status_code == 200
        refused = complete(url, "b")
        assert refused.status_code == 503
        message = refused.json()["error"]["message"]
        assert re.search(r"none of those in memory may be unloaded: a \(\d+ bytes\)\. Raise --memory", message)
        assert states(url) == {"a": "ready", "b": "unloaded"}


def test_a_model_is_loaded_once_for_all_who_wait_for_it():
    loads = []
    source = toy()

    def load(kv_bytes: int | None) -> AsyncEngine:
        loads.append(kv_bytes)
        eventually(lambda: httpx.get(f"{url}/load").json() == {"server_load": 8})  # all are there
        return source.load(kv_bytes)

    with serving({"a": ModelSource(load=load, size_bytes=lambda: 60 * MB)}, ROOM_FOR_ONE) as url:
        with ThreadPoolExecutor(8) as pool:
            replies = list(pool.map(lambda _: complete(url, "a"), range(8)))
        assert [reply.status_code for reply in replies] == [200] * 8
    assert loads == [16 * MB]  # a quarter of the 40 MB that are left, but no less than this


def test_a_model_that_cannot_be_loaded_says_why_and_the_next_request_tries_again():
    errors = [ModelError("weights.gguf is cut short")]
    source = toy()

    def load(kv_bytes: int | None) -> AsyncEngine:
        if errors:
            raise errors.pop()
        return source.load(kv_bytes)

    with serving({"a": ModelSource(load=load, size_bytes=lambda: 1)}) as url:
        refused = complete(url, "a")
        assert refused.status_code == 503
        assert "a cannot be loaded: weights.gguf is cut short" in refused.json()["error"]["message"]
        assert httpx.get(f"{url}/health").status_code == 200
        assert complete(url, "a").status_code == 200


def test_who_has_waited_long_enough_is_told_what_is_going_on():
    may_load = threading.Event()
    source = toy()

    def load(kv_bytes: int | None) -> AsyncEngine:
        assert may_load.wait(60)
        return source.load(kv_bytes)

    with serving({"a": ModelSource(load=load, size_bytes=lambda: 1)}, ServerConfig(load_wait_s=0.1)) as url:
        late = complete(url, "a")
        assert late.status_code == 503
        assert "a is loading, for" in late.json()["error"]["message"]
        assert "retry-after" in late.headers
        assert httpx.get(f"{url}/health").status_code == 503
        may_load.set()
        eventually(lambda: states(url) == {"a": "ready"})
        assert complete(url, "a").status_code == 200


def test_an_unloaded_model_comes_back_warm_from_its_tier(tmp_path: Path):
    def load(_: int | None) -> AsyncEngine:
        return chatty_engine(num_blocks=64, tiers=[Tier("disk", FolderBackend(tmp_path / "kv", 1 << 24))])

    source = ModelSource(load=load, size_bytes=lambda: 1)
    prompt = "a prompt of more than two blocks of sixteen tokens"
    with serving({"a": source}, ServerConfig(keep_alive_s=0)) as url:
        cold = complete(url, "a", prompt).json()
        eventually(lambda: states(url) == {"a": "unloaded"})
        warm = complete(url, "a", prompt).json()
        assert warm["choices"] == cold["choices"]
        assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] >= 48


def test_a_session_outlives_its_models_stay_in_memory():
    with serving({"a": toy()}, ServerConfig(keep_alive_s=0)) as url:
        session = httpx.post(f"{url}/v1/sessions", json={"model": "a"}).json()["id"]
        for turn in range(1, 3):
            eventually(lambda: states(url) == {"a": "unloaded"})
            assert complete(url, "a", "more", session=session).status_code == 200
            assert httpx.get(f"{url}/v1/sessions/{session}").json()["num_turns"] == turn


def test_a_session_outlives_the_failure_of_its_engine():
    executables: list[ToyExecutable] = []

    def load(_: int | None) -> AsyncEngine:
        executables.append(ToyExecutable())
        return chatty_engine(executable=executables[-1], num_blocks=64)

    with serving({"a": ModelSource(load=load, size_bytes=lambda: 1)}) as url:
        session = httpx.post(f"{url}/v1/sessions", json={"model": "a"}).json()["id"]
        first = complete(url, "a", "more", session=session)
        executables[0].error = RuntimeError("the kernel broke")
        assert complete(url, "a", "x").status_code == 500
        assert states(url) == {"a": "failed"}
        again = complete(url, "a", "more", session=session)  # loads it anew
        assert again.status_code == 200, again.text
        assert len(executables) == 2
        usage = [reply.json()["usage"]["prompt_tokens"] for reply in (first, again)]
        assert usage[1] > usage[0] + 4  # what was said is there


@pytest.mark.parametrize("verb", ["lookup", "warm", "export", "clear"])
def test_what_an_operator_asks_of_an_unloaded_model_loads_it(verb: str):
    body = {"model": "a", "all": True} if verb == "clear" else {"model": "a", "prompt": "hello, who is there?"}
    with serving({"a": toy(), "b": toy()}, ROOM_FOR_ONE) as url:
        assert complete(url, "b").status_code == 200
        reply = httpx.post(f"{url}/v1/cache/{verb}", json=body, timeout=60)
        assert reply.status_code == (400 if verb == "export" else 200), reply.text
        assert states(url) == {"a": "ready", "b": "unloaded"}


def test_a_stream_that_may_be_resumed_holds_its_model():
    with serving({"a": toy(observer=Pace(step_s=0.02))}, ServerConfig(keep_alive_s=0)) as url:
        body = {"model": "a", "prompt": "x", "max_tokens": 40, "ignore_eos": True, "stream": True, "resumable": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as reply:
            stream_id = reply.headers["x-request-id"]
        rest = httpx.get(f"{url}/v1/streams/{stream_id}", timeout=60).text
        assert rest.rstrip().endswith("[DONE]")
        eventually(lambda: states(url) == {"a": "unloaded"})


# Ollama's keep_alive.


@pytest.fixture
def client_of() -> Callable[[str], Any]:
    return lambda url: closing(ollama.Client(host=url))


def test_ollamas_client_loads_unloads_and_sees_until_when_a_model_stays(client_of):
    with serving({"a": toy(), "b": toy(MB)}) as url, client_of(url) as client:
        assert client.ps().models == []
        assert {model.model for model in client.list().models} == {"a", "b"}
        assert client.generate(model="a", prompt="", keep_alive="5m").done_reason == "load"
        (shown,) = client.ps().models
        assert shown.model == "a"
        assert shown.size >= 60 * MB
        assert 240 < shown.expires_at.timestamp() - time.time() <= 300
        client.generate(model="a", prompt="x", keep_alive=-1, options={"num_predict": 2})
        assert client.ps().models[0].expires_at.year == 9999
        assert client.generate(model="a", prompt="", keep_alive=0).done_reason == "unload"
        eventually(lambda: client.ps().models == [])
        client.chat(
            model="b", messages=[{"role": "user", "content": "x"}], keep_alive="50ms", options={"num_predict": 2}
        )
        eventually(lambda: states(url) == {"a": "unloaded", "b": "unloaded"})
        assert len(client.embed(model="b", input="x", keep_alive="1h30m").embeddings) == 1
        assert 5300 < client.ps().models[0].expires_at.timestamp() - time.time() <= 5400
        with pytest.raises(ollama.ResponseError, match="keep_alive: 'soon' is no duration"):
            client.generate(model="a", prompt="x", keep_alive="soon")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("5m", 300), ("1h30m", 5400), ("300", 300), (90, 90), (1.5, 1.5), ("250ms", 0.25), ("0", 0), ("-0", 0)]
    + [(never, float("inf")) for never in ("-1", -1, "-5m")],
)
def test_durations(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "5 m", "five", "1h-3m", "nan"])
def test_no_durations(text):
    with pytest.raises(ValueError, match="is no duration"):
        parse_duration(text)


# Models that nobody named.


def test_a_library_is_listed_and_each_of_it_loaded_when_it_is_asked_for():
    books = {"a": toy()}
    with serving({}, library=lambda: books) as url:
        assert states(url) == {"a": "unloaded"}
        assert complete(url, "a").status_code == 200
        books["b"] = toy()  # pulled meanwhile
        assert complete(url, "b").status_code == 200
        assert complete(url, "c").status_code == 404
        assert states(url) == {"a": "ready", "b": "ready"}


def test_spolia_ps_says_what_is_in_memory_and_why_the_rest_is_not():
    with serving({"a": pinned(toy()), "b": toy()}, ServerConfig(memory_bytes=200 * MB, keep_alive_s=60)) as url:
        complete(url, "a")
        shown = report(httpx.get(f"{url}/v1/models").json(), time.time()).splitlines()
        assert shown[0].split() == ["model", "state", "weights", "kv", "requests", "stays"]
        assert shown[1].split() == ["a", "ready", "63", "MB", "0", "MB", "0", "for", "ever"]
        assert shown[2].split() == ["b", "unloaded", "0"]
        assert shown[-1].startswith("in use 63 MB of 210 MB; available on this machine")
        complete(url, "b")
        seconds = int(report(httpx.get(f"{url}/v1/models").json(), time.time()).splitlines()[2].split()[-3])
        assert 0 <= seconds <= 60


def test_counters_go_on_when_a_model_is_loaded_again(tmp_path: Path):
    def load(_: int | None) -> AsyncEngine:
        return chatty_engine(num_blocks=64, tiers=[Tier("disk", FolderBackend(tmp_path / "kv", 1 << 24))])

    def counters(url: str) -> dict[str, float]:
        lines = httpx.get(f"{url}/metrics").text.splitlines()
        kinds = dict(line.split()[2:4] for line in lines if line.startswith("# TYPE"))
        samples = dict(line.rsplit(" ", 1) for line in lines if line[0] != "#")
        growing = tuple(name for name, kind in kinds.items() if kind in ("counter", "histogram"))
        return {name: float(value) for name, value in samples.items() if name.startswith(growing)}

    prompt = "a prompt of more than two blocks of sixteen tokens"
    with serving({"a": ModelSource(load=load, size_bytes=lambda: 1)}, ServerConfig(keep_alive_s=0)) as url:
        for turn in range(1, 4):
            before = counters(url)
            complete(url, "a", prompt)
            while states(url) != {"a": "unloaded"}:  # also while it goes
                now = counters(url)
                assert {name for name, value in before.items() if now[name] < value} == set()
                before = now
            assert metric(url, "llamacpp:tokens_predicted_total") == 4 * turn
            assert metric(url, "vllm:prompt_tokens_total") == 50 * turn
            assert metric(url, "sglang:prompt_tokens_total") == 50 * turn
            # Whole blocks are in the tier; what is over is computed each time.
            assert metric(url, "spolia_missed_prompt_tokens_total", reason="never_seen") == 50
            assert metric(url, "spolia_missed_prompt_tokens_total", reason="too_short") == 2 * (turn - 1)
            assert metric(url, "spolia_kv_blocks", state="cached") == 0
            assert metric(url, "spolia_requests_running") == 0
            assert metric(url, "spolia_tier_bytes", tier="disk") > 0
        assert metric(url, "spolia_tier_blocks_total", tier="disk", outcome="hits") >= 6
        assert metric(url, "spolia_tier_state", tier="disk", state="up") == 0


def test_what_was_changed_outlives_an_unloading():
    weights, block_bytes = 60 * MB, 128
    config = ServerConfig(memory_bytes=2 * weights - MB)
    with serving({"a": toy(weights), "b": toy(weights)}, config) as url:

        def change(status: int, **wanted: Any) -> dict[str, Any]:
            reply = httpx.post(f"{url}/v1/cache/config", json={"model": "a", **wanted}, timeout=60)
            assert reply.status_code == status, reply.text
            return reply.json()

        assert complete(url, "a").status_code == 200
        change(200, kv_memory=32 * block_bytes, kv_policy="slru", attach=[{"host": "1MiB"}])
        assert complete(url, "b").status_code == 200
        assert states(url)["a"] == "unloaded"
        assert complete(url, "a").status_code == 200
        eventually(lambda: change_of(url, "a") == (32 * block_bytes, "slru", ["host"]))


@pytest.mark.parametrize("has_tier", [False, True])
def test_pins_and_settings_are_there_again_when_a_model_is_back(has_tier: bool, tmp_path: Path):
    def load(_: int | None) -> AsyncEngine:
        tiers = [Tier("disk", FolderBackend(tmp_path / "kv", 1 << 24))] if has_tier else []
        return chatty_engine(num_blocks=64, tiers=tiers)

    prompt = "a prompt of more than two blocks of sixteen tokens"
    source = ModelSource(load=load, size_bytes=lambda: 1, config=EngineConfig(kv_policy="slru", kv_host=1 << 20))
    with serving({"a": source}) as url, httpx.Client(base_url=url, timeout=60) as client:
        fresh = client.get("/v1/cache/config").json()
        assert (fresh["status"], fresh["kv_policy"], fresh["kv_memory"]) == ("unloaded", "slru", None)
        assert [(tier["name"], tier["state"]) for tier in fresh["tiers"]] == [("host", "unloaded")]
        assert client.get("/v1/cache/curve").json()["advice"] == "no requests yet"
        assert states(url) == {"a": "unloaded"}  # none of these was a reason to load it
        pin = client.post("/v1/cache/warm", json={"prompt": prompt, "pin": True, "cache_salt": "x"}).json()["pin"]
        lifted = client.post("/v1/cache/pins", json={"prompt": prompt, "cache_salt": "x"}).json()["id"]
        client.delete(f"/v1/cache/pins/{lifted}", params={"cache_salt": "x"}).raise_for_status()
        gone = client.post("/v1/cache/pins", json={"prompt": prompt, "cache_salt": "x"}).json()["id"]
        loaded = client.get("/v1/cache/config").json()
        client.post("/api/generate", json={"model": "a", "keep_alive": 0}).raise_for_status()
        eventually(lambda: states(url) == {"a": "unloaded"})
        kept = client.get("/v1/cache/config").json()
        assert (kept["kv_policy"], kept["kv_memory"]) == (loaded["kv_policy"], loaded["kv_memory"])
        assert client.get("/v1/cache/curve").status_code == 200
        assert states(url) == {"a": "unloaded"}
        holds = {"id": pin, "object": "cache.pin", "num_tokens": 50, "exact_kv": False}
        assert client.get("/v1/cache/pins", params={"cache_salt": "x"}).json()["data"] == [holds, {**holds, "id": gone}]
        assert client.get("/v1/cache/pins").json()["data"] == []
        assert client.delete(f"/v1/cache/pins/{pin}").status_code == 404  # another's
        assert client.delete(f"/v1/cache/pins/{gone}", params={"cache_salt": "x"}).json()["deleted"]
        assert client.get("/v1/cache/pins", params={"cache_salt": "x"}).json()["data"] == [holds]
        assert states(url) == {"a": "unloaded"}  # nor was any of these
        assert complete(url, "a").status_code == 200
        eventually(lambda: client.get("/v1/cache/pins", params={"cache_salt": "x"}).json()["data"] == [holds])
        assert client.get("/v1/cache/pins").json()["data"] == []  # it is its owner's
        assert client.delete(f"/v1/cache/pins/{pin}", params={"cache_salt": "x"}).json()["deleted"]
        assert client.get("/v1/cache/pins", params={"cache_salt": "x"}).json()["data"] == []


def test_a_pin_on_exact_kv_is_on_exact_kv_again_when_a_model_is_back(tmp_path: Path):
    def load(_: int | None) -> AsyncEngine:
        return chatty_engine(num_blocks=64, tiers=[Tier("disk", FolderBackend(tmp_path))], codec=ToyCodec())

    body = {"prompt": "a prompt of more than two blocks of sixteen tokens", "exact_kv": True}
    with (
        serving({"a": ModelSource(load=load, size_bytes=lambda: 1)}) as url,
        httpx.Client(base_url=url, timeout=60) as client,
    ):

        def pins() -> list[dict[str, Any]]:
            return client.get("/v1/cache/pins").json()["data"]

        pin = client.post("/v1/cache/warm", json={**body, "pin": True}).json()["pin"]
        held = [{"id": pin, "object": "cache.pin", "num_tokens": 50, "exact_kv": True}]
        assert pins() == held
        client.post("/api/generate", json={"model": "a", "keep_alive": 0}).raise_for_status()
        eventually(lambda: states(url) == {"a": "unloaded"})
        assert pins() == held
        assert complete(url, "a").status_code == 200
        eventually(lambda: pins() == held)
        assert client.post("/v1/cache/lookup", json=body).json()["num_cached_tokens"] == 49
        assert client.post("/v1/cache/lookup", json={**body, "exact_kv": False}).json()["num_cached_tokens"] == 0


def test_a_model_that_is_back_has_the_memory_that_it_had():
    asked: list[tuple[str, int | None]] = []
    block_bytes = 128

    def source(name: str) -> ModelSource:
        def load(kv_bytes: int | None) -> AsyncEngine:
            asked.append((name, kv_bytes))
            executable = ToyExecutable()
            executable.packed_bytes = 60 * MB
            return chatty_engine(executable=executable, num_blocks=(kv_bytes or 0) // block_bytes)

        return ModelSource(load=load, size_bytes=lambda: 60 * MB)

    with serving({"a": source("a"), "b": source("b")}, ServerConfig(memory_bytes=180 * MB)) as url:
        for name in "aba":
            assert complete(url, name).status_code == 200
        assert asked == [("a", 30 * MB), ("b", 16 * MB)]
        ollama_body = {"model": "a", "keep_alive": 0}
        httpx.post(f"{url}/api/generate", json=ollama_body, timeout=60).raise_for_status()
        eventually(lambda: states(url)["a"] == "unloaded")
        assert complete(url, "a").status_code == 200
        assert asked[2:] == [("a", 30 * MB)]


def change_of(url: str, model: str) -> tuple[int, str, list[str]]:
    config = httpx.get(f"{url}/v1/cache/config", params={"model": model}).json()
    return config["kv_memory"], config["kv_policy"], [tier["name"] for tier in config["tiers"]]
