"""Traces: what a collector gets, and that nothing is even imported without one."""

from __future__ import annotations

import asyncio
import gzip
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from spolia.server import ServerConfig
from spolia.tiers import HostBackend, Tier, TierUse

from .harness import chatty_engine, eventually, serving

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@contextmanager
def collector() -> Iterator[tuple[str, list[Any]]]:
    """A URL that takes OTLP, and the spans that have come."""
    spans: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            request = ExportTraceServiceRequest.FromString(body)
            for scope in [scope for resource in request.resource_spans for scope in resource.scope_spans]:
                spans.extend(scope.spans)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", spans
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def attributes(span: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, str(each.value.WhichOneof("value"))) for each in span.attributes}


def test_an_answer_is_a_span_below_the_clients_with_its_parts_below_it():
    host = TierUse(Tier("host", HostBackend(1 << 20)), "write_through")
    engine = chatty_engine(num_blocks=10, max_context=120, tiers=[host])
    with collector() as (endpoint, spans), serving({"toy": engine}, ServerConfig(traces=endpoint)) as url:
        headers = {"traceparent": f"00-{TRACE}-{SPAN}-01"}
        for letter in "aba":
            body = {"prompt": letter * 100, "max_tokens": 3, "temperature": 0.5, "seed": 7}
            httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60).raise_for_status()
            eventually(lambda: httpx.get(f"{url}/v1/cache/live").json()["tiers"][0]["num_bytes"] > 0)
        roots = lambda: [span for span in spans if span.name == "text_completion toy"]  # noqa: E731
        eventually(lambda: len(roots()) == 3, timeout_s=60)
    asyncio.run(engine.aclose())
    root = max(roots(), key=lambda span: span.start_time_unix_nano)
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE, SPAN)
    told = attributes(root)
    assert told["gen_ai.operation.name"] == "text_completion"
    assert [told[f"gen_ai.request.{name}"] for name in ("model", "temperature", "seed")] == ["toy", 0.5, 7]
    assert (told["gen_ai.usage.input_tokens"], told["gen_ai.usage.output_tokens"]) == (100, 3)
    assert told["gen_ai.usage.cache_read.input_tokens"] >= told["spolia.restored_tokens.host"] > 0
    children = {span.name: span for span in spans if span.parent_span_id == root.span_id}
    assert set(children) == {"queue", "prefill", "decode"}
    (restore,) = [span for span in spans if span.parent_span_id == children["queue"].span_id]
    assert restore.name == "restore"
    times = [children[name] for name in ("queue", "prefill", "decode")]
    assert root.start_time_unix_nano == times[0].start_time_unix_nano
    for before, after in pairwise(times):
        assert before.end_time_unix_nano == after.start_time_unix_nano
    assert abs(times[-1].end_time_unix_nano - root.end_time_unix_nano) < 1_000


def test_chats_and_choices_are_spans_of_their_own_and_without_a_parent_a_trace_begins():
    engine = chatty_engine()
    with collector() as (endpoint, spans), serving({"toy": engine}, ServerConfig(traces=endpoint)) as url:
        body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3, "n": 2}
        httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).raise_for_status()
        eventually(lambda: len([span for span in spans if span.name == "chat toy"]) == 2, timeout_s=60)
    asyncio.run(engine.aclose())
    assert {span.parent_span_id for span in spans if span.name == "chat toy"} == {b""}


def test_without_traces_nothing_of_opentelemetry_is_imported():
    code = "import sys, spolia.server.app; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    parts = ("opentelemetry.sdk", "opentelemetry.exporter")  # FastAPI itself looks whether the interface is there
    assert [name for name in modules if name.startswith(parts)] == []


def test_a_url_is_wanted():
    with pytest.raises(ValueError, match="traces is 'here'; it must be a URL"):
        ServerConfig(traces="here")
