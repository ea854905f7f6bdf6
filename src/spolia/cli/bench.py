"""`spolia bench`: the workloads of `spolia.bench` against a server that is there, or one started for the purpose."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields

import httpx

from spolia.bench import BenchError, Measurement, served_model
from spolia.bench import run as measure
from spolia.cli.flags import EngineFlags
from spolia.errors import InvalidRequest, SpoliaError

__all__ = ["Target", "run"]

_START_TIMEOUT_S = 600
_DEFAULT_VOCAB_SIZE = 32_000
_FLAG_NAMES = {
    "kv_dtype": "--kv-dtype",
    "kv_memory": "--kv-memory",
    "kv_policy": "--kv-policy",
    "num_threads": "--threads",
    "max_context": "--max-context",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What to measure: a server at `url`, or else `source` served by a process of our own."""

    source: str | None
    url: str | None
    model: str | None
    vocab_size: int | None
    engine: EngineFlags


def run(target: Target, *, only: Sequence[str], concurrency: int, seed: int, label: str) -> None:
    """Print a line of JSON a workload to standard output, and the table to standard error.

    Raises:
        InvalidRequest: neither a model nor a URL, or both.
        SpoliaError: the server cannot be started or does not answer as it should.
    """
    if (target.source is None) == (target.url is None):
        raise InvalidRequest("name a model to serve, or a running server with --url")
    try:
        if target.url is not None:
            url = target.url.rstrip("/").removesuffix("/v1")  # as clients are given it, or as it is
            measurements = asyncio.run(_measure(url, target, only, concurrency, seed, label))
        else:
            with _server(target) as url:
                measurements = asyncio.run(_measure(url, target, only, concurrency, seed, label))
    except (BenchError, httpx.HTTPError) as error:
        raise SpoliaError(f"the benchmark failed: {error or type(error).__name__}") from error
    _show(measurements)


async def _measure(
    url: str, target: Target, only: Sequence[str], concurrency: int, seed: int, label: str
) -> list[Measurement]:
    model, vocab_size = target.model, target.vocab_size
    if model is None or vocab_size is None:
        first, told = await served_model(url)
        model = model or first
        vocab_size = vocab_size or told or _DEFAULT_VOCAB_SIZE
    measurements = []
    async for measurement in measure(url, model, vocab_size=vocab_size, seed=seed, concurrency=concurrency, only=only):
        print(measurement.json_line(label), flush=True)
        measurements.append(measurement)
    return measurements


@contextmanager
def _server(target: Target) -> Iterator[str]:
    """Serve `target.source` in a process of its own, ended at the end; yields its URL once it can answer."""
    flags = [
        part
        for field in fields(target.engine)
        if (value := getattr(target.engine, field.name)) is not None and field.name in _FLAG_NAMES
        for part in (_FLAG_NAMES[field.name], str(value))
    ]
    command = [sys.executable, "-m", "spolia", "serve", str(target.source), "--port", "0", *flags]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ)
    try:
        yield _await_ready(process)
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate()


def _await_ready(process: subprocess.Popen[str]) -> str:
    """The server's URL, from its log, when it says that it is ready."""
    if process.stderr is None:
        raise SpoliaError("the server's log is not connected")
    url = ""
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    for line in process.stderr:
        if found := re.search(r"listening .* url=(\S+)/v1", line):
            url = found[1]
        if re.search(r"\bready model=", line):
            return url
        if time.monotonic() > deadline_s:
            break
    raise SpoliaError(f"the server did not start: {line.strip()}")


def _show(measurements: Sequence[Measurement]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("workload")
    for heading in ("out tok/s", "in+out tok/s", "TTFT p50 ms", "p99 ms", "ms/token", "hit"):
        table.add_column(heading, justify="right")
    for m in measurements:
        between = "" if m.tpot_ms is None else f"{m.tpot_ms:.2f}"
        figures = f"{m.out_tok_s:.0f}", f"{m.total_tok_s:.0f}", f"{m.ttft_ms['p50']:.1f}", f"{m.ttft_ms['p99']:.1f}"
        table.add_row(m.workload, *figures, between, f"{m.hit:.1%}")
    Console(stderr=True).print(table)
