"""The miss-ratio curve, as text for a terminal and as a picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["curve_png", "curve_text", "size_text"]

_MARKS = "ox+*#@%&~"
_BOUND = "."


def size_text(num_tokens: int) -> str:
    """5100000 -> "5.1M"."""
    for limit, unit in ((1_000_000, "M"), (1_000, "k")):
        if num_tokens >= limit:
            return f"{num_tokens / limit:.3g}{unit}"
    return str(num_tokens)


def curve_text(
    sizes: Sequence[int],
    rates: Mapping[str, Sequence[float]],
    bound: Sequence[float],
    *,
    width: int = 72,
    height: int = 16,
) -> str:
    """Miss ratio (100 % at the top) over size, logarithmic; a mark a policy, points between sizes interpolated."""
    canvas = [[" "] * width for _ in range(height)]
    series = [(_BOUND, bound), *((_MARKS[index % len(_MARKS)], row) for index, row in enumerate(rates.values()))]
    logs = [math.log(size) for size in sizes]
    span = (logs[-1] - logs[0]) or 1.0
    for mark, row in series:
        for column in range(width):
            miss = 1.0 - _interpolated(logs, row, logs[0] + span * column / (width - 1))
            canvas[round((1.0 - miss) * (height - 1))][column] = mark
    lines = [f"{100 * (1 - line / (height - 1)):4.0f}% |{''.join(row)}" for line, row in enumerate(canvas)]
    low, high = size_text(sizes[0]), size_text(sizes[-1])
    lines.append("      +" + "-" * width)
    lines.append("       " + low + f"{'tokens':^{max(6, width - len(low) - len(high))}}" + high)
    legend = [f"{_MARKS[index % len(_MARKS)]} {name}" for index, name in enumerate(rates)]
    lines.append("       misses: " + "   ".join([*legend, f"{_BOUND} no policy can pass"]))
    return "\n".join(lines)


def curve_png(
    path: Path, title: str, sizes: Sequence[int], rates: Mapping[str, Sequence[float]], bound: Sequence[float]
) -> None:
    """Draw it with matplotlib.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="tight")
    axes = figure.add_subplot()
    for name, row in rates.items():
        axes.plot(sizes, [100 * (1 - rate) for rate in row], marker="o", label=name)
    axes.plot(sizes, [100 * (1 - rate) for rate in bound], "k--", label="no policy can pass")
    axes.set_xscale("log")
    axes.set_xticks(sizes, [size_text(size) for size in sizes])
    axes.minorticks_off()
    axes.set_xlabel("cache size, tokens")
    axes.set_ylabel("prompt tokens missed, %")
    axes.set_ylim(0, 100)
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, format="png", dpi=120)


def _interpolated(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    for left in range(len(xs) - 1):
        if x <= xs[left + 1]:
            share = (x - xs[left]) / ((xs[left + 1] - xs[left]) or 1.0)
            return ys[left] + share * (ys[left + 1] - ys[left])
    return ys[-1]
