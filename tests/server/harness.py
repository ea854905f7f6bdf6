"""A real server on 127.0.0.1 around engines of the test's choice."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import numpy as np
import uvicorn

from engine.toy import EOS, VOCAB_SIZE, ByteTokenizer, ToyExecutable, toy_engine
from spolia.engine import AsyncEngine, RequestOutput, StepStats
from spolia.errors import InvalidRequest
from spolia.models.tokenizer import SpecialTokens
from spolia.server import ModelSource, ServerConfig, create_app, listen

__all__ = ["ChattyToy", "Pace", "chatty_engine", "eventually", "metric", "scripted_engine", "serving"]


class TextTokenizer(ByteTokenizer):
    """A token is a byte, also on the way back to text."""

    adds_bos = False
    special = SpecialTokens()
    special_ids = end_ids = frozenset({EOS})

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Any, *, skip_special: bool = True) -> str:
        return b"".join(self.token_bytes(id_) for id_ in ids).decode(errors="replace")

    def token_text(self, token_id: int) -> str:
        return self.decode([token_id])


class PlainTemplate:
    """`role: content` a line."""

    source = tool_source = "<tool_call>"

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: Any = None,
        add_generation_prompt: bool = True,
        **_variables: Any,
    ) -> str:
        if any(message["role"] == "nobody" for message in messages):
            raise InvalidRequest("nobody may not speak", param="messages")
        lines = [f"{message['role']}: {message['content']}" for message in messages]
        end = ["assistant:"] if add_generation_prompt else []
        return "\n".join([*(tool["function"]["name"] for tool in tools or ()), *lines, *end])


@dataclass
class ChattyToy:
    """As much of a model as the server looks at."""

    name: str = "toy"
    tokenizer: TextTokenizer = field(default_factory=TextTokenizer)
    chat_template: PlainTemplate | None = field(default_factory=PlainTemplate)
    architecture: str = "toy"
    num_parameters: int = 257_000_000
    main_type: str = "F32"
    file_bytes: int = 1000
    digest: bytes = bytes(32)
    context_length: int = 4096


class ScriptedExecutable(ToyExecutable):
    """Says what the script has for the prompt's last line before the answer, byte by byte, and then ends."""

    def __init__(self, script: Mapping[str, str]) -> None:
        super().__init__()
        self._script = script

    def logits_of(self, views: Any) -> Any:
        prompt, begun, said = bytes(id_ for id_ in views[0].tolist() if id_ < 256).rpartition(b"assistant:")
        # A part of a prompt, which contrastive search asks of too, has no answer.
        answer = self._script[prompt.decode().strip().rpartition("\n")[2]].encode() if begun else b""
        logits = np.zeros(VOCAB_SIZE, np.float32)
        logits[answer[len(said)] if len(said) < len(answer) else EOS] = 50.0
        return logits


class ThinkingTemplate(PlainTemplate):
    """Of a model that thinks before it answers."""

    source = tool_source = "<tool_call> <think>"


def scripted_engine(script: Mapping[str, str], model: ChattyToy | None = None, **settings: Any) -> AsyncEngine:
    """An engine whose model knows its answers by heart: from "user: ..." (the last message) to the reply's text."""
    parts = toy_engine(executable=ScriptedExecutable(script), eos_token_ids=[EOS], **settings)
    return AsyncEngine(replace(parts, model=model or ChattyToy()))  # type: ignore[arg-type]


class Pace:
    """An engine's observer that slows its steps down, or holds them while it is shut.

    It is called after a step was computed and before its tokens are handed out.
    """

    def __init__(self, step_s: float = 0.0) -> None:
        self.step_s = step_s
        self._open = threading.Event()
        self._open.set()

    def on_step(self, _: StepStats) -> None:
        time.sleep(self.step_s)
        assert self._open.wait(timeout=60)

    def on_finish(self, _: RequestOutput) -> None:
        return

    @contextmanager
    def held(self) -> Iterator[None]:
        self._open.clear()
        try:
            yield
        finally:
            self._open.set()


def chatty_engine(model: ChattyToy | None = None, **settings: Any) -> AsyncEngine:
    """The engine tests' toy, with text and a chat template."""
    return AsyncEngine(replace(toy_engine(**settings), model=model or ChattyToy()))  # type: ignore[arg-type]


@contextmanager
def serving(
    engines: Mapping[str, AsyncEngine | Future[AsyncEngine] | ModelSource],
    config: ServerConfig | None = None,
    *,
    library: Callable[[], Mapping[str, ModelSource]] = dict,
) -> Iterator[str]:
    """The URL of a server in a thread; engines stay the caller's, but for those that were loaded from a source."""
    config = config or ServerConfig(port=0)
    listener = listen(replace(config, port=0))
    app = create_app(engines, config, library=library)
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off", timeout_graceful_shutdown=5))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        eventually(lambda: server.started)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        for served in app.state.models.all():
            if served.source is not None and served.state == "ready":
                asyncio.run(served.engine.aclose())


def eventually(holds: Callable[[], bool], *, timeout_s: float = 20) -> None:
    """Wait for something that other threads bring about."""
    deadline_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline_s, f"did not come true within {timeout_s} s"
        time.sleep(0.01)


def metric(url: str, name: str, **labels: str) -> float:
    """One sample of `/metrics`; 0 where it has not been counted yet."""
    for line in httpx.get(f"{url}/metrics").text.splitlines():
        sample, _, value = line.rpartition(" ")
        if sample.partition("{")[0] == name and all(f'{key}="{text}"' in sample for key, text in labels.items()):
            return float(value)
    return 0.0
