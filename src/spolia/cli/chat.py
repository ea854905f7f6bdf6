"""`spolia chat`: a conversation in the terminal, or a script of one through a pipe."""

from __future__ import annotations

import sys
import time
from typing import TypeAlias

from spolia.cli.flags import CHAT_DEFAULTS, EngineFlags, SamplingFlags
from spolia.cli.generate import figures
from spolia.cli.models import fetch
from spolia.engine import LLM, SamplingParams
from spolia.errors import InvalidRequest

__all__ = ["run"]

Messages: TypeAlias = list[dict[str, str]]

_HELP = "/reset forgets the conversation · /quit or Ctrl-D ends · Ctrl-C stops an answer"


def run(source: str, *, system: str | None, sampling: SamplingFlags, engine: EngineFlags) -> None:
    """Read lines until the end of input or `/quit`, and answer each.

    Raises:
        ModelError: the model cannot be had or read.
        InvalidRequest: a flag that is impossible, a base model, or, through a pipe, a line that cannot be answered.
    """
    params = sampling.params(**CHAT_DEFAULTS)
    config = engine.config()
    fetch(source)
    with LLM(source, config) as llm:
        if llm.model.chat_template is None:
            raise InvalidRequest(f"{source} is a base model without a chat template; use `spolia generate`")
        opening: Messages = [] if system is None else [{"role": "system", "content": system}]
        messages = list(opening)
        _say(f"{llm.model.describe()}\n{_HELP}")
        while (line := _read()) is not None:
            if line in ("/quit", "/exit"):
                return
            if line == "/reset":
                messages = list(opening)
                _say("forgotten")
            elif line.startswith("/"):
                _say(_HELP)
            elif line:
                asked = [*messages, {"role": "user", "content": line}]
                try:
                    messages = [*asked, {"role": "assistant", "content": _answer(llm, asked, params)}]
                except InvalidRequest as error:  # a context that is full, say: whoever sits here can go on from before
                    if not sys.stdin.isatty():
                        raise
                    _say(f"{error}\n{_HELP}")


def _answer(llm: LLM, messages: Messages, params: SamplingParams) -> str:
    """Stream the next turn; returns its text, what there is of it if Ctrl-C stopped it."""
    template = llm.model.chat_template
    if template is None:
        raise InvalidRequest(f"{llm.model.name} has no chat template")
    ids = llm.model.tokenizer.encode(template.render(messages), add_special=False)
    parts: list[str] = []
    start_s = time.perf_counter()
    stream = llm.stream(ids, params)
    try:
        for delta in stream:
            parts.append(delta.text)
            sys.stdout.write(delta.text)
            sys.stdout.flush()
            if delta.output is not None:
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
