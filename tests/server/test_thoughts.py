"""Thoughts are told from the answer in every chat API, whole and in streams."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import httpx
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


class OpeningTemplate(ThinkingTemplate):
    """Begins the thoughts itself."""

    def render(self, messages: list[dict[str, Any]], *, tools: Any = None, add_generation_prompt: bool = True) -> str:
        begun = "<think>\n" if add_generation_prompt else ""
        return super().render(messages, tools=tools, add_generation_prompt=add_generation_prompt) + begun


HM = '<think>\nWhat {is} it? 12, or "answer"?\n</think>\n\n'
SHOWN = HM.removeprefix("<think>\n").partition("\n</think>")[0]
SCHEMA = {
    "type": "object",
    "properties": {"answer": {"type": "integer"}},
    "required": ["answer"],
    "additionalProperties": False,
}
OPENED = {"user: json": HM + '{"answer": 12}', "user: word": HM + "abba", "user: wrong": HM + "none of it"}
JSON_SCHEMA = {"name": "answer", "schema": SCHEMA, "strict": True}
FORMS: list[tuple[str, dict[str, Any]]] = [
    ("json", {"response_format": {"type": "json_schema", "json_schema": JSON_SCHEMA}}),
    ("json", {"response_format": {"type": "json_object"}}),
    ("word", {"structured_outputs": {"regex": "[ab]{4}"}}),
    ("word", {"guided_choice": ["baba", "abba"]}),
    ("word", {"grammar": 'root ::= ("a" | "b") root | "a"'}),
    ("word", {"structured_outputs": {"grammar": "start: PAIR PAIR\nPAIR: /[ab]{2}/"}}),
]


@pytest.fixture(scope="module")
def opened_url() -> Iterator[str]:
    engine = scripted_engine(OPENED, ChattyToy(chat_template=OpeningTemplate()), num_blocks=256, max_context=2048)
    with serving({"scripted": engine}) as url:
        yield url
    asyncio.run(engine.aclose())


def ask(url: str, path: str, **body: Any) -> Any:
    asked = {"model": "scripted", "max_tokens": 300, "temperature": 0, **body}
    reply = httpx.post(f"{url}{path}", json=asked, timeout=120)
    assert reply.status_code == 200, reply.text
    return reply.json()


@pytest.mark.parametrize(("question", "fields"), FORMS, ids=str)
@pytest.mark.parametrize("also", [{}, {"n": 2}, {"use_beam_search": True, "n": 2}, {"penalty_alpha": 0.2}], ids=str)
def test_a_form_begins_after_thoughts_that_the_template_opens(opened_url, question, fields, also):
    """Every strategy; else the form would leave nothing of thoughts, or forbid what the model wants to say."""
    messages = [{"role": "user", "content": question}]
    choices = ask(opened_url, "/v1/chat/completions", messages=messages, **fields, **also)["choices"]
    message = choices[0]["message"]
    assert message["reasoning_content"] == SHOWN
    assert message["content"] == OPENED[f"user: {question}"].removeprefix(HM)
    assert len(choices) == also.get("n", 1)


def test_what_follows_the_thoughts_has_the_form_whatever_the_model_wants(opened_url):
    messages = [{"role": "user", "content": "wrong"}]
    fields = {"messages": messages, "structured_outputs": {"regex": "[ab]{4}"}}
    message = ask(opened_url, "/v1/chat/completions", **fields)["choices"][0]["message"]
    assert message["reasoning_content"] == SHOWN
    assert re.fullmatch("[ab]{4}", message["content"])
    whole = ask(opened_url, "/v1/chat/completions", **fields, reasoning_format="none")["choices"][0]["message"]
    assert re.fullmatch("[ab]{4}", whole["content"])  # who wants thoughts in the text wants all of it in the form


def test_other_apis_begin_forms_after_thoughts_too(opened_url):
    messages = [{"role": "user", "content": "json"}]
    chat = ask(opened_url, "/api/chat", messages=messages, format=SCHEMA, stream=False)["message"]
    assert (chat["thinking"], chat["content"]) == (SHOWN, '{"answer": 12}')
    told = ask(opened_url, "/api/generate", prompt="json", format="json", stream=False)
    assert (told["thinking"], told["response"]) == (SHOWN, '{"answer": 12}')
    format_ = {"type": "json_schema", "name": "answer", "schema": SCHEMA}
    with OpenAI(base_url=f"{opened_url}/v1", api_key="none", max_retries=0) as client:
        response = client.responses.create(model="scripted", input="json", text={"format": format_}, temperature=0)
    assert response.output_text == '{"answer": 12}'


def test_responses_show_the_answer_only(url):
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        assert client.responses.create(model="scripted", input="hello").output_text == "Hello!"
        with client.responses.stream(model="scripted", input="hello") as stream:
            assert stream.get_final_response().output_text == "Hello!"
