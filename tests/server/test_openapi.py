"""Every operation of the OpenAPI document, with parameters and bodies made from it and at random: no 5xx."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spolia.server import ServerConfig, create_app

from .harness import chatty_engine, serving
from .test_robust import values

# Would take their time, honestly: long answers, and what goes on for ever or to the network.
LONG = frozenset({"max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict", "min_tokens", "min_length",
                  "min_new_tokens", "n", "best_of", "options", "num_predict", "ttl", "max_time"})  # fmt: skip
NOT_TRIED = frozenset({"/v1/cache/events", "/api/pull"})
SHORT = {"max_tokens": 2, "n_predict": 2, "max_output_tokens": 2, "options": {"num_predict": 2}}

QUERIES = st.dictionaries(
    st.sampled_from(["model", "action", "after", "cache_salt", "x"]),
    st.sampled_from(["toy", "save", "restore", "erase", "-1", "x", ""]),
    max_size=2,
)


def document() -> dict[str, Any]:
    engine = chatty_engine()
    try:
        shown: dict[str, Any] = create_app({"toy": engine}).openapi()
        return shown
    finally:
        asyncio.run(engine.aclose())


DOCUMENT = document()
OPERATIONS = [
    (method, path) for path, operations in DOCUMENT["paths"].items() for method in operations if path not in NOT_TRIED
]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    engine = chatty_engine(num_blocks=256)
    config = ServerConfig(slot_save_path=tmp_path_factory.mktemp("slots"))
    with (
        pytest.MonkeyPatch.context() as patch,  # models are made and deleted too, and not the user's
        serving({"toy": engine}, config) as url,
        httpx.Client() as client,
    ):
        patch.setenv("SPOLIA_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield url
        assert client.get(f"{url}/health").status_code == 200  # after all of it
    asyncio.run(engine.aclose())


def resolved(schema: dict[str, Any]) -> dict[str, Any]:
    name = schema.get("$ref", "").rpartition("/")[2]
    return DOCUMENT["components"]["schemas"][name] if name else schema


def of_schema(schema: dict[str, Any], depth: int = 0) -> st.SearchStrategy[Any]:
    """Mostly what the schema wants; anything at all where it is silent, or where it has gone deep."""
    schema = resolved(schema)
    if depth > 3:
        return values
    if "anyOf" in schema:
        return st.one_of([of_schema(each, depth) for each in schema["anyOf"]])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    match schema.get("type"):
        case "string":
            return st.text(max_size=8)
        case "integer":
            return st.integers(-3, 300)
        case "number":
            return st.floats(-1, 3)
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
        case "array":
            return st.lists(of_schema(schema.get("items") or {}, depth + 1), max_size=3)
        case "object" if "properties" in schema:
            return fields_of(schema, depth + 1)
    return values


@st.composite
def fields_of(draw: st.DrawFn, schema: dict[str, Any], depth: int = 0) -> dict[str, Any]:
    known = {name: each for name, each in schema["properties"].items() if name not in LONG}
    chosen = draw(st.lists(st.sampled_from(sorted(known)), max_size=5, unique=True)) if known else []
    names = {*chosen, *(name for name in schema.get("required", ()) if name in known)}
    return {name: draw(st.one_of(of_schema(known[name], depth), values)) for name in sorted(names)}


@pytest.mark.parametrize(("method", "path"), OPERATIONS, ids=str)
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_request_that_the_document_allows_or_does_not_makes_an_operation_fail(url, method, path, data):
    operation = DOCUMENT["paths"][path][method]
    place = path
    for parameter in operation.get("parameters", ()):
        if parameter["in"] == "path":
            value = data.draw(st.one_of(st.integers(-1, 3).map(str), st.text(min_size=1, max_size=8)))
            for spelt in (f"{{{parameter['name']}}}", f"{{{parameter['name']}:path}}"):
                place = place.replace(spelt, quote(value, safe=""))
    query = data.draw(QUERIES)
    if path == "/slots/{id_slot}":
        query["action"] = data.draw(st.sampled_from(["save", "restore", "erase"]))
    content = None
    if "requestBody" in operation:
        schema = resolved(operation["requestBody"]["content"]["application/json"]["schema"])
        body = {**data.draw(fields_of(schema)), **{k: v for k, v in SHORT.items() if k in schema["properties"]}}
        content = json.dumps(body).encode()
    reply = httpx.request(method.upper(), url + place, params=query, content=content, timeout=60)
    assert reply.status_code < 500, (place, query, content, reply.text)


def test_the_document_has_every_api():
    paths = set(DOCUMENT["paths"])
    assert {
        "/v1/chat/completions",
        "/v1/embeddings",
        "/v1/messages",
        "/v1/responses",
        "/api/chat",
        "/api/embed",
    } <= paths
    assert {"/completion", "/slots/{id_slot}", "/v1/sessions", "/v1/cache/pins"} <= paths
