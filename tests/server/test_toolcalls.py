"""Replies of each model family to text and calls, whole and in any pieces."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spolia.models.chat_template import ChatTemplate
from spolia.server.toolcalls import FORMATS, CallArguments, CallBegan, Text, ToolCallParser, format_of, gather

NAMES = {"weather", "time"}
SCHEMAS = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "ratio": {"type": "number"},
            "warm": {"type": "boolean"},
            "near": {"$ref": "#/$defs/near"},
            "note": {"type": ["string", "null"]},
            "free": {},
        },
        "$defs": {"near": {"type": "array", "items": {"type": "string"}}},
    }
}
Calls = list[tuple[str, str]]


def read(family: str, text: str, pieces: list[int] | None = None, **options: Any) -> tuple[str, Calls]:
    """Text and calls of a reply that comes in pieces of these sizes, and then at once."""
    parser = ToolCallParser(FORMATS[family], NAMES, schemas=SCHEMAS, **options)
    parts = []
    for size in pieces or ():
        parts += parser.feed(text[:size])
        text = text[size:]
    parts += parser.feed(text)
    content, calls = gather([*parts, *parser.finish()])
    assert len(calls) == parser.num_calls or options.get("one_call")
    return content, [(call.name, call.arguments) for call in calls]


TIME = ("time", "{}")
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
    (
        "granite",
        '<|tool_call|>[{"name": "weather", "arguments": {"city": "Rome"}}, {"name": "time"}]',
        "",
        [ROME, TIME],
    ),
    (
        "command",
        'So.<|START_ACTION|>[\n  {"tool_call_id": "0", "tool_name": "weather", "parameters": {"city": "Rome"}}\n]'
        "<|END_ACTION|>",
        "So.",
        [ROME],
    ),
    (
        "deepseek",
        "So.\n\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
        '{"city": "Rome"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>time\n```json\n{}\n```'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "So.",
        [ROME, TIME],
    ),
    (
        "deepseek",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\nin Rome",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\nin Rome",
        [],
    ),
    (
        "deepseek_v31",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Rome"}<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>time<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>Done.",
        "Done.",
        [ROME, TIME],
    ),
    (
        "kimi",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
        '{"city": "Rome"}<|tool_call_end|><|tool_call_begin|>functions.time:1 <|tool_call_argument_begin|>{}'
        "<|tool_call_end|><|tool_calls_section_end|>",
        "",
        [ROME, TIME],
    ),
    (
        "glm",
        "Both.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n</tool_call>\n"
        "<tool_call>time</tool_call>",
        "Both.",
        [ROME, TIME],
    ),
    (
        "glm",
        "<tool_call>weather<arg_key>city</arg_key><arg_value> a\n</arg_val 1 < 2</arg_value><arg_key>days</arg_key>"
        "<arg_value>5</arg_value></tool_call>",
        "",
        [("weather", '{"city": " a\\n</arg_val 1 < 2", "days": 5}')],
    ),
    ("glm", "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Ro", "", [("weather", '{"city": "Ro')]),
    (
        "glm",
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n<arg_key>days</arg_key> or so",
        "<arg_key>days</arg_key> or so",
        [ROME],
    ),
    (
        "qwen3_coder",
        "Look:\n<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=time>\n</function>\n</tool_call>",
        "Look:",
        [ROME, TIME],
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=weather>\n<parameter=days>\n5\n</parameter>\n<parameter=ratio>\n1e3\n</parameter>\n"
        '<parameter=warm>\nTrue\n</parameter>\n<parameter=near>\n["</parameter>"]\n</parameter>\n'
        "<parameter=note>\n5\n</parameter>\n<parameter=free>\n5\n</parameter>\n<parameter=other>\nfive\n</parameter>\n"
        "</function>\n</tool_call>",
        "",
        [
            (
                "weather",
                '{"days": 5, "ratio": 1e3, "warm": true, "near": ["</parameter>"], "note": "5", "free": 5, '
                '"other": "five"}',
            )
        ],
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=weather>\n<parameter=city>\n\nline\n\n</parameter>\n</function>\n</tool_call>",
        "",
        [("weather", '{"city": "\\nline\\n"}')],
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=weather>\n<parameter=days>\nfive",
        "",
        [("weather", '{"days": five')],
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=weather> is what I would call.",
        "<tool_call>\n<function=weather> is what I would call.",
        [],
    ),
    (
        "functiongemma",
        "<start_function_call>call:weather{city:<escape>Rome<escape>}<end_function_call>"
        "<start_function_call>call:time{}<end_function_call>",
        "",
        [ROME, TIME],
    ),
    (
        "gemma4",
        'So.<|tool_call>call:weather{city:<|"|>a "b" <|, }<|"|>,days:5,near:[<|"|>x<|"|>,<|"|>y<|"|>],warm:true,'
        'free:{a:{},"b":"c,}",d:odd}}<tool_call|>',
        "So.",
        [
            (
                "weather",
                '{"city": "a \\"b\\" <|, }", "days": 5, "near": ["x", "y"], "warm": true, '
                '"free": {"a": {}, "b": "c,}", "d": "odd"}}',
            )
        ],
    ),
    ("gemma4", '<|tool_call>call:weather{city:<|"|>Ro', "", [("weather", '{"city": "Ro')]),
    ("gemma4", "<|tool_call>call:weather in Rome", "<|tool_call>call:weather in Rome", []),
    (
        "minimax",
        '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Rome</parameter>\n</invoke>\n'
        '<invoke name="time">\n</invoke>\n</minimax:tool_call>',
        "",
        [ROME, TIME],
    ),
    (
        "seed",
        "<seed:tool_call>\n<function=weather>\n<parameter=city>Rome</parameter>\n</function>\n</seed:tool_call>",
        "",
        [ROME],
    ),
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
    if FORMATS[family].opening == "<tool_call>" or "<tool_call>" not in reply:
        assert read(family, reply) == read(family, reply, [1] * len(reply)) == (reply, [])


def test_every_family_is_read():
    assert {family for family, *_ in REPLIES} == {*FORMATS}


@given(st.sampled_from(REPLIES), st.data())
def test_a_broken_reply_in_any_pieces_is_read_as_it_is_whole(case, data):
    family, reply, *_ = case
    start, end = sorted(data.draw(st.tuples(*[st.integers(0, len(reply))] * 2)))
    broken = (
        reply[:start] + data.draw(st.sampled_from(["", " ", "<", "oops", "}", FORMATS[family].opening])) + reply[end:]
    )
    pieces = data.draw(st.lists(st.integers(1, 7), max_size=len(broken)))
    assert read(family, broken, pieces) == read(family, broken)


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


def test_a_kimi_call_has_the_id_that_the_model_gave_it():
    parser = ToolCallParser(FORMATS["kimi"], NAMES)
    reply = next(reply for family, reply, *_ in REPLIES if family == "kimi")
    calls = gather([*parser.feed(reply), *parser.finish()])[1]
    assert [call.id for call in calls] == ["functions.weather:0", "functions.time:1"]


def test_text_without_quotes_is_told_before_its_end():
    parser = ToolCallParser(FORMATS["glm"], NAMES, schemas=SCHEMAS)
    (began,) = parser.feed("<tool_call>weather\n<arg_key>ci")
    assert isinstance(began, CallBegan)
    assert parser.feed("ty</arg_key>\n<arg_value>Ro") == [CallArguments(0, '{"city": "Ro')]
    assert parser.feed("me</arg") == [CallArguments(0, "me")]
    assert parser.feed("_value>") == [CallArguments(0, '"')]
    assert parser.feed("\n</tool_call>") == [CallArguments(0, "}")]


# Written after what the families' own templates do with a message's calls; `calls` are a message's.
TEMPLATES = {
    "deepseek": """<｜tool▁calls▁begin｜>{% for call in calls %}{% if not loop.first %}
{% endif %}<｜tool▁call▁begin｜>{{ call.type }}<｜tool▁sep｜>{{ call.function.name }}
```json
{{ call.function.arguments | tojson }}
```<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>""",
    "deepseek_v31": """<｜tool▁calls▁begin｜>{% for call in calls %}<｜tool▁call▁begin｜>{{ call.function.name }}\
<｜tool▁sep｜>{{ call.function.arguments | tojson }}<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>""",
    "kimi": """<|tool_calls_section_begin|>{% for call in calls %}<|tool_call_begin|>{{ call.id }}\
<|tool_call_argument_begin|>{{ call.function.arguments | tojson }}<|tool_call_end|>{% endfor %}\
<|tool_calls_section_end|>""",
    "glm": """{% for call in calls %}
<tool_call>{{ call.function.name }}
{% for key, value in call.function.arguments.items() %}<arg_key>{{ key }}</arg_key>
<arg_value>{{ value if value is string else value | tojson }}</arg_value>
{% endfor %}</tool_call>{% endfor %}""",
    "qwen3_coder": """{% for call in calls %}
<tool_call>
<function={{ call.function.name }}>
{% for key, value in call.function.arguments.items() %}<parameter={{ key }}>
{{ value | tojson if value is mapping or value is sequence and value is not string else value | string }}
</parameter>
{% endfor %}</function>
</tool_call>{% endfor %}""",
    "minimax": """<minimax:tool_call>
{% for call in calls %}<invoke name="{{ call.function.name }}">
{% for key, value in call.function.arguments.items() %}<parameter name="{{ key }}">\
{{ value if value is string else value | tojson }}</parameter>
{% endfor %}</invoke>
{% endfor %}</minimax:tool_call>""",
    "functiongemma": """{% macro put(v) %}{% if v is string %}<escape>{{ v }}<escape>{% elif v is mapping %}\
{{ '{' }}{% for k, w in v | dictsort %}{% if not loop.first %},{% endif %}{{ k }}:{{ put(w) }}{% endfor %}{{ '}' }}\
{% elif v is sequence %}[{% for w in v %}{% if not loop.first %},{% endif %}{{ put(w) }}{% endfor %}]\
{% else %}{{ v | tojson }}{% endif %}{% endmacro %}\
{% for call in calls %}<start_function_call>call:{{ call.function.name }}{{ put(call.function.arguments) }}\
<end_function_call>{% endfor %}""",
    "granite": """<|start_of_role|>assistant<|end_of_role|><|tool_call|>[{% for call in calls %}\
{{ call.function | tojson }}{% if not loop.last %}, {% endif %}{% endfor %}]""",
    "command": """<|START_ACTION|>[{% for call in calls %}
    {"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ call.function.name }}", "parameters": \
{{ call.function.arguments | tojson }}}{% if not loop.last %},{% endif %}{% endfor %}
]<|END_ACTION|>""",
}


TEMPLATES["gemma4"] = (
    TEMPLATES["functiongemma"]
    .replace("<escape>", '<|"|>')
    .replace("<start_function_call>", "<|tool_call>")
    .replace("<end_function_call>", "<tool_call|>")
)


@pytest.mark.parametrize("family", TEMPLATES)
def test_calls_that_a_template_writes_are_read_as_they_were(family):
    source = "{% for message in messages %}{% set calls = message.tool_calls %}" + TEMPLATES[family] + "{% endfor %}"
    assert format_of(source) is FORMATS[family]
    said: list[tuple[str, dict[str, Any]]] = [
        (
            "weather",
            {"city": 'São "P"\n<b>', "days": -3, "ratio": 0.5, "warm": False, "near": ["a", "</b>"], "note": None},
        ),
        ("time", {}),
    ]
    calls = [
        {"id": f"functions.{name}:{index}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for index, (name, arguments) in enumerate(said)
    ]
    text = ChatTemplate(source).render([{"role": "assistant", "content": None, "tool_calls": calls}])
    content, found = read(family, text.removeprefix("<|start_of_role|>assistant<|end_of_role|>"))
    assert not content.strip()
    assert [(name, json.loads(arguments)) for name, arguments in found] == said


def test_a_template_gives_its_familys_format_away():
    assert format_of("... within <tool_call></tool_call> XML tags") is FORMATS["hermes"]
    assert format_of('{{ "[TOOL_CALLS] [" }}') is FORMATS["mistral"]
    assert format_of('Environment: ipython ... {"name": function name, "parameters": ...}') is FORMATS["llama3"]
    assert format_of("no tools at all") is FORMATS["hermes"]


def test_the_guide_has_every_family():
    guide = (Path(__file__).parents[2] / "docs" / "tool-calls.md").read_text()
    assert {*re.findall(r"^\| `(\w+)`", guide, re.MULTILINE)} == {*FORMATS}
