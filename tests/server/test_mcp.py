"""Tools of a real MCP server, made with the SDK and spoken to over its standard input and output."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from spolia.errors import InvalidRequest
from spolia.server import ServerConfig, read_mcp_file

from .harness import scripted_engine, serving
from .test_tools import ROME, TOOLS, tagged

SERVER = '''
from mcp.server.mcpserver import MCPServer

server = MCPServer("city")


@server.tool()
def temperature(city: str) -> str:
    """The temperature in a city."""
    if city == "Atlantis":
        raise ValueError("no such city")
    return f"{len(city)} degrees in {city}"


@server.tool()
def slow() -> str:
    import time
    time.sleep(60)
    return "done"


server.run()
'''


def call(name: str, **arguments: Any) -> str:
    return json.dumps({"name": name, "arguments": arguments})


SCRIPT = {
    "user: rome": "Let me see.\n" + tagged(call("temperature", city="Rome")),
    "tool: 4 degrees in Rome": "It is 4 degrees.",
    "user: both": tagged(call("temperature", city="Rome"), call("temperature", city="Paris")),
    "tool: 5 degrees in Paris": "4 and 5.",
    "user: atlantis": tagged(call("temperature", city="Atlantis")),
    "user: wrong": tagged(call("temperature", town="Rome")),
    "user: slow": tagged(call("slow")),
    "user: mine": tagged(ROME),
    "tool: 7 degrees in Nowhere": tagged(call("temperature", city="Nowhere")),
    "user: for ever": tagged(call("temperature", city="Nowhere")),
    "user: hello": "Hello.",
}


class Script(dict[str, str]):
    """Errors of tools are answered by what the model was told."""

    def __missing__(self, line: str) -> str:
        return f"I was told: {line}"


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mcp")
    (folder / "city.py").write_text(SERVER)
    command = {"command": sys.executable, "args": [str(folder / "city.py")]}
    hasty = {**command, "timeout": 0.3}
    broken = {"command": sys.executable, "args": ["-c", "raise SystemExit(3)"]}
    (folder / "mcp.json").write_text(json.dumps({"mcpServers": {"city": command, "hasty": hasty, "broken": broken}}))
    return folder / "mcp.json"


@pytest.fixture(scope="module")
def url(settings: Path) -> Iterator[str]:
    engine = scripted_engine(Script(SCRIPT), num_blocks=512, max_context=4096)
    with serving({"scripted": engine}, ServerConfig(mcp=settings)) as url:
        yield url
    asyncio.run(engine.aclose())


def chat(url: str, content: str, **fields: Any) -> Any:
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "mcp": ["city"], **fields}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)


def message_of(reply: httpx.Response) -> dict[str, Any]:
    assert reply.status_code == 200, reply.text
    message: dict[str, Any] = reply.json()["choices"][0]["message"]
    return message


def test_a_tool_is_called_and_the_answer_shows_it(url: str):
    reply = chat(url, "rome")
    message = message_of(reply)
    assert message["content"] == "It is 4 degrees."
    (done,) = message["mcp_calls"]
    assert (done["server"], done["name"], done["arguments"]) == ("city", "temperature", {"city": "Rome"})
    assert (done["result"], done["is_error"]) == ("4 degrees in Rome", False)
    assert reply.json()["choices"][0]["finish_reason"] == "stop"
    assert "tool_calls" not in message
    usage = reply.json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > 0  # the second round goes on from the first


def test_several_calls_of_one_reply_are_made_in_their_order(url: str):
    message = message_of(chat(url, "both"))
    assert [done["result"] for done in message["mcp_calls"]] == ["4 degrees in Rome", "5 degrees in Paris"]
    assert message["content"] == "4 and 5."


def test_openais_client_streams_it(url: str):
    with OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        chunks = list(
            client.chat.completions.create(
                model="scripted",
                messages=[{"role": "user", "content": "rome"}],
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"mcp": ["city"], "temperature": 0},
            )
        )
    content = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert content.replace("\n", "") == "Let me see.It is 4 degrees."
    calls = [chunk.choices[0].delta.model_extra.get("mcp_calls") for chunk in chunks if chunk.choices]
    assert [done[0]["result"] for done in calls if done] == ["4 degrees in Rome"]
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage is not None


@pytest.mark.parametrize(
    ("content", "words"),
    [("atlantis", "Error executing tool temperature"), ("wrong", "city"), ("slow", "slow took longer than 0.3 s")],
)
def test_what_goes_wrong_with_a_tool_is_told_to_the_model(url: str, content: str, words: str):
    message = message_of(chat(url, content, mcp=["hasty" if content == "slow" else "city"]))
    (done,) = message["mcp_calls"]
    assert done["is_error"]
    assert words in done["result"]
    assert message["content"].startswith("I was told: ")


def test_a_call_of_the_clients_own_tool_goes_to_the_client(url: str):
    reply = chat(url, "mine", tools=TOOLS)
    assert reply.json()["choices"][0]["finish_reason"] == "tool_calls"
    (theirs,) = message_of(reply)["tool_calls"]
    assert theirs["function"]["name"] == "weather"
    assert "mcp_calls" not in message_of(reply)


def test_rounds_end(url: str):
    message = message_of(chat(url, "for ever", mcp_max_rounds=4))
    assert len(message["mcp_calls"]) == 3  # the fourth round has no tools, and is the answer


def test_without_the_wish_nothing_is_offered(url: str):
    reply = chat(url, "rome", mcp=None)
    assert "mcp_calls" not in message_of(reply)


@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        ({"mcp": ["nobody"]}, 400, "mcp names 'nobody'; there are: city, hasty, broken"),
        ({"mcp": ["broken"]}, 503, "the MCP server broken cannot be used"),
        ({"mcp_max_rounds": 0}, 400, "mcp_max_rounds is 0"),
        ({"n": 2}, 400, "one answer"),
        ({"session": "x"}, 400, "session does not go with mcp"),
    ],
)
def test_what_cannot_be_is_refused(url: str, fields: dict[str, Any], status: int, words: str):
    reply = chat(url, "hello", **fields)
    assert reply.status_code == status
    assert words in reply.json()["error"]["message"]


def test_a_server_without_a_file_offers_nothing(toy_url: str):
    reply = chat(toy_url, "hello")
    assert reply.status_code == 400
    assert "start it with --mcp FILE" in reply.json()["error"]["message"]


def test_keys_may_use_it_only_if_they_say_so(settings: Path, tmp_path: Path):
    keys = tmp_path / "keys.toml"
    lines = [f'[[keys]]\nname = "{name}"\nkey = "sk-{name}-0123456789"\n{more}' for name, more in
             (("poor", ""), ("rich", "mcp = true\n"))]  # fmt: skip
    keys.write_text("\n".join(lines))
    engine = scripted_engine(Script(SCRIPT), num_blocks=256, max_context=2048)
    with serving({"scripted": engine}, ServerConfig(mcp=settings, keys=keys)) as url:
        body = {"messages": [{"role": "user", "content": "rome"}], "temperature": 0, "mcp": ["city"]}
        for name, status in (("poor", 403), ("rich", 200)):
            headers = {"authorization": f"Bearer sk-{name}-0123456789"}
            assert (
                httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=60).status_code == status
            )
    asyncio.run(engine.aclose())


HTTP_SERVER = """
import sys
import uvicorn
from mcp.server.mcpserver import MCPServer

server = MCPServer("city")

@server.tool()
def temperature(city: str) -> str:
    return f"{len(city)} degrees in {city}"

inner = server.sse_app() if sys.argv[1] == "sse" else server.streamable_http_app()

async def app(scope, receive, send):
    if scope["type"] == "http" and (b"authorization", b"Bearer secret") not in scope["headers"]:
        await send({"type": "http.response.start", "status": 401, "headers": []})
        await send({"type": "http.response.body", "body": b""})
    else:
        await inner(scope, receive, send)

uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]))
"""


@contextmanager
def city_at(kind: str, port: int = 0) -> Iterator[int]:
    """The port of a server that speaks HTTP."""
    command = [sys.executable, "-c", HTTP_SERVER, kind, str(port)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            yield next(int(found[1]) for line in process.stderr if (found := re.search(r"127\.0\.0\.1:(\d+)", line)))
        finally:
            process.kill()


@pytest.mark.parametrize(("kind", "path"), [("http", "mcp"), ("sse", "sse")])
def test_a_server_at_an_address_is_called_with_headers_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, path: str
):
    monkeypatch.setenv("CITY_TOKEN", "secret")
    engine = scripted_engine(Script(SCRIPT), num_blocks=512, max_context=4096)
    with city_at(kind) as port:
        at = {"url": f"http://127.0.0.1:{port}/{path}", "type": kind}
        right = {**at, "headers": {"Authorization": "Bearer ${CITY_TOKEN}"}}
        (tmp_path / "mcp.json").write_text(json.dumps({"mcpServers": {"city": right, "keyless": at}}))
        with serving({"scripted": engine}, ServerConfig(mcp=tmp_path / "mcp.json")) as url:
            for _ in range(2):  # the second over what the first has opened
                message = message_of(chat(url, "rome"))
                assert message["content"] == "It is 4 degrees."
                assert message["mcp_calls"][0]["result"] == "4 degrees in Rome"
            refused = chat(url, "rome", mcp=["keyless"])
            assert refused.status_code == 503
            assert "the MCP server keyless cannot be used" in refused.text
    asyncio.run(engine.aclose())


def test_a_server_that_was_started_again_is_reached_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CITY_TOKEN", "secret")
    engine = scripted_engine(Script(SCRIPT), num_blocks=512, max_context=4096)
    with ExitStack() as stack:
        first = ExitStack()
        port = first.enter_context(city_at("http"))
        city = {"url": f"http://127.0.0.1:{port}/mcp", "headers": {"Authorization": "Bearer ${CITY_TOKEN}"}}
        (tmp_path / "mcp.json").write_text(json.dumps({"mcpServers": {"city": city}}))
        url = stack.enter_context(serving({"scripted": engine}, ServerConfig(mcp=tmp_path / "mcp.json")))
        with first:
            assert message_of(chat(url, "rome"))["content"] == "It is 4 degrees."
        stack.enter_context(city_at("http", port))
        assert message_of(chat(url, "rome"))["mcp_calls"][0]["is_error"]  # the session is gone, the model is told
        assert message_of(chat(url, "rome"))["content"] == "It is 4 degrees."
    asyncio.run(engine.aclose())


@pytest.mark.parametrize(
    ("server", "words"),
    [
        ({}, "needs either a command or a url"),
        ({"command": "x", "url": "http://x"}, "needs either a command or a url"),
        ({"url": "x"}, "must begin with http"),
        ({"url": "http://x", "type": "stdio"}, "with a url http or sse"),
        ({"command": "x", "type": "sse"}, "with a command it is stdio"),
        (
            {"url": "http://x", "headers": {"A": "${NOBODY_SET_THIS}"}},
            "NOBODY_SET_THIS.*not in the environment; set it",
        ),
        ({"command": "x", "timeout": 0}, "timeout of 0"),
    ],
)
def test_what_is_wrong_with_a_server_is_told(tmp_path: Path, server: dict[str, Any], words: str):
    (tmp_path / "mcp.json").write_text(json.dumps({"mcpServers": {"a": server}}))
    with pytest.raises(InvalidRequest, match=f"server 'a' .*{words}"):
        read_mcp_file(tmp_path / "mcp.json")


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"servers": {}}', '{"mcpServers": {"a": {}}}', '{"mcpServers": {"a": {"command": ""}}}']
)
def test_a_wrong_file_is_told_at_once(tmp_path: Path, text: str):
    (tmp_path / "mcp.json").write_text(text)
    with pytest.raises(InvalidRequest, match=r"mcp\.json"):
        read_mcp_file(tmp_path / "mcp.json")
