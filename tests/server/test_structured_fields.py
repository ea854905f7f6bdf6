"""Every client's way of asking for a form is understood, and gives it."""

from __future__ import annotations

import json

import httpx
import pytest

SCHEMA = {"type": "object", "properties": {"ok": {"enum": [True]}}, "required": ["ok"], "additionalProperties": False}
GBNF = 'root ::= "ye" "s"+'


def ask(url, path="completions", **body):
    prompt = {"prompt": "x"} if path == "completions" else {"messages": [{"role": "user", "content": "x"}]}
    return httpx.post(
        f"{url}/v1/{path}",
        json={"max_tokens": 60, "temperature": 0, "logit_bias": {str(ord("}")): 50}, **prompt, **body},
        timeout=60,
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "it", "strict": True, "schema": SCHEMA}}},
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"structured_outputs": {"json": SCHEMA}},
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA)},
        {"json_schema": SCHEMA},
    ],
    ids=str,
)
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_a_schema_is_understood_however_it_is_sent(toy_url, path, fields):
    reply = ask(toy_url, path, **fields)
    assert reply.status_code == 200, reply.text
    choice = reply.json()["choices"][0]
    text = choice["text"] if path == "completions" else choice["message"]["content"]
    assert json.loads(text) == {"ok": True}
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"guided_choice": ["maybe"]}, "maybe"),
        ({"structured_outputs": {"choice": ["maybe"]}}, "maybe"),
        ({"guided_regex": "a{7}"}, "aaaaaaa"),
        ({"structured_outputs": {"regex": "a{7}"}}, "aaaaaaa"),
        ({"grammar": 'root ::= "a" "b"'}, "ab"),
        ({"guided_grammar": 'start: "a" "b"'}, "ab"),
        ({"structured_outputs": {"grammar": 'start: "a" "b"'}}, "ab"),
        ({"response_format": {"type": "text"}, "guided_choice": ["maybe"]}, "maybe"),
    ],
    ids=str,
)
def test_every_kind_of_form_is_understood(toy_url, fields, expected):
    reply = ask(toy_url, **fields)
    assert reply.status_code == 200, reply.text
    assert reply.json()["choices"][0]["text"] == expected


def test_any_json_object(toy_url):
    reply = ask(toy_url, "chat/completions", response_format={"type": "json_object"})
    assert json.loads(reply.json()["choices"][0]["message"]["content"]) == {}


def test_each_of_n_choices_has_the_form(toy_url):
    reply = ask(toy_url, temperature=2, n=3, seed=1, guided_regex="[abc]{20}")
    texts = [choice["text"] for choice in reply.json()["choices"]]
    assert len(set(texts)) == 3
    assert all(len(text) == 20 and set(text) <= set("abc") for text in texts)


def test_a_schema_that_cannot_be_compiled_is_400_that_says_where(toy_url):
    wrong = {"type": "object", "properties": {"list": {"type": "array", "items": {"type": "nothing"}}}}
    reply = ask(
        toy_url,
        "chat/completions",
        response_format={"type": "json_schema", "json_schema": {"name": "it", "schema": wrong}},
    )
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["param"] == "response_format"
    assert "#/properties/list/items" in error["message"]
    assert "nothing" in error["message"]


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
@pytest.mark.parametrize(
    ("fields", "param", "place"),
    [
        ({"guided_regex": "ab(c"}, "guided_regex", "at character 3, '(c': unclosed group"),
        ({"structured_outputs": {"regex": "ab(c"}}, "structured_outputs", "at character 3, '(c': unclosed group"),
        ({"guided_grammar": 'start: "a" x'}, "guided_grammar", 'at 1(8): unknown name: "x"'),
        ({"grammar": 'root ::= "a"\nb ::= "c" digit'}, "grammar", "at line 2: rule 'digit' is not there"),
        ({"grammar": 'root ::= "a"\nb ::= )'}, "grammar", "Expected name at line 2"),
        ({"guided_json": {"items": {"type": "odd"}}}, "guided_json", "at #/items: Invalid type: odd"),
        ({"json_schema": {"pattern": "("}}, "json_schema", "at #: regex parse error"),
    ],
    ids=str,
)
def test_a_form_that_cannot_be_compiled_is_400_that_says_where(toy_url, path, fields, param, place):
    reply = ask(toy_url, path, **fields)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["param"] == param
    assert error["message"].startswith(param)
    assert place in error["message"]
