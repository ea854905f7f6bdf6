"""`/v1/sessions` and `session` in requests: all of a turn's history is reused, whatever template and client do."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.toy import ToyCodec
from spolia.engine import SessionStore
from spolia.engine.session_files import SessionFiles
from spolia.server.resuming import ResumableStreams
from spolia.tiers import Checksum, DocumentFolder

from .harness import ChattyToy, PlainTemplate, chatty_engine, serving


class DriftingTemplate(PlainTemplate):
    """Renders replies in other words than they were generated in."""

    def render(self, messages: list[dict[str, Any]], **options: Any) -> str:
        def shown(message: dict[str, Any]) -> dict[str, Any]:
            content = message["content"]
            return {**message, "content": f" [{content}] " if message["role"] == "assistant" else content}

        return super().render([shown(message) for message in messages], **options)


class Server:
    def __init__(self, url: str) -> None:
        self.url = url

    def call(self, method: str, path: str, *, status: int = 200, **body: Any) -> dict[str, Any]:
        reply = httpx.request(method, f"{self.url}{path}", json=body or None, timeout=60)
        assert reply.status_code == status, reply.text
        return reply.json()

    def open(self, **body: Any) -> str:
        return self.call("POST", "/v1/sessions", **(body or {"ttl": 100}))["id"]

    def say(self, session: str, text: str, **fields: Any) -> dict[str, Any]:
        """A turn of chat; what it reused of what the session had."""
        before = self.call("GET", f"/v1/sessions/{session}")["num_tokens"]
        messages = [{"role": "user", "content": text}]
        body = {"messages": messages, "session": session, "max_tokens": 6, "temperature": 0, **fields}
        reply = self.call("POST", "/v1/chat/completions", **body)
        usage = reply["usage"]
        return {
            "history": before,
            "cached": usage["prompt_tokens_details"]["cached_tokens"],
            "prompt": usage["prompt_tokens"],
            "text": reply["choices"][0]["message"]["content"],
        }


@pytest.fixture(scope="module", params=[PlainTemplate, DriftingTemplate])
def server(request):
    engine = chatty_engine(ChattyToy(chat_template=request.param()), num_blocks=512)
    with serving({"toy": engine}) as url:
        yield Server(url)
    asyncio.run(engine.aclose())


def test_all_history_is_reused_at_every_turn(server):
    session = server.open()
    for turn in range(5):
        said = server.say(session, f"Question {turn}?")
        # The last token of an answer was sampled and never computed.
        assert said["cached"] >= said["history"] - 1
        assert said["prompt"] > said["history"]
    card = server.call("GET", f"/v1/sessions/{session}")
    assert (card["num_turns"], card["num_messages"]) == (5, 10)


def test_plain_chat_with_a_drifting_template_reuses_less_than_a_session():
    engine = chatty_engine(ChattyToy(chat_template=DriftingTemplate()), num_blocks=512)
    with serving({"toy": engine}) as url:
        server = Server(url)
        messages: list[dict[str, str]] = []
        num_prompt = num_cached = 0
        for turn in range(4):
            messages.append({"role": "user", "content": f"Plain {turn}?"})
            reply = server.call("POST", "/v1/chat/completions", messages=messages, max_tokens=30, temperature=0)
            messages.append(reply["choices"][0]["message"])
            num_prompt += reply["usage"]["prompt_tokens"] if turn else 0
            num_cached += reply["usage"]["prompt_tokens_details"]["cached_tokens"] if turn else 0
        plain = num_cached / num_prompt
        session = server.open()
        turns = [server.say(session, f"Kept {turn}?", max_tokens=30) for turn in range(4)][1:]
        kept = sum(turn["cached"] for turn in turns) / sum(turn["prompt"] for turn in turns)
        assert kept > plain + 0.15
    asyncio.run(engine.aclose())


def test_whole_histories_are_taken_too_however_the_client_changed_the_replies(server):
    session = server.open()
    first = server.say(session, "One?")
    again = [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": first["text"].strip() + " (edited)"},
        {"role": "user", "content": "Two?"},
    ]
    second = server.say(session, "", messages=again)
    assert second["cached"] >= second["history"] - 1
    assert server.call("GET", f"/v1/sessions/{session}")["num_messages"] == 4


def test_completions_go_on_from_the_tokens_generated(server):
    session = server.open()
    fields = {"session": session, "max_tokens": 5, "temperature": 0, "return_token_ids": True}
    first = server.call("POST", "/v1/completions", prompt="Once", **fields)["choices"][0]
    second = server.call("POST", "/v1/completions", prompt=[65, 66], **fields)["choices"][0]
    assert second["prompt_token_ids"] == [*first["prompt_token_ids"], *first["token_ids"], 65, 66]


def test_append_fork_rewind_close_and_list(server):
    session = server.open()
    server.call("POST", f"/v1/sessions/{session}/append", prompt="Given.")
    assert server.call("GET", f"/v1/sessions/{session}")["num_tokens"] == 6
    other = server.call("POST", f"/v1/sessions/{session}/fork", model="toy")["id"]
    server.call("POST", "/v1/completions", session=other, prompt=" More.", max_tokens=4)
    assert server.call("GET", f"/v1/sessions/{other}")["num_tokens"] == 6 + 6 + 4
    assert server.call("POST", f"/v1/sessions/{other}/rewind", turns=1)["num_tokens"] == 6
    listed = {card["id"] for card in server.call("GET", "/v1/sessions")["data"]}
    assert {session, other} <= listed
    assert server.call("DELETE", f"/v1/sessions/{other}")["deleted"]
    server.call("GET", f"/v1/sessions/{other}", status=404)
    server.call("GET", f"/v1/sessions/{session}")


def test_messages_can_be_appended_without_an_answer(server):
    session = server.open()
    system = [{"role": "system", "content": "Be kind."}]
    num_system = server.call("POST", f"/v1/sessions/{session}/append", messages=system)["num_tokens"]
    said = server.say(session, "Hello?")
    assert said["history"] == num_system
    assert server.call("GET", f"/v1/sessions/{session}")["num_messages"] == 3


def test_a_reply_may_be_appended_and_what_comes_after_it_comes_once(server):
    session = server.open()
    said = [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "Fine."}]
    asked = [{"role": "user", "content": "Two?"}]
    server.call("POST", f"/v1/sessions/{session}/append", messages=said)
    body = {"max_tokens": 1, "return_token_ids": True}
    kept = server.call("POST", "/v1/chat/completions", session=session, messages=asked, **body)
    plain = server.call("POST", "/v1/chat/completions", messages=[*said, *asked], **body)
    assert kept["choices"][0]["prompt_token_ids"] == plain["choices"][0]["prompt_token_ids"]


def test_what_is_shown_of_a_session_has_its_messages_its_title_and_where_its_turns_end(server):
    session = server.open()
    server.say(session, " How are\nyou? " + "x" * 100)
    server.say(session, "Well?")
    whole = server.call("GET", f"/v1/sessions/{session}")
    assert [message["role"] for message in whole["messages"]] == ["user", "assistant"] * 2
    assert whole["turns"] == [2, 4]
    listed = next(card for card in server.call("GET", "/v1/sessions")["data"] if card["id"] == session)
    assert listed["title"] == whole["title"] == ("How are you? " + "x" * 100)[:60]
    assert listed["idle"] >= 0
    assert "messages" not in listed


def test_a_turn_of_a_session_is_explained_by_the_whole_conversation(server):
    session = server.open()
    for question in ("First?", "Second?", "Third?"):
        reply = server.call("POST", "/v1/chat/completions", session=session, max_tokens=6, explain=True,
                            messages=[{"role": "user", "content": question}])  # fmt: skip
    told = reply["spolia"]["choices"][0]
    assert told["reason"] == "never_seen"


def test_a_turn_that_was_cut_off_leaves_the_session_as_it_was(server):
    session = server.open()
    server.say(session, "One?")
    before = server.call("GET", f"/v1/sessions/{session}")
    other = server.open()  # whose turn comes to its end, as this one's does where the client was too slow to leave it
    server.say(other, "One?")
    server.say(other, "Two?", max_tokens=300)
    whole = server.call("GET", f"/v1/sessions/{other}")
    body = {"messages": [{"role": "user", "content": "Two?"}], "session": session, "max_tokens": 300, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        busy = httpx.post(f"{server.url}/v1/chat/completions", json={**body, "stream": False})
        if server.call("GET", f"/v1/sessions/{session}")["is_busy"]:
            assert busy.status_code == 409
            assert busy.json()["error"]["code"] == "session_busy"
    for _ in range(200):
        after = server.call("GET", f"/v1/sessions/{session}")
        if not after["is_busy"]:
            break
    assert after["num_tokens"] in (before["num_tokens"], whole["num_tokens"])


def test_a_session_of_another_salt_is_unknown(server):
    session = server.open(cache_salt="mine")
    server.call("GET", f"/v1/sessions/{session}", status=404)
    server.call("GET", f"/v1/sessions/{session}?cache_salt=mine")
    body = {"messages": [{"role": "user", "content": "?"}], "session": session, "max_tokens": 1}
    error = server.call("POST", "/v1/chat/completions", **body, status=404)["error"]
    assert error["code"] == "session_not_found"
    server.call("POST", "/v1/chat/completions", **body, cache_salt="mine")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "?"}], "n": 2}, "n"),
        ("/v1/completions", {"prompt": ["a", "b"]}, "prompt"),
        ("/v1/completions", {"prompt": [1000]}, "prompt"),
    ],
)
def test_what_no_session_can_do_is_refused(server, path, body, param):
    session = server.open()
    error = server.call("POST", path, session=session, status=400, **body)["error"]
    assert error["param"] == param
    assert not server.call("GET", f"/v1/sessions/{session}")["is_busy"]


@pytest.mark.parametrize(
    "bad", [{"temperature": -5}, {"structured_outputs": {"regex": "(a"}}, {"retention": [{"priority": 1000}]}]
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_refused_turn_does_not_hold_its_session_up(server, path, bad):
    session = server.open()
    said = {"messages": [{"role": "user", "content": "?"}]} if "chat" in path else {"prompt": "?"}
    body = {"session": session, "max_tokens": 2, **said}
    server.call("POST", path, status=400, **body, **bad)
    assert not server.call("GET", f"/v1/sessions/{session}")["is_busy"]
    server.call("POST", path, **body)
    server.call("DELETE", f"/v1/sessions/{session}")


def test_a_stream_for_which_there_is_no_room_does_not_hold_its_session_up(monkeypatch):
    monkeypatch.setattr("spolia.server.app.ResumableStreams", functools.partial(ResumableStreams, max_streams=0))
    engine = chatty_engine(num_blocks=64)
    with serving({"toy": engine}) as url:
        server = Server(url)
        session = server.open()
        body = {"session": session, "prompt": "?", "max_tokens": 2}
        server.call("POST", "/v1/completions", status=429, **body, stream=True, resumable=True)
        server.call("POST", "/v1/completions", **body)
    asyncio.run(engine.aclose())


def test_a_session_of_text_takes_no_messages(server):
    session = server.open()
    server.call("POST", "/v1/completions", session=session, prompt="?", max_tokens=2)
    body = {"session": session, "max_tokens": 2, "messages": [{"role": "user", "content": "?"}]}
    error = server.call("POST", "/v1/chat/completions", status=400, **body)["error"]
    assert "this session is of text" in error["message"]


def test_text_and_messages_do_not_mix(server):
    session = server.open()
    server.call("POST", f"/v1/sessions/{session}/append", prompt="Given.")
    body = {"messages": [{"role": "user", "content": "?"}], "session": session}
    assert "of text" in server.call("POST", "/v1/chat/completions", **body, status=400)["error"]["message"]


@pytest.mark.parametrize("is_exact", [False, True])
@pytest.mark.parametrize("codec", [None, ToyCodec()])
def test_what_a_closed_session_alone_used_goes_first(codec, is_exact):
    engine = chatty_engine(num_blocks=14, codec=codec)
    with serving({"toy": engine}) as url:
        server = Server(url)
        fields = {"max_tokens": 1, "temperature": 0, "exact_kv": is_exact}

        def cached(prompt: list[int]) -> int:
            usage = server.call("POST", "/v1/completions", prompt=prompt, **fields)["usage"]
            return usage["prompt_tokens_details"]["cached_tokens"]

        cached([1] * 64)
        session = server.open()
        server.call("POST", "/v1/completions", session=session, prompt=[2] * 64, **fields)
        server.call("DELETE", f"/v1/sessions/{session}")
        cached([3] * 120)
        assert cached([1] * 64) == 63
    asyncio.run(engine.aclose())


def test_a_disk_that_hangs_costs_the_sessions_that_are_not_in_memory_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    engine = chatty_engine()
    engine.sessions = SessionStore(clock=time.monotonic, files=SessionFiles(tmp_path, b"o" * 32, Checksum()))
    hangs, answers = threading.Event(), threading.Event()

    def hanging(folder: DocumentFolder, name: str, state: Any = DocumentFolder.state) -> Any:
        hangs.set()
        assert answers.wait(120)
        return state(folder, name)

    with serving({"toy": engine}) as url:
        server = Server(url)
        mine = server.open()
        server.say(mine, "hello")
        monkeypatch.setattr(DocumentFolder, "state", hanging)
        replies: list[httpx.Response] = []
        missing = f"{url}/v1/sessions/session-{'0' * 32}"
        asking = threading.Thread(target=lambda: replies.append(httpx.get(missing, timeout=60)))
        try:
            asking.start()
            assert hangs.wait(60)
            httpx.get(f"{url}/health", timeout=60).raise_for_status()
            server.call("POST", "/v1/completions", prompt="x", max_tokens=2)
            asking.join(60)
            (reply,) = replies
            assert (reply.status_code, reply.json()["error"]["code"]) == (503, "storage_unavailable"), reply.text
            assert "try again" in reply.json()["error"]["message"]
            body = {"messages": [{"role": "user", "content": "more"}], "session": mine, "max_tokens": 2}
            server.call("POST", "/v1/chat/completions", **body)
        finally:
            answers.set()
        asking.join(60)
    asyncio.run(engine.aclose())  # what waited is written
    again = SessionStore(clock=time.monotonic, files=SessionFiles(tmp_path, b"o" * 32, Checksum()))
    again.loaded.result(10)
    assert len(again.get(mine, "").marks) == 2
