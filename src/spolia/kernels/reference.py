"""The meaning of every op, in plain numpy: the oracle of all tests, and a backend for whoever doubts the others.

Arithmetic is float32 on dequantised weights (sums of norms in float64). Not bit-exact between batches: numpy's matrix
product may choose another order for another shape. With `activation_bits=8` the operands of products with integer
weight types are rounded as the CPU kernels round them, so that what is left between the two is the order of sums.

    block of a group   layer | layer | ...
    layer              K [16 tokens, num_kv_heads, stored_width] | V, alike (kv_types)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from spolia.kernels import quants
from spolia.kernels.kv_types import STORAGE, stored_width, to_float32, to_storage
from spolia.kernels.program import (
    BLOCK_SIZE,
    Activation,
    ActivationKind,
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
    Scale,
    StepInputs,
    Weight,
    inputs,
)

__all__ = ["ReferenceExecutable", "activate", "attend", "layer_norm", "quantize_activations", "rms_norm", "rope"]

Floats = NDArray[np.float32]

_FLOAT_TYPES = ("F32", "F16", "BF16")


def rms_norm(x: Floats, weight: Floats, eps: float) -> Floats:
    """Each group of `len(weight)` columns by its root mean square."""
    groups = x.reshape(len(x), -1, len(weight))
    mean = np.square(groups, dtype=np.float64).mean(-1, keepdims=True)
    return _f32(groups / np.sqrt(mean + eps) * weight).reshape(x.shape)


def layer_norm(x: Floats, weight: Floats, bias: Floats | None, eps: float) -> Floats:
    centred = x - x.mean(-1, keepdims=True, dtype=np.float64)
    normed = centred / np.sqrt(np.square(centred).mean(-1, keepdims=True) + eps) * weight
    return _f32(normed if bias is None else normed + bias)


def activate(x: Floats, kind: ActivationKind) -> Floats:
    wide = x.astype(np.float64)
    match kind:
        case "silu":
            return _f32(wide / (1 + np.exp(-wide)))
        case "gelu_tanh":
            return _f32(0.5 * wide * (1 + np.tanh(np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3))))
        case "gelu":
            return _f32(0.5 * wide * _erfc(-wide / np.sqrt(2)))


def rope(x: Floats, positions: NDArray[np.int32], head_dim: int, inv_freq: Floats, scale: float) -> Floats:
    """Rotate the first `2 * len(inv_freq)` columns of each head; x is `[num_rows, num_heads * head_dim]`."""
    angles = positions.astype(np.float32)[:, None] * inv_freq
    cos, sin = (_f32(f(angles.astype(np.float64)) * scale)[:, None, :] for f in (np.cos, np.sin))
    half = len(inv_freq)
    heads = x.reshape(len(x), -1, head_dim)
    out = heads.copy()
    low, high = heads[..., :half], heads[..., half : 2 * half]
    out[..., :half] = low * cos - high * sin
    out[..., half : 2 * half] = high * cos + low * sin
    return out.reshape(x.shape)


def attend(
    q: Floats,
    k: Floats,
    v: Floats,
    q_positions: NDArray[np.int32],
    k_positions: NDArray[np.int32],
    *,
    scale: float,
    softcap: float | None,
    window: int | None,
) -> Floats:
    """Causal attention of one sequence: q `[rows, num_heads, head_dim]`, k and v `[tokens, num_kv_heads, head_dim]`."""
    num_groups = q.shape[1] // k.shape[1]
    scores = np.einsum("rhd,thd->hrt", q, np.repeat(k, num_groups, axis=1), optimize=True) * np.float32(scale)
    if softcap is not None:
        scores = np.float32(softcap) * np.tanh(scores / np.float32(softcap))
    distance = q_positions[:, None] - k_positions
    seen = (distance >= 0) & (True if window is None else distance < window)
    scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return _f32(np.einsum("hrt,thd->rhd", weights, np.repeat(v, num_groups, axis=1), optimize=True))


def quantize_activations(x: Floats) -> Floats:
    """Each 32 values of a row rounded to 8-bit multiples of their largest magnitude / 127."""
    groups = x.reshape(len(x), -1, 32)
    step = np.abs(groups).max(-1, keepdims=True) / np.float32(127)
    inverse = np.divide(np.float32(1), step, out=np.zeros_like(step), where=step > 0)
    return _f32(np.rint(groups * inverse) * step).reshape(x.shape)


class ReferenceExecutable:
    """A program in numpy; see `program.Executable` for the promises.

    Args:
        program: what to run. Its weights are dequantised to float32 once: 4 bytes a value.
        kv_dtype: of the KV blocks.
        num_threads: reported, not used: numpy has its own.
        activation_bits: 8 rounds what products with integer weight types read, as the CPU kernels do; None does not.
    """

    def __init__(
        self, program: Program, *, kv_dtype: KvDtype, num_threads: int = 1, activation_bits: int | None = None
    ) -> None:
        if activation_bits not in (None, 8):
            raise ValueError(f"activation_bits={activation_bits}: 8 or None")
        self._program = program
        self._kv_dtype: KvDtype = kv_dtype
        self._num_threads = num_threads
        self._activation_bits = activation_bits
        self._pools: tuple[NDArray[np.uint8], ...] = ()
        self._last_reads = {value.id: i for i, op in enumerate(program.ops) for value in inputs(op)}
        self._shared: dict[tuple[int, tuple[int, ...]], Floats] = {}  # tied weights are dequantised once
        for op in program.ops:
            for weight in (getattr(op, name, None) for name in ("table", "weight", "bias")):
                if isinstance(weight, Weight):
                    self._dequantize(weight)

    @property
    def vocab_size(self) -> int:
        return self._program.vocab_size

    @property
    def packed_bytes(self) -> int:
        return sum(values.nbytes for values in self._shared.values())

    @property
    def hidden_size(self) -> int:
        (head,) = (op for op in self._program.ops if isinstance(op, Logits))
        return head.x.width

    @property
    def num_layers(self) -> int:
        return len(self._program.layer_inputs)

    @property
    def num_threads(self) -> int:
        return self._num_threads

    @property
    def numerics(self) -> str:
        return f"reference/{self._activation_bits or 'exact'}"

    def set_num_threads(self, num_threads: int) -> None:
        self._num_threads = num_threads

    def block_bytes(self, group: int) -> int:
        return sum(self._layer_bytes(layer) for layer in self._program.cache_groups[group].layers)

    def argmax(self, rows: NDArray[np.float32]) -> NDArray[np.int64]:
        best: NDArray[np.int64] = rows.argmax(axis=1)
        return best

    def bind_kv(self, pools: Sequence[NDArray[np.uint8]]) -> None:
        expected = [self.block_bytes(g) for g in range(len(self._program.cache_groups))]
        found = [pool.shape[1] for pool in pools]
        if found != expected:
            raise ValueError(f"pools with blocks of {found} bytes, expected {expected}")
        self._pools = tuple(pools)

    def set_kv_dtype(self, kv_dtype: KvDtype) -> None:
        self._kv_dtype, self._pools = kv_dtype, ()

    def load_kv(self, group: int, block: NDArray[np.uint8]) -> list[Floats]:
        return [
            np.ascontiguousarray(to_float32(part, self._kv_dtype).transpose(0, 1, 3, 2, 4))
            for part in self._run_parts(group, block)
        ]

    def store_kv(self, group: int, runs: list[Floats], block: NDArray[np.uint8]) -> None:
        for part, kv in zip(self._run_parts(group, block), runs, strict=True):
            part[:] = to_storage(kv.transpose(0, 1, 3, 2, 4), self._kv_dtype)

    def run(
        self,
        step: StepInputs,
        logits: NDArray[np.float32] | None,
        hidden: NDArray[np.float32] | None = None,
        layers: NDArray[np.float32] | None = None,
    ) -> None:
        self._check(step, logits, hidden)
        kept = {value.id: layer for layer, value in enumerate(self._program.layer_inputs)}
        for copy in step.copies:
            for layer in self._program.cache_groups[copy.group].layers:
                kv = self._kv(layer)
                kv[copy.dst, :, : copy.num_tokens] = kv[copy.src, :, : copy.num_tokens]
        values: dict[int, Floats] = {}
        for i, op in enumerate(self._program.ops):
            if isinstance(op, Logits):
                if hidden is not None:
                    hidden[:] = values[op.x.id][step.logit_rows]
                if logits is not None:
                    logits[:] = self._compute(op, [values[op.x.id]], step)
            else:
                values[op.out.id] = self._compute(op, [values[value.id] for value in inputs(op)], step)
                if layers is not None and op.out.id in kept:
                    layers[kept[op.out.id]] = values[op.out.id][step.logit_rows]
            for value in inputs(op):
                if self._last_reads[value.id] == i:
                    values.pop(value.id, None)

    def _compute(self, op: Op, operands: list[Floats], step: StepInputs) -> Floats:
        match op:
            case Embed(table=table, scale=scale):
                return self._dequantize(table)[step.token_ids] * np.float32(scale)
            case RmsNorm(weight=weight, eps=eps):
                return rms_norm(operands[0], self._dequantize(weight), eps)
            case LayerNorm(weight=weight, bias=bias, eps=eps):
                return layer_norm(operands[0], self._dequantize(weight), self._bias(bias), eps)
            case Linear(weight=weight, bias=bias):
                return self._multiply(operands[0], weight, bias)
            case Rope(head_dim=head_dim, rope=spec):
                return rope(operands[0], step.positions, head_dim, np.array(spec.inv_freq, np.float32), spec.scale)
            case Attend():
                return self._attend(op, operands, step)
            case Glu(act=act):
                return activate(operands[0], act) * operands[1]
            case Activation(act=act):
                return activate(operands[0], act)
            case Add():
                return operands[0] + operands[1]
            case Scale(factor=factor):
                return operands[0] * np.float32(factor)
            case Logits():
                return self._logits(op, operands[0][step.logit_rows])

    def head(self, hidden: NDArray[np.float32], logits: NDArray[np.float32]) -> None:
        (head,) = (op for op in self._program.ops if isinstance(op, Logits))
        logits[:] = self._logits(head, hidden)

    def _logits(self, head: Logits, x: Floats) -> Floats:
        # The CPU reads this operand in 16 bits, which is as good as unrounded.
        result = self._multiply(x, head.weight, head.bias, exact=True) * np.float32(head.scale)
        return result if head.softcap is None else np.tanh(result / np.float32(head.softcap)) * np.float32(head.softcap)

    def _multiply(self, x: Floats, weight: Weight, bias: Weight | None, *, exact: bool = False) -> Floats:
        if self._activation_bits and weight.type not in _FLOAT_TYPES and not exact:
            x = quantize_activations(x)
        result = x @ self._dequantize(weight).T
        return result if bias is None else result + self._dequantize(bias)

    def _attend(self, op: Attend, operands: list[Floats], step: StepInputs) -> Floats:
        q, k, v = operands
        layer = self._program.cache_layers[op.layer]
        group = next(g for g, group in enumerate(self._program.cache_groups) if op.layer in group.layers)
        kv = self._kv(op.layer)
        out = np.empty_like(q)
        for s, table in enumerate(step.block_tables[group]):
            rows = slice(step.row_starts[s], step.row_starts[s + 1])
            positions = step.positions[rows]
            for i, new in ((0, k), (1, v)):
                heads = new[rows].reshape(-1, layer.num_kv_heads, layer.head_dim)
                kv[table[positions // BLOCK_SIZE], i, positions % BLOCK_SIZE] = to_storage(heads, self._kv_dtype)
            begin = 0 if layer.window is None else max(0, int(positions[0]) - layer.window + 1)
            past = np.arange(begin, positions[-1] + 1, dtype=np.int32)
            keys, values = (
                to_float32(kv[table[past // BLOCK_SIZE], i, past % BLOCK_SIZE], self._kv_dtype) for i in (0, 1)
            )
            heads = q[rows].reshape(-1, op.num_heads, layer.head_dim)
            result = attend(
                heads, keys, values, positions, past, scale=op.scale, softcap=op.softcap, window=layer.window
            )
            out[rows] = result.reshape(len(positions), -1)
        return out

    def _kv(self, layer: int) -> NDArray[np.generic]:
        """`[num_blocks, 2, 16, num_kv_heads, stored_width]`, a view of the layer's part of its group's pool."""
        shape = self._program.cache_layers[layer]
        group = next(g for g, group in enumerate(self._program.cache_groups) if layer in group.layers)
        before = [i for i in self._program.cache_groups[group].layers if i < layer]
        begin = sum(self._layer_bytes(i) for i in before)
        part = self._pools[group][:, begin : begin + self._layer_bytes(layer)]
        width = stored_width(shape.head_dim, self._kv_dtype)
        return part.view(STORAGE[self._kv_dtype]).reshape(-1, 2, BLOCK_SIZE, shape.num_kv_heads, width)

    def _run_parts(self, group: int, block: NDArray[np.uint8]) -> list[NDArray[np.generic]]:
        """Views `[num_layers, 2, 16, num_kv_heads, stored_width]` of one block of a group, by run of layers."""
        elements, views = block.view(STORAGE[self._kv_dtype]), []
        for layer, num_layers in self._program.layer_runs(group):
            width = stored_width(layer.head_dim, self._kv_dtype)
            shape = (num_layers, 2, BLOCK_SIZE, layer.num_kv_heads, width)
            size = math.prod(shape)
            views.append(elements[:size].reshape(shape))
            elements = elements[size:]
        return views

    def _layer_bytes(self, layer: int) -> int:
        shape = self._program.cache_layers[layer]
        item_bytes = np.dtype(STORAGE[self._kv_dtype]).itemsize
        return 2 * BLOCK_SIZE * shape.num_kv_heads * stored_width(shape.head_dim, self._kv_dtype) * item_bytes

    def _dequantize(self, weight: Weight) -> Floats:
        key = (weight.data.ctypes.data, weight.shape)
        if key not in self._shared:
            self._shared[key] = quants.dequantize(weight)
        return self._shared[key]

    def _bias(self, bias: Weight | None) -> Floats | None:
        return None if bias is None else self._dequantize(bias)

    def _check(self, step: StepInputs, logits: NDArray[np.float32] | None, hidden: NDArray[np.float32] | None) -> None:
        table = next(op.table for op in self._program.ops if isinstance(op, Embed))
        bad = step.token_ids[(step.token_ids < 0) | (step.token_ids >= table.shape[0])]
        if bad.size:
            raise ValueError(f"token_ids holds {bad[0]}, which is not in [0, {table.shape[0]})")
        for name, rows, width in ("logits", logits, self.vocab_size), ("hidden", hidden, self.hidden_size):
            if rows is not None and rows.shape != (len(step.logit_rows), width):
                raise ValueError(f"{name}: shape {rows.shape}, expected ({len(step.logit_rows)}, {width})")


def _f32(x: NDArray[np.floating]) -> Floats:
    return x.astype(np.float32)


def _erfc(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.array([math.erfc(value) for value in x.flat]).reshape(x.shape)
