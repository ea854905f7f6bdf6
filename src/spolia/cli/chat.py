"""`spolia chat`: a conversation in the terminal, or a script of one through a pipe."""

from __future__ import annotations

import os
import sys
from contextlib import closing
from typing import TextIO

from spolia.cli.flags import CHAT_DEFAULTS, EngineFlags, SamplingFlags
from spolia.cli.markdown import MarkdownStream
from spolia.cli.models import fetch
from spolia.cli.partner import LocalPartner, Partner, RemotePartner
from spolia.cli.piped import read_line
from spolia.cli.talk import Messages, Talk
from spolia.engine import LLM
from spolia.errors import InvalidRequest, SpoliaError

__all__ = ["run", "run_remote"]

_HELP = """/fork [NAME] goes on in a copy · /open NAME · /sessions lists · /reset forgets
/rewind [N] takes back N exchanges · /explain: where the last context came from
/cache: the pools · Ctrl-C stops an answer · /quit or Ctrl-D ends · /help"""


def run(source: str, *, system: str | None, sampling: SamplingFlags, engine: EngineFlags) -> None:
    """Read lines until the end of input or `/quit`, and answer each.

    Raises:
        ModelError: the model cannot be had or read.
        InvalidRequest: a flag that is impossible, a base model, or, through a pipe, a line that cannot be answered.
    """
    params = sampling.params(**CHAT_DEFAULTS)
    config = engine.config()
    fetch(source)
    if engine.draft_model is not None:
        fetch(engine.draft_model)
    with LLM(source, config) as llm:
        _talk(LocalPartner(llm, source, params), system)


def run_remote(
    url: str, *, model: str | None, key: str | None, system: str | None, sampling: SamplingFlags, engine: EngineFlags
) -> None:
    """The same with a model of a server, the first that it lists if `model` is None.

    Raises:
        InvalidRequest: a flag that is for the server to have; otherwise as `run`.
        SpoliaError: the server is not there.
    """
    if engine != EngineFlags():
        raise InvalidRequest("flags of the cache and the engine are the server's own; give them to `spolia serve`")
    with closing(RemotePartner(url, model, key, sampling.body(**CHAT_DEFAULTS))) as partner:
        _talk(partner, system)


def _talk(partner: Partner, system: str | None) -> None:
    conversation = _Conversation(partner, Talk([] if system is None else [{"role": "system", "content": system}]))
    _say(f"{partner.describe()}\n{_HELP}")
    while (line := _read(conversation.name)) is not None:
        if line in ("/quit", "/exit"):
            return
        try:
            conversation.take(line)
        except SpoliaError as error:  # a full context, a server that restarts: whoever sits here can go on from before
            if not sys.stdin.isatty():
                raise
            _say(str(error))


class _Conversation:
    """Takes lines: commands, and questions to the model."""

    def __init__(self, partner: Partner, talk: Talk) -> None:
        self._partner = partner
        self._talk = talk

    @property
    def name(self) -> str:
        """Of the one that is open."""
        return self._talk.name

    def take(self, line: str) -> None:
        """
        Raises:
            InvalidRequest: a question that cannot be answered, or a command that cannot be followed.
            SpoliaError: the server is not there any more.
        """
        command, _, argument = line.partition(" ")
        argument = argument.strip()
        match command:
            case "":
                return
            case "/reset":
                self._talk.reset()
                _say("forgotten")
            case "/rewind":
                _say(f"back before: {self._talk.rewind(argument)}")
            case "/fork":
                _say(f"now in {self._talk.fork(argument)}")
            case "/open":
                self._talk.open(argument)
                _say(f"now in {argument}")
            case "/sessions" | "/forks":
                _say(self._talk.listing())
            case "/explain":
                _say(self._partner.explain() or "nothing was answered yet")
            case "/cache":
                _say(self._partner.cache())
            case "/help":
                _say(_HELP)
            case _ if line.startswith("/"):
                _say(f"there is no command {command}\n{_HELP}")
            case _:
                answer = self._answer(self._talk.asked(line))
                if answer:  # else it was stopped before it began: as if it had not been asked
                    self._talk.take(line, answer)

    def _answer(self, messages: Messages) -> str:
        """Stream the next turn; returns its text, what there is of it if Ctrl-C stopped it."""
        parts: list[str] = []
        markdown = MarkdownStream() if _is_styled(sys.stdout) else None
        try:
            for text in self._partner.answer(messages):
                parts.append(text)
                sys.stdout.write(text if markdown is None else markdown.feed(text))
                sys.stdout.flush()
            about = self._partner.figures()
        except KeyboardInterrupt:
            about = "[stopped]"
        finally:
            sys.stdout.write("\n" if markdown is None else markdown.finish() + "\n")
        _say(about)
        return "".join(parts)


def _read(name: str) -> str | None:
    """The next line, stripped; None at the end of input. A pipe gets no prompt; a fork's has its name.

    Ctrl-C drops what was typed, as in a shell.
    """
    if not sys.stdin.isatty():
        line = read_line()
        return line.strip() if line else None
    import readline  # noqa: F401 - line editing and history for input()

    while True:
        try:
            return input("\n> " if name == "main" else f"\n{name}> ").strip()
        except KeyboardInterrupt:
            _say("\nCtrl-D or /quit ends")
        except EOFError:
            return None


def _is_styled(stream: TextIO) -> bool:
    """Whether somebody looks at it who has not asked for plain text (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR")


def _say(text: str) -> None:
    """What is about the conversation and not part of it."""
    sys.stdout.flush()
    print(f"\x1b[2m{text}\x1b[0m" if _is_styled(sys.stderr) else text, file=sys.stderr, flush=True)
