"""Prometheus metrics, in a registry of the app's own.

What happens to a request is observed as it happens; what the engine counts is read at the scrape, one consistent
snapshot a model, so that gauges of one scrape agree (free + cached + leased is the pool).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, TypeAlias

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from spolia.engine import CacheStats, Durations, EngineStats, MissReason, RequestOutput, TierState, TierStats
from spolia.kernels import BLOCK_SIZE

__all__ = ["Metrics", "ModelMetrics", "Reading"]

_TTFT_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_INTER_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_REQUEST_S = (0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_QUEUE_S = (0.001, 0.005, 0.025, 0.1, 0.5, 1, 5, 10, 30, 60)


class ModelMetrics:
    """One model's instruments, their labels bound once so that a token costs one observation."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._inter_token_s = metrics.inter_token_s.of_model(model)
        self._ttft_s = metrics.ttft_s.labels(model)
        self._request_s = metrics.request_s.labels(model)
        self._queue_s = metrics.queue_s.labels(model)
        self._restore_s = metrics.restore_s.labels(model)
        self._prefill_s = metrics.prefill_s.labels(model)
        self._decode_s = metrics.decode_s.labels(model)
        self._finished = metrics.finished
        self._engines = metrics.engines
        self._model = model

    def observe_gap(self, seconds: float, num_tokens: int) -> None:
        """`num_tokens` arrived together, `seconds` after the ones before: each waited its share."""
        self._inter_token_s.observe(seconds / num_tokens, num_tokens)

    def observe(self, output: RequestOutput) -> None:
        """A request has ended."""
        timings = output.timings
        self._request_s.observe(timings.total_s)
        if timings.queue_s is not None:
            self._queue_s.observe(timings.queue_s)
            if timings.first_token_s is not None:
                self._prefill_s.observe(timings.first_token_s - timings.queue_s)
        if timings.restore_s is not None:
            self._restore_s.observe(timings.restore_s)
        if timings.first_token_s is not None:
            self._ttft_s.observe(timings.first_token_s)
            self._decode_s.observe(timings.total_s - timings.first_token_s)
        self._finished.labels(self._model, output.finish_reason).inc()

    def end(self, reading: Reading) -> None:
        """The model's engine has ended, having counted so much; the next one begins at 0."""
        self._engines.end(self._model, reading)


class _Buckets:
    """A histogram's counts. Prometheus' own takes a lock for each value, which would be the dearest part of a token."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum_s = 0.0

    def observe(self, seconds: float, times: int) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += times
        self.sum_s += seconds * times


class _InterTokenHistogram(Collector):
    """`spolia_inter_token_seconds`, filled and read on the event loop only."""

    def __init__(self) -> None:
        self._by_model: dict[str, _Buckets] = {}

    def of_model(self, model: str) -> _Buckets:
        return self._by_model.setdefault(model, _Buckets(_INTER_TOKEN_S))

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(
            "spolia_inter_token_seconds", "Between a token and the one before.", labels=["model"]
        )
        for model, buckets in self._by_model.items():
            bounds = [*map(str, buckets.bounds), "+Inf"]
            cumulated = list(zip(bounds, accumulate(buckets.counts), strict=True))
            family.add_metric([model], cumulated, buckets.sum_s)
        return [family]


@dataclass(frozen=True, slots=True)
class Reading:
    """What one model's engine and its cache have counted at a moment."""

    stats: EngineStats
    cache: CacheStats


_Labels: TypeAlias = tuple[str, ...]
_Value: TypeAlias = "float | Durations"
_Rows: TypeAlias = Iterable[tuple[_Labels, _Value]]


@dataclass(frozen=True, slots=True)
class _Family:
    """One metric that is read from engines.

    Attributes:
        labels: beside the model's.
        read: label values, and the value, of one engine.
        outlives: of a gauge: what it tells is there when the model is not in memory, too.
    """

    kind: Literal["counter", "gauge", "histogram"]
    name: str
    help: str
    read: Callable[[Reading], _Rows]
    labels: _Labels = ()
    outlives: bool = False

    def collect(self, by_model: Mapping[str, Mapping[_Labels, _Value]]) -> Metric:
        labels = ["model_name" if self.name.startswith(("vllm:", "sglang:")) else "model", *self.labels]
        family: Any = _KINDS[self.kind](self.name, self.help, labels=labels)
        for model, rows in by_model.items():
            for mine, value in rows.items():
                if isinstance(value, Durations):
                    bounds = [*map(str, value.BOUNDS_S), "+Inf"]
                    cumulated = list(zip(bounds, accumulate(value.counts), strict=True))
                    family.add_metric([model, *mine], cumulated, value.sum_s)
                else:
                    family.add_metric([model, *mine], value)
        return family  # type: ignore[no-any-return]

    def end(self, before: Mapping[_Labels, _Value], reading: Reading) -> dict[_Labels, _Value]:
        """What there is to tell of a model when an engine of it has ended.

        Args:
            before: of the engines that ended earlier.
        """
        rows = dict(self.read(reading))
        if self.kind == "gauge":
            return rows if self.outlives else dict.fromkeys(rows, 0)
        return {labels: _plus(before.get(labels, 0), rows.get(labels, 0)) for labels in dict.fromkeys([*before, *rows])}

    def now(self, before: Mapping[_Labels, _Value], reading: Reading) -> dict[_Labels, _Value]:
        """What there is to tell of a model that is in memory."""
        return dict(self.read(reading)) if self.kind == "gauge" else self.end(before, reading)


_KINDS: dict[str, Any] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}


def _plus(one: _Value, other: _Value) -> _Value:
    if isinstance(other, Durations):
        return other + one if isinstance(one, Durations) else other
    return one if isinstance(one, Durations) else one + other


def _counter(name: str, help_: str, read: Callable[[Reading], float]) -> _Family:
    return _Family("counter", name, help_, lambda reading: [((), read(reading))])


def _gauge(name: str, help_: str, read: Callable[[Reading], float]) -> _Family:
    return _Family("gauge", name, help_, lambda reading: [((), read(reading))])


def _durations(name: str, help_: str, read: Callable[[Reading], Durations]) -> _Family:
    return _Family("histogram", name, help_, lambda reading: [((), read(reading))])


def _labelled(name: str, help_: str, label: str, read: Callable[[Reading], Mapping[str, float]]) -> _Family:
    def rows(reading: Reading) -> _Rows:
        return [((text,), value) for text, value in read(reading).items()]

    return _Family("counter", name, help_, rows, (label,))


def _by_reason(counts: Mapping[MissReason, int]) -> dict[str, float]:
    return {reason.value: counts.get(reason, 0) for reason in MissReason}


def _usage(reading: Reading) -> float:
    return max(ledger.leased / ledger.total for ledger in reading.stats.ledger)


def _blocks(reading: Reading) -> _Rows:
    for group, ledger in enumerate(reading.stats.ledger):
        for state in ("free", "cached", "leased"):
            yield (str(group), state), getattr(ledger, state)


def _tier(
    kind: Literal["counter", "gauge"],
    name: str,
    help_: str,
    read: Callable[[TierStats], Iterable[tuple[_Labels, float | None]]],
    *labels: str,
    outlives: bool = False,
) -> _Family:
    """A metric of each tier; None: it has no such value."""

    def rows(reading: Reading) -> _Rows:
        for tier in reading.stats.tiers:
            for more, value in read(tier):
                if value is not None:
                    yield (tier.name, *more), value

    return _Family(kind, name, help_, rows, ("tier", *labels), outlives)


_FAMILIES = (
    _Family("gauge", "spolia_kv_blocks", "KV blocks by state.", _blocks, ("group", "state")),
    _Family(
        "gauge",
        "spolia_kv_usage_ratio",
        "Share of KV blocks that running requests hold.",
        lambda now: [((str(group),), each.leased / each.total) for group, each in enumerate(now.stats.ledger)],
        ("group",),
    ),
    _gauge("spolia_requests_running", "Requests in the batch.", lambda now: now.stats.num_running),
    _gauge("spolia_requests_waiting", "Requests not yet in the batch.", lambda now: now.stats.num_waiting),
    _labelled(
        "spolia_spec_decode_num_draft_tokens",
        "Tokens guessed ahead, by where the guess was from.",
        "source",
        lambda now: {source: drafts.num_drafted for source, drafts in now.stats.counters.drafts.items()},
    ),
    _labelled(
        "spolia_spec_decode_num_accepted_tokens",
        "Of those, tokens that were right.",
        "source",
        lambda now: {source: drafts.num_accepted for source, drafts in now.stats.counters.drafts.items()},
    ),
    _labelled(
        "spolia_rounded_tokens",
        "Cached tokens whose KV had been kept in fewer bits.",
        "kind",
        lambda now: now.stats.counters.num_rounded_tokens,
    ),
    _labelled(
        "spolia_prompt_tokens",
        "Prompt tokens by where their KV came from.",
        "source",
        lambda now: now.stats.counters.num_tokens_by_source,
    ),
    _labelled(
        "spolia_missed_prompt_tokens",
        "Prompt tokens that were computed, by why they were not reused.",
        "reason",
        lambda now: _by_reason(now.stats.counters.num_missed_tokens),
    ),
    _labelled(
        "spolia_reuse_ended",
        "Prompts by why reuse ended where it did.",
        "reason",
        lambda now: _by_reason(now.stats.counters.reuse_ended),
    ),
    _counter("spolia_steps", "Engine steps.", lambda now: now.stats.counters.num_steps),
    _counter("spolia_generated_tokens", "Tokens sampled.", lambda now: now.stats.counters.num_generated_tokens),
    _counter(
        "spolia_computed_tokens",
        "Tokens that went through the model.",
        lambda now: now.stats.counters.num_computed_tokens,
    ),
    _counter(
        "spolia_recomputed_tokens",
        "Tokens computed again after a preemption.",
        lambda now: now.stats.counters.num_recomputed_tokens,
    ),
    _counter(
        "spolia_tier_lost_blocks",
        "Blocks evicted before they were written to a tier.",
        lambda now: now.stats.counters.num_lost_blocks,
    ),
    _counter(
        "spolia_preemptions",
        "Running sequences stopped to make room.",
        lambda now: now.stats.counters.num_preemptions,
    ),
    _tier(
        "gauge",
        "spolia_tier_state",
        "1 for the state that a tier is in; 0 for all while the model is not in memory.",
        lambda tier: [((state.value,), float(tier.state is state)) for state in TierState],
        "state",
    ),
    _tier(
        "gauge",
        "spolia_tier_bytes",
        "Bytes that a tier holds.",
        lambda tier: [((), tier.health.num_bytes or 0)],
        outlives=True,
    ),
    _tier(
        "gauge",
        "spolia_tier_capacity_bytes",
        "Bytes that a tier may hold.",
        lambda tier: [((), tier.health.capacity_bytes)],
        outlives=True,
    ),
    _tier(
        "counter",
        "spolia_tier_blocks",
        "Blocks asked of a tier, by outcome.",
        lambda tier: [(("hits",), tier.num_hits), (("misses",), tier.num_misses), (("refused",), tier.num_refused)],
        "outcome",
    ),
    _tier(
        "counter",
        "spolia_tier_moved_bytes",
        "Bytes moved.",
        lambda tier: [(("down",), tier.num_written_bytes), (("up",), tier.num_read_bytes)],
        "direction",
    ),
    _tier("counter", "spolia_tier_failures", "Calls to a tier that failed.", lambda tier: [((), tier.num_failures)]),
    _tier(
        "counter",
        "spolia_tier_no_room_blocks",
        "Blocks that a tier did not take because it is full.",
        lambda tier: [((), tier.num_no_room)],
    ),
    _tier(
        "gauge",
        "spolia_tier_read_bytes_per_second",
        "How fast a tier has been read of late.",
        lambda tier: [((), tier.read_bytes_per_s)],
    ),
    _counter("spolia_evictions", "Blocks given up to make room.", lambda now: now.cache.num_evicted_blocks),
    _counter(
        "spolia_evicted_tokens",
        "Tokens whose KV was given up to make room.",
        lambda now: now.cache.num_evicted_tokens,
    ),
    _counter(
        "spolia_prefix_cache_queries",
        "Prompt tokens that were looked up in the cache.",
        lambda now: now.cache.num_asked_tokens,
    ),
    _counter("spolia_prefix_cache_hits", "Of those, tokens that were reused.", lambda now: now.cache.num_reused_tokens),
    _counter(
        "spolia_copied_blocks",
        "Blocks copied at the first write after a shared beginning.",
        lambda now: now.cache.num_copied_blocks,
    ),
    _durations(
        "spolia_kv_lifetime_seconds",
        "Of KV that was given up: since it was computed, by token.",
        lambda now: now.cache.evicted_ages,
    ),
    _durations(
        "spolia_kv_idle_before_evict_seconds",
        "Of KV that was given up: since its last use.",
        lambda now: now.cache.evicted_idle_times,
    ),
    _durations(
        "spolia_kv_reuse_gap_seconds",
        "Of KV that was found: since its use before, by token.",
        lambda now: now.cache.reuse_gaps,
    ),
    # What gateways and dashboards read from other servers, under their names.
    _gauge("vllm:num_requests_running", "Requests in the batch.", lambda now: now.stats.num_running),
    _gauge("vllm:num_requests_waiting", "Requests not yet in the batch.", lambda now: now.stats.num_waiting),
    _gauge("vllm:kv_cache_usage_perc", "Share of KV blocks in use; 1 is all.", _usage),
    _counter("vllm:generation_tokens", "Tokens sampled.", lambda now: now.stats.counters.num_generated_tokens),
    _counter("vllm:num_preemptions", "Sequences stopped to make room.", lambda now: now.stats.counters.num_preemptions),
    _counter("vllm:prefix_cache_queries", "Prompt tokens that were looked up.", lambda now: now.cache.num_asked_tokens),
    _counter("vllm:prefix_cache_hits", "Of those, tokens that were reused.", lambda now: now.cache.num_reused_tokens),
    _counter("vllm:prompt_tokens", "Prompt tokens.", lambda now: now.cache.num_asked_tokens),
    _counter(
        "llamacpp:prompt_tokens",
        "Prompt tokens that were computed.",
        lambda now: now.cache.num_asked_tokens - now.cache.num_reused_tokens,
    ),
    _counter("llamacpp:tokens_predicted", "Tokens sampled.", lambda now: now.stats.counters.num_generated_tokens),
    _counter("llamacpp:n_decode", "Engine steps.", lambda now: now.stats.counters.num_steps),
    _gauge("llamacpp:requests_processing", "Requests in the batch.", lambda now: now.stats.num_running),
    _gauge("llamacpp:requests_deferred", "Requests not yet in the batch.", lambda now: now.stats.num_waiting),
    _gauge("sglang:num_running_reqs", "Requests in the batch.", lambda now: now.stats.num_running),
    _gauge("sglang:num_queue_reqs", "Requests not yet in the batch.", lambda now: now.stats.num_waiting),
    _gauge(
        "sglang:num_used_tokens",
        "Tokens for which running requests hold KV blocks.",
        lambda now: BLOCK_SIZE * max(ledger.leased for ledger in now.stats.ledger),
    ),
    _gauge("sglang:token_usage", "Share of KV blocks in use; 1 is all.", _usage),
    _gauge(
        "sglang:cache_hit_rate",
        "Share of the prompt tokens since the model was loaded that were reused.",
        lambda now: now.cache.num_reused_tokens / max(1, now.cache.num_asked_tokens),
    ),
    _counter("sglang:prompt_tokens", "Prompt tokens.", lambda now: now.cache.num_asked_tokens),
    _counter("sglang:generation_tokens", "Tokens sampled.", lambda now: now.stats.counters.num_generated_tokens),
    _counter("sglang:cached_tokens", "Prompt tokens that were reused.", lambda now: now.cache.num_reused_tokens),
)


class _EngineCollector(Collector):
    """Reads what engines count, at the scrape. A model's counters go on when its next engine begins at 0.

    Event loop only.
    """

    def __init__(self, readings: Callable[[], Mapping[str, Reading]]) -> None:
        self._readings = readings
        self._ended: dict[str, dict[_Family, dict[_Labels, _Value]]] = {}

    def end(self, model: str, reading: Reading) -> None:
        before = self._ended.get(model, {})
        self._ended[model] = {family: family.end(before.get(family, {}), reading) for family in _FAMILIES}

    def collect(self) -> Iterable[Metric]:
        readings = self._readings()
        for family in _FAMILIES:
            rows: dict[str, Mapping[_Labels, _Value]] = {}
            for model in dict.fromkeys([*self._ended, *readings]):
                before = self._ended.get(model, {}).get(family, {})
                rows[model] = family.now(before, readings[model]) if model in readings else before
            yield family.collect(rows)


class Metrics:
    """The app's instruments.

    Args:
        readings: of each engine that there is, called at a scrape.
    """

    def __init__(self, readings: Callable[[], Mapping[str, Reading]]) -> None:
        self._registry = registry = CollectorRegistry()
        self.engines = _EngineCollector(readings)
        registry.register(self.engines)
        by_model = ["model"]
        self.ttft_s = Histogram(
            "spolia_time_to_first_token_seconds", "From submission to the first token.", by_model,
            registry=registry, buckets=_TTFT_S,
        )  # fmt: skip
        self.inter_token_s = _InterTokenHistogram()
        registry.register(self.inter_token_s)
        self.request_s = Histogram(
            "spolia_request_seconds", "From submission to the end.", by_model, registry=registry, buckets=_REQUEST_S
        )
        self.queue_s = Histogram(
            "spolia_queue_seconds", "From submission to the first step.", by_model, registry=registry, buckets=_QUEUE_S
        )
        self.restore_s = Histogram(
            "spolia_restore_seconds", "From submission until its KV had come from other tiers, or it waited no more.",
            by_model, registry=registry, buckets=_QUEUE_S,
        )  # fmt: skip
        self.prefill_s = Histogram(
            "spolia_prefill_seconds", "From the first step to the first token.", by_model,
            registry=registry, buckets=_TTFT_S,
        )  # fmt: skip
        self.decode_s = Histogram(
            "spolia_decode_seconds", "From the first token to the end.", by_model, registry=registry, buckets=_REQUEST_S
        )
        self.finished = Counter(
            "spolia_requests_finished", "Requests by how they ended.", ["model", "reason"], registry=registry
        )

    def of_model(self, model: str) -> ModelMetrics:
        return ModelMetrics(self, model)

    def exposition(self) -> bytes:
        """The text format of a scrape."""
        return generate_latest(self._registry)
