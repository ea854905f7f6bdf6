"""What a model computes, as data: a list of ops over values, which a backend prepares once and then runs.

An architecture file (`models/arch/`) emits a `Program` through a `ProgramBuilder`; a backend (`cpu`, `reference`)
turns it into an `Executable`. All values are float32 matrices `[num_rows, width]`: a row is one token of one sequence
in this step. No op mixes rows, except `Attend`, which reads earlier tokens of the same sequence from KV blocks. So a
row's result is a function of that row and of its sequence's earlier tokens, never of its neighbours in the batch
(promise 1 of the design).

    tokens -> Embed -> x
    per layer:  RmsNorm -> Linear q,k,v -> Rope -> Attend -> Linear -> Add -> RmsNorm -> Linear -> Glu -> Linear -> Add
    RmsNorm -> Logits -> float32 [num_logit_rows, vocab]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "BLOCK_SIZE",
    "Activation",
    "Add",
    "Attend",
    "Backend",
    "BlockCopy",
    "CacheGroup",
    "CacheLayer",
    "Embed",
    "Executable",
    "Glu",
    "KvDtype",
    "LayerNorm",
    "Linear",
    "Logits",
    "Op",
    "Program",
    "ProgramBuilder",
    "RmsNorm",
    "Rope",
    "RopeSpec",
    "Scale",
    "StepInputs",
    "Value",
    "Weight",
    "inputs",
]

BLOCK_SIZE = 16
"""Tokens of a KV block: one 512-bit vector of float32."""

KvDtype = Literal["bf16", "f16", "f32", "int8"]
_RUN_VALUES = 1 << 15
ActivationKind = Literal["silu", "gelu_tanh", "gelu"]


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """A tensor as it lies in the file: never dequantised, usually a view of the mapped file.

    Attributes:
        name: as in the file, for error messages.
        type: storage type, a key of `quants.TYPES` ("F32", "BF16", "Q4_1", ...).
        shape: in numpy's order: `(out_features, in_features)` of a matrix, `(n,)` of a vector.
        data: uint8 `[rows, bytes_per_row]`, C-contiguous; a vector is one row.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8]

    def rows(self, start: int, stop: int) -> Weight:
        """Rows [start, stop) as a weight of their own, sharing memory: how fused QKV or gate-up matrices are cut."""
        return Weight(f"{self.name}[{start}:{stop}]", self.type, (stop - start, *self.shape[1:]), self.data[start:stop])


@dataclass(frozen=True, slots=True)
class Value:
    """A float32 matrix `[num_rows, width]`, written by exactly one op."""

    id: int
    width: int


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding of the first `2 * len(inv_freq)` dimensions of each head, rotate-half (NEOX) pairing.

    Dimension i is paired with i + len(inv_freq). Angle = position * inv_freq[i] in float32; cos and sin are multiplied
    by `scale` (YaRN's and LongRoPE's attention factor). All scaling schemes are folded into `inv_freq` by the model.

    Source: Su et al. 2021, RoFormer (arXiv:2104.09864).
    """

    inv_freq: tuple[float, ...]
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class CacheLayer:
    """The KV that one attention layer keeps per token, and for how long.

    `window` = W: a token at position p attends to positions (p - W, p]: W tokens, itself included. None: to all.
    """

    num_kv_heads: int
    head_dim: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers with the same need, which share one pool of blocks. `layers` are indices into `Program.cache_layers`."""

    window: int | None
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Embed:
    """out[r] = dequantise(table[token_ids[r]]) * scale."""

    out: Value
    table: Weight
    scale: float


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """Each group of `len(weight)` consecutive columns: x / sqrt(mean(x^2) + eps) * weight.

    `len(weight) == width` is the usual norm; `len(weight) == head_dim` is a norm of each head (qk-norm).
    """

    out: Value
    x: Value
    weight: Weight
    eps: float


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """(x - mean) / sqrt(var + eps) * weight + bias, over the whole row."""

    out: Value
    x: Value
    weight: Weight
    bias: Weight | None
    eps: float


@dataclass(frozen=True, slots=True)
class Linear:
    """out = x @ weight.T + bias. `weight` is `(out.width, x.width)` of any storage type; `bias` is a vector."""

    out: Value
    x: Value
    weight: Weight
    bias: Weight | None


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotate each head of `head_dim` columns by the row's absolute position."""

    out: Value
    x: Value
    head_dim: int
    rope: RopeSpec


@dataclass(frozen=True, slots=True)
class Attend:
    """Store k and v of the step's rows in the sequence's blocks, then attend causally over all its tokens so far.

    q is `[rows, num_heads * head_dim]`, k and v are `[rows, num_kv_heads * head_dim]`; query head h reads KV head
    h // (num_heads / num_kv_heads). score = scale * q.k, then softcap * tanh(score / softcap) if there is a softcap.
    """

    out: Value
    q: Value
    k: Value
    v: Value
    layer: int
    num_heads: int
    scale: float
    softcap: float | None


@dataclass(frozen=True, slots=True)
class Glu:
    """out = act(gate) * up."""

    out: Value
    gate: Value
    up: Value
    act: ActivationKind


@dataclass(frozen=True, slots=True)
class Activation:
    """out = act(x)."""

    out: Value
    x: Value
    act: ActivationKind


@dataclass(frozen=True, slots=True)
class Add:
    """out = a + b, the residual stream."""

    out: Value
    a: Value
    b: Value


@dataclass(frozen=True, slots=True)
class Scale:
    """out = x * factor."""

    out: Value
    x: Value
    factor: float


@dataclass(frozen=True, slots=True)
class Logits:
    """logits = (x[logit_rows] @ weight.T + bias) * scale, then softcap * tanh(. / softcap) if there is a softcap.

    Always the last op; the only one that reads `StepInputs.logit_rows`.
    """

    x: Value
    weight: Weight
    bias: Weight | None
    scale: float
    softcap: float | None


Op = Embed | RmsNorm | LayerNorm | Linear | Rope | Attend | Glu | Activation | Add | Scale | Logits


def inputs(op: Op) -> tuple[Value, ...]:
    """The values that `op` reads, in the order of its fields."""
    match op:
        case Embed():
            return ()
        case Attend(q=q, k=k, v=v):
            return q, k, v
        case Glu(gate=gate, up=up):
            return gate, up
        case Add(a=a, b=b):
            return a, b
        case _:
            return (op.x,)


@dataclass(frozen=True, slots=True)
class Program:
    """Ops in order of execution; `values` counts the values they write; the last op is `Logits`."""

    ops: tuple[Op, ...]
    num_values: int
    cache_layers: tuple[CacheLayer, ...]
    vocab_size: int

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """Layers grouped by window, full attention first, then by growing window: the order of all block tables."""
        windows = sorted({layer.window for layer in self.cache_layers}, key=lambda w: (w is not None, w or 0))
        return tuple(
            CacheGroup(w, tuple(i for i, layer in enumerate(self.cache_layers) if layer.window == w)) for w in windows
        )

    @property
    def layer_inputs(self) -> tuple[Value, ...]:
        """What each attention layer begins with, before its norm: the residual stream, of the head's width."""
        writers = {op.out.id: op for op in self.ops if not isinstance(op, Logits)}
        found = []
        for op in self.ops:
            if isinstance(op, Attend):
                value = op.q
                while isinstance(writer := writers[value.id], RmsNorm | LayerNorm | Linear | Rope):
                    value = writer.x
                found.append(value)
        return tuple(found)

    @property
    def has_tied_head(self) -> bool:
        """Whether the head is the embedding table."""
        tables = [op.table for op in self.ops if isinstance(op, Embed)]
        return any(isinstance(op, Logits) and any(op.weight is table for table in tables) for op in self.ops)

    def layer_runs(self, group: int) -> list[tuple[CacheLayer, int]]:
        """A cache group's layers in order: those alike that follow each other, and how many they are.

        No more at a time than a core's cache holds the KV of, for one block in float32.
        """
        runs = []
        for layer, same in groupby(self.cache_layers[index] for index in self.cache_groups[group].layers):
            count = len(list(same))
            most = max(1, _RUN_VALUES // (2 * BLOCK_SIZE * layer.num_kv_heads * layer.head_dim))
            runs += [(layer, min(most, count - first)) for first in range(0, count, most)]
        return runs


@dataclass(slots=True)
class ProgramBuilder:
    """Emits ops in the order they are called; each method returns the value that its op writes."""

    ops: list[Op] = field(default_factory=list)
    cache_layers: list[CacheLayer] = field(default_factory=list)
    num_values: int = 0

    def _value(self, width: int) -> Value:
        self.num_values += 1
        return Value(self.num_values - 1, width)

    def embed(self, table: Weight, *, scale: float = 1.0) -> Value:
        out = self._value(table.shape[1])
        self.ops.append(Embed(out, table, scale))
        return out

    def rms_norm(self, x: Value, weight: Weight, eps: float) -> Value:
        if x.width % weight.shape[0]:
            raise ValueError(f"{weight.name}: {weight.shape[0]} values do not divide a row of {x.width}")
        out = self._value(x.width)
        self.ops.append(RmsNorm(out, x, weight, eps))
        return out

    def layer_norm(self, x: Value, weight: Weight, bias: Weight | None, eps: float) -> Value:
        out = self._value(x.width)
        self.ops.append(LayerNorm(out, x, weight, bias, eps))
        return out

    def linear(self, x: Value, weight: Weight, bias: Weight | None = None) -> Value:
        if weight.shape[1] != x.width:
            raise ValueError(f"{weight.name}: {weight.shape} cannot multiply a row of {x.width}")
        if bias is not None and bias.shape != (weight.shape[0],):
            raise ValueError(f"{bias.name}: shape {bias.shape}, expected ({weight.shape[0]},)")
        out = self._value(weight.shape[0])
        self.ops.append(Linear(out, x, weight, bias))
        return out

    def rope(self, x: Value, head_dim: int, rope: RopeSpec) -> Value:
        if 2 * len(rope.inv_freq) > head_dim or x.width % head_dim:
            turned = 2 * len(rope.inv_freq)
            raise ValueError(f"rope of {turned} dimensions on heads of {head_dim} in a row of {x.width}")
        out = self._value(x.width)
        self.ops.append(Rope(out, x, head_dim, rope))
        return out

    def attend(
        self,
        q: Value,
        k: Value,
        v: Value,
        *,
        num_heads: int,
        num_kv_heads: int,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Value:
        """Attention of the next cache layer: layers are numbered in the order of these calls."""
        head_dim = k.width // num_kv_heads
        if q.width != num_heads * head_dim or v.width != k.width or num_heads % num_kv_heads:
            raise ValueError(f"attend: q {q.width}, k {k.width}, v {v.width} with {num_heads}/{num_kv_heads} heads")
        self.cache_layers.append(CacheLayer(num_kv_heads, head_dim, window))
        out = self._value(q.width)
        self.ops.append(Attend(out, q, k, v, len(self.cache_layers) - 1, num_heads, scale, softcap))
        return out

    def glu(self, gate: Value, up: Value, act: ActivationKind) -> Value:
        out = self._value(gate.width)
        self.ops.append(Glu(out, gate, up, act))
        return out

    def activation(self, x: Value, act: ActivationKind) -> Value:
        out = self._value(x.width)
        self.ops.append(Activation(out, x, act))
        return out

    def add(self, a: Value, b: Value) -> Value:
        out = self._value(a.width)
        self.ops.append(Add(out, a, b))
        return out

    def scale(self, x: Value, factor: float) -> Value:
        out = self._value(x.width)
        self.ops.append(Scale(out, x, factor))
        return out

    def logits(
        self, x: Value, weight: Weight, *, bias: Weight | None = None, scale: float = 1.0, softcap: float | None = None
    ) -> Program:
        """The last op; returns the finished program."""
        if weight.shape[1] != x.width:
            raise ValueError(f"{weight.name}: {weight.shape} cannot multiply a row of {x.width}")
        self.ops.append(Logits(x, weight, bias, scale, softcap))
        return Program(tuple(self.ops), self.num_values, tuple(self.cache_layers), weight.shape[0])


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy the first `num_tokens` tokens of block `src` to `dst`, in all layers of `group`, before the step."""

    group: int
    src: int
    dst: int
    num_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class StepInputs:
    """One step's rows, grouped by sequence.

    Sequence s owns rows [row_starts[s], row_starts[s + 1]), at least one; its rows are consecutive positions. The KV of
    position p lies in block `block_tables[g][s, p // 16]` at offset p % 16, for each group g. A window group's table
    may hold -1 for blocks wholly outside the window of the sequence's first row of this step; they are never read.

    Attributes:
        token_ids: int32 `[num_rows]`.
        positions: int32 `[num_rows]`, absolute.
        row_starts: int32 `[num_seqs + 1]`, from 0 to num_rows.
        block_tables: per group int32 `[num_seqs, max_blocks]`, in the order of `Program.cache_groups`.
        logit_rows: int32 `[num_logit_rows]`, ascending.
        copies: copy-on-write of shared blocks, made before anything else.
    """

    token_ids: NDArray[np.int32]
    positions: NDArray[np.int32]
    row_starts: NDArray[np.int32]
    block_tables: tuple[NDArray[np.int32], ...]
    logit_rows: NDArray[np.int32]
    copies: tuple[BlockCopy, ...] = ()


class Executable(Protocol):
    """A prepared program. One thread at a time may call it; the caller owns all arrays it passes in."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def packed_bytes(self) -> int:
        """Memory that the weights take."""

    @property
    def hidden_size(self) -> int:
        """Columns of what the head reads."""

    @property
    def num_layers(self) -> int:
        """Of attention."""

    @property
    def num_threads(self) -> int: ...

    @property
    def numerics(self) -> str:
        """Names the arithmetic: executables of one program and kv_dtype that agree in it compute the same bits."""

    def set_num_threads(self, num_threads: int) -> None:
        """Results do not depend on it."""

    def block_bytes(self, group: int) -> int:
        """Bytes of one block of `group`: 16 tokens of all its layers, contiguous."""

    def bind_kv(self, pools: Sequence[NDArray[np.uint8]]) -> None:
        """Use these pools, one uint8 `[num_blocks, block_bytes(group)]` a group, until the next call; kept alive."""

    def set_kv_dtype(self, kv_dtype: KvDtype) -> None:
        """Keep KV so from now on: blocks have other sizes, and no pools are bound. Between steps only."""

    def load_kv(self, group: int, block: NDArray[np.uint8]) -> list[NDArray[np.float32]]:
        """A block's values, float32 `[num_layers, 2, num_kv_heads, 16, head_dim]` (K, then V) for each run of layers
        that are alike. Any thread may call.
        """

    def store_kv(self, group: int, runs: list[NDArray[np.float32]], block: NDArray[np.uint8]) -> None:
        """Write a block, rounding to `kv_dtype`. Any thread may call."""

    def run(
        self,
        step: StepInputs,
        logits: NDArray[np.float32] | None,
        hidden: NDArray[np.float32] | None = None,
        layers: NDArray[np.float32] | None = None,
    ) -> None:
        """Run one step and write `logits` `[num_logit_rows, vocab_size]`; KV of all rows is in the pools afterwards.

        Without `logits` the head is not computed. `hidden` `[num_logit_rows, hidden_size]` gets what the head reads of
        the same rows: the last layer's result, after the final norm. `layers`, `[num_layers, num_logit_rows,
        hidden_size]`, gets what each layer reads of them, before any norm (`Program.layer_inputs`).

        Releases the GIL while computing. Block and token ids are checked against pools and vocabulary first.

        Raises:
            ValueError: an id out of range or arrays of the wrong shape; nothing was computed.
        """

    def head(self, hidden: NDArray[np.float32], logits: NDArray[np.float32]) -> None:
        """The head alone, of rows `[num_rows, hidden_size]` as `run` gives them, into `[num_rows, vocab_size]`."""

    def argmax(self, rows: NDArray[np.float32]) -> NDArray[np.int64]:
        """`rows.argmax(axis=1)` of a C-contiguous matrix, on all threads: logits of many rows are many megabytes."""


class Backend(Protocol):
    """Turns programs into executables. `kernels.BACKENDS` names those there are."""

    def __call__(self, program: Program, *, kv_dtype: KvDtype, num_threads: int) -> Executable: ...
