"""`spolia sim`: what a trace would have hit, by policy and size."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from spolia.errors import InvalidRequest
from spolia.kvcache import POLICIES, make_policy
from spolia.sim import HitRates, Replayed, default_sizes, hit_rates, load_trace
from spolia.sim.chart import curve_png, curve_text, size_text

__all__ = ["parse_tokens", "run"]

_TOKENS = re.compile(r"(?P<number>\d+(?:\.\d+)?)(?P<unit>[kM]?)")
_UNITS = {"": 1, "k": 1_000, "M": 1_000_000}


def parse_tokens(text: str) -> int:
    """Tokens of "1.5M", "64k" or "4096".

    Raises:
        InvalidRequest: anything else, or none.
    """
    match = _TOKENS.fullmatch(text.strip())
    tokens = 0 if match is None else int(float(match["number"]) * _UNITS[match["unit"]])
    if tokens < 1:
        raise InvalidRequest(f"{text!r} is no size; write tokens, like 1.5M, 64k or 4096", param="sizes")
    return tokens


def run(
    path: Path, *, policies: Sequence[str], sizes: Sequence[str], spread_s: float, seed: int, png: Path | None
) -> None:
    """Print a line of JSON with all figures to standard output, and table and curve to standard error.

    Raises:
        InvalidRequest: no such trace, policy or size.
    """
    names = list(policies) or list(POLICIES)
    asked = sorted({parse_tokens(size) for size in sizes})
    try:
        for name in names:
            make_policy(name)
        trace = load_trace(path, spread_s=spread_s, seed=seed)
        result = hit_rates(trace, names, asked or default_sizes(trace), progress=_progress)
    except ValueError as error:
        raise InvalidRequest(str(error)) from None
    print(json.dumps(_figures(result)))
    _show(result)
    if png is not None:
        _draw(png, result)


def _figures(result: HitRates) -> dict[str, object]:
    percent = {name: [round(100 * rate, 2) for rate in row] for name, row in result.rates.items()}
    figures: dict[str, object] = {
        "trace": result.trace,
        "requests": result.num_requests,
        "input_tokens": result.num_input_tokens,
        "size_tokens": list(result.sizes),
        "hit_percent": percent,
        "bound_percent": [round(100 * rate, 2) for rate in result.bound],
        "unlimited_percent": round(100 * result.unlimited, 2),
    }
    if {"lru", "lifecycle"} <= set(result.rates):
        shares = result.gap_closed("lifecycle")
        figures["lifecycle_gap_closed_percent"] = [None if s is None else round(100 * s, 1) for s in shares]
    return figures


def _progress(replayed: Replayed) -> None:
    if sys.stderr.isatty():
        print(f"{replayed.policy} at {size_text(replayed.size_tokens)}: {replayed.hit_rate:.1%}", file=sys.stderr)


def _show(result: HitRates) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("% of prompt tokens hit")
    for size in result.sizes:
        table.add_column(size_text(size), justify="right")
    for name, row in result.rates.items():
        table.add_row(name, *(f"{100 * rate:.1f}" for rate in row))
    table.add_row("no policy can pass", *(f"{100 * rate:.1f}" for rate in result.bound), style="dim")
    console = Console(stderr=True, highlight=False)
    console.print(
        f"{result.trace}: {result.num_requests} requests, {size_text(result.num_input_tokens)} prompt tokens; "
        f"a cache without a limit hits {100 * result.unlimited:.1f} %"
    )
    console.print(table)
    print(curve_text(result.sizes, result.rates, result.bound), file=sys.stderr)


def _draw(png: Path, result: HitRates) -> None:
    try:
        curve_png(png, result.trace, result.sizes, result.rates, result.bound)
    except ImportError:
        raise InvalidRequest("--png needs matplotlib: pip install 'spolia[plot]'", param="png") from None
    except OSError as error:
        raise InvalidRequest(f"{png} cannot be written: {error.strerror or error}", param="png") from None
