"""From a program to the plan that `src/executable.cpp` runs: stages, buffers, and what lies where.

A stage has a row part (a chain of ops that takes each row through, on one thread) and a heavy part (matrix products
and attention, cut by columns and by heads), with a meeting of all threads after each. An op goes to the earliest stage
where its operands are there, so ops that read the same value run side by side however the model emitted them. A llama
layer is five stages:

    rows                                heavy
    norm, prepare                       q, k, v products
    rope, store k and v in the blocks   attention
    merge splits, prepare               output product + residual
    norm, prepare                       up product * act(gate product)
    prepare                             down product + residual

`prepare` turns a row into what a product reads (int8 with scales, say), once for all products that read it. A value
that only its stage's row part touches never leaves that thread's scratch. After the last attention only the rows whose
logits are wanted go on: the stages from there have one row for each of those (`Domain.LOGITS`).

Time is counted in points: 2 * stage after its row part, 2 * stage + 1 after its heavy part.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from spolia.kernels import quants
from spolia.kernels.program import (
    Activation,
    Add,
    Attend,
    Embed,
    Glu,
    KvDtype,
    LayerNorm,
    Linear,
    Logits,
    Op,
    Program,
    RmsNorm,
    Rope,
    RopeSpec,
    Scale,
    Value,
    Weight,
    inputs,
)

__all__ = ["Buffer", "Domain", "Layer", "Matmul", "Plan", "RowOp", "Stage", "lower", "part_names"]

LOGITS_ARRAY = -1
"""The buffer that is the caller's array of logits."""


class Domain(IntEnum):
    """What a buffer has one row for. In the order of plan.h."""

    STEP = 0
    LOGITS = 1
    THREAD = 2


@dataclass(frozen=True, slots=True)
class Buffer:
    """`offset` is the bytes of its domain's arena, per row, that lie before it."""

    domain: Domain
    offset: int
    row_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RowOp:
    """Fields as in plan.h: buffers by index, -1 where there is none."""

    kind: str
    out: int = -1
    a: int = -1
    b: int = -1
    width: int = 0
    weight: int = -1
    bias: int = -1
    index: int = -1
    group: int = 0
    half: int = 0
    factor: float = 0.0
    act: str = "silu"
    row_kind: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Matmul:
    """out = rows @ matrix.T + bias, then one of: + residual; scaled and capped; * act(rows @ gate.T + gate_bias)."""

    matrix: int
    rows: int
    row_kind: int
    out: int
    bias: int = -1
    residual: int = -1
    scale: float = 1.0
    softcap: float = 0.0
    gate: int = -1
    gate_bias: int = -1
    act: str = "silu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One attention layer; `window` and `softcap` are 0 where there is none."""

    q: int
    k: int
    v: int
    out: int
    group: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int
    scale: float
    softcap: float


@dataclass(slots=True)
class Stage:
    domain: Domain
    merges: list[int] = field(default_factory=list)
    row_ops: list[RowOp] = field(default_factory=list)
    keeps: list[tuple[int, int]] = field(default_factory=list)
    stores: list[int] = field(default_factory=list)
    matmuls: list[Matmul] = field(default_factory=list)
    attends: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Plan:
    """What the executable is made of. `arena_row_bytes` is by domain; `groups` are indices of `layers`.

    `hidden` is the buffer of the rows that the head reads, before they are prepared; `hidden_size` their columns. What
    each of `num_layers` layers reads is in the buffers that stages keep for it, as (buffer, layer).
    """

    buffers: tuple[Buffer, ...]
    arena_row_bytes: tuple[int, int, int]
    vectors: tuple[NDArray[np.float32], ...]
    matrices: tuple[Weight, ...]
    tables: tuple[Weight, ...]
    ropes: tuple[RopeSpec, ...]
    layers: tuple[Layer, ...]
    groups: tuple[tuple[int, ...], ...]
    stages: tuple[Stage, ...]
    kv_dtype: KvDtype
    hidden: int
    hidden_size: int
    num_layers: int


@dataclass(slots=True)
class _Place:
    """A buffer before it has an offset: stages [first, last] touch it; `private` if only row ops of the first do."""

    index: int
    domain: Domain
    row_bytes: int
    first: int
    last: int
    private: bool


RowFormat = Callable[[str, int, bool], tuple[int, int]]
"""(weight type, columns, whether to round finely) -> (kind of prepared row, its bytes): a matter of the ISA level."""


def lower(program: Program, kv_dtype: KvDtype, row_format: RowFormat) -> Plan:
    return _Lowering(program, kv_dtype, row_format).plan()


def part_names(plan: Plan) -> list[str]:
    """What each stage's row part and heavy part do, two names a stage; alike in layers that are alike."""
    names = []
    for stage in plan.stages:
        kinds = ["merge"] * bool(stage.merges) + [op.kind for op in stage.row_ops] + ["store"] * bool(stage.stores)
        matrices = [i for matmul in stage.matmuls for i in (matmul.gate, matmul.matrix) if i >= 0]
        products = [re.sub(r"\d+", "N", plan.matrices[i].name) for i in matrices]
        heavy = products + [f"attend window={plan.layers[i].window}" for i in stage.attends]
        names += [" ".join(dict.fromkeys(kinds)) or "nothing", " ".join(heavy) or "nothing"]
    return names


def _float_bytes(width: int) -> int:
    """Whole cache lines, an odd number of them: rows a power of two apart would crowd into few sets of the cache."""
    return (-(-width * 4 // 64) | 1) * 64


class _Lowering:
    def __init__(self, program: Program, kv_dtype: KvDtype, row_format: RowFormat) -> None:
        self.program = program
        self.kv_dtype: KvDtype = kv_dtype
        self.row_format = row_format
        self.points: list[int] = []  # by op: when its result is there
        self.ready: dict[int, int] = {}  # by value: the same
        self.epilogues: dict[int, Linear] = {}  # by sum: the product whose epilogue it is
        self.pairs: dict[int, tuple[Linear, Linear]] = {}  # by Glu: the products of gate and up that it goes with
        self.absorbed: set[int] = set()  # products that are computed with such a sum or Glu
        self.first_logits_stage = 0
        self.hidden = -1
        self.hidden_size = 0
        self.stages: list[Stage] = []
        self.places: dict[Hashable, _Place] = {}  # by value id, or by what else is kept in a buffer
        self.vectors: list[NDArray[np.float32]] = []
        self.matrices: list[Weight] = []
        self.tables: list[Weight] = []
        self.ropes: list[RopeSpec] = []
        self.layers: list[Layer] = []

    def plan(self) -> Plan:
        self._schedule()
        for op, point in zip(self.program.ops, self.points, strict=True):
            self._emit(op, point // 2)
        for layer, value in enumerate(self.program.layer_inputs):
            stage = (self.ready[value.id] + 1) // 2  # the first whose row part can read it
            self.stages[stage].keeps.append((self._read(value.id, stage), layer))
        buffers, arena_row_bytes = self._allocate()
        return Plan(
            buffers=buffers,
            arena_row_bytes=arena_row_bytes,
            vectors=tuple(self.vectors),
            matrices=tuple(self.matrices),
            tables=tuple(self.tables),
            ropes=tuple(self.ropes),
            layers=tuple(self.layers),
            groups=tuple(group.layers for group in self.program.cache_groups),
            stages=tuple(self.stages),
            kv_dtype=self.kv_dtype,
            hidden=self.hidden,
            hidden_size=self.hidden_size,
            num_layers=len(self.program.layer_inputs),
        )

    def _schedule(self) -> None:
        """Give each op the earliest point that its operands allow."""
        ready = self.ready
        products = {op.out.id: op for op in self.program.ops if isinstance(op, Linear)}
        num_reads = Counter(value.id for op in self.program.ops for value in inputs(op))
        for op in self.program.ops:
            rows = max((ready[value.id] for value in inputs(op)), default=0)
            rows += rows % 2  # the first row part that can read them
            match op:
                case Linear():
                    point = rows + 1
                case Logits():
                    point = max(rows, 2 * self.first_logits_stage) + 1
                case Attend():
                    point = rows + 2  # store, attend, merge
                    self.first_logits_stage = max(self.first_logits_stage, point // 2)
                case Add(a=a, b=b):
                    point = rows
                    for product, other in ((a, b), (b, a)):
                        only_here = product.id in products and num_reads[product.id] == 1
                        if only_here and ready[other.id] < ready[product.id]:
                            self.epilogues[op.out.id] = products[product.id]
                            self.absorbed.add(product.id)
                            point = ready[product.id]
                            break
                case Glu(out=out, gate=gate, up=up):
                    point = rows
                    pair = [products[value.id] for value in (gate, up) if value.id in products]
                    only_here = num_reads[gate.id] == num_reads[up.id] == 1
                    if len(pair) == 2 and only_here and self._same_rows(*pair):
                        self.pairs[out.id] = (pair[0], pair[1])
                        self.absorbed |= {gate.id, up.id}
                        point = ready[up.id]
                case _:
                    point = rows
            self.points.append(point)
            if not isinstance(op, Logits):
                ready[op.out.id] = point
        self.stages = [
            Stage(Domain.STEP if i < self.first_logits_stage else Domain.LOGITS)
            for i in range(max(self.points) // 2 + 1)
        ]

    def _same_rows(self, *products: Linear) -> bool:
        """Whether they read the same prepared rows."""
        return len({(op.x.id, self.row_format(op.weight.type, op.x.width, False)) for op in products}) == 1

    def _emit(self, op: Op, stage: int) -> None:
        match op:
            case Embed(out=out, table=table, scale=scale):
                self.tables.append(table)
                self._row_op(stage, RowOp(kind="embed", index=len(self.tables) - 1, factor=scale), out)
            case RmsNorm(out=out, x=x, weight=weight, eps=eps):
                norm = RowOp(kind="rms_norm", weight=self._vector(weight), group=weight.shape[0], factor=eps)
                self._row_op(stage, norm, out, x)
            case LayerNorm(out=out, x=x, weight=weight, bias=bias, eps=eps):
                norm = RowOp(kind="layer_norm", weight=self._vector(weight), bias=self._vector(bias), factor=eps)
                self._row_op(stage, norm, out, x)
            case Rope(out=out, x=x, head_dim=head_dim, rope=rope):
                turn = RowOp(kind="rope", group=head_dim, half=len(rope.inv_freq), b=self._rope_table(rope, stage))
                self._row_op(stage, turn, out, x)
            case Glu(out=out, act=act) if out.id in self.pairs:
                gate_product, product = self.pairs[out.id]
                gate_matrix, gate_bias = self._matrix(gate_product.weight), self._vector(gate_product.bias)
                self._matmul(stage, product, out, gate=gate_matrix, gate_bias=gate_bias, act=act)
            case Glu(out=out, gate=gate, up=up, act=act):
                self._row_op(stage, RowOp(kind="glu", act=act), out, gate, up)
            case Activation(out=out, x=x, act=act):
                self._row_op(stage, RowOp(kind="activation", act=act), out, x)
            case Scale(out=out, x=x, factor=factor):
                self._row_op(stage, RowOp(kind="scale", factor=factor), out, x)
            case Add(out=out, a=a, b=b) if out.id in self.epilogues:
                product = self.epilogues[out.id]
                other = b if a.id == product.out.id else a
                self._matmul(stage, product, out, residual=self._read(other.id, stage))
            case Add(out=out, a=a, b=b):
                self._row_op(stage, RowOp(kind="add"), out, a, b)
            case Attend():
                self._attend(op, stage - 1, stage)
            case Linear(out=out) if out.id in self.absorbed:
                pass
            case Linear(out=out):
                self._matmul(stage, op, out)
            case Logits(x=x, weight=weight, bias=bias, scale=scale, softcap=softcap):
                # Rounded finely: nothing comes after that could average the rounding out, and it is few rows.
                rows, row_kind = self._prepare(x, weight, stage, precise=True)
                self.hidden, self.hidden_size = self._read(x.id, stage), x.width
                matmul = Matmul(
                    matrix=self._matrix(weight),
                    rows=rows,
                    row_kind=row_kind,
                    out=LOGITS_ARRAY,
                    bias=self._vector(bias),
                    scale=scale,
                    softcap=softcap or 0.0,
                )
                self.stages[stage].matmuls.append(matmul)

    def _matmul(
        self,
        stage: int,
        product: Linear,
        out: Value,
        *,
        residual: int = -1,
        gate: int = -1,
        gate_bias: int = -1,
        act: str = "silu",
    ) -> None:
        """Append `product`, and what follows on its result, to the stage's heavy part; the end result is `out`."""
        rows, row_kind = self._prepare(product.x, product.weight, stage)
        self.stages[stage].matmuls.append(
            Matmul(
                matrix=self._matrix(product.weight),
                rows=rows,
                row_kind=row_kind,
                out=self._write(out.id, _float_bytes(out.width), stage),
                bias=self._vector(product.bias),
                residual=residual,
                gate=gate,
                gate_bias=gate_bias,
                act=act,
            )
        )

    def _row_op(self, stage: int, op: RowOp, out: Value, a: Value | None = None, b: Value | None = None) -> None:
        """Append `op`, its operands filled in, to the stage's row part."""
        if a is not None:
            op = replace(op, a=self._read(a.id, stage, by_row_op=True))
        if b is not None:
            op = replace(op, b=self._read(b.id, stage, by_row_op=True))
        target = self._write(out.id, _float_bytes(out.width), stage, by_row_op=True)
        self.stages[stage].row_ops.append(replace(op, out=target, width=out.width))

    def _attend(self, op: Attend, stage: int, merge_stage: int) -> None:
        cache_layer = self.program.cache_layers[op.layer]
        q, k, v = (self._read(value.id, stage) for value in (op.q, op.k, op.v))
        out = self._write(op.out.id, _float_bytes(op.out.width), stage)
        self._read(op.out.id, merge_stage, of_step=True)
        self.layers.append(
            Layer(
                q=q,
                k=k,
                v=v,
                out=out,
                group=[group.window for group in self.program.cache_groups].index(cache_layer.window),
                num_heads=op.num_heads,
                num_kv_heads=cache_layer.num_kv_heads,
                head_dim=cache_layer.head_dim,
                window=cache_layer.window or 0,
                scale=op.scale,
                softcap=op.softcap or 0.0,
            )
        )
        self.stages[stage].stores.append(op.layer)
        self.stages[stage].attends.append(op.layer)
        self.stages[merge_stage].merges.append(op.layer)

    def _prepare(self, x: Value, weight: Weight, stage: int, *, precise: bool = False) -> tuple[int, int]:
        """The buffer of x's rows as products with `weight` read them, and their kind."""
        row_kind, row_bytes = self.row_format(weight.type, x.width, precise)
        key = ("prepared", x.id, row_kind)
        if key not in self.places:
            a = self._read(x.id, stage, by_row_op=True)
            out = self._write(key, row_bytes, stage)
            self.stages[stage].row_ops.append(RowOp(kind="prepare", out=out, a=a, width=x.width, row_kind=row_kind))
        return self._read(key, stage), row_kind

    def _rope_table(self, rope: RopeSpec, stage: int) -> int:
        """The buffer of each row's cosines and sines, made in the first stage."""
        if rope not in self.ropes:
            self.ropes.append(rope)
            width = 2 * len(rope.inv_freq)
            out = self._write(rope, _float_bytes(width), 0, by_row_op=True)
            self.stages[0].row_ops.append(RowOp(kind="rope_table", out=out, width=width, index=len(self.ropes) - 1))
        return self._read(rope, stage, by_row_op=True)

    def _write(self, key: Hashable, row_bytes: int, stage: int, *, by_row_op: bool = False) -> int:
        """A new buffer for `key`."""
        index = len(self.places)
        self.places[key] = _Place(index, self.stages[stage].domain, row_bytes, stage, stage, by_row_op)
        return index

    def _read(self, key: Hashable, stage: int, *, by_row_op: bool = False, of_step: bool = False) -> int:
        """The buffer of `key` as `stage` reads it: in its own domain, unless it wants that of all rows of the step."""
        place = self.places[key]
        place.last = max(place.last, stage)
        place.private &= by_row_op and stage == place.first
        if of_step or place.domain == self.stages[stage].domain:
            return place.index
        gathered = ("gathered", key)
        if gathered not in self.places:
            first = self.first_logits_stage
            place.last = max(place.last, first)
            out = self._write(gathered, place.row_bytes, first, by_row_op=True)
            self.stages[first].row_ops.append(RowOp(kind="gather", out=out, a=place.index, width=place.row_bytes // 4))
        return self._read(gathered, stage, by_row_op=by_row_op)

    def _vector(self, weight: Weight | None) -> int:
        if weight is None:
            return -1
        self.vectors.append(quants.dequantize(weight))
        return len(self.vectors) - 1

    def _matrix(self, weight: Weight) -> int:
        self.matrices.append(weight)
        return len(self.matrices) - 1

    def _allocate(self) -> tuple[tuple[Buffer, ...], tuple[int, int, int]]:
        """First fit over the stages that touch a buffer; private ones side by side in their stage's thread arena."""
        buffers: dict[int, Buffer] = {}
        sizes = dict.fromkeys(Domain, 0)
        live: dict[Domain, list[tuple[int, int, int]]] = {domain: [] for domain in Domain}  # (offset, end, last stage)
        for place in sorted(self.places.values(), key=lambda place: (place.first, place.index)):
            domain = Domain.THREAD if place.private else place.domain
            taken = sorted(span for span in live[domain] if span[2] >= place.first)
            offset = 0
            for begin, end, _ in taken:
                if begin - offset >= place.row_bytes:
                    break
                offset = max(offset, end)
            live[domain] = [*taken, (offset, offset + place.row_bytes, place.last)]
            sizes[domain] = max(sizes[domain], offset + place.row_bytes)
            buffers[place.index] = Buffer(domain, offset, place.row_bytes)
        arena_row_bytes = sizes[Domain.STEP], sizes[Domain.LOGITS], sizes[Domain.THREAD]
        return tuple(buffers[i] for i in range(len(buffers))), arena_row_bytes
