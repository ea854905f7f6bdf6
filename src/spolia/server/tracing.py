"""OpenTelemetry traces: each answer a span, and below it where its time went. With `spolia[otel]` and `--traces`.

    chat MODEL        from submission to the end; its parent is the client's span, if it sent a `traceparent`
      queue           until the first step, and as its first part, if KV came from other tiers:
        restore
      prefill         from the first step to the first token
      decode          from there to the end

Attributes are those of the semantic conventions for generative AI, and `spolia.*` for what they have no word for. No
text is in them. Spans are made when an answer has ended, from the times that the engine keeps anyway, so a server that
does not trace pays nothing, and one that does nothing per token.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import spolia
from spolia.engine import RequestOutput, SamplingParams
from spolia.errors import InvalidRequest

if TYPE_CHECKING:
    from opentelemetry.context import Context

__all__ = ["RequestTrace", "Tracing"]

_EXPORT_TIMEOUT_S = 5
_EXPORT_INTERVAL_MS = 1_000
# How clients of each API say what they do; the id of an answer tells them apart.
_OPERATIONS = {"cmpl": "text_completion", "gen": "text_completion"}


class Tracing:
    """Where spans go.

    Args:
        endpoint: of a collector that takes OTLP over HTTP, such as http://127.0.0.1:4318/v1/traces.

    Raises:
        InvalidRequest: OpenTelemetry is not installed.
    """

    def __init__(self, endpoint: str) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError:
            raise InvalidRequest("traces need OpenTelemetry: pip install 'spolia[otel]'", param="traces") from None
        resource = Resource.create({"service.name": "spolia", "service.version": spolia.__version__})
        self._provider = TracerProvider(resource=resource)
        exporter = OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_TIMEOUT_S)
        processor = BatchSpanProcessor(exporter, schedule_delay_millis=_EXPORT_INTERVAL_MS)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("spolia", spolia.__version__)
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, headers: Mapping[str, str]) -> RequestTrace:
        """For one HTTP request, whose W3C `traceparent` and `tracestate` say what it is a part of."""
        return RequestTrace(self._tracer, self._propagator.extract(headers))

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()


class RequestTrace:
    """The answers to one HTTP request."""

    def __init__(self, tracer: Any, parent: Context) -> None:
        self._tracer = tracer
        self._parent = parent

    def record(self, model: str, params: SamplingParams, output: RequestOutput) -> None:
        """An answer has ended, just now."""
        from opentelemetry.trace import SpanKind, set_span_in_context

        timings = output.timings
        end = time.time_ns()
        start = end - round(1e9 * timings.total_s)
        operation = _OPERATIONS.get(output.request_id.partition("-")[0], "chat")
        span = self._tracer.start_span(
            f"{operation} {model}",
            context=self._parent,
            kind=SpanKind.SERVER,
            start_time=start,
            attributes=_attributes(operation, model, params, output),
        )
        inside = set_span_in_context(span)

        def part(name: str, from_s: float, to_s: float, context: Any = inside) -> Any:
            made = self._tracer.start_span(name, context=context, start_time=start + round(1e9 * from_s))
            made.end(start + round(1e9 * to_s))
            return made

        first_step_s = timings.total_s if timings.queue_s is None else timings.queue_s
        queue = part("queue", 0.0, first_step_s)
        if timings.restore_s is not None:
            part("restore", 0.0, timings.restore_s, set_span_in_context(queue))
        if timings.queue_s is not None:
            first_token_s = timings.total_s if timings.first_token_s is None else timings.first_token_s
            part("prefill", first_step_s, first_token_s)
            if timings.first_token_s is not None:
                part("decode", first_token_s, timings.total_s)
        span.end(end)


def _attributes(operation: str, model: str, params: SamplingParams, output: RequestOutput) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "spolia",
        "gen_ai.request.model": model,
        "gen_ai.request.temperature": float(params.temperature),
        "gen_ai.request.top_p": float(params.top_p),
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.seed": params.seed,
        "gen_ai.response.model": model,
        "gen_ai.response.id": output.request_id.rpartition("-")[0],
        "gen_ai.response.finish_reasons": [output.finish_reason],
        "gen_ai.usage.input_tokens": len(output.prompt_token_ids),
        "gen_ai.usage.output_tokens": len(output.token_ids),
        "gen_ai.usage.cache_read.input_tokens": output.num_cached_tokens,
        "spolia.first_token_s": output.timings.first_token_s,
    }
    for tier, count in output.num_restored_tokens.items():
        attributes[f"spolia.restored_tokens.{tier}"] = count
    if output.explanation is not None:
        attributes["spolia.reuse_ended"] = output.explanation.reason.value
    return {name: value for name, value in attributes.items() if value is not None}
