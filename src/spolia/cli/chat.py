"""`spolia chat`: a conversation in the terminal, or a script of one through a pipe."""

from __future__ import annotations

import sys
import time

from spolia.cli.flags import CHAT_DEFAULTS, EngineFlags, SamplingFlags
from spolia.cli.generate import figures
from spolia.cli.models import fetch
from spolia.cli.talk import Messages, Talk, cache_bar, explained
from spolia.engine import LLM, RequestOutput, SamplingParams
from spolia.errors import InvalidRequest

__all__ = ["run"]

_HELP = """/rewind [N] takes back N exchanges · /fork [NAME] goes on in a copy · /open NAME · /forks · /reset forgets
/explain: where the last answer came from · /cache: the pools · /quit or Ctrl-D ends · Ctrl-C stops an answer"""


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
        if llm.model.chat_template is None:
            raise InvalidRequest(f"{source} is a base model without a chat template; use `spolia generate`")
        conversation = _Conversation(
            llm, params, Talk([] if system is None else [{"role": "system", "content": system}])
        )
        _say(f"{llm.model.describe()}\n{_HELP}")
        while (line := _read()) is not None:
            if line in ("/quit", "/exit"):
                return
            try:
                conversation.take(line)
            except InvalidRequest as error:  # a context that is full, say: whoever sits here can go on from before
                if not sys.stdin.isatty():
                    raise
                _say(f"{error}\n{_HELP}")


class _Conversation:
    """Takes lines: commands, and questions to the model."""

    def __init__(self, llm: LLM, params: SamplingParams, talk: Talk) -> None:
        self._llm = llm
        self._params = params
        self._talk = talk
        self._last: RequestOutput | None = None

    def take(self, line: str) -> None:
        """
        Raises:
            InvalidRequest: a question that cannot be answered, or a command that cannot be followed.
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
            case "/forks":
                _say(self._talk.listing())
            case "/explain":
                _say(
                    "nothing was answered yet"
                    if self._last is None
                    else explained(self._last, self._llm.model.tokenizer)
                )
            case "/cache":
                _say(cache_bar(self._llm.stats.ledger))
            case _ if line.startswith("/"):
                _say(_HELP)
            case _:
                self._talk.take(line, self._answer(self._talk.asked(line)))

    def _answer(self, messages: Messages) -> str:
        """Stream the next turn; returns its text, what there is of it if Ctrl-C stopped it."""
        parts: list[str] = []
        start_s = time.perf_counter()
        try:
            for delta in self._llm.stream(self._llm.chat_prompt(messages), self._params):
                parts.append(delta.text)
                sys.stdout.write(delta.text)
                sys.stdout.flush()
                if delta.output is not None:
                    self._last = delta.output
                    sys.stdout.write("\n")
                    _say(figures(delta.output, time.perf_counter() - start_s))
        except KeyboardInterrupt:
            sys.stdout.write("\n")
            _say("[stopped]")
        return "".join(parts)


def _read() -> str | None:
    """The next line, stripped; None at the end of input. A pipe gets no prompt."""
    if not sys.stdin.isatty():
        line = sys.stdin.readline()
        return line.strip() if line else None
    import readline  # noqa: F401 - line editing and history for input()

    try:
        return input("\n> ").strip()
    except (EOFError, KeyboardInterrupt):
        return None


def _say(text: str) -> None:
    """What is about the conversation and not part of it."""
    sys.stdout.flush()
    print(f"\x1b[2m{text}\x1b[0m" if sys.stderr.isatty() else text, file=sys.stderr, flush=True)
