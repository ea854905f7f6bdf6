"""`spolia chat` with a server's model, and Markdown in a terminal as it is written."""

from __future__ import annotations

import asyncio
import io
import os
import random
import subprocess
import sys
from collections.abc import Iterator

import pytest

from server.harness import scripted_engine, serving
from spolia.cli.chat import run_remote
from spolia.cli.flags import EngineFlags, SamplingFlags
from spolia.cli.markdown import MarkdownStream
from spolia.cli.partner import RemotePartner
from spolia.errors import SpoliaError

SCRIPT = {
    "user: hello": "Hello! How are you?",
    "user: a story": "# Stones\n**Old** ones and `new` ones:\n\n```python\nx = 2 ** 3\n```\n* a * b",
}
BOLD, CODE, HEADING, DIM, PLAIN = "\x1b[1m", "\x1b[36m", "\x1b[1;4m", "\x1b[2m", "\x1b[0m"
SHOWN = (
    f"{HEADING}Stones{PLAIN}\n{PLAIN}{BOLD}Old{PLAIN} ones and {PLAIN}{CODE}new{PLAIN} ones:\n\n"
    f"{DIM}```python\nx = 2 ** 3\n```{PLAIN}\n* a * b"
)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    engine = scripted_engine(SCRIPT, num_blocks=300, max_context=2048)
    with serving({"scripted": engine}) as url:
        yield url
    asyncio.run(engine.aclose())


def spolia(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "spolia", *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize("seed", range(20))
def test_markdown_is_shown_the_same_however_the_text_comes(seed: int):
    rng = random.Random(seed)
    text = SCRIPT["user: a story"]
    stream, shown, at = MarkdownStream(), "", 0
    while at < len(text):
        size = rng.randrange(1, 6) if seed else len(text)
        shown += stream.feed(text[at : at + size])
        at += size
    assert shown + stream.finish() == SHOWN


@pytest.mark.parametrize("text", ["**open", "`open", "# open", "```\nopen"])
def test_a_style_that_is_never_closed_ends_with_the_answer(text: str):
    stream = MarkdownStream()
    shown = stream.feed(text) + stream.finish()
    assert shown.endswith(PLAIN)
    assert "open" in shown


@pytest.mark.parametrize("text", ["*", "``", "##", "2 * 3 ** 0.5 # no", "#no", "a * b * c"])
def test_what_is_no_mark_is_shown_as_it_is(text: str):
    stream = MarkdownStream()
    shown = stream.feed(text) + stream.finish()
    assert shown.replace(PLAIN, "").replace(BOLD, "").replace("**", "") == text.replace("**", "")


def test_a_servers_model_is_talked_to_forked_rewound_and_explained(url: str):
    lines = "hello\n/fork other\na story\n/rewind\n/sessions\n/explain\n/cache\n/quit\n"
    result = spolia("chat", "--url", f"{url}/v1", "-t", "0", stdin=lines)
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"{SCRIPT['user: hello']}\n{SCRIPT['user: a story']}\n"
    said = result.stderr
    assert f"scripted at {url}/v1" in said
    assert "22 tokens in, 0 reused · 20 out" in said
    assert "back before: a story" in said
    assert "  main: 1 exchange\n* other: 1 exchange\n" in said
    assert "tokens 0 to " in said
    assert "reuse ended at token" in said
    assert "cached █" in said


def test_what_a_server_cannot_do_is_one_line(url: str):
    for arguments, words in (
        (["--url", "http://127.0.0.1:9"], "does not answer"),
        (["none", "--url", url], "does not serve 'none'; it has scripted"),
        (["--url", url, "--threads", "2"], "give them to `spolia serve`"),
        ([], "name a model, such as smollm2, or a running server with --url"),
    ):
        result = spolia("chat", *arguments)
        assert result.returncode in (1, 2)
        (line,) = result.stderr.splitlines()
        assert words in line


def test_a_terminal_gets_styles(url: str):
    master, terminal = os.openpty()
    command = [sys.executable, "-m", "spolia", "chat", "--url", url]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=terminal, stderr=subprocess.DEVNULL, text=True)
    os.close(terminal)
    process.communicate("a story\n/quit\n", timeout=300)
    shown = b""
    try:
        while part := os.read(master, 4096):
            shown += part
    except OSError:  # that is how a terminal says that nobody is left to write
        pass
    os.close(master)
    assert shown.decode().replace("\r\n", "\n") == SHOWN + "\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_conversation_goes_on_after_its_server_was_away(url: str, monkeypatch: pytest.MonkeyPatch, capsys):
    there, num_calls = RemotePartner.answer, 0

    def answer(self, messages):
        nonlocal num_calls
        num_calls += 1
        if num_calls == 2:
            raise SpoliaError("away; is `spolia serve` running there?")
        return there(self, messages)

    monkeypatch.setattr(RemotePartner, "answer", answer)
    monkeypatch.setattr(sys, "stdin", Terminal("hello\na story\n/nothing\n/fork other\na story\n/sessions\n/quit\n"))
    run_remote(url, model=None, key=None, system=None, sampling=SamplingFlags(temperature=0), engine=EngineFlags())
    out, said = capsys.readouterr()
    assert "away; is `spolia serve` running there?" in said
    assert "there is no command /nothing" in said
    assert "x = 2 ** 3" in out
    assert "other> " in out
    assert "  main: 1 exchange\n* other: 2 exchanges" in said


class Interrupted(Terminal):
    """Ctrl-C is pressed where a line says so."""

    def readline(self, *arguments):
        line = super().readline(*arguments)
        if line == "^C\n":
            raise KeyboardInterrupt
        return line


def test_ctrl_c_drops_a_line_or_stops_an_answer_and_the_conversation_stays(url: str, monkeypatch, capsys):
    there, num_calls = RemotePartner.answer, 0

    def answer(self, messages):
        nonlocal num_calls
        num_calls += 1
        if num_calls == 2:
            raise KeyboardInterrupt  # before the first word
        yield from there(self, messages)

    monkeypatch.setattr(RemotePartner, "answer", answer)
    monkeypatch.setattr(sys, "stdin", Interrupted("hello\n^C\na story\n/sessions\n^C\n/quit\n"))
    run_remote(url, model=None, key=None, system=None, sampling=SamplingFlags(temperature=0), engine=EngineFlags())
    out, said = capsys.readouterr()
    assert "How are you?" in out
    assert said.count("Ctrl-D or /quit ends") == 2
    assert "[stopped]" in said
    assert "* main: 1 exchange\n" in said


@pytest.mark.parametrize("no_color", ["", "1"])
def test_an_answer_that_breaks_off_ends_its_line_and_its_styles(url: str, monkeypatch, capsys, no_color: str):
    def answer(self, messages):
        yield "so **far"
        raise SpoliaError("the server is gone")

    monkeypatch.setattr(RemotePartner, "answer", answer)
    monkeypatch.setattr(sys, "stdin", Terminal("hello\n/quit\n"))
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    run_remote(url, model=None, key=None, system=None, sampling=SamplingFlags(temperature=0), engine=EngineFlags())
    out, said = capsys.readouterr()
    assert ("so **far\n" if no_color else f"{BOLD}far{PLAIN}\n") in out
    assert "the server is gone" in said
