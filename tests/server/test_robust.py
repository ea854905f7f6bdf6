"""No body makes an endpoint fail: whatever is sent, the answer is 2xx or 4xx, in the shape of its API."""

from __future__ import annotations

import json

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spolia.server.anthropic.schema import CountRequest, MessagesRequest
from spolia.server.llamacpp.schema import CompletionRequest, InfillRequest, TemplateRequest
from spolia.server.ollama.schema import ChatRequest, GenerateRequest, ModelRequest
from spolia.server.responses.schema import ResponsesRequest
from spolia.server.schema import DetokenizeRequest, TokenizeRequest

BODIES = {
    "/v1/responses": (ResponsesRequest, {"input": "x", "max_output_tokens": 1}),
    "/v1/messages": (MessagesRequest, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}),
    "/v1/messages/count_tokens": (CountRequest, {"messages": [{"role": "user", "content": "x"}]}),
    "/api/chat": (ChatRequest, {"messages": [{"role": "user", "content": "x"}], "options": {"num_predict": 1}}),
    "/api/generate": (GenerateRequest, {"prompt": "x", "options": {"num_predict": 1}}),
    "/api/show": (ModelRequest, {}),
    "/completion": (CompletionRequest, {"prompt": "x", "n_predict": 1}),
    "/infill": (InfillRequest, {"input_prefix": "x", "n_predict": 1}),
    "/apply-template": (TemplateRequest, {"messages": [{"role": "user", "content": "x"}]}),
    "/tokenize": (TokenizeRequest, {"prompt": "x"}),
    "/detokenize": (DetokenizeRequest, {"tokens": [1]}),
}
# fmt: off
WORDS = st.sampled_from(
    ["type", "text", "content", "role", "user", "assistant", "tool", "tool_use", "tool_result", "id", "name",
     "input", "function", "thinking", "arguments", "function_call", "function_call_output", "output",
     "call_id", "message", "input_text", "format"]
)
# fmt: on
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS | st.text(max_size=5), inner, max_size=4),
    max_leaves=10,
)


@pytest.mark.parametrize("path", BODIES)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_body_makes_an_endpoint_fail(toy_url, path, data):
    kind, right = BODIES[path]
    fields = data.draw(st.dictionaries(st.sampled_from([*kind.__struct_fields__, "x"]), values, max_size=4))
    for name in ("max_tokens", "n_predict", "max_output_tokens", "options"):
        fields.pop(name, None)  # an honest request for much would take its time
    response = httpx.post(toy_url + path, content=json.dumps({**right, **fields}).encode(), timeout=30)
    assert response.status_code < 500, (fields, response.text)
    if response.status_code >= 400:
        assert "error" in response.json()
        assert (response.json().get("type") == "error") == path.startswith("/v1/messages")
        assert isinstance(response.json()["error"], str) == path.startswith("/api/")


WRONG = [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"model": 5}']


@pytest.mark.parametrize("path", [*BODIES, "/api/pull"])
@pytest.mark.parametrize("body", WRONG, ids=lambda body: repr(body[:12]))
def test_what_is_not_a_body_is_400(toy_url, path, body):
    assert httpx.post(toy_url + path, content=body).status_code == 400
