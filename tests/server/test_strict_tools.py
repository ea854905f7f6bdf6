"""Strict tools that may be called: each call has the form of its schema, and no answer changes otherwise."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jsonschema
import numpy as np
import openai
import pytest
from anthropic import Anthropic
from llguidance import LLMatcher
from openai import OpenAI

from engine.toy import EOS
from spolia.errors import InvalidRequest
from spolia.generation import ReasoningSplitter, StructuredOutput, Vocabulary
from spolia.server.toolcalls import FORMATS, Format, ToolCallParser, gather
from spolia.server.toolcalls.shapes import Shape
from spolia.server.toolcalls.strict import call_grammar, form_or_calls_grammar, one_call_grammar

from .harness import ChattyToy, TextTokenizer, ThinkingTemplate, scripted_engine, serving

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}

VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


def tool(name: str, *, strict: bool) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA, "strict": strict}}


TOOLS = [tool("weather", strict=True), tool("time", strict=False)]


@dataclass
class MarkedTokenizer(TextTokenizer):
    """Bytes, an end, and special tokens: some marks, and one that is none."""

    marks: tuple[bytes, ...] = ()

    @property
    def special_ids(self) -> frozenset[int]:  # type: ignore[override]
        return frozenset(range(EOS, EOS + 1 + len(self.marks)))

    def is_special(self, token_id: int) -> bool:
        return token_id >= EOS

    def token_bytes(self, token_id: int) -> bytes:
        return self.marks[token_id - EOS - 1] if token_id > EOS else super().token_bytes(token_id)


class Walk:
    """A reply that grows under the grammar."""

    def __init__(
        self,
        format_: Format,
        thoughts: ReasoningSplitter | None = None,
        one_call_of: Any = None,
        form: StructuredOutput | None = None,
    ) -> None:
        written = [format_.opening, format_.closing]
        if (shape := format_.shape) is not None:
            written += re.findall(r"<[^<>]+>", shape.before + shape.after + shape.end)
            written += [shape.quote or ""]
        marks = tuple(mark.encode() for mark in written if mark and format_.is_special)
        self.tokenizer = MarkedTokenizer((*marks, b"<|other|>"))
        vocabulary = Vocabulary(
            EOS + 2 + len(marks),
            eos_token_ids=[EOS],
            encode=self.tokenizer.encode,
            token_bytes=self.tokenizer.token_bytes,
            is_special=self.tokenizer.is_special,
        )
        if form is not None:
            grammar = form_or_calls_grammar(format_, TOOLS, self.tokenizer, form, thoughts)  # type: ignore[arg-type]
        elif one_call_of is None:
            grammar = call_grammar(format_, TOOLS, self.tokenizer, thoughts)  # type: ignore[arg-type]
        else:
            grammar = one_call_grammar(format_, one_call_of, self.tokenizer)  # type: ignore[arg-type]
        self._matcher: LLMatcher = vocabulary.grammars.compile(StructuredOutput(grammar=grammar))._matcher
        self._size = vocabulary.size
        self.ids: list[int] = []

    def allowed(self) -> list[int]:
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")
        return [int(id_) for id_ in np.flatnonzero(bits[: self._size])]

    def may_end(self) -> bool:
        return self._matcher.is_accepting()

    def take(self, ids: Sequence[int]) -> bool:
        """Go on with all of them, or as far as it is allowed; whether it was all."""
        for id_ in ids:
            if id_ not in self.allowed():
                return False
            self._matcher.consume_token(id_)
            self.ids.append(id_)
        return True

    @property
    def text(self) -> str:
        return self.tokenizer.decode(self.ids, skip_special=False)


def closing_of(shape: Shape | None) -> str | None:
    """What ends a text that is not JSON's."""
    if shape is None:
        return None
    return shape.parameters.closing if shape.parameters is not None else shape.quote


def calls_of(format_: Format, text: str, splitter: ReasoningSplitter | None = None) -> list[tuple[str, str]]:
    parser = ToolCallParser(format_, {"weather", "time"}, schemas={"weather": SCHEMA}, strict={"weather"})
    if splitter is not None:
        text = splitter.feed(text).content + splitter.finish().content
    _, calls = gather([*parser.feed(text), *parser.finish()])
    return [(call.name, call.arguments) for call in calls]


@pytest.mark.parametrize("family", FORMATS)
@pytest.mark.parametrize(
    "text",
    [
        "",
        "Just words, é and 🙂.\r\n\0",
        "1 < 2, and <tool_c",
        "import functools, then [TOOL_",
        '{"city": "Rome"}',
        '```json\n{"name": "Ada", "arguments": 5}\n```',
        '[{"name": "time", "arguments": 5}]',
        'I would say {"name": "weather", "arguments": 5}.',
        "<think>hm",
    ],
)
def test_an_answer_that_calls_nothing_is_met_by_no_constraint(family, text):
    walk = Walk(FORMATS[family])
    for id_ in text.encode():
        allowed = walk.allowed()
        assert {*range(32, 127), EOS, walk._size - 1} <= {*allowed} or not walk.may_end()
        assert walk.take([id_]), walk.text
    assert walk.take([walk._size - 1])  # a special token that is no mark
    assert walk.may_end()


@pytest.mark.parametrize("family", FORMATS)
@pytest.mark.parametrize("thinks", [None, "may", "does"])
def test_whatever_a_model_writes_the_calls_of_strict_tools_are_of_their_schema(family, thinks):
    format_, rng = FORMATS[family], random.Random(f"{family} {thinks}")
    arguments = [
        '{"city": "Rome", "days": 2}',
        '{"days": 2, "city": "Rome"}',
        '{"city": "}\\"{", "days": 10}',
        '"{}"',
        "null",
        "{}",
        "[]",
    ]
    names = ['"weather"', '"wea\\u0074her"', '"time"', '"other"']
    key = format_.argument_key
    pool = [
        *"[],; \n{}", "```json\n", "```", "<think>", "</think>", "weather", "[ARGS]", "Words. ", '"name": ',
        f'"{key}": ', '"parameters": ', '"type": "function", "function": {', format_.closing,
        *[format_.opening] * 6, *[f'{{"name": "weather", "{key}": '] * 5, *arguments, *names,
        *(f'{{"name": {name}, "{key}": {each}}}' for name in names for each in arguments),
        *(f'{{"{key}": {each}, "name": {name}}}' for name in names for each in arguments),
    ]  # fmt: skip
    if (shape := format_.shape) is not None:
        begun = [f"{shape.before}{shape.prefix}{name}{shape.after}" for name in ("weather", "time", "other")]
        pool += [format_.opening + begun[0]] * 12 + begun + [shape.end] * 6
        if (parameters := shape.parameters) is not None:
            line = "\n" if parameters.has_lines else ""
            pool += [
                f"{parameters.opening}{key}{parameters.middle}{line}{value}{line}{parameters.closing}"
                for key, value in (("city", "Rome"), ("city", ""), ("days", "5"), ("days", "ten"), ("else", "5"))
            ] * 4 + [parameters.closing] * 4
        if shape.quote is not None:
            text = shape.quote
            pool += [
                *[
                    f"{{city:{text}Rome{text},days:2}}",
                    f"{{city:{text}Rome{text},days:",
                    f"{{city:{text}{text},days:10}}",
                ]
                * 6,
                *(
                    f"{{days:2,city:{text}Rome{text}}}",
                    "{city:Rome,days:2}",
                    '{city:"Rome",days:2}',
                    "2}",
                    "{}",
                    "{x:[1]}",
                ),
            ]
    num_strict = 0
    for _ in range(60):
        make = lambda: None if thinks is None else ReasoningSplitter(is_open=thinks == "does")  # noqa: E731
        walk = Walk(format_, make())
        if thinks == "does" and rng.random() < 0.7:
            walk.take(b"hm</think>")
        for _ in range(12):
            chunk = rng.choice(pool)
            ids = list(chunk.encode())
            if chunk.encode() in walk.tokenizer.marks and rng.random() < 0.5:
                ids = [EOS + 1 + walk.tokenizer.marks.index(chunk.encode())]
            if not walk.take(ids) and (allowed := walk.allowed()):
                walk.take([rng.choice(allowed)])
        for _ in range(400):  # to an end: what is forced first, or else whatever closes things
            if walk.may_end() or not (allowed := walk.allowed()):
                break
            if rng.random() < 0.2 and (closing := closing_of(shape)) is not None:
                walk.take(closing.encode())
                continue
            wanted = [id_ for id_ in b'"}]' if id_ in allowed]
            walk.take([rng.choice(wanted or allowed)])
        if not walk.may_end():
            continue
        for name, said in calls_of(format_, walk.text, make()):
            if name == "weather":
                num_strict += 1
                assert VALIDATOR.is_valid(json.loads(said)), walk.text
    assert num_strict > 5


FORMS = {
    "json": StructuredOutput(json={"enum": [{"answer": 7}, ["a/b"]]}),
    "regex": StructuredOutput(regex=r"[0-3]{2}/[4-9]{1,3}|a\\/\n|b\/c"),
    "choice": StructuredOutput(choice=("yes", "<no>", 'a "b"\n')),
}


def has_form(text: str, kind: str) -> bool:
    if kind == "json":
        return json.loads(text) in [{"answer": 7}, ["a/b"]]
    return (
        text in (FORMS["choice"].choice or ())
        if kind == "choice"
        else bool(re.fullmatch(FORMS[kind].regex or "", text))
    )


@pytest.mark.parametrize("family", FORMATS)
@pytest.mark.parametrize("thinks", [None, "may", "does"])
def test_a_reply_with_a_form_and_tools_is_of_the_form_or_calls_and_nothing_else(family, thinks):
    format_, rng = FORMATS[family], random.Random(f"{family} {thinks} form")
    num = {"form": 0, "calls": 0}
    for index, kind in enumerate(list(FORMS) * 8):
        make = lambda: None if thinks is None else ReasoningSplitter(is_open=thinks == "does")  # noqa: E731
        walk = Walk(format_, make(), form=FORMS[kind])
        if thinks == "does" or (thinks and rng.random() < 0.5):
            assert walk.take(b"hm</think>" if thinks == "does" else b"<think>hm</think>")
        assert walk.take(format_.opening.encode() if index % 2 else {"json": b"[", "regex": b"1", "choice": b"<"}[kind])
        for _ in range(600):
            if walk.may_end() or not (allowed := walk.allowed()):
                break
            if (shape := format_.shape) is not None and rng.random() < 0.2:
                walk.take((closing_of(shape) or shape.end).encode())
                continue
            wanted = [id_ for id_ in b'"}]' if id_ in allowed]
            walk.take([rng.choice(wanted if wanted and rng.random() < 0.6 else allowed)])
        if not walk.may_end():
            continue
        calls = calls_of(format_, walk.text, make())
        splitter = make()
        text = walk.text
        if splitter is not None:
            text = splitter.feed(text).content + splitter.finish().content
        if calls:
            num["calls"] += 1
            assert all(VALIDATOR.is_valid(json.loads(said)) for name, said in calls if name == "weather"), walk.text
            parser = ToolCallParser(format_, {"weather", "time"}, schemas={"weather": SCHEMA}, strict={"weather"})
            assert not gather([*parser.feed(text), *parser.finish()])[0].strip(), walk.text
        else:
            num["form"] += 1
            assert has_form(text.lstrip() if thinks else text, kind), walk.text
    assert min(num.values()) > 1


MIXED = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "code": {"type": "string", "pattern": r"^[A-Z]\/[0-9]+$", "maxLength": 5},
        "unit": {"$ref": "#/$defs/Unit"},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "near": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
        "note": {"type": ["string", "null"], "maxLength": 4},
        "warm": {"type": "boolean"},
    },
    "required": ["city", "code", "unit", "near"],
    "additionalProperties": False,
    "$defs": {"Unit": {"enum": ["°C", "a\nb"], "type": "string"}},
}


@pytest.mark.parametrize("family", FORMATS)
def test_what_a_random_model_must_call_is_read_as_one_call_of_the_schema(family):
    format_, rng = FORMATS[family], random.Random(family)
    tools = [
        {"type": "function", "function": {"name": name, "parameters": MIXED}} for name in ("weather", "weather_more")
    ]
    validator = jsonschema.Draft202012Validator(MIXED)
    closing = closing_of(format_.shape)
    num_whole = 0
    for _ in range(15):
        walk = Walk(format_, one_call_of=tools)
        for _ in range(1500):
            if walk.may_end() or not (allowed := walk.allowed()):
                break
            if closing is not None and rng.random() < 0.1:
                walk.take(closing.encode())
                continue
            wanted = [id_ for id_ in b'"}]>' if id_ in allowed] if rng.random() < 0.5 else []
            walk.take([rng.choice(wanted or allowed)])
        if not walk.may_end():
            continue
        num_whole += 1
        parser = ToolCallParser(
            format_,
            {"weather", "weather_more"},
            schemas={"weather": MIXED, "weather_more": MIXED},
            begun_with=format_.beginning,
        )
        text = walk.text if closing is not None else walk.text + "\n"
        content, (call,) = gather([*parser.feed(text), *parser.finish()])
        assert not content.strip()
        assert call.name in ("weather", "weather_more")
        assert validator.is_valid(json.loads(call.arguments)), walk.text
    assert num_whole > 5


NESTED = {
    "type": "object",
    "properties": {
        "tree": {"$ref": "#/$defs/Tree"},
        "size": {"anyOf": [{"type": "integer", "minimum": 3}, {"enum": ["small", "large", None]}]},
        "pairs": {
            "type": "array",
            "items": {"type": "array", "items": {"type": "number"}, "maxItems": 2},
            "minItems": 1,
        },
        "free": {"type": "object"},
    },
    "required": ["size", "pairs"],
    "additionalProperties": False,
    "$defs": {
        "Tree": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "trees": {"type": "array", "items": {"$ref": "#/$defs/Tree"}}},
            "required": ["name"],
            "additionalProperties": False,
        }
    },
}


@pytest.mark.parametrize("family", ["functiongemma", "gemma4"])
def test_objects_with_bare_keys_are_held_to_schemas_that_nest_and_refer_to_themselves(family):
    format_, rng = FORMATS[family], random.Random(family)
    tools = [{"type": "function", "function": {"name": "weather", "parameters": NESTED}}]
    validator, seen = jsonschema.Draft202012Validator(NESTED), set()
    for _ in range(80):
        walk = Walk(format_, one_call_of=tools)
        for _ in range(600):
            if walk.may_end() or not (allowed := walk.allowed()):
                break
            if rng.random() < 0.3:
                walk.take(closing_of(format_.shape).encode())
                continue
            wanted = [id_ for id_ in b"}]" if id_ in allowed] if rng.random() < 0.6 else []
            walk.take([rng.choice(wanted or allowed)])
        if walk.may_end():
            parser = ToolCallParser(format_, {"weather"}, schemas={"weather": NESTED}, begun_with=format_.beginning)
            _, (call,) = gather([*parser.feed(walk.text), *parser.finish()])
            said = json.loads(call.arguments)
            assert validator.is_valid(said), walk.text
            seen |= {*said, *(type(said["size"]).__name__,)}
            seen |= {"nested"} if said.get("tree", {}).get("trees") else set()
    assert seen == {"tree", "size", "pairs", "free", "int", "str", "NoneType", "nested"}


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"properties": {"a b": {"type": "string"}}, "required": ["a b"]}, "'a b'"),
        ({"properties": {"when": {"type": "string", "format": "date"}}}, "'format'"),
        ({"properties": {"x": {"type": "array", "uniqueItems": True}}}, "'uniqueItems'"),
        ({"properties": {"x": {"allOf": [{"type": "string"}]}}}, "'allOf'"),
        ({"properties": {"x": {"enum": [[1]]}}}, "'enum'"),
    ],
)
def test_what_objects_with_bare_keys_cannot_be_held_to_is_refused_for_strict_tools_only(schema, named):
    format_ = FORMATS["gemma4"]
    tokenizer: Any = Walk(format_).tokenizer
    function = {"name": "weather", "parameters": {"type": "object", **schema}}
    call_grammar(format_, [*TOOLS, {"type": "function", "function": function}], tokenizer)
    with pytest.raises(InvalidRequest, match=named):
        call_grammar(format_, [{"type": "function", "function": {**function, "strict": True}}], tokenizer)


DEEP: dict[str, Any] = {}
for _ in range(250):
    DEEP = {"type": "object", "properties": {"deeper": DEEP}}


@pytest.mark.parametrize("family", ["gemma4", "qwen3_coder"])
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": 5},
        {"type": "string", "pattern": [None]},
        {"enum": 3},
        {"anyOf": -1},
        {"type": "array", "minItems": {}},
        {"type": "array", "maxItems": "many"},
        DEEP,
    ],
    ids=lambda schema: "deep" if schema is DEEP else str(schema),
)
def test_what_is_no_schema_is_refused_for_strict_tools_and_leaves_others_free(family, schema):
    format_ = FORMATS[family]
    tokenizer: Any = Walk(format_).tokenizer
    parameters = {"type": "object", "properties": {"x": schema}}
    free, strict = (
        {"type": "function", "function": {"name": "odd", "parameters": parameters, "strict": is_strict}}
        for is_strict in (False, True)
    )
    one_call_grammar(format_, [free], tokenizer)
    if family == "gemma4" or schema.get("type") == "string":  # else it is a part in JSON, which the compiler sees to
        with pytest.raises(InvalidRequest) as caught:
            one_call_grammar(format_, [strict], tokenizer)
        assert caught.value.param == "structured_outputs"


ROME = '{"city": "Rome", "days": 2}'
WRONG = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
SCRIPT = {
    "user: rome": f'Yes.\n<tool_call>\n{{"name": "weather", "arguments": {ROME}}}\n</tool_call>',
    "user: wrong": f"Yes.\n{WRONG}",
    "user: bare": '```json\n{"name": "weather", "arguments": {"city": "Rome"}}\n```',
    "user: think": f"<think>\nI could say {WRONG}, but no.\n</think>\n\nHello.",
    "user: hello": "Hello! 1 < 2.",
    "user: call": WRONG,
    "user: think and call": f"<think>\nLet me see: {{}}.\n</think>\n\n{WRONG}",
    "user: form": '{"answer": 12}',
    "user: think and say": '<think>\nEasy.\n</think>\n\n{"answer": 12}',
}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    sizes: dict[str, Any] = {"num_blocks": 256, "max_context": 2048}
    engines = {
        "toy": scripted_engine(SCRIPT, **sizes),
        "thinker": scripted_engine(SCRIPT, ChattyToy(chat_template=ThinkingTemplate()), **sizes),
    }
    with serving(engines) as url:
        yield url
    for engine in engines.values():
        asyncio.run(engine.aclose())


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def chat(client: OpenAI, question: str, model: str = "toy", tools: Any = TOOLS) -> Any:
    messages: Any = [{"role": "user", "content": question}]
    return client.chat.completions.create(
        model=model, messages=messages, tools=tools, temperature=0, max_tokens=600, logprobs=True
    ).choices[0]


@pytest.mark.parametrize("question", ["wrong", "bare"])
def test_a_call_that_would_be_wrong_is_held_to_its_schema(client, question):
    (call,) = chat(client, question).message.tool_calls
    assert call.function.name == "weather"
    jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
    loose = [tool(name, strict=False) for name in ("weather", "time")]
    (call,) = chat(client, question, tools=loose).message.tool_calls
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(json.loads(call.function.arguments), SCHEMA)


def test_a_call_that_is_right_and_an_answer_without_one_are_what_they_were(client):
    loose = [tool(name, strict=False) for name in ("weather", "time")]
    for question, model in (("rome", "toy"), ("hello", "toy"), ("hello", "thinker"), ("think", "thinker")):
        strict, other = chat(client, question, model), chat(client, question, model, loose)
        assert strict.message.content == other.message.content
        assert strict.finish_reason == other.finish_reason
        if question != "rome":  # a call's tokens have no other way to go
            assert strict.logprobs == other.logprobs
        told = [[call.function for call in choice.message.tool_calls or ()] for choice in (strict, other)]
        assert told[0] == told[1]


def test_the_other_apis_strict_tools_are_held_too(client, url):
    given: Any = [{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}]
    response = client.responses.create(model="toy", input="wrong", tools=given, temperature=0)
    call = response.output[-1]
    assert call.type == "function_call"
    jsonschema.validate(json.loads(call.arguments), SCHEMA)
    with Anthropic(base_url=url, api_key="none", max_retries=0) as anthropic:
        message = anthropic.messages.create(
            model="toy",
            max_tokens=600,
            messages=[{"role": "user", "content": "wrong"}],
            tools=[{"name": "weather", "input_schema": SCHEMA, "strict": True}],
        )
    block = message.content[-1]
    assert block.type == "tool_use"
    jsonschema.validate(block.input, SCHEMA)


def test_a_schema_that_cannot_be_held_is_refused_by_name(client):
    bad = {"type": "function", "function": {"name": "it", "strict": True, "parameters": {"type": "nonsense"}}}
    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, "hello", tools=[bad])
    assert refused.value.param == "tools"


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_schema_that_cannot_be_compiled_is_refused_with_the_tool_and_the_place(client, choice):
    wrong = {"type": "object", "properties": {"days": {"type": "array", "items": {"type": "nothing"}}}}
    bad = {"type": "function", "function": {"name": "it", "strict": True, "parameters": wrong}}
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(
            model="toy",
            messages=[{"role": "user", "content": "hello"}],
            tools=[tool("weather", strict=True), bad],
            tool_choice=choice,
        )
    assert refused.value.param == "tools"
    said = "tools.1 (it): the JSON Schema cannot be compiled: at #/properties/days/items: Invalid type: nothing"
    assert refused.value.body["message"] == said


@pytest.mark.parametrize("strict", [False, True])
def test_an_answer_that_has_a_form_may_be_a_call_instead(client, strict):
    schema = {"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"]}
    form: Any = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
    tools: Any = [tool(name, strict=strict) for name in ("weather", "time")]

    def ask(question: str, model: str, **fields: Any) -> Any:
        messages: Any = [{"role": "user", "content": question}]
        given: Any = {"response_format": form, "tools": tools, "temperature": 0, "max_tokens": 600, **fields}
        return client.chat.completions.create(model=model, messages=messages, **given).choices[0].message

    for question, model in (("call", "toy"), ("think and call", "thinker")):
        message = ask(question, model)
        (call,) = message.tool_calls
        assert not (message.content or "").strip()
        assert VALIDATOR.is_valid(json.loads(call.function.arguments)) is strict
    for question, model in (("form", "toy"), ("think and say", "thinker")):
        message = ask(question, model)
        assert message.tool_calls is None
        assert isinstance(json.loads(message.content)["answer"], int)
    assert ask("call", "toy", tool_choice="none").tool_calls is None


def test_a_form_that_is_wrong_is_not_blamed_on_the_tools_and_a_grammar_of_ones_own_is_refused(client):
    messages: Any = [{"role": "user", "content": "hello"}]
    bad: Any = {"type": "json_schema", "json_schema": {"name": "it", "schema": {"type": "nonsense"}}}
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="toy", messages=messages, tools=TOOLS, response_format=bad)
    assert refused.value.param == "response_format"
    with pytest.raises(openai.BadRequestError, match="grammar of its own") as refused:
        client.chat.completions.create(
            model="toy", messages=messages, tools=TOOLS, extra_body={"structured_outputs": {"grammar": 'start: "a"'}}
        )
    assert refused.value.param == "tools"
