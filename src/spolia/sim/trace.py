"""Traces: who asked for which tokens when, by ids that say nothing but where two prompts are the same.

A *unit* is `unit_tokens` tokens of a prompt; two requests with the same id at a place have the same prompt up to the
end of that unit. Three forms are read, one JSON object a line, gzipped or not:

    Mooncake    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, ...]}
                units of 512 tokens, `timestamp` in ms
    sessions    {"id": ..., "block": 64, "tool_tokens": ..., "system_tokens": ..., "requests": [[t_s, in_tokens,
                out_tokens, stop_reason, api_time_s, think_time_s, [n, [[start, count], ...]]], ...]}
                a request's ids are the first n of the session's previous request, then the runs; ids are the session's
                own, but for the tool and system prompt, which all sessions share
    ours        {"timestamp": 27482.1, "duration": 310.5, "input_length": 695, "output_length": 52, "block": 1,
                "tenant": 0, "stop_reason": "tool_call", "runs": [[0, 640], [9120, 106]]}
                units of one token; the runs go on over the answer, whose tokens are cached as well
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from spolia.kvcache import Outcome

__all__ = ["Trace", "TraceRequest", "load_trace"]

UnitIds: TypeAlias = NDArray[np.int32]

_MOONCAKE_UNIT_TOKENS = 512
_TOOL_CALLS = ("tool_use", "tool_calls", "tool_call")


@dataclass(frozen=True, slots=True, eq=False)
class TraceRequest:
    """One request.

    Attributes:
        time_s: when it came.
        unit_ids: int32, of the prompt and, in our own traces, the answer.
        num_input_tokens: of the prompt.
        tenant: only requests of the same tenant share.
    """

    time_s: float
    unit_ids: UnitIds
    num_input_tokens: int
    outcome: Outcome = Outcome.TURN
    tenant: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Requests in the order in which they came."""

    name: str
    unit_tokens: int
    requests: tuple[TraceRequest, ...]

    @property
    def num_input_tokens(self) -> int:
        return sum(request.num_input_tokens for request in self.requests)

    @property
    def num_distinct_tokens(self) -> int:
        """What a cache that never forgets would hold at the end."""
        num_keys, paths = self.unit_keys()
        seen = np.zeros(num_keys, np.bool_)
        for path in paths:
            seen[path] = True
        return self.unit_tokens * int(np.count_nonzero(seen))

    def unit_keys(self) -> tuple[int, list[NDArray[np.int64]]]:
        """By request, its units as integers below the first result, different for each tenant."""
        lowest = min((int(request.unit_ids.min(initial=0)) for request in self.requests), default=0)
        span = 1 + max((int(request.unit_ids.max(initial=0)) for request in self.requests), default=0) - lowest
        num_tenants = 1 + max((request.tenant for request in self.requests), default=0)
        return num_tenants * span, [
            request.unit_ids.astype(np.int64) + (request.tenant * span - lowest) for request in self.requests
        ]


def load_trace(path: Path, *, spread_s: float = 4 * 3600.0, seed: int = 0) -> Trace:
    """Read a trace of any of the forms.

    Args:
        spread_s: sessions that say when their requests came relative to their own start begin at random within so many
            seconds, drawn from `seed`.

    Raises:
        ValueError: there is no such file, or a line is of no known form; names the line.
    """
    lines = _lines(path)
    first = next(lines, None)
    if first is None:
        raise ValueError(f"{path} is empty; a trace has one JSON object a line")
    rest = _chained(first, lines)
    keys = first[1].keys()
    try:
        if "requests" in keys:
            return _sessions(path.name, rest, spread_s, seed)
        if "runs" in keys:
            return _ours(path.name, rest)
        if "hash_ids" in keys:
            return _mooncake(path.name, rest)
    except (KeyError, TypeError, IndexError, OverflowError) as error:
        raise ValueError(f"{path} has a line that is unlike its first: {type(error).__name__}: {error}") from error
    raise ValueError(f"{path} is no trace: its first line has none of hash_ids, requests and runs")


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    try:
                        parsed = json.loads(line)
                    except ValueError as error:
                        raise ValueError(f"{path}, line {number} is not JSON: {error}") from None
                    if not isinstance(parsed, dict):
                        raise ValueError(f"{path}, line {number} is no JSON object")
                    yield number, parsed
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from None


def _chained(first: tuple[int, dict[str, Any]], rest: Iterator[tuple[int, dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    yield first[1]
    for _, line in rest:
        yield line


def _mooncake(name: str, lines: Iterable[dict[str, Any]]) -> Trace:
    requests = [
        TraceRequest(
            line["timestamp"] / 1e3,
            np.array(line["hash_ids"], np.int32),
            int(line["input_length"]),
        )
        for line in lines
    ]
    return Trace(name, _MOONCAKE_UNIT_TOKENS, _in_order(requests))


def _ours(name: str, lines: Iterable[dict[str, Any]]) -> Trace:
    requests = []
    unit_tokens = 1
    for line in lines:
        unit_tokens = int(line["block"])
        requests.append(
            TraceRequest(
                line["timestamp"] / 1e3,
                _expanded(line["runs"]),
                int(line["input_length"]),
                _outcome(line["stop_reason"]),
                int(line["tenant"]),
            )
        )
    return Trace(name, unit_tokens, _in_order(requests))


def _sessions(name: str, lines: Iterable[dict[str, Any]], spread_s: float, seed: int) -> Trace:
    rng = random.Random(seed)
    unit_tokens, num_ids = 64, 1
    requests = []
    for session in lines:
        unit_tokens = int(session["block"])
        num_common = (int(session["tool_tokens"]) + int(session["system_tokens"])) // unit_tokens
        begin_s = rng.uniform(0, spread_s)
        previous = np.empty(0, np.int32)
        highest = 0
        for t_s, num_input, _, stop_reason, _, _, (keep, runs) in session["requests"]:
            previous = np.concatenate([previous[:keep], _expanded(runs)])
            highest = max(highest, int(previous.max(initial=0)))
            ids = previous + np.int32(num_ids)
            common = min(num_common, len(ids))
            ids[:common] = -1 - np.arange(common)
            requests.append(TraceRequest(begin_s + t_s, ids, int(num_input), _outcome(stop_reason)))
        num_ids += highest + 1
    return Trace(name, unit_tokens, _in_order(requests))


def _expanded(runs: Sequence[Sequence[int]]) -> UnitIds:
    parts = [np.arange(start, start + count, dtype=np.int32) for start, count in runs]
    return np.concatenate(parts) if parts else np.empty(0, np.int32)


def _outcome(stop_reason: str | None) -> Outcome:
    if stop_reason in _TOOL_CALLS:
        return Outcome.TOOL_CALL
    return Outcome.BROKEN_OFF if stop_reason in ("abort", Outcome.BROKEN_OFF) else Outcome.TURN


def _in_order(requests: Iterable[TraceRequest]) -> tuple[TraceRequest, ...]:
    return tuple(sorted(requests, key=lambda request: request.time_s))
