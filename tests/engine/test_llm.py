"""The offline face: one or many prompts, text or ids, whole or streamed."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest
from transformers.generation.streamers import BaseStreamer

from spolia.engine import LLM, SamplingParams
from spolia.errors import Bug, InvalidRequest, Overloaded

from .toy import GREEDY, toy_answer, toy_engine


@pytest.fixture
def llm():
    parts = toy_engine(num_blocks=200, max_context=2_000)
    with LLM(parts) as llm:
        yield llm
    assert parts.core.cache.ledger()[0].leased == 0


def test_one_prompt_gives_one_output(llm):
    assert list(llm.generate("hi", GREEDY).token_ids) == toy_answer(b"hi", 8)
    assert list(llm.generate([104, 105], GREEDY).token_ids) == toy_answer(b"hi", 8)


def test_many_prompts_give_outputs_in_their_order(llm):
    prompts = [[i] * (50 - i) for i in range(40)]
    params = [SamplingParams(temperature=0.0, max_tokens=1 + i % 7) for i in range(40)]
    outputs = llm.generate(prompts, params)
    assert [list(o.token_ids) for o in outputs] == [toy_answer(p, 1 + i % 7) for i, p in enumerate(prompts)]


def test_a_list_of_one_gives_a_list_and_an_empty_one_an_empty_one(llm):
    assert len(llm.generate(["hi"], GREEDY)) == 1
    assert llm.generate([], GREEDY) == []


def test_a_list_of_prompts_with_a_bad_one_starts_none(llm):
    with pytest.raises(InvalidRequest):
        llm.generate([[1], [9999]], GREEDY)
    assert llm.stats.counters.num_steps == 0


@pytest.mark.parametrize("salt", ["\ud800", 5, None, b"x"])
def test_a_salt_that_is_no_text_is_refused_by_name(llm, salt):
    with pytest.raises(InvalidRequest, match="cache_salt is") as caught:
        llm.generate("hi", GREEDY, cache_salt=salt)
    assert caught.value.param == "cache_salt"


def test_a_closed_one_says_that_it_is_closed():
    llm = LLM(toy_engine())
    llm.close()
    with pytest.raises(Overloaded, match="the engine is closed"):
        llm.generate("hi", GREEDY)


def test_params_must_match_prompts(llm):
    with pytest.raises(InvalidRequest, match="2 params for 1 prompts"):
        llm.generate(["a"], [GREEDY, GREEDY])


def test_a_stream_yields_the_answer_bit_by_bit(llm):
    deltas = list(llm.stream([1, 2], GREEDY))
    assert [i for delta in deltas for i in delta.token_ids] == toy_answer([1, 2], 8)
    assert deltas[-1].output.text == "".join(delta.text for delta in deltas)


def test_two_streams_may_be_read_in_turns(llm):
    pairs = list(zip(llm.stream([1], GREEDY), llm.stream([2], GREEDY), strict=True))
    assert [i for pair in pairs for i in pair[0].token_ids] == toy_answer([1], 8)
    assert [i for pair in pairs for i in pair[1].token_ids] == toy_answer([2], 8)


def test_closing_a_stream_ends_its_request(llm):
    stream = llm.stream([1], SamplingParams(temperature=0.0, max_tokens=1_900))
    next(stream)
    stream.close()
    deadline = time.monotonic() + 30
    while not llm.stats.counters.num_finished:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert llm.stats.counters.num_finished == {"abort": 1}


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """That it is heard: what a shell runs in the background is made to ignore it, these tests included."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_ends_the_call_and_leaves_the_engine_usable(llm):
    def interrupt() -> None:
        while llm.stats.num_running < 8:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[i] for i in range(8)], SamplingParams(temperature=0.0, max_tokens=1_900))
    assert list(llm.generate([1], GREEDY).token_ids) == toy_answer([1], 8)
    assert llm.stats.counters.num_finished == {"abort": 8, "length": 1}


def test_chat_needs_a_template(llm):
    with pytest.raises(InvalidRequest, match="no chat template"):
        llm.chat([{"role": "user", "content": "hi"}])


def test_a_failing_step_raises_here(llm):
    llm._engine.core.executable.error = RuntimeError("the kernel broke")
    with pytest.raises(Bug, match="the kernel broke"):
        llm.generate([1], GREEDY)
    llm._engine.core.abort_all()


def test_the_engines_thread_ends_with_its_owner():
    llm = LLM(toy_engine())
    llm.generate([1], GREEDY)
    thread = llm._thread._thread
    del llm
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_a_streamer_of_transformers_gets_the_prompt_and_each_token():
    class Streamer(BaseStreamer):
        def __init__(self):
            self.values = []

        def put(self, value):
            self.values.append(value.tolist())

        def end(self):
            self.values.append("end")

    streamer = Streamer()
    with LLM(toy_engine()) as llm:
        output = llm.stream_to(streamer, [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=3))
    assert streamer.values == [[[1, 2, 3]], *([token_id] for token_id in output.token_ids), "end"]
