"""Replies of each model family to text and calls, whole and in any pieces."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spolia.server.toolcalls import FORMATS, CallArguments, CallBegan, Text, ToolCallParser, format_of, gather

NAMES = {"weather", "time"}
Calls = list[tuple[str, str]]


def read(family: str, text: str, pieces: list[int] | None = None, **options: Any) -> tuple[str, Calls]:
    """Text and calls of a reply that comes in pieces of these sizes, and then at once."""
    parser = ToolCallParser(FORMATS[family], NAMES, **options)
    parts = []
    for size in pieces or ():
        parts += parser.feed(text[:size])
        text = text[size:]
    parts += parser.feed(text)
    content, calls = gather([*parts, *parser.finish()])
    assert len(calls) == parser.num_calls or options.get("one_call")
    return content, [(call.name, call.arguments) for call in calls]


ROME, PARIS = ("weather", '{"city": "Rome"}'), ("weather", '{"city": "Paris"}')

REPLIES = [
    # (family, reply, text, calls)
    ("hermes", '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>', "", [ROME]),
    (
        "hermes",
        'Both.\n\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>\n<tool_call>\n'
        '{"arguments": {"city": "Paris"}, "name": "weather"}\n</tool_call>\n',
        "Both.",
        [ROME, PARIS],
    ),
    ("hermes", '<tool_call>{"name": "other", "arguments": {}}</tool_call> and so on', " and so on", [("other", "{}")]),
    ("hermes", '<tool_call>{"name": "time"}</tool_call>', "", [("time", "{}")]),
    ("hermes", '<tool_call>{"name": "time", "arguments": null}</tool_call>', "", [("time", "{}")]),
    ("hermes", '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Rome\\"}"}</tool_call>', "", [ROME]),
    (
        "hermes",
        '<tool_call>{"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}</tool_call>',
        "",
        [ROME],
    ),
    ("hermes", '<tool_call>{"name": "time", "arguments": {"a": "}\\"{<"}}', "", [("time", '{"a": "}\\"{<"}')]),
    ("hermes", '<tool_call>\n{"name": "time", "arguments": {"zone": "Eur', "", [("time", '{"zone": "Eur')]),
    # small models forget the marks
    ("hermes", '{"name": "weather", "arguments": {"city": "Rome"}}', "", [ROME]),
    ("hermes", '```json\n{"name": "weather", "arguments": {"city": "Rome"}}\n```', "", [ROME]),
    (
        "hermes",
        '[{"name": "weather", "arguments": {"city": "Rome"}}, {"name": "weather", "arguments": {"city": "Paris"}}]',
        "",
        [ROME, PARIS],
    ),
    ("mistral", '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Rome"}}]', "", [ROME]),
    (
        "mistral",
        'So:[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Rome"}}, {"name": "time", "arguments": {}}]',
        "So:",
        [ROME, ("time", "{}")],
    ),
    ("mistral", '[TOOL_CALLS]weather[ARGS]{"city": "Rome"}[TOOL_CALLS]time{"a": 1}', "", [ROME, ("time", '{"a": 1}')]),
    ("llama3", '{"name": "weather", "parameters": {"city": "Rome"}}', "", [ROME]),
    (
        "llama3",
        '<|python_tag|>{"name": "weather", "parameters": {"city": "Rome"}}; {"name": "time", "parameters": {}}',
        "",
        [ROME, ("time", "{}")],
    ),
    ("phi4", '<|tool_call|>[{"name": "weather", "arguments": {"city": "Rome"}}]<|/tool_call|>', "", [ROME]),
    ("functools", 'functools[{"name": "weather", "arguments": {"city": "Rome"}}]', "", [ROME]),
]


@pytest.mark.parametrize(("family", "reply", "text", "calls"), REPLIES)
def test_a_reply_is_read_the_same_whole_and_in_any_pieces(family, reply, text, calls):
    assert read(family, reply) == (text, calls)
    rng = random.Random(reply)
    for _ in range(30):
        assert read(family, reply, [rng.randrange(1, 9) for _ in range(len(reply))]) == (text, calls)


@pytest.mark.parametrize(
    "reply",
    [
        "",
        "  \n",
        "Just words.\n\n",
        "1 < 2, and <tool_c",
        "<tool_call>never mind",
        '<tool_call>\n{"nam',
        "[1, 2] is a list",
        '{"city": "Rome"}',
        '```json\n{"name": "Ada", "arguments": {"city": "Rome"}}\n```\nis JSON.',
        '{"name": 5, "arguments": {}}',
        '{"name"',
        "```python\nprint(1)\n```",
    ],
)
@pytest.mark.parametrize("family", FORMATS)
def test_what_is_no_call_is_text_to_the_letter(family, reply):
    if family == "hermes" or "<tool_call>" not in reply:
        assert read(family, reply) == read(family, reply, [1] * len(reply)) == (reply, [])


@given(st.sampled_from(sorted(FORMATS)), st.text(alphabet='<tool_cal>/[]{}"nme: \n`j\\', max_size=60), st.data())
def test_any_text_in_any_pieces_is_read_as_it_is_whole(family, text, data):
    text = data.draw(st.sampled_from([text, FORMATS[family].opening + text, text + FORMATS[family].opening]))
    pieces = data.draw(st.lists(st.integers(1, 7), max_size=40))
    assert read(family, text, pieces) == read(family, text)


@pytest.mark.parametrize("family", FORMATS)
def test_a_reply_that_was_begun_goes_on_from_there(family):
    call = f'{{"name": "weather", "{FORMATS[family].argument_key}": {{"city": "Rome"}}}}'
    assert read(family, call, begun_with=FORMATS[family].beginning, one_call=True) == ("", [ROME])


def test_arguments_are_told_before_their_end_and_the_name_first():
    parser = ToolCallParser(FORMATS["hermes"], NAMES)
    assert parser.feed('Let me see. <tool_call>{"name": "wea') == [Text("Let me see.")]
    (began,) = parser.feed('ther", "arguments": ')
    assert isinstance(began, CallBegan)
    assert (began.index, began.name) == (0, "weather")
    assert parser.feed('{"city": "Ro') == [CallArguments(0, '{"city": "Ro')]
    assert parser.feed('me"}}\n</tool_call>') == [CallArguments(0, 'me"}')]
    assert parser.finish() == []


def test_who_wants_one_call_gets_one():
    reply = "".join(f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>\n' for name in ("time", "weather"))
    assert read("hermes", reply + "and more", one_call=True) == ("", [("time", "{}")])


def test_ids_are_of_the_shape_that_each_familys_template_takes():
    for family, reply in (("mistral", '[TOOL_CALLS][{"name": "time"}]'), ("hermes", '{"name": "time"}')):
        parser = ToolCallParser(FORMATS[family], NAMES)
        (call,) = gather([*parser.feed(reply), *parser.finish()])[1]
        assert (len(call.id) == 9 and call.id.isalnum()) if family == "mistral" else call.id.startswith("call_")


def test_a_template_gives_its_familys_format_away():
    assert format_of("... within <tool_call></tool_call> XML tags") is FORMATS["hermes"]
    assert format_of('{{ "[TOOL_CALLS] [" }}') is FORMATS["mistral"]
    assert format_of('Environment: ipython ... {"name": function name, "parameters": ...}') is FORMATS["llama3"]
    assert format_of("no tools at all") is FORMATS["hermes"]
