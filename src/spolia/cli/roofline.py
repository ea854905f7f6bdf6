"""`spolia bench MODEL --roofline`: what a step's time is spent on, beside what the machine could do."""

from __future__ import annotations

import json
from dataclasses import asdict

from spolia import models
from spolia.cli.flags import EngineFlags
from spolia.cli.models import fetch
from spolia.engine.memory import default_num_threads
from spolia.errors import InvalidRequest
from spolia.kernels.cpu import CpuExecutable
from spolia.kernels.cpu.roofline import Machine, StepCost, StepShape, measure_machine, measure_step

__all__ = ["run"]

_SHAPES = (
    StepShape("decode, 1 stream", 1, 1, 128),
    StepShape("decode, 1 stream at 4,000 tokens", 1, 1, 4_000),
    StepShape("decode, 16 streams", 16, 1, 128),
    StepShape("prefill, 256 tokens", 1, 256, 0),
    StepShape("prefill, 256 tokens after 768", 1, 256, 768),
)


def run(source: str | None, *, engine: EngineFlags) -> None:
    """Print a line of JSON a step to standard output, and tables to standard error.

    Raises:
        ModelError: the model cannot be had or read.
        InvalidRequest: no model, or a flag that is impossible.
    """
    if source is None:
        raise InvalidRequest("name a model: the roofline is that of the kernels, not of a server")
    config = engine.config()
    fetch(source)
    model = models.load(source)
    program = model.program
    num_threads = config.num_threads or default_num_threads()
    executable = CpuExecutable(program, kv_dtype=config.kv_dtype, num_threads=num_threads)
    machine = measure_machine(executable)
    print(json.dumps({"machine": asdict(machine), "level": executable.level}), flush=True)
    for shape in _SHAPES:
        if shape.context + shape.num_rows > model.context_length:
            continue
        cost = measure_step(executable, program, shape)
        print(json.dumps(_record(cost, machine)), flush=True)
        _show(cost, machine)


def _record(cost: StepCost, machine: Machine) -> dict[str, object]:
    return {
        **asdict(cost.shape),
        "seconds": cost.seconds,
        "least_seconds": cost.least_seconds(machine),
        "bandwidth_share": cost.num_bytes / cost.seconds / machine.bytes_per_s,
        "parts": [{**asdict(part), "least_seconds": part.least_seconds(machine)} for part in cost.parts],
    }


def _show(cost: StepCost, machine: Machine) -> None:
    from rich.console import Console
    from rich.table import Table

    rows = cost.shape.num_rows * cost.shape.num_sequences
    title = (
        f"{cost.shape.name}: {1e3 * cost.seconds:.2f} ms, {rows / cost.seconds:.0f} tokens/s, "
        f"{cost.num_bytes / cost.seconds / 1e9:.1f} of {machine.bytes_per_s / 1e9:.1f} GB/s; "
        f"limit {1e3 * cost.least_seconds(machine):.2f} ms"
    )
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    table.add_column("work")
    for heading in ("ms", "MB", "GB/s", "GOP", "GOP/s", "limit ms", "of limit"):
        table.add_column(heading, justify="right")
    for part in cost.parts:
        if part.seconds < 0.005 * cost.seconds:
            continue
        num_ops = part.num_int8_ops + part.num_float_ops
        least = part.least_seconds(machine)
        figures = [""] * 6
        if num_ops:
            figures = [
                f"{part.num_bytes / 1e6:.2f}",
                f"{part.num_bytes / part.seconds / 1e9:.1f}",
                f"{num_ops / 1e9:.3f}",
                f"{num_ops / part.seconds / 1e9:.0f}",
                f"{1e3 * least:.3f}",
                f"{least / part.seconds:.0%}",
            ]
        table.add_row(part.name.replace("blk.N.", "").replace(".weight", ""), f"{1e3 * part.seconds:.3f}", *figures)
    Console(stderr=True).print(table)
