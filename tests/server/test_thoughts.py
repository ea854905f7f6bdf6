"""Thoughts are told from the answer in every chat API, whole and in streams."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing

import ollama
import pytest
from anthropic import Anthropic
from openai import OpenAI

from .harness import ChattyToy, ThinkingTemplate, scripted_engine, serving
from .test_anthropic import TOOLS
from .test_tools import ROME, tagged

SCRIPT = {
    "user: hello": "<think>\nThey greet me.\n</think>\n\nHello!",
    "user: rome": f"<think>\nI should look.\n</think>\n\n{tagged(ROME)}",
    "user: silence": "<think>\nNothing to say.\n</think>",
}
VALUES = {"thinking": "thinking", "text": "text", "tool_use": "input"}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    engine = scripted_engine(SCRIPT, ChattyToy(chat_template=ThinkingTemplate()), num_blocks=256, max_context=2048)
    with serving({"scripted": engine}) as url:
        yield url
    asyncio.run(engine.aclose())


def test_anthropics_messages_have_a_block_of_thinking(url):
    with Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        for content, expected in (
            ("hello", [("thinking", "They greet me."), ("text", "Hello!")]),
            ("rome", [("thinking", "I should look."), ("tool_use", {"city": "Rome"})]),
            ("silence", [("thinking", "Nothing to say."), ("text", "")]),
        ):
            asked = {"model": "scripted", "max_tokens": 300, "messages": [{"role": "user", "content": content}]}
            whole = client.messages.create(**asked, tools=TOOLS)
            with client.messages.stream(**asked, tools=TOOLS) as stream:
                streamed = stream.get_final_message()
            for message in (whole, streamed):
                shown = [(block.type, getattr(block, VALUES[block.type])) for block in message.content]
                assert shown == expected


def test_ollamas_messages_have_their_thinking_beside_the_content(url):
    with closing(ollama.Client(host=url)) as client:
        asked = {"model": "scripted", "messages": [{"role": "user", "content": "hello"}]}
        message = client.chat(**asked).message
        assert (message.thinking, message.content) == ("They greet me.", "Hello!")
        chunks = list(client.chat(**asked, stream=True))
        assert "".join(chunk.message.thinking or "" for chunk in chunks) == "They greet me."
        assert "".join(chunk.message.content or "" for chunk in chunks) == "Hello!"


def test_responses_show_the_answer_only(url):
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        assert client.responses.create(model="scripted", input="hello").output_text == "Hello!"
        with client.responses.stream(model="scripted", input="hello") as stream:
            assert stream.get_final_response().output_text == "Hello!"
