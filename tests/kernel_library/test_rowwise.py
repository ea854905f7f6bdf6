"""Ops on one row, at every ISA level, at widths that leave partial vectors, against `reference`."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from spolia.kernels import reference
from spolia.kernels.cpu import _cpu

ACTS = {"silu": 0, "gelu_tanh": 1, "gelu": 2}
WIDTHS = [1, 3, 16, 37, 64, 200, 577]

Array = NDArray[np.float32]

pytestmark = pytest.mark.parametrize("level", _cpu.levels())


def at(array: Array) -> int:
    """The address that raw entry points take; the caller keeps the array."""
    assert array.dtype == np.float32
    assert array.flags.c_contiguous
    return array.ctypes.data


def rows(width: int, count: int = 1, gain: float = 1.0, seed: int = 0) -> list[Array]:
    rng = np.random.default_rng(seed + width)
    return [(gain * rng.standard_normal(width)).astype(np.float32) for _ in range(count)]


def guarded(width: int) -> tuple[Array, Array]:
    """Room for a result, and the same room with the values behind it that must stay as they are."""
    room = np.full(width + 32, 7.5, np.float32)
    return room[:width], room


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("gain", [1e-4, 1.0, 300.0])
def test_rms_norm_is_the_reference(level: str, width: int, gain: float) -> None:
    x, weight = rows(width, 2, gain)
    out, room = guarded(width)
    _cpu.raw_rms_norm(level, at(x), at(weight), width, width, 1e-6, at(out))
    np.testing.assert_allclose(out, reference.rms_norm(x[None], weight, 1e-6)[0], rtol=2e-6)
    assert (room[width:] == 7.5).all()


@pytest.mark.parametrize("group", [1, 12, 64])
def test_rms_norm_of_each_head_is_that_of_the_head_alone(level: str, group: int) -> None:
    (x,), (weight,) = rows(5 * group), rows(group)
    together, alone = np.empty_like(x), np.empty_like(x)
    _cpu.raw_rms_norm(level, at(x), at(weight), len(x), group, 1e-6, at(together))
    for begin in range(0, len(x), group):
        _cpu.raw_rms_norm(level, at(x[begin:]), at(weight), group, group, 1e-6, at(alone[begin:]))
    assert together.tobytes() == alone.tobytes()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("biased", [True, False])
def test_layer_norm_is_the_reference(level: str, width: int, biased: bool) -> None:
    x, weight, bias = rows(width, 3)
    x += 3
    out, room = guarded(width)
    _cpu.raw_layer_norm(level, at(x), at(weight), at(bias) if biased else 0, width, 1e-5, at(out))
    expected = reference.layer_norm(x[None], weight, bias if biased else None, 1e-5)[0]
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
    assert (room[width:] == 7.5).all()


@pytest.mark.parametrize(("head_dim", "half"), [(16, 8), (64, 32), (80, 20), (6, 3), (24, 5), (128, 64)])
@pytest.mark.parametrize("in_place", [True, False])
def test_rope_is_the_reference(level: str, head_dim: int, half: int, in_place: bool) -> None:
    (x,) = rows(3 * head_dim)
    inv_freq = (10_000.0 ** -(np.arange(half) / half)).astype(np.float32)
    expected = reference.rope(x[None], np.array([1234], np.int32), head_dim, inv_freq, 1.2)[0]
    angles = (np.float32(1234) * inv_freq).astype(np.float64)
    cos, sin = (np.ascontiguousarray(f(angles) * 1.2, np.float32) for f in (np.cos, np.sin))
    out = x if in_place else np.empty_like(x)
    _cpu.raw_rope(level, at(x), at(cos), at(sin), half, head_dim, len(x), at(out))
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("act", list(ACTS))
def test_activations_are_right_over_their_whole_range(level: str, act: str) -> None:
    x = np.concatenate([np.linspace(-100, 100, 4001), np.linspace(-1, 1, 2001), [0.0, 1e-30, -1e-30, 1e30, -1e30]])
    x = x.astype(np.float32)
    out = np.empty_like(x)
    _cpu.raw_activation(level, at(x), len(x), ACTS[act], at(out))
    with np.errstate(over="ignore"):
        expected = reference.activate(x, act)  # type: ignore[arg-type]
    np.testing.assert_allclose(out, expected, rtol=2e-6, atol=1e-8)


@pytest.mark.parametrize("act", list(ACTS))
@pytest.mark.parametrize("width", WIDTHS)
def test_glu_is_the_activation_of_gate_times_up_to_the_bit(level: str, act: str, width: int) -> None:
    gate, up = rows(width, 2, gain=3)
    activated = np.empty_like(gate)
    out, room = guarded(width)
    _cpu.raw_activation(level, at(gate), width, ACTS[act], at(activated))
    _cpu.raw_glu(level, at(gate), at(up), width, ACTS[act], at(out))
    assert out.tobytes() == (activated * up).tobytes()
    assert (room[width:] == 7.5).all()


@pytest.mark.parametrize("width", WIDTHS)
def test_a_column_does_not_depend_on_where_it_lies_in_its_row(level: str, width: int) -> None:
    (x,) = rows(width, gain=3)
    whole, single = np.empty_like(x), np.empty_like(x)
    _cpu.raw_activation(level, at(x), width, ACTS["gelu"], at(whole))
    for i in range(width):
        _cpu.raw_activation(level, at(x[i:]), 1, ACTS["gelu"], at(single[i:]))
    assert whole.tobytes() == single.tobytes()


@pytest.mark.parametrize("width", WIDTHS)
def test_add_and_scale_are_exact(level: str, width: int) -> None:
    a, b = rows(width, 2)
    total, room = guarded(width)
    _cpu.raw_add(level, at(a), at(b), width, at(total))
    assert total.tobytes() == (a + b).tobytes()
    _cpu.raw_scale(level, at(a), 0.3, width, at(total))
    assert total.tobytes() == (a * np.float32(0.3)).tobytes()
    assert (room[width:] == 7.5).all()


@pytest.mark.parametrize("cap", [0.0, 1.0, 30.0])
def test_softcap_is_scaled_tanh_and_only_a_scale_without_a_cap(level: str, cap: float) -> None:
    x = np.concatenate([np.linspace(-200, 200, 999), np.geomspace(1e-20, 1, 99)]).astype(np.float32)
    out = x.copy()
    _cpu.raw_softcap(level, at(out), len(out), 0.7, cap)
    scaled = x.astype(np.float64) * np.float32(0.7)
    np.testing.assert_allclose(out, np.tanh(scaled / cap) * cap if cap else scaled, rtol=1e-6)


def test_gelu_of_a_large_negative_does_not_cancel(level: str) -> None:
    x = np.array([-5.0, -8.0], np.float32)
    out = np.empty_like(x)
    _cpu.raw_activation(level, at(x), len(x), ACTS["gelu"], at(out))
    np.testing.assert_allclose(out, [v * 0.5 * math.erfc(-v / math.sqrt(2)) for v in (-5, -8)], rtol=1e-5)
