"""Thoughts come as `reasoning_content`, whole or streamed, and end when their budget does."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from openai import OpenAI

from .harness import ChattyToy, PlainTemplate, chatty_engine, serving


class ThinkingTemplate(PlainTemplate):
    """Its source shows that the model thinks in tags; on demand it opens them itself."""

    source = "{% for message in messages %}...<think>...{% endfor %}"

    def render(self, messages: list[dict[str, Any]], *, is_open: bool = False, **options: Any) -> str:
        return super().render(messages, **options) + ("<think>\n" if is_open else "")


@dataclass
class Thinker(ChattyToy):
    chat_template: PlainTemplate | None = field(default_factory=ThinkingTemplate)


@pytest.fixture(scope="module")
def thinker() -> Iterator[OpenAI]:
    engine = chatty_engine(Thinker())
    with serving({"toy": engine}) as url, OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client
    asyncio.run(engine.aclose())


def say(client: OpenAI, pattern: str, *, stream: bool = False, **fields: Any) -> tuple[str | None, str | None]:
    """Thoughts and answer of a model that says what `pattern` describes."""
    reply = client.chat.completions.create(
        model="toy",
        messages=[{"role": "user", "content": "Hm?"}],
        temperature=0,
        max_tokens=60,
        stream=stream,
        extra_body={"structured_outputs": {"regex": pattern}, **fields},
    )
    if not stream:
        message = reply.choices[0].message
        return getattr(message, "reasoning_content", None), message.content
    deltas = [choice.delta for chunk in reply for choice in chunk.choices]
    reasoning = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    return reasoning or None, "".join(delta.content or "" for delta in deltas)


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_are_told_from_the_answer(thinker, stream):
    assert say(thinker, "<think>\nab</think>\n\nc<d", stream=stream) == ("ab", "c<d")
    assert say(thinker, "just <an> answer", stream=stream) == (None, "just <an> answer")


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_that_the_template_opened_are_thoughts(thinker, stream):
    opened = {"chat_template_kwargs": {"is_open": True}, "thinking_budget": 5}
    thoughts, answer = say(thinker, "c", stream=stream, **opened)
    assert len(thoughts) >= 1
    assert answer == "c"


@pytest.mark.parametrize("stream", [False, True])
def test_other_tags_and_none(thinker, client, stream):
    assert say(thinker, "<a>x</a>y", stream=stream, reasoning_tags=["<a>", "</a>"]) == ("x", "y")
    text = "<think>x</think>y"
    assert say(thinker, text, stream=stream, reasoning_format="none") == (None, text)
    assert say(client, text, stream=stream) == (None, text)  # a template that knows of no thoughts
    assert say(client, text, stream=stream, reasoning_format="deepseek") == ("x", "y")


def test_a_budget_ends_thoughts(thinker):
    reply = thinker.chat.completions.create(
        model="toy",
        messages=[{"role": "user", "content": "Hm?"}],
        temperature=0,
        max_tokens=40,
        extra_body={"thinking_budget": 5, "chat_template_kwargs": {"is_open": True}, "return_token_ids": True},
    )
    ids = reply.choices[0].token_ids
    assert ids[5 : 5 + len("</think>")] == list(b"</think>")
    assert len(ids) == 40
