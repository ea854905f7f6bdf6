"""A real model and settings to an engine."""

from __future__ import annotations

import asyncio

import pytest

from spolia.engine import LLM, AsyncEngine, EngineConfig, SamplingParams, build_engine, load
from spolia.errors import InvalidRequest
from spolia.kernels.cpu import levels

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
QUESTION = [{"role": "user", "content": "Name three rivers. Be brief."}]


@pytest.fixture(scope="module")
def model(smollm2_path):
    return load(smollm2_path)


@pytest.fixture(scope="module")
def llm(model):
    with LLM(model, kv_memory=64 * 2**20) as llm:
        yield llm


def test_the_resolved_settings_leave_nothing_open(model):
    config = build_engine(model, EngineConfig(max_batch_tokens=32)).config
    assert config.num_threads >= 1
    assert config.kv_memory > 2**20
    assert config.max_context == model.context_length
    assert config.max_sequences == 32  # each needs a token a step


def test_an_isa_level_that_is_not_there_is_refused(model, monkeypatch):
    monkeypatch.setenv("SPOLIA_ISA", "mmx")
    with pytest.raises(InvalidRequest, match="SPOLIA_ISA=mmx: this CPU has"):
        build_engine(model, EngineConfig(kv_memory=8 * 2**20))


def test_a_small_pool_makes_the_context_as_long_as_fits(model):
    engine = build_engine(model, EngineConfig(kv_memory=8 * 2**20))
    limit = engine.config.max_context
    assert 0 < limit < model.context_length
    assert engine.admission.admit([1] * (limit - 1)).max_tokens == 1
    with pytest.raises(InvalidRequest, match=rf"holds {limit}\..* memory for KV bounds it.*kv_memory"):
        engine.admission.admit([1] * limit)


def test_a_pool_that_grows_makes_the_context_longer(model):
    async def main() -> None:
        async with AsyncEngine(model, EngineConfig(kv_memory=4 * 2**20)) as engine:
            before = engine.context_tokens
            with pytest.raises(InvalidRequest, match=f"holds {before}"):
                engine.generate([1] * before, SamplingParams(max_tokens=1))
            await engine.resize(8 * 2**20)
            assert 1.9 * before < engine.context_tokens < 2.1 * before
            assert len((await engine.generate([1] * before, SamplingParams(max_tokens=1)).output()).token_ids) == 1

    asyncio.run(main())


def test_a_context_beyond_the_models_is_refused(model):
    with pytest.raises(InvalidRequest, match=str(model.context_length)) as caught:
        build_engine(model, EngineConfig(max_context=model.context_length + 1))
    assert caught.value.param == "max_context"


def test_everything_that_kv_bits_depend_on_is_in_the_namespace(model, monkeypatch):
    def namespace(salt="", **settings):
        engine = build_engine(model, EngineConfig(kv_memory=8 * 2**20, **settings))
        return engine.admission.admit([1], cache_salt=salt).namespace

    keys = [namespace(), namespace("a"), namespace(kv_dtype="f32"), namespace(cache_salt="a")]
    for level in levels()[1:]:
        monkeypatch.setenv("SPOLIA_ISA", level)
        keys.append(namespace())
    assert len(set(keys)) == len(keys)
    monkeypatch.delenv("SPOLIA_ISA")
    assert namespace(num_threads=1, max_batch_tokens=17, max_sequences=3, max_context=100) == keys[0]


def test_a_chat_is_answered_and_its_next_turn_reuses_it(llm):
    first = llm.chat(QUESTION, GREEDY)
    assert first.text.strip()
    prompt = llm.chat_prompt(QUESTION)
    assert list(first.prompt_token_ids) == prompt
    follow_up = [*prompt, *first.token_ids, *llm.model.tokenizer.encode("And three lakes?", add_special=False)]
    second = llm.generate(follow_up, GREEDY)
    assert second.num_cached_tokens == len(prompt) + len(first.token_ids) - 1


def test_the_text_of_an_answer_is_its_ids_decoded(llm):
    output = llm.generate("Emoji and scripts: 🪨 日本語 ñ. More of them:", SamplingParams(max_tokens=40, seed=3))
    assert output.text == llm.model.tokenizer.decode(output.token_ids)


def test_a_batch_answers_as_its_requests_alone(model, llm):
    prompts = [f"{i} is a number, and {i + 1} is" for i in range(10)]
    together = llm.generate(prompts, GREEDY)
    with LLM(model, kv_memory=64 * 2**20, num_threads=1, max_batch_tokens=11) as other:
        alone = [other.generate(prompt, GREEDY) for prompt in prompts]
    assert [o.token_ids for o in together] == [o.token_ids for o in alone]
    assert [o.text for o in together] == [o.text for o in alone]


def test_the_fingerprint_is_of_what_decides_an_answer_and_of_nothing_else(smollm2_path):
    model = load(smollm2_path)
    small = {"max_context": 64, "kv_memory": 1 << 22}

    def fingerprint(**settings):
        return build_engine(model, EngineConfig(**small, **settings)).fingerprint

    plain = fingerprint()
    assert plain.startswith("spolia-")
    assert fingerprint(num_threads=1, max_batch_tokens=32, cache_salt="secret", speculation="auto") == plain
    assert fingerprint(kv_dtype="f32") != plain
