"""Vectors of texts: right, the same to the bit however they are computed, and at no cost to what else runs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from spolia.engine import LLM, AsyncEngine, SamplingParams
from spolia.engine.embedding import EmbeddingRun
from spolia.errors import InvalidRequest, ModelError
from spolia.kernels import allocate_pool, get_backend

from .tiny import tiny_program
from .toy import ToyExecutable, run, submit, toy_answer, toy_engine, toy_logits

GREEDY_LONG = SamplingParams(temperature=0.0, max_tokens=50)

PROMPTS: list[list[int]] = [[1, 2, 3], [*range(40)], [*range(40), 7, 8], [5], [*range(100)], [1, 2, 3]]


def expected(ids: Sequence[int], pooling: str, windows: Sequence[int | None] = (None,)) -> NDArray[np.float32]:
    """The toy's, whose hidden state is the beginning of its logits."""
    first = len(ids) if pooling == "last" else 1
    rows = [toy_logits(ids[:stop], windows)[: ToyExecutable.hidden_size] for stop in range(first, len(ids) + 1)]
    total = np.zeros(ToyExecutable.hidden_size)
    for row in rows:
        total += row
    return (total / len(rows)).astype(np.float32)


@pytest.mark.parametrize("windows", [(None,), (None, 20)])
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_vectors_are_right_cold_and_again(pooling, windows):
    with LLM(toy_engine(windows=windows)) as llm:
        for _ in range(2):
            for prompt, each in zip(PROMPTS, llm.embed(PROMPTS, pooling=pooling), strict=True):
                assert each.vector.tobytes() == expected(prompt, pooling, windows).tobytes()
                assert each.num_tokens == len(prompt)
        assert all(ledger.leased == 0 for ledger in llm.stats.ledger)


def test_an_input_that_was_seen_costs_one_token_and_a_common_beginning_is_computed_once():
    engine = toy_engine(max_batch_tokens=64)
    inputs = [np.array([*range(40), 100 + n], np.int32) for n in range(5)]
    run_ = EmbeddingRun(inputs, namespace=engine.admission.namespace(""))
    num_tokens = 0
    while run_.embeddings is None:
        num_tokens += run_.step(engine.core)
    assert num_tokens == 41 + 4
    again = EmbeddingRun(inputs, namespace=engine.admission.namespace(""))
    assert again.step(engine.core) == 5
    assert [each.num_cached_tokens for each in again.embeddings or ()] == [40] * 5
    other = EmbeddingRun(inputs[:1], namespace=engine.admission.namespace("somebody else"))
    assert other.step(engine.core) == 41


def test_what_conversations_have_goes_after_what_was_embedded():
    engine = toy_engine(num_blocks=12)
    submit(engine, [*range(60)])
    run(engine)
    for n in range(5):  # three blocks each, in a cache of twelve
        inputs = [np.array([200, n, *range(40)], np.int32)]
        embedding = EmbeddingRun(inputs, namespace=engine.admission.namespace(""))
        while embedding.embeddings is None:
            assert embedding.step(engine.core)
    assert engine.core.cache.probe(engine.admission.namespace(""), np.arange(60)) == 59


def test_in_a_full_cache_an_input_waits_and_the_running_request_does_not_notice():
    async def main() -> None:
        engine = AsyncEngine(toy_engine(num_blocks=6, max_context=96))
        stream = engine.generate([*range(40)], GREEDY_LONG)
        vectors = await engine.embed([[9] * 70, [*range(30)]], pooling="mean")
        output = await stream.output()
        assert list(output.token_ids) == toy_answer([*range(40)], 50)
        assert vectors[0].vector.tobytes() == expected([9] * 70, "mean").tobytes()
        assert vectors[1].vector.tobytes() == expected([*range(30)], "mean").tobytes()
        await engine.aclose()

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_real_vectors_are_the_same_bits_at_any_cut(pooling):
    program = tiny_program("Q8_0", (None, 24))
    rng = np.random.default_rng(3)
    inputs = [rng.integers(0, 256, size, dtype=np.int32) for size in (1, 16, 50, 90)]
    results = []
    for max_batch_tokens in (8, 64, 256):
        executable = get_backend("cpu")(program, kv_dtype="bf16", num_threads=2)
        engine = toy_engine(windows=(None, 24), executable=Tiny(executable), max_batch_tokens=max_batch_tokens)
        embedding = EmbeddingRun(inputs, namespace=b"n", pooling=pooling)
        while embedding.embeddings is None:
            assert embedding.step(engine.core)
        results.append([each.vector.tobytes() for each in embedding.embeddings])
    assert results[0] == results[1] == results[2]


class Tiny:
    """A real executable whose pools the toy's engine makes."""

    def __init__(self, executable) -> None:
        self._executable = executable

    def block_bytes(self, _: int) -> int:
        return self._executable.block_bytes(0)

    def bind_kv(self, pools) -> None:
        self._pools = [allocate_pool(len(pool), pool.shape[1]) for pool in pools]
        self._executable.bind_kv(self._pools)

    def __getattr__(self, name: str):
        return getattr(self._executable, name)


def test_what_cannot_be_embedded_is_refused_and_names_its_field():
    with LLM(toy_engine(max_context=64)) as llm:
        with pytest.raises(InvalidRequest, match="65 tokens; the context") as caught:
            llm.embed([[1] * 65])
        assert caught.value.param == "input"
        assert llm.embed([[1] * 65], truncate=True)[0].vector.tobytes() == expected([1] * 64, "last").tobytes()
        with pytest.raises(InvalidRequest, match="empty"):
            llm.embed([[]])
        with pytest.raises(InvalidRequest, match="pooling is 'cls'"):
            llm.embed([[1]], pooling="cls")  # type: ignore[arg-type]


def test_results_that_are_no_numbers_are_an_error_of_that_request_alone():
    executable = ToyExecutable()
    executable.poison = 13
    with LLM(toy_engine(executable=executable)) as llm:
        with pytest.raises(ModelError, match="not finite"):
            llm.embed([[12, 13]])
        assert llm.embed([[12, 14]])[0].vector.tobytes() == expected([12, 14], "last").tobytes()
        assert llm.stats.ledger[0].leased == 0
