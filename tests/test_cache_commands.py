"""`spolia cache` against a running server, and `spolia serve --warm`."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from engine.toy import ToyCodec
from models.tiny import LLAMA, llama_tensors, write_gguf
from server.harness import chatty_engine, eventually, serving
from server.process import ServerProcess, server_process
from spolia.cli import operator
from spolia.cli.app import app
from spolia.errors import InvalidRequest, SpoliaError

PROMPT = "The quick brown fox jumps over the lazy dog, and the lazy dog does not mind."


@pytest.fixture
def url():
    engine = chatty_engine(num_blocks=64)
    with serving({"toy": engine}) as url:
        yield url
    asyncio.run(engine.aclose())


def test_each_verb_is_the_servers(url, capsys, tmp_path):
    (tmp_path / "messages.json").write_text(json.dumps([{"role": "user", "content": PROMPT}]))
    operator.post("warm", url, None, operator.selection(PROMPT, None, None, None, None))
    assert f"num_computed_tokens: {len(PROMPT)}" in capsys.readouterr().out
    operator.post("lookup", url + "/v1", None, operator.selection(PROMPT, None, None, "toy", None))
    assert f"num_cached_tokens: {len(PROMPT) - 1}" in (shown := capsys.readouterr().out)
    assert not set("{}[]'") & set(shown)
    assert "None" not in shown
    operator.post("warm", url, None, operator.selection(None, None, tmp_path / "messages.json", None, None))
    assert "num_computed_tokens" in capsys.readouterr().out
    operator.post("pins", url, None, {"prompt": PROMPT})
    assert "id: 1" in capsys.readouterr().out
    operator.unpin(1, url, None, None, None)
    operator.config(url, None, None, policy="slru", kv_memory=None, attach=[str(tmp_path / "kv")], detach=[])
    assert "kv_policy: lru -> slru: done\nattach: None -> disk: done" in capsys.readouterr().out
    operator.config(url, None, None, policy=None, kv_memory=None, attach=[], detach=[])
    assert "kv_policy: slru" in (shown := capsys.readouterr().out)
    assert "tier disk: up" in shown
    operator.clear(url, None, {"all": True})
    assert f"num_tokens: {len(PROMPT)}" not in capsys.readouterr().out
    operator.post("lookup", url, None, {"prompt": PROMPT})
    assert "num_cached_tokens: 0" in capsys.readouterr().out


def test_the_commands_reach_the_server(url, tmp_path):
    def spolia(*arguments: str) -> str:
        result = CliRunner().invoke(app, ["cache", *arguments])
        assert result.exit_code == 0, (result.output, result.exception)
        return result.output

    session = httpx.post(f"{url}/v1/sessions", json={"ttl": 60}).json()["id"]
    httpx.post(f"{url}/v1/completions", json={"prompt": PROMPT, "session": session, "max_tokens": 4}, timeout=60)
    assert "num_computed_tokens: 1\n" in spolia("warm", PROMPT, "--pin", "--ttl", "60", "--url", url)
    assert "outcome" not in spolia("config", "--policy", "lfu", "--kv-memory", "4096", "--url", url)
    assert "kv_policy: lfu" in spolia("config", "--url", url)
    assert "num_cached_tokens: 7" in spolia("lookup", "--session", session, "--url", url)
    assert "num_cached_tokens: 7" in spolia("lookup", "--session", session, "--exact-kv", "--url", url)
    assert "deleted: yes" in spolia("unpin", "1", "--url", url)
    assert "talk.kv" in spolia("export", url, session, str(tmp_path / "talk.kv"))
    assert "talk2.kv" in spolia("export", url, session, str(tmp_path / "talk2.kv"), "--exact-kv")
    assert "num_tokens" in spolia("clear", url, "--session", session)
    assert "num_tokens: 64" in spolia("import", url, str(tmp_path / "talk.kv"))
    with pytest.raises(InvalidRequest, match="--kv-offload-dtype"):
        operator.post("compress", url, None, {"prompt": PROMPT})
    assert "to: device" in spolia("move", PROMPT, "--to", "device", "--url", url)
    assert "to: device" in spolia("move", PROMPT, "--to", "device", "--exact-kv", "--url", url)
    assert "num_tokens: 64" in spolia("clear", url, "--prefix", PROMPT[:40], "--pinned")
    assert "num_tokens: 0" in spolia("pin", PROMPT, "--url", url)


def test_warm_and_pin_reach_exact_kv():
    engine = chatty_engine(num_blocks=64, codec=ToyCodec())
    with serving({"toy": engine}) as url:

        def spolia(*arguments: str) -> str:
            return CliRunner().invoke(app, ["cache", *arguments, "--url", url]).output

        assert f"num_computed_tokens: {len(PROMPT)}" in spolia("warm", PROMPT, "--exact-kv")
        assert f"num_tokens: {len(PROMPT)}\nexact_kv: yes" in spolia("pin", PROMPT, "--exact-kv")
        assert "num_tokens: 0\nexact_kv: no" in spolia("pin", PROMPT)
        assert f"num_cached_tokens: {len(PROMPT) - 1}" in spolia("lookup", PROMPT, "--exact-kv")
        assert "num_cached_tokens: 0" in spolia("lookup", PROMPT)
    asyncio.run(engine.aclose())


def test_a_session_goes_to_a_file_and_back(url, tmp_path, capsys):
    session = httpx.post(f"{url}/v1/sessions", json={"ttl": 60}).json()["id"]
    httpx.post(f"{url}/v1/completions", json={"prompt": PROMPT, "session": session, "max_tokens": 4}, timeout=60)
    operator.export(url, None, session, None, tmp_path / "talk.kv")
    with pytest.raises(InvalidRequest, match="cannot be written"):
        operator.export(url, None, session, None, tmp_path / "talk.kv")
    operator.clear(url, None, {"all": True})
    operator.import_file(url, None, None, tmp_path / "talk.kv")
    assert f"num_tokens: {len(PROMPT) // 16 * 16}" in capsys.readouterr().out


def test_what_is_wrong_is_told(url, tmp_path):
    with pytest.raises(InvalidRequest, match="no tier 'cellar'"):
        operator.post("move", url, None, {"prompt": PROMPT, "to": "cellar"})
    with pytest.raises(InvalidRequest, match="a JSON list of messages"):
        operator.selection(None, None, tmp_path / "nothing", None, None)
    with pytest.raises(SpoliaError, match="is `spolia serve` running there"):
        operator.post("lookup", "http://127.0.0.1:9", None, {"prompt": PROMPT})


def test_prompts_of_a_file_are_computed_before_anybody_asks(tmp_path: Path):
    model = write_gguf(tmp_path / "tiny.gguf", LLAMA, llama_tensors("Q8_0"))
    prompts = [
        {"prompt": list(range(60)), "pin": True},
        {"prompt": list(range(100, 150)), "model": "another"},
        {"prompt": [999_999]},
    ]
    (tmp_path / "warm.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    with server_process(model, "--kv-memory", "16MiB", "--warm", str(tmp_path / "warm.jsonl")) as process:
        eventually(lambda: process.find("warmed model=tiny tokens=60 computed=60") is not None, timeout_s=60)
        assert process.find("not warmed model=tiny prompt=3")
        reply = httpx.post(f"{process.url}/v1/completions", json={"prompt": list(range(60)), "max_tokens": 1}).json()
        assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 59
        assert len(httpx.get(f"{process.url}/v1/cache/pins").json()["data"]) == 1


def test_a_file_of_prompts_that_is_none_is_told_before_anything_takes_time(tmp_path: Path):
    (tmp_path / "warm.jsonl").write_text('{"prompt": "a"}\n{"prompts": "b"}\n')
    process = ServerProcess("smollm2", "--warm", str(tmp_path / "warm.jsonl"))
    assert process.wait() == 2
    assert 'line 2, \'{"prompts": "b"}\', is no prompt to warm' in process.log[-1]
