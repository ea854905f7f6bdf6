"""Every answer has the form that was asked for, and a form that cannot be is refused with the place."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace

import jsonschema
import numpy as np
import pytest

from engine.toy import EOS, ByteTokenizer
from spolia.errors import InvalidRequest
from spolia.generation import SamplingParams, StructuredOutput, Vocabulary
from spolia.generation.pipeline import build_pipeline

VOCAB_SIZE = 257
TOKENIZER = ByteTokenizer()
VOCABULARY = Vocabulary(
    VOCAB_SIZE,
    eos_token_ids=(EOS,),
    encode=TOKENIZER.encode,
    token_bytes=TOKENIZER.token_bytes,
    is_special=TOKENIZER.is_special,
)


CLOSING = b'}]",:'  # what brings JSON to its end, the surest first


def write(form, seed=0, max_tokens=400, likely="", ends_after=10**9):
    """What a model writes whose logits are noise, with `likely` characters favoured; None if it did not end.

    After `ends_after` tokens it wants to come to an end, as models do.
    """
    rng = np.random.default_rng(seed)
    bias = np.zeros(VOCAB_SIZE, np.float32)
    bias[list(likely.encode())] += 3
    params = SamplingParams(structured_outputs=form, temperature=0.0)
    pipeline = build_pipeline(params, VOCABULARY, max_tokens=max_tokens)
    ids = np.zeros(1 + max_tokens, np.int32)
    pipeline.follow(ids, 1, seed=seed)
    for position in range(1, 1 + max_tokens):
        row = (rng.standard_normal((1, VOCAB_SIZE)) + bias).astype(np.float32)
        if position > ends_after:
            row[0, EOS] += 60
            row[0, list(CLOSING)] += np.arange(len(CLOSING), 0, -1, dtype=np.float32) * 8
        pipeline.process(row, position)
        assert np.isfinite(row.max())
        ids[position] = row.argmax()
        is_complete = pipeline.advance(position + 1)
        if ids[position] == EOS or is_complete:
            end = position + (ids[position] != EOS)
            return bytes(ids[1:end].tolist()).decode()
    return None


ENDS = '"}],0:'  # what brings JSON to its end


def random_schema(rng, depth=0):
    """A schema of the features that llguidance documents."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const"]
    kind = rng.choice(kinds + ["object", "array", "anyOf"] * 2 if depth < 3 else kinds)
    match kind:
        case "string":
            extra = [
                {},
                {"minLength": 1, "maxLength": 6},
                {"pattern": "^[a-f]{2,5}$"},
                {"format": "ipv4", "maxLength": 15},
            ]
            return {"type": "string", "maxLength": 12} | rng.choice(extra)
        case "integer":
            low = rng.randrange(-50, 50)
            return {"type": "integer", "minimum": low, "maximum": low + rng.randrange(1, 90)}
        case "number":
            return {"type": "number", "minimum": -2, "exclusiveMaximum": 3.5}
        case "enum":
            return {"enum": rng.sample(["red", "green", 7, None, True, "ü"], 3)}
        case "const":
            return {"const": rng.choice(["fixed", 12, {"a": [1]}])}
        case "anyOf":
            return {"anyOf": [random_schema(rng, depth + 1) for _ in range(2)]}
        case "array":
            low = rng.randrange(3)
            return {"type": "array", "items": random_schema(rng, depth + 1), "minItems": low, "maxItems": low + 2}
        case "object":
            names = rng.sample(["name", "age", "tags", "x y", "é"], rng.randrange(1, 4))
            properties = {name: random_schema(rng, depth + 1) for name in names}
            required = rng.sample(names, rng.randrange(len(names) + 1))
            return {
                "type": "object",
                "properties": properties,
                "required": required,
                "additionalProperties": rng.choice([False, {"type": "boolean"}]),
            }
        case _:
            return {"type": kind}


@pytest.mark.parametrize("batch", range(10))
def test_500_random_schemas_give_documents_that_validate(batch):
    for seed in range(50 * batch, 50 * (batch + 1)):
        schema = random_schema(random.Random(seed))
        text = write({"json": schema}, seed, likely=ENDS, ends_after=100)
        assert text is not None, f"cut: {schema}"
        jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())


TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"v": {"enum": [1, 2]}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
            "required": ["v", "next"],
            "additionalProperties": False,
        }
    },
}
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
# By keyword that llguidance documents: schemas in which it decides. Formats are those that `jsonschema` can check.
CORPUS = {
    "type": [{"type": kind} for kind in ("null", "boolean", "integer", "number")]
    + [{"type": ["boolean", "null"]}, {"type": "string", "maxLength": 5}],
    "true and false": [
        {"type": "array", "items": True, "maxItems": 1, "prefixItems": [{"type": "null"}]},
        {"type": "object", "properties": {"a": DIGIT, "b": False}, "required": ["a"], "additionalProperties": False},
    ],
    "enum, const": [
        {"enum": ["a", 1, None, {"b": [2]}]},
        {"const": {"x": [1, "é"]}},
        {"type": "string", "enum": ["q"]},
    ],
    "anyOf": [{"anyOf": [{"type": "null"}, {"type": "array", "items": DIGIT, "maxItems": 2}]}],
    "oneOf": [{"oneOf": [{"type": "boolean"}, {"const": "x"}, DIGIT]}],
    "allOf": [
        {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 7}]},
        {"allOf": [{"properties": {"a": DIGIT}, "required": ["a"]}, {"properties": {"b": {"type": "null"}}}]}
        | {"type": "object", "additionalProperties": False, "properties": {"a": {}, "b": {}}},
    ],
    "$ref, $defs": [TREE, {"$ref": "#/definitions/d", "definitions": {"d": DIGIT}}],
    "items, prefixItems": [
        {"type": "array", "items": DIGIT, "minItems": 1, "maxItems": 4},
        {"type": "array", "prefixItems": [DIGIT, {"const": "b"}], "items": False, "minItems": 2},
        {
            "type": "array",
            "prefixItems": [{"type": "null"}],
            "items": {"type": "boolean"},
            "minItems": 2,
            "maxItems": 4,
        },
    ],
    "minItems, maxItems": [{"type": "array", "items": DIGIT, "minItems": low, "maxItems": low + 2} for low in range(3)],
    "properties, required": [
        {"type": "object", "properties": {"a": DIGIT, "b": {"type": "null"}}, "required": names}
        | {"additionalProperties": False}
        for names in ([], ["b"], ["a", "b"])
    ],
    "additionalProperties": [{"type": "object", "additionalProperties": DIGIT}],
    "patternProperties": [
        {"type": "object", "patternProperties": {"^n[0-9]$": DIGIT}, "additionalProperties": False},
        {"type": "object", "patternProperties": {"^n": {"type": "null"}}, "properties": {"a": DIGIT}, "required": ["a"]}
        | {"additionalProperties": False},
    ],
    "minLength, maxLength": [{"type": "string", "minLength": low, "maxLength": low + 3} for low in (0, 1, 7)],
    "pattern": [
        {"type": "string", "pattern": "^[a-f]{2,5}(-[0-9]+)?$", "maxLength": 12},
        {"type": "string", "pattern": "^(yes|no)$"},
        {"type": "string", "pattern": "b", "maxLength": 6},
    ],
    "format": [
        {"type": "string", "format": name} for name in ("date", "ipv4", "ipv6", "uuid", "time", "date-time", "duration")
    ]
    + [{"type": "string", "format": name, "maxLength": 20} for name in ("email", "hostname")],
    "minimum, maximum": [
        {"type": "integer", "minimum": -120, "maximum": -7},
        {"type": "integer", "exclusiveMinimum": 9, "exclusiveMaximum": 12},
        {"type": "number", "minimum": -0.5, "maximum": 0.25},
        {"type": "number", "exclusiveMinimum": 1, "exclusiveMaximum": 1.5},
    ],
    "multipleOf": [
        {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 100},
        {"type": "integer", "multipleOf": 25},
    ],
}


@pytest.mark.parametrize("keyword", CORPUS)
def test_documents_of_each_keyword_validate_and_end(keyword):
    for schema in CORPUS[keyword]:
        written = {write({"json": schema}, seed, likely=ENDS, ends_after=60) for seed in range(8)}
        assert None not in written, f"cut: {schema}"
        for text in written:
            # A year 0 and leap seconds on any day are of RFC 3339; Python's dates and the checker lack them.
            plain = text.replace('"0000-', '"2000-').replace(":60", ":59")
            jsonschema.Draft202012Validator(
                schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
            ).validate(json.loads(plain))


def allows(schema, text):
    """Whether a document is one that an answer may be."""
    pipeline = build_pipeline(SamplingParams(structured_outputs={"json": schema}), VOCABULARY, max_tokens=99)
    ids = np.array([0, *text.encode()], np.int32)
    pipeline.follow(ids, 1, seed=0)
    for position in range(1, len(ids) + 1):
        row = np.zeros((1, VOCAB_SIZE), np.float32)
        pipeline.process(row, position)
        wanted = EOS if position == len(ids) else ids[position]
        if row[0, wanted] == -np.inf:
            return position == len(ids) and pipeline.advance(position)
        pipeline.advance(position + 1)
    return True


@pytest.mark.parametrize("names", [("exclusiveMinimum", "maximum"), ("minimum", "exclusiveMaximum")], ids=str)
@pytest.mark.parametrize("both", [False, True])
def test_no_number_beyond_its_bounds_is_allowed_however_near_they_are(names, both):
    names = ("exclusiveMinimum", "exclusiveMaximum") if both else names
    numbers = ["-1", "-1.0", "-0.75", "-0.5", "-0", "0", "0.0", "0.25", "0.5", "0.75", "1", "1.0", "1.25"]
    bounds = [-1, -0.5, 0, 0.25, 0.75, 1, 2.5]
    for low in bounds:
        for high in (bound for bound in bounds if bound > low):
            schema = {"anyOf": [{"type": "number", names[0]: low, names[1]: high}]}
            for number in numbers:
                is_valid = jsonschema.Draft202012Validator(schema).is_valid(json.loads(number))
                assert not allows(schema, number) or is_valid, (number, schema)
    inside = {"type": "number", names[0]: 0, names[1]: 0.5}
    assert allows(inside, "0.25")


def test_any_json_object_is_an_object():
    for seed in range(20):
        text = write({"json_object": True}, seed, likely=ENDS + "}}")
        assert text is None or isinstance(json.loads(text), dict)
    assert sum(write({"json_object": True}, seed, likely=ENDS) is not None for seed in range(20)) > 10


@pytest.mark.parametrize("pattern", [r"[a-c]{3}-[0-9]+", r"(yes|no)!*", r"[a-z]+@[a-z]+\.com", "é{2,4}ü"])
def test_an_answer_matches_the_whole_regular_expression(pattern):
    for seed in range(10):
        text = write({"regex": pattern}, seed)
        assert text is None or re.fullmatch(pattern, text)
    assert any(write({"regex": pattern}, seed) for seed in range(10))


def test_an_answer_is_one_of_the_choices_and_all_occur():
    choices = ['say "no"', "yes", "yes, please\nnow", "ü"]
    assert {write({"choice": choices}, seed) for seed in range(60)} == set(choices)


GBNF = """
root ::= sum
sum ::= term (("+" | "-") term)*
term ::= [0-9]+ | "(" sum ")"
"""
LARK = """
start: sum
sum: term (("+" | "-") term)*
term: /[0-9]+/ | "(" sum ")"
"""


@pytest.mark.parametrize("grammar", [GBNF, LARK], ids=["gbnf", "lark"])
def test_an_answer_follows_a_grammar(grammar):
    written = {write({"grammar": grammar}, seed, likely=")") for seed in range(20)} - {None}
    assert len(written) > 5
    for text in written:
        assert re.fullmatch(r"[0-9+()\-]+", text)
        assert text.count("(") == text.count(")")


def test_white_space_ends_even_if_the_model_likes_it_best():
    text = write({"json": {"type": "array", "items": {"const": 1}, "maxItems": 3}}, likely=" \n\t\r")
    assert isinstance(json.loads(text), list)


@pytest.mark.parametrize(
    ("form", "place"),
    [
        ({"json": {"type": "objekt"}}, "at #: .*objekt"),
        ({"json": {"properties": {"a": {"items": {"type": "strin"}}}}}, "at #/properties/a/items: .*strin"),
        ({"json": {"anyOf": [{"type": "null"}, {"pattern": "(["}]}}, "at #/anyOf/1: .*regex"),
        ({"json": {"$defs": {"t": {"not": {}}}, "$ref": "#/$defs/t"}}, r"at #/\$defs/t: .*not"),
        ({"json": {"$ref": "#/nowhere"}}, "at #: .*nowhere"),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "minimum"),
        ({"json": '{"type": '}, "no JSON"),
        ({"json": {"type": "string"}, "whitespace_pattern": "("}, "unclosed group"),
        ({"regex": "(ab"}, r"regex cannot be compiled: at character 1, '\(ab': unclosed group"),
        ({"regex": "é/\n(b"}, r"at character 4, '\(b': unclosed"),
        ({"regex": "[a-f]{2}[z-a]"}, r"at character 10, 'z-a\]': invalid character class range"),
        ({"regex": "a(?=b)"}, r"at character 2, '\(\?=b\)': look-around"),
        ({"regex": r"ab\q"}, "at character 3, .*unrecognized escape"),
        ({"grammar": "start: nothing"}, r"at 1\(8\): unknown name: \"nothing\""),
        ({"grammar": 'start: a\na: ("b"\n'}, r"2\(8\): Expected token '\)'"),
        ({"grammar": "start: WORD\nWORD: /a(b/"}, r"at 2\(7\): .*a\(b\n +\^\nerror: unclosed group"),
        ({"grammar": 'start: %json {"type": "odd"}'}, r"at 1\(8\): .*Invalid type: odd"),
        ({"grammar": 'x: "a"'}, "no start rule found"),
        ({"grammar": "start: start"}, "grammar cannot be compiled: it allows no text at all$"),
        ({"grammar": 'root ::= "a" ('}, r"grammar cannot be compiled: .* at line 1, .*\('"),
        ({"grammar": 'root ::= "a"\n\nb ::= "c" | )'}, r"Expected name at line 3, .* \^ '\)'"),
        ({"grammar": 'root ::= "a" b\nb ::= "c" digit'}, "at line 2: rule 'digit' is not there"),
        ({"grammar": 'root ::= "a" a-b\na-b ::= [z-a]'}, "at line 2, in rule 'a-b': invalid character class range"),
        ({"grammar": 'root ::= "a"{2,1}'}, "at line 1, in rule 'root': range end must be"),
        ({"grammar": 'rot ::= "a"'}, "No 'root' rule found"),
    ],
    ids=str,
)
def test_a_form_that_cannot_be_compiled_is_refused_with_the_place(form, place):
    """The place in what was sent, also where thoughts come before it."""
    for after in (None, "</think>"):
        with pytest.raises(InvalidRequest, match=re.compile(place, re.DOTALL)) as caught:
            VOCABULARY.grammars.compile(replace(StructuredOutput.of(form), after=after))
        assert caught.value.param == "structured_outputs"


def test_the_place_in_a_regex_is_found_as_fast_as_it_is_long_whatever_is_escaped_before():
    """A quadratic search would take minutes here, and all who want a form would wait for it."""
    rng = random.Random(3)
    parts = ["a", "é", "/", "\n", r"\/", r"\.", r"\\", "\\\n"]
    for length in (*range(12), 200_000):
        before = "".join(rng.choice(parts) for _ in range(length))
        place = rf"at character {len(before) + 1}, '\(b': unclosed group"
        with pytest.raises(InvalidRequest, match=place):
            VOCABULARY.grammars.compile(StructuredOutput(regex=f"{before}(b"))


AFTER = [
    ({"regex": "[ab]{2}"}, "[ab]{2}"),
    ({"choice": ["yes", "no/\n"]}, "yes|no/\n"),
    ({"grammar": 'root ::= "x" y\ny ::= [0-9]{3}'}, "x[0-9]{3}"),
    ({"grammar": "start: A A\nA: /[ab]c/"}, "([ab]c){2}"),
    ({"json": {"enum": [12, "é"]}}, '12|"é"'),
    ({"json_object": True}, r"\{.*\}"),
]


@pytest.mark.parametrize(("form", "pattern"), AFTER, ids=str)
@pytest.mark.parametrize("mark", ["</", "\n."])
def test_a_form_may_begin_after_a_text(form, pattern, mark):
    """What comes before is free, and ends where the text comes about first."""
    found = 0
    for seed in range(12):
        text = write(replace(StructuredOutput.of(form), after=mark), seed, max_tokens=1_000, likely=mark + ENDS)
        if text is not None:
            found += 1
            assert re.fullmatch(pattern, text.partition(mark)[2].lstrip(), re.DOTALL), text
    assert found > 3


@pytest.mark.parametrize(
    "form",
    [
        {},
        {"json": {}, "regex": "a"},
        {"regex": ""},
        {"regex": 5},
        {"choice": []},
        {"choice": [5]},
        {"xml": 1},
        7,
        "json",
    ],
    ids=str,
)
def test_a_form_that_is_none_is_refused(form):
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(structured_outputs=form)
    assert caught.value.param == "structured_outputs"


def test_a_compiled_form_is_not_changed_by_its_use():
    texts = [write({"regex": "[ab]{8}"}, seed=3) for _ in range(2)]
    assert texts[0] == texts[1]


def test_schemas_that_allow_all_or_nothing():
    texts = [write({"json": True}, seed, likely=ENDS) for seed in range(10)]
    assert any(texts)
    for text in filter(None, texts):
        json.loads(text)
    with pytest.raises(InvalidRequest, match="nothing satisfies"):
        VOCABULARY.grammars.compile(StructuredOutput(json=False))
