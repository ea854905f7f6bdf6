"""KV that tiers keep in fewer bits: who gets it, who never does, and what is told of it."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from models.tiny import LLAMA, llama_tensors, write_gguf
from spolia.engine import (
    LLM,
    AsyncEngine,
    BeamParams,
    CacheAdmin,
    ContrastiveParams,
    EngineConfig,
    RequestOutput,
    SamplingParams,
)
from spolia.errors import InvalidRequest
from spolia.tiers import Compressed, FolderBackend, conversations, export_conversation, import_conversation


def tokens(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(count)]


PROMPT = tokens(200, seed=0)
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=1)
EXACT = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=1, exact_kv=True)
KINDS = pytest.mark.parametrize("kind", ["int8", "int4"])


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", LLAMA, llama_tensors("Q8_0"))


def engine(model: Path, folder: Path | None, **settings: Any) -> LLM:
    return LLM(model, **{"kv_memory": 4 << 20, "num_threads": 1, "kv_disk": folder, **settings})


def ask(model: Path, folder: Path, prompt=PROMPT, params: SamplingParams = PARAMS, **settings: Any) -> RequestOutput:
    """The answer of an engine that is made for it and closed after it."""
    with engine(model, folder, **settings) as llm:
        return llm.generate(prompt, params)


def logprobs(output: RequestOutput) -> list[float]:
    return [entry.logprob for entry in output.logprobs or ()]


@KINDS
def test_what_was_kept_in_fewer_bits_is_restored_and_told(model, tmp_path, kind):
    ask(model, tmp_path, kv_offload_dtype=kind)
    with engine(model, tmp_path, kv_offload_dtype=kind) as llm:
        warm = llm.generate(PROMPT, PARAMS)
        assert warm.num_restored_tokens == {"disk": 192}
        assert warm.num_rounded_tokens == {kind: 192}
        assert llm.stats.counters.num_rounded_tokens == {kind: 192}
    cold = ask(model, tmp_path / "elsewhere")
    assert cold.num_rounded_tokens == {}
    assert logprobs(warm)[0] == pytest.approx(logprobs(cold)[0], abs={"int8": 0.05, "int4": 0.5}[kind])


@KINDS
def test_it_takes_so_much_less_room(model, tmp_path, kind):
    ask(model, tmp_path / "exact")
    ask(model, tmp_path / kind, kv_offload_dtype=kind)
    exact, rounded = (sum(file.stat().st_size for file in (tmp_path / name).rglob("*.kv")) for name in ("exact", kind))
    # Heads of 16 values, and 256 bytes of header: larger models gain more.
    assert rounded < {"int8": 0.7, "int4": 0.6}[kind] * exact


@KINDS
def test_a_request_for_exact_kv_gets_none_of_it_and_is_right_to_the_bit(model, tmp_path, kind):
    cold = ask(model, tmp_path / "cold")
    with engine(model, tmp_path / "kv", kv_offload_dtype=kind) as llm:
        llm.generate(PROMPT, PARAMS)
    with engine(model, tmp_path / "kv", kv_offload_dtype=kind) as llm:
        assert llm.generate(PROMPT, PARAMS).num_rounded_tokens == {kind: 192}  # it is in the pools now, too
        exact = llm.generate(PROMPT, EXACT)
    assert (exact.num_cached_tokens, exact.num_rounded_tokens) == (0, {})
    assert (exact.token_ids, logprobs(exact)) == (cold.token_ids, logprobs(cold))
    again = ask(model, tmp_path / "kv", params=EXACT, kv_offload_dtype=kind)
    assert (again.num_restored_tokens, again.num_rounded_tokens) == ({"disk": 192}, {})
    assert (again.token_ids, logprobs(again)) == (cold.token_ids, logprobs(cold))


@KINDS
def test_searches_and_the_prompts_log_probabilities_never_rest_on_it(model, tmp_path, kind):
    of_prompt = replace(PARAMS, prompt_logprobs=0)
    beams, contrast = BeamParams(num_beams=2, max_tokens=8), ContrastiveParams(max_tokens=4)
    with engine(model, None) as llm:
        cold, found = llm.generate(PROMPT, of_prompt), llm.beam_search(PROMPT, beams)
        contrasted = llm.contrastive_search(PROMPT, contrast)
    ask(model, tmp_path, kv_offload_dtype=kind)
    with engine(model, tmp_path, kv_offload_dtype=kind) as llm:
        assert llm.generate(PROMPT, PARAMS).num_rounded_tokens == {kind: 192}  # it is in the pools
        warm = llm.generate(PROMPT, of_prompt)
        assert (warm.num_rounded_tokens, logprobs(warm)) == ({}, logprobs(cold))
        assert llm.beam_search(PROMPT, beams) == found
        again = llm.contrastive_search(PROMPT, contrast)  # what it chose among says how each was rated
        assert (again.token_ids, again.choices) == (contrasted.token_ids, contrasted.choices)
        assert again.num_rounded_tokens == {}
        assert llm.stats.counters.num_rounded_tokens == {kind: 192}  # of the first request


def test_engines_of_different_bits_share_a_folder_and_only_exact_kv(model, tmp_path):
    for kind in ("exact", "int8", "int4"):
        assert ask(model, tmp_path, kv_offload_dtype=kind).num_cached_tokens == 0
    for kind in ("exact", "int8", "int4"):
        found = ask(model, tmp_path, kv_offload_dtype=kind)
        assert found.num_rounded_tokens == ({} if kind == "exact" else {kind: 192})
        assert ask(model, tmp_path, params=EXACT, kv_offload_dtype=kind).num_restored_tokens == {"disk": 192}


def test_the_mark_goes_with_the_content_and_not_with_what_is_computed_after_it(model, tmp_path):
    ask(model, tmp_path, kv_offload_dtype="int8")
    with engine(model, tmp_path, kv_offload_dtype="int8", check=True) as llm:
        first = llm.generate(PROMPT, PARAMS)
        turn = [*PROMPT, *first.token_ids, *tokens(20, seed=1)]
        later = llm.generate(turn, PARAMS)  # 192 restored, the rest computed on top of it
        assert later.num_cached_tokens == len(PROMPT) + len(first.token_ids) - 1
        assert (later.num_restored_tokens, later.num_rounded_tokens) == ({}, {"int8": 192})
        branch = [*PROMPT[:120], *tokens(90, seed=2)]  # leaves in the middle of a block, which is copied
        split = llm.generate(branch, PARAMS)
        assert (split.num_cached_tokens, split.num_rounded_tokens) == (120, {"int8": 120})
        again = llm.generate(branch, PARAMS)
        assert (again.num_cached_tokens, again.num_rounded_tokens) == (209, {"int8": 120})
        assert llm.generate(tokens(64, seed=3), PARAMS).num_rounded_tokens == {}


@KINDS
def test_going_down_and_up_many_times_changes_it_no_further(model, tmp_path, kind):
    settings = {"kv_host": 200_000, "kv_memory": 200_000, "max_context": 400, "kv_offload_dtype": kind}
    with engine(model, None, **settings) as llm:
        answers = []
        for round_number in range(8):
            answers.append(llm.generate(PROMPT, PARAMS))
            for seed in range(3):  # drive it out of the pools, and in the end out of the host tier's sight
                llm.generate(tokens(200, 10 * round_number + seed + 10), PARAMS)
        rounded = [output for output in answers if output.num_rounded_tokens]
        assert len(rounded) >= 6
        assert all(output.num_rounded_tokens[kind] == output.num_cached_tokens for output in rounded)
        first, last = logprobs(rounded[0]), logprobs(rounded[-1])
        assert rounded[0].token_ids == rounded[-1].token_ids
        assert last == pytest.approx(first, abs=0.02)


def test_an_exported_conversation_says_its_bits_and_goes_only_where_they_are_wanted(model, tmp_path):
    ask(model, tmp_path / "exact")
    ask(model, tmp_path / "int8", kv_offload_dtype="int8")
    source = FolderBackend(tmp_path / "int8")
    (conversation,) = conversations(source)
    assert conversation.layout.endswith("/bf16/int8")
    export_conversation(source, conversation.digest.hex(), tmp_path / "talk.kv")
    with pytest.raises(InvalidRequest, match="/bf16/int8"):
        import_conversation(FolderBackend(tmp_path / "exact"), tmp_path / "talk.kv")
    # Even by force it is not taken for exact, nor in another engine's place.
    import_conversation(FolderBackend(tmp_path / "exact"), tmp_path / "talk.kv", is_forced=True)
    assert ask(model, tmp_path / "exact").num_rounded_tokens == {}
    import_conversation(FolderBackend(tmp_path / "new"), tmp_path / "talk.kv")
    assert ask(model, tmp_path / "new", kv_offload_dtype="int8").num_rounded_tokens == {"int8": 192}


@KINDS
def test_exact_kv_that_is_compressed_is_to_the_byte_what_an_engine_that_rounds_writes(model, tmp_path, kind):
    cold = ask(model, tmp_path / "kv", params=EXACT, kv_offload_dtype=kind)
    ask(model, tmp_path / "rounded", kv_offload_dtype=kind)

    async def compress() -> dict[str, Compressed]:
        settings = EngineConfig(kv_memory=4 << 20, num_threads=1, kv_disk=tmp_path / "kv", kv_offload_dtype=kind)
        async with AsyncEngine(model, settings) as engine:
            return (await CacheAdmin(engine, engine.sealer).compress({""})).tiers

    report = asyncio.run(compress())["disk"]
    assert (report.num_blocks, report.num_skipped) == ((len(PROMPT) + 11) // 16, 0)
    assert report.num_bytes_after < {"int8": 0.7, "int4": 0.6}[kind] * report.num_bytes_before
    names = sorted(path.relative_to(tmp_path / "rounded") for path in (tmp_path / "rounded").rglob("*.kv"))
    assert sorted(path.relative_to(tmp_path / "kv") for path in (tmp_path / "kv").rglob("*.kv")) == names
    assert all((tmp_path / "kv" / name).read_bytes() == (tmp_path / "rounded" / name).read_bytes() for name in names)
    warm = ask(model, tmp_path / "kv", kv_offload_dtype=kind)
    assert (warm.num_restored_tokens, warm.num_rounded_tokens) == ({"disk": 192}, {kind: 192})
    again = ask(model, tmp_path / "kv", params=EXACT, kv_offload_dtype=kind)
    assert (again.num_cached_tokens, again.token_ids, logprobs(again)) == (0, cold.token_ids, logprobs(cold))


def test_the_fingerprint_tells_an_engine_that_rounds(model, tmp_path):
    def fingerprint(kind: str) -> str:
        with engine(model, tmp_path, kv_offload_dtype=kind) as llm:
            return llm.fingerprint

    assert len({fingerprint(kind) for kind in ("exact", "int8", "int4")}) == 3


def test_a_type_that_is_not_there_is_refused(model):
    with pytest.raises(InvalidRequest, match=r"int3.*exact, int8, int4"):
        engine(model, None, kv_offload_dtype="int3")
