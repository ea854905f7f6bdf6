"""The oracle itself, against torch's definitions of the same ops."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from spolia.kernels import BlockCopy, StepInputs, reference
from spolia.kernels.program import KvDtype
from spolia.kernels.reference import ReferenceExecutable

from .programs import PROGRAMS, VOCAB_SIZE, Session, llama, random_tokens


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_rms_norm_is_torchs() -> None:
    x, weight = random(5, 48), random(48, seed=1)
    expected = F.rms_norm(torch.tensor(x), (48,), torch.tensor(weight), 1e-5)
    np.testing.assert_allclose(reference.rms_norm(x, weight, 1e-5), expected, rtol=1e-5, atol=1e-6)


def test_rms_norm_with_a_short_weight_norms_each_head() -> None:
    x, weight = random(5, 48), random(12, seed=1)
    expected = F.rms_norm(torch.tensor(x.reshape(5, 4, 12)), (12,), torch.tensor(weight), 1e-5).reshape(5, 48)
    np.testing.assert_allclose(reference.rms_norm(x, weight, 1e-5), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("biased", [True, False])
def test_layer_norm_is_torchs(biased: bool) -> None:
    x, weight, bias = random(5, 48), random(48, seed=1), random(48, seed=2) if biased else None
    expected = F.layer_norm(
        torch.tensor(x), (48,), torch.tensor(weight), None if bias is None else torch.tensor(bias), 1e-5
    )
    np.testing.assert_allclose(reference.layer_norm(x, weight, bias, 1e-5), expected, rtol=1e-5, atol=1e-5)


def test_activations_are_torchs() -> None:
    x = np.linspace(-12, 12, 999, dtype=np.float32)
    wide = torch.tensor(x, dtype=torch.float64)
    np.testing.assert_allclose(reference.activate(x, "silu"), F.silu(wide), rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(reference.activate(x, "gelu"), F.gelu(wide), rtol=1e-6, atol=1e-9)
    expected = F.gelu(wide, approximate="tanh")
    np.testing.assert_allclose(reference.activate(x, "gelu_tanh"), expected, rtol=1e-6, atol=1e-9)


def test_rope_turns_pairs_by_their_angle_and_leaves_the_rest() -> None:
    x, positions = random(3, 2 * 10), np.array([0, 1, 77], np.int32)
    inv_freq = np.array([1.0, 0.1, 0.01], np.float32)
    out = reference.rope(x, positions, 10, inv_freq, 1.5).reshape(3, 2, 10)
    heads = x.reshape(3, 2, 10)
    turned = (heads[..., :3] + 1j * heads[..., 3:6]) * 1.5 * np.exp(1j * positions[:, None, None] * inv_freq)
    np.testing.assert_allclose(out[..., :3], turned.real, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(out[..., 3:6], turned.imag, rtol=1e-4, atol=1e-5)
    assert (out[..., 6:] == heads[..., 6:]).all()


@pytest.mark.parametrize("window", [None, 3])
def test_attention_is_torchs(window: int | None) -> None:
    q, k, v = random(5, 4, 8), random(9, 2, 8, seed=1), random(9, 2, 8, seed=2)
    q_positions, k_positions = np.arange(4, 9, dtype=np.int32), np.arange(9, dtype=np.int32)
    got = reference.attend(q, k, v, q_positions, k_positions, scale=0.3, softcap=None, window=window)
    distance = q_positions[:, None] - k_positions
    mask = (distance >= 0) & (distance < (window or 100))
    q_, k_, v_ = (torch.tensor(x).transpose(0, 1)[None] for x in (q, k, v))
    expected = F.scaled_dot_product_attention(q_, k_, v_, torch.tensor(mask), scale=0.3, enable_gqa=True)
    np.testing.assert_allclose(got, expected[0].transpose(0, 1), rtol=1e-5, atol=1e-6)


def test_softcap_bounds_scores_before_softmax() -> None:
    q, k, v = 100 * random(1, 1, 4), 100 * random(6, 1, 4, seed=1), random(6, 1, 4, seed=2)
    positions = np.arange(6, dtype=np.int32)
    got = reference.attend(q, k, v, positions[-1:], positions, scale=1.0, softcap=2.0, window=None)
    scores = 2 * np.tanh(q[0, 0] @ k[:, 0].T / 2)
    weights = np.exp(scores) / np.exp(scores).sum()
    np.testing.assert_allclose(got[0, 0], weights @ v[:, 0], rtol=1e-5)


def test_quantised_activations_are_off_by_half_a_step_at_most() -> None:
    x = random(4, 96)
    step = np.abs(x.reshape(4, 3, 32)).max(-1) / 127
    error = np.abs(reference.quantize_activations(x) - x).reshape(4, 3, 32).max(-1)
    assert (error <= 0.5001 * step).all()
    assert (error > 0.3 * step).all()
    assert (reference.quantize_activations(np.zeros((1, 32), np.float32)) == 0).all()


@pytest.mark.parametrize("kv_dtype", ["f32", "f16", "bf16", "int8"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_prompt_in_pieces_is_the_prompt_at_once(kv_dtype: KvDtype, name: str) -> None:
    program = PROGRAMS[name]("F32")
    session = Session(ReferenceExecutable(program, kv_dtype=kv_dtype), program)
    tokens = random_tokens(50)
    expected = session.step([(session.open(tokens), 50)])
    sequence, other = session.open(tokens), session.open(random_tokens(20, seed=1))
    parts = [session.step([(sequence, n), (other, m)])[:n] for n, m in ((16, 3), (1, 1), (33, 9))]
    # BLAS may sum another shape in another order; a last bit may then round to another value in the blocks.
    tolerance = {"f32": 1e-4, "f16": 2e-3, "bf16": 2e-2, "int8": 2e-2}[kv_dtype]
    np.testing.assert_allclose(np.concatenate(parts), expected, atol=tolerance * np.abs(expected).max())


def test_a_wrong_step_is_refused() -> None:
    program = llama("F32")
    session = Session(ReferenceExecutable(program, kv_dtype="f32"), program)
    inputs = session.inputs([(session.open([1, 2]), 2)])
    with pytest.raises(ValueError, match="logits: shape"):
        session.executable.run(inputs, np.empty((1, VOCAB_SIZE), np.float32))
    bad = StepInputs(inputs.token_ids + 77, inputs.positions, inputs.row_starts, inputs.block_tables, inputs.logit_rows)
    with pytest.raises(ValueError, match=r"token_ids holds 78, which is not in \[0, 77\)"):
        session.executable.run(bad, np.empty((2, VOCAB_SIZE), np.float32))
    with pytest.raises(ValueError, match="pools with blocks of"):
        session.executable.bind_kv([session.pools[0][:, 1:]])


def test_only_none_and_8_activation_bits_are_known() -> None:
    with pytest.raises(ValueError, match="activation_bits=4"):
        ReferenceExecutable(llama("F32"), kv_dtype="f32", activation_bits=4)


def test_copies_are_made_before_the_step() -> None:
    program = llama("F32")
    session = Session(ReferenceExecutable(program, kv_dtype="f32"), program)
    first, second = session.open(random_tokens(20)), session.open(random_tokens(20))
    expected = session.step([(first, 20)])[12:]
    second.num_computed = 12
    inputs = session.inputs([(second, 8)])
    copy = BlockCopy(0, int(first.blocks[0][0]), int(second.blocks[0][0]), 12)
    with_copy = StepInputs(
        inputs.token_ids, inputs.positions, inputs.row_starts, inputs.block_tables, inputs.logit_rows, (copy,)
    )
    logits = np.empty_like(expected)
    session.executable.run(with_copy, logits)
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)
