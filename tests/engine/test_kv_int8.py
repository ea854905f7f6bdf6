"""The device pool in int8: twice the tokens, answers that the cache never changes, and a model that it would ruin."""

from __future__ import annotations

import logging
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from models.tiny import BYTE_TOKENS, HEAD_DIM, KV_HEADS, LAYERS, LLAMA, llama_tensors, write_gguf
from spolia.engine import LLM, BeamParams, ContrastiveParams, SamplingParams
from spolia.engine.kv_gate import REFUSE_ABOVE, kv_divergence
from spolia.errors import InvalidRequest
from spolia.kernels import get_backend
from spolia.kernels.quants import quantize
from spolia.models import load

PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=1)
PROMPT = random.Random(0).choices(range(256), k=200)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", LLAMA, llama_tensors("Q8_0"))


def write_hostile(path: Path, size: float = 5_000.0) -> Path:
    """Random weights, and in each head of K one channel that is `size` in every token, as a bias makes it."""
    bias = np.zeros(KV_HEADS * HEAD_DIM, np.float32)
    bias[HEAD_DIM - 1 :: HEAD_DIM] = size  # of the slowest rotation: it stays one channel
    tensors = llama_tensors("F32")
    for layer in range(LAYERS):
        for name, count in (("q", len(bias) * 4), ("k", len(bias)), ("v", len(bias))):
            values = bias if name == "k" else np.zeros(count, np.float32)
            tensors[f"blk.{layer}.attn_{name}.bias"] = quantize(values, "F32", f"blk.{layer}.attn_{name}.bias")
    for name, weight in tensors.items():  # what attention finds decides the next token
        if name.endswith("norm.weight"):
            tensors[name] = quantize(np.ones(weight.shape, np.float32), "F32", name)
    metadata = {key.replace("llama.", "qwen2."): value for key, value in LLAMA.items()}
    return write_gguf(path, {**metadata, "general.architecture": "qwen2"}, tensors)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory) -> Path:
    return write_hostile(tmp_path_factory.mktemp("model") / "hostile.gguf")


def divergence(path: Path, kv_dtype) -> float:
    program = load(path).program
    executable = get_backend("cpu")(program, kv_dtype="bf16", num_threads=1)
    ids = np.frombuffer(b"A text of which every token is looked at, and some are looked at twice." * 2, np.uint8)
    known = [BYTE_TOKENS.index(chr(byte)) if 33 <= byte <= 126 else 32 for byte in ids.tolist()]
    return kv_divergence(executable, len(program.cache_groups), known, kv_dtype)


def test_a_pool_holds_nearly_twice_the_tokens(model):
    sizes = {}
    for kv_dtype in ("bf16", "int8"):
        with LLM(model, kv_memory=1 << 20, num_threads=1, kv_dtype=kv_dtype) as llm:
            sizes[kv_dtype] = llm.stats.ledger[0].total
    # A head of 32 values has a scale of two bytes; one of 128 loses a quarter as much.
    assert sizes["int8"] / sizes["bf16"] > 1.85


def test_its_answers_are_the_same_bits_cold_cached_and_after_a_restart(model, tmp_path):
    def ask(folder: Path | None):
        with LLM(model, kv_memory=1 << 20, num_threads=1, kv_dtype="int8", kv_disk=folder, max_batch_tokens=64) as llm:
            return llm.generate(PROMPT, PARAMS), llm.generate(PROMPT, PARAMS)

    cold, cached = ask(tmp_path)
    restored, _ = ask(tmp_path)
    assert cached.num_cached_tokens > 0
    assert restored.num_restored_tokens == {"disk": 192}
    for other in (cached, restored):
        assert [each.logprob for each in other.logprobs] == [each.logprob for each in cold.logprobs]


def test_kv_of_other_types_in_the_same_folder_is_not_read(model, tmp_path):
    for kv_dtype in ("bf16", "int8", "bf16"):
        with LLM(model, kv_memory=1 << 20, num_threads=1, kv_dtype=kv_dtype, kv_disk=tmp_path) as llm:
            restored = llm.generate(PROMPT, PARAMS).num_restored_tokens
    assert restored == {"disk": 192}
    with LLM(model, kv_memory=1 << 20, num_threads=1, kv_dtype="f16", kv_disk=tmp_path) as llm:
        assert llm.generate(PROMPT, PARAMS).num_restored_tokens == {}


def test_exact_kv_is_refused_where_there_is_none_and_beams_go_on(model):
    with LLM(model, kv_memory=1 << 20, num_threads=1, kv_dtype="int8") as llm:
        with pytest.raises(InvalidRequest, match=r"exact_kv.*int8.*bf16"):
            llm.generate(PROMPT, replace(PARAMS, exact_kv=True))
        assert len(llm.beam_search(PROMPT[:20], BeamParams(num_beams=2, max_tokens=3))) > 0
        assert llm.contrastive_search(PROMPT[:20], ContrastiveParams(max_tokens=2)).token_ids
        assert llm.embed([PROMPT[:20]])


def test_the_gate_says_what_it_measured(model, caplog):
    with caplog.at_level(logging.INFO, "spolia.engine"), LLM(model, kv_memory=1 << 20, num_threads=1, kv_dtype="int8"):
        pass
    (record,) = [record for record in caplog.records if "KL divergence" in record.message]
    assert record.levelno == logging.INFO


def test_the_gate_warns_above_its_lower_threshold(model, caplog, monkeypatch):
    monkeypatch.setattr("spolia.engine.kv_gate.WARN_ABOVE", 0.0)
    with LLM(model, kv_memory=1 << 20, num_threads=1, kv_dtype="int8"):
        pass
    assert any(
        record.levelno == logging.WARNING and "answers may suffer" in record.message for record in caplog.records
    )


def test_a_model_that_int8_would_ruin_is_refused(hostile):
    assert divergence(hostile, "f16") < REFUSE_ABOVE < divergence(hostile, "int8")
    with pytest.raises(InvalidRequest, match=rf"nats.*more than the {REFUSE_ABOVE:g}.*bf16") as caught:
        LLM(hostile, kv_memory=1 << 20, num_threads=1, kv_dtype="int8")
    assert caught.value.param == "kv_dtype"
