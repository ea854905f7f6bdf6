"""Prometheus metrics, in a registry of the app's own.

What happens to a request is observed as it happens; what the engine counts is read at the scrape, one consistent
snapshot a model, so that gauges of one scrape agree (free + cached + leased is the pool).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import ClassVar

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from spolia.engine import CacheStats, Durations, EngineStats, MissReason, RequestOutput, TierState

__all__ = ["Metrics", "ModelMetrics"]

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


def _histogram(name: str, help_: str, by_model: Mapping[str, Durations]) -> HistogramMetricFamily:
    family = HistogramMetricFamily(name, help_, labels=["model"])
    for model, durations in by_model.items():
        bounds = [*map(str, durations.BOUNDS_S), "+Inf"]
        family.add_metric([model], list(zip(bounds, accumulate(durations.counts), strict=True)), durations.sum_s)
    return family


class _CacheCollector(Collector):
    """Reads the caches' counters at the scrape. They only grow, so it does no harm if one is older than another."""

    _COUNTERS: ClassVar = {
        "num_evicted_blocks": ("spolia_evictions", "Blocks given up to make room."),
        "num_evicted_tokens": ("spolia_evicted_tokens", "Tokens whose KV was given up to make room."),
        "num_asked_tokens": ("spolia_prefix_cache_queries", "Prompt tokens that were looked up in the cache."),
        "num_reused_tokens": ("spolia_prefix_cache_hits", "Of those, tokens that were reused."),
        "num_copied_blocks": ("spolia_copied_blocks", "Blocks copied at the first write after a shared beginning."),
    }

    _HISTOGRAMS: ClassVar = {
        "evicted_ages": ("spolia_kv_lifetime_seconds", "Of KV that was given up: since it was computed, by token."),
        "evicted_idle_times": ("spolia_kv_idle_before_evict_seconds", "Of KV that was given up: since its last use."),
        "reuse_gaps": ("spolia_kv_reuse_gap_seconds", "Of KV that was found: since its use before, by token."),
    }

    def __init__(self, caches: Callable[[], Mapping[str, CacheStats]]) -> None:
        self._caches = caches

    def collect(self) -> Iterable[Metric]:
        families = {field: CounterMetricFamily(*named, labels=["model"]) for field, named in self._COUNTERS.items()}
        missed = CounterMetricFamily(
            "spolia_missed_tokens", "Prompt tokens that were not reused, by why.", labels=["model", "reason"]
        )
        for model, stats in self._caches().items():
            for field, family in families.items():
                family.add_metric([model], getattr(stats, field))
            for reason, count in stats.num_missed_tokens.items():
                missed.add_metric([model, reason.value], count)
        histograms = [
            _histogram(*named, {model: getattr(stats, field) for model, stats in self._caches().items()})
            for field, named in self._HISTOGRAMS.items()
        ]
        return [*families.values(), missed, *histograms]


class _EngineCollector(Collector):
    """Reads the engines' snapshots at the scrape."""

    def __init__(self, snapshots: Callable[[], Mapping[str, EngineStats]]) -> None:
        self._snapshots = snapshots

    def collect(self) -> Iterable[Metric]:
        usage = GaugeMetricFamily(
            "spolia_kv_usage_ratio", "Share of KV blocks that running requests hold.", labels=["model", "group"]
        )
        blocks = GaugeMetricFamily("spolia_kv_blocks", "KV blocks by state.", labels=["model", "group", "state"])
        running = GaugeMetricFamily("spolia_requests_running", "Requests in the batch.", labels=["model"])
        waiting = GaugeMetricFamily("spolia_requests_waiting", "Requests not yet in the batch.", labels=["model"])
        totals = {
            "num_steps": ("spolia_steps", "Engine steps."),
            "num_generated_tokens": ("spolia_generated_tokens", "Tokens sampled."),
            "num_computed_tokens": ("spolia_computed_tokens", "Tokens that went through the model."),
            "num_recomputed_tokens": ("spolia_recomputed_tokens", "Tokens computed again after a preemption."),
            "num_lost_blocks": ("spolia_tier_lost_blocks", "Blocks evicted before they were written to a tier."),
            "num_preemptions": ("spolia_preemptions", "Running sequences stopped to make room."),
        }
        rounded = CounterMetricFamily(
            "spolia_rounded_tokens", "Cached tokens whose KV had been kept in fewer bits.", labels=["model", "kind"]
        )
        counters = {
            field: CounterMetricFamily(*name_and_help, labels=["model"]) for field, name_and_help in totals.items()
        }
        labels = ["model", "source"]
        drafted = CounterMetricFamily(
            "spolia_spec_decode_num_draft_tokens", "Tokens guessed ahead, by where the guess was from.", labels=labels
        )
        accepted = CounterMetricFamily(
            "spolia_spec_decode_num_accepted_tokens", "Of those, tokens that were right.", labels=labels
        )
        prompts = CounterMetricFamily(
            "spolia_prompt_tokens", "Prompt tokens by where their KV came from.", labels=labels
        )
        missed = CounterMetricFamily(
            "spolia_missed_prompt_tokens",
            "Prompt tokens that were computed, by why they were not reused.",
            labels=["model", "reason"],
        )
        ended = CounterMetricFamily(
            "spolia_reuse_ended", "Prompts by why reuse ended where it did.", labels=["model", "reason"]
        )
        snapshots = self._snapshots()
        for model, stats in snapshots.items():
            for source, count in stats.counters.num_tokens_by_source.items():
                prompts.add_metric([model, source], count)
            for reason in MissReason:
                missed.add_metric([model, reason.value], stats.counters.num_missed_tokens.get(reason, 0))
                ended.add_metric([model, reason.value], stats.counters.reuse_ended.get(reason, 0))
            for source, drafts in stats.counters.drafts.items():
                drafted.add_metric([model, source], drafts.num_drafted)
                accepted.add_metric([model, source], drafts.num_accepted)
            running.add_metric([model], stats.num_running)
            waiting.add_metric([model], stats.num_waiting)
            for group, ledger in enumerate(stats.ledger):
                usage.add_metric([model, str(group)], ledger.leased / ledger.total)
                for state in ("free", "cached", "leased"):
                    blocks.add_metric([model, str(group), state], getattr(ledger, state))
            for field, counter in counters.items():
                counter.add_metric([model], getattr(stats.counters, field))
            for kind, count in stats.counters.num_rounded_tokens.items():
                rounded.add_metric([model, kind], count)
        families = [blocks, usage, running, waiting, drafted, accepted, rounded, prompts, missed, ended]
        return [*families, *counters.values(), *self._tiers(snapshots)]

    def _tiers(self, snapshots: Mapping[str, EngineStats]) -> Iterable[Metric]:
        labels = ["model", "tier"]
        states = GaugeMetricFamily("spolia_tier_state", "1 for the state that a tier is in.", labels=[*labels, "state"])
        held = GaugeMetricFamily("spolia_tier_bytes", "Bytes that a tier holds.", labels=labels)
        capacity = GaugeMetricFamily("spolia_tier_capacity_bytes", "Bytes that a tier may hold.", labels=labels)
        blocks = CounterMetricFamily(
            "spolia_tier_blocks", "Blocks asked of a tier, by outcome.", labels=[*labels, "outcome"]
        )
        moved = CounterMetricFamily("spolia_tier_moved_bytes", "Bytes moved.", labels=[*labels, "direction"])
        failures = CounterMetricFamily("spolia_tier_failures", "Calls to a tier that failed.", labels=labels)
        for model, stats in snapshots.items():
            for tier in stats.tiers:
                mine = [model, tier.name]
                for state in TierState:
                    states.add_metric([*mine, state.value], tier.state is state)
                held.add_metric(mine, tier.health.num_bytes or 0)
                if tier.health.capacity_bytes is not None:
                    capacity.add_metric(mine, tier.health.capacity_bytes)
                for outcome in ("hits", "misses", "refused"):
                    blocks.add_metric([*mine, outcome], getattr(tier, f"num_{outcome}"))
                moved.add_metric([*mine, "down"], tier.num_written_bytes)
                moved.add_metric([*mine, "up"], tier.num_read_bytes)
                failures.add_metric(mine, tier.num_failures)
        return [states, held, capacity, blocks, moved, failures]


class _VllmNames(Collector):
    """The few metrics that gateways and autoscalers read from vLLM, under its names, so that they find them here."""

    def __init__(
        self, snapshots: Callable[[], Mapping[str, EngineStats]], caches: Callable[[], Mapping[str, CacheStats]]
    ) -> None:
        self._snapshots = snapshots
        self._caches = caches

    def collect(self) -> Iterable[Metric]:
        labels = ["model_name"]
        running = GaugeMetricFamily("vllm:num_requests_running", "Requests in the batch.", labels=labels)
        waiting = GaugeMetricFamily("vllm:num_requests_waiting", "Requests not yet in the batch.", labels=labels)
        usage = GaugeMetricFamily("vllm:kv_cache_usage_perc", "Share of KV blocks in use; 1 is all.", labels=labels)
        generated = CounterMetricFamily("vllm:generation_tokens", "Tokens sampled.", labels=labels)
        preempted = CounterMetricFamily("vllm:num_preemptions", "Sequences stopped to make room.", labels=labels)
        asked = CounterMetricFamily("vllm:prefix_cache_queries", "Prompt tokens that were looked up.", labels=labels)
        reused = CounterMetricFamily("vllm:prefix_cache_hits", "Of those, tokens that were reused.", labels=labels)
        prompts = CounterMetricFamily("vllm:prompt_tokens", "Prompt tokens.", labels=labels)
        for model, stats in self._snapshots().items():
            running.add_metric([model], stats.num_running)
            waiting.add_metric([model], stats.num_waiting)
            usage.add_metric([model], max(ledger.leased / ledger.total for ledger in stats.ledger))
            generated.add_metric([model], stats.counters.num_generated_tokens)
            preempted.add_metric([model], stats.counters.num_preemptions)
        for model, cache in self._caches().items():
            asked.add_metric([model], cache.num_asked_tokens)
            reused.add_metric([model], cache.num_reused_tokens)
            prompts.add_metric([model], cache.num_asked_tokens)
        return [running, waiting, usage, generated, preempted, asked, reused, prompts]


class _LlamaCppNames(Collector):
    """What dashboards for llama.cpp's server read, under its names."""

    def __init__(
        self, snapshots: Callable[[], Mapping[str, EngineStats]], caches: Callable[[], Mapping[str, CacheStats]]
    ) -> None:
        self._snapshots = snapshots
        self._caches = caches

    def collect(self) -> Iterable[Metric]:
        labels = ["model"]
        prompts = CounterMetricFamily("llamacpp:prompt_tokens", "Prompt tokens that were computed.", labels=labels)
        predicted = CounterMetricFamily("llamacpp:tokens_predicted", "Tokens sampled.", labels=labels)
        decodes = CounterMetricFamily("llamacpp:n_decode", "Engine steps.", labels=labels)
        processing = GaugeMetricFamily("llamacpp:requests_processing", "Requests in the batch.", labels=labels)
        deferred = GaugeMetricFamily("llamacpp:requests_deferred", "Requests not yet in the batch.", labels=labels)
        for model, stats in self._snapshots().items():
            predicted.add_metric([model], stats.counters.num_generated_tokens)
            decodes.add_metric([model], stats.counters.num_steps)
            processing.add_metric([model], stats.num_running)
            deferred.add_metric([model], stats.num_waiting)
        for model, cache in self._caches().items():
            prompts.add_metric([model], cache.num_asked_tokens - cache.num_reused_tokens)
        return [prompts, predicted, decodes, processing, deferred]


class Metrics:
    """The app's instruments.

    Args:
        snapshots: each loaded model's engine statistics, called at a scrape.
        caches: each loaded model's cache counters.
    """

    def __init__(
        self, snapshots: Callable[[], Mapping[str, EngineStats]], caches: Callable[[], Mapping[str, CacheStats]]
    ) -> None:
        self._registry = registry = CollectorRegistry()
        registry.register(_EngineCollector(snapshots))
        registry.register(_CacheCollector(caches))
        registry.register(_VllmNames(snapshots, caches))
        registry.register(_LlamaCppNames(snapshots, caches))
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
