"""What a request may have done to its prompt."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
import pytest

from engine.toy import toy_answer, toy_logits
from spolia.errors import InvalidRequest
from spolia.models.tokenizer import SpecialTokens
from spolia.server.fill_in import infill_ids

from .harness import ChattyToy, TextTokenizer, chatty_engine, serving


class CodeTokenizer(TextTokenizer):
    special = SpecialTokens(fim_prefix=250, fim_suffix=251, fim_middle=252)


@dataclass
class CodeToy(ChattyToy):
    tokenizer: TextTokenizer = field(default_factory=CodeTokenizer)


def complete(url: str, **body: Any) -> dict[str, Any]:
    known = {"max_tokens": 8, "temperature": 0, "return_token_ids": True, **body}
    reply = httpx.post(f"{url}/v1/completions", json=known, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_a_suffix_is_filled_in_by_a_model_that_can():
    engine = chatty_engine(CodeToy())
    with serving({"code": engine}) as url:
        reply = complete(url, prompt="def f(", suffix="return x")
    asyncio.run(engine.aclose())
    ids = [250, *b"def f(", 251, *b"return x", 252]
    assert reply["choices"][0]["prompt_token_ids"] == ids
    assert reply["choices"][0]["token_ids"] == toy_answer(ids, 8)


def test_a_suffix_needs_text_and_a_model_for_it():
    with pytest.raises(InvalidRequest, match="needs a prompt that is text"):
        infill_ids(CodeTokenizer(), [1, 2], "x")
    with pytest.raises(InvalidRequest, match="no tokens for filling in"):
        infill_ids(TextTokenizer(), "x", "x")


def test_a_models_own_marks_are_used_for_filling_in(qwen_coder_path):
    from spolia.models import load

    tokenizer = load(qwen_coder_path).tokenizer
    text = tokenizer.decode(infill_ids(tokenizer, "a <|fim_suffix|> b", "c"), skip_special=False)
    assert text == "<|fim_prefix|>a <|fim_suffix|> b<|fim_suffix|>c<|fim_middle|>"


def test_a_prompt_that_was_cut_is_told_in_the_usage(toy_url):
    reply = complete(toy_url, prompt=list(range(100)), truncate_prompt_tokens=10)
    assert reply["choices"][0]["prompt_token_ids"] == list(range(90, 100))
    assert reply["usage"]["prompt_tokens_details"]["truncated_tokens"] == 90
    assert "truncated_tokens" not in complete(toy_url, prompt=[1])["usage"]["prompt_tokens_details"]
    long = complete(toy_url, prompt=[7] * 600, truncate="middle")  # the toy's context is 512
    assert long["usage"]["prompt_tokens"] == 504


def exact(prompt: list[int], position: int) -> np.ndarray:
    x = toy_logits(prompt[:position]).astype(np.float64)
    return x - np.log(np.exp(x).sum())


@pytest.mark.parametrize("times", [1, 2])
def test_an_echoed_prompt_has_logprobs_whether_it_is_cached_or_not(toy_url, times):
    prompt = list(b"to be scored")
    for _ in range(times):
        (choice,) = complete(toy_url, prompt="to be scored", echo=True, logprobs=2, max_tokens=3)["choices"]
    columns = choice["logprobs"]
    assert "".join(columns["tokens"][: len(prompt)]) == "to be scored"
    assert columns["token_logprobs"][0] is None
    assert columns["top_logprobs"][0] is None
    assert columns["text_offset"][: len(prompt)] == list(range(len(prompt)))
    assert len(columns["tokens"]) == len(prompt) + 3
    for position in range(1, len(prompt)):
        assert columns["token_logprobs"][position] == pytest.approx(exact(prompt, position)[prompt[position]], abs=1e-5)


def test_prompt_logprobs_are_given_as_vllm_gives_them(toy_url):
    (choice,) = complete(toy_url, prompt=[1, 2, 3], prompt_logprobs=1)["choices"]
    rows = choice["prompt_logprobs"]
    assert rows[0] is None
    for position in (1, 2):
        logprobs = exact([1, 2, 3], position)
        best = int(logprobs.argmax())
        assert set(rows[position]) == {str([1, 2, 3][position]), str(best)}
        assert rows[position][str(best)]["logprob"] == pytest.approx(logprobs[best], abs=1e-5)
    assert "prompt_logprobs" not in complete(toy_url, prompt=[1, 2, 3])["choices"][0]


def test_a_chats_prompt_has_logprobs_too(toy_url):
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "prompt_logprobs": 0}
    reply = httpx.post(f"{toy_url}/v1/chat/completions", json=body, timeout=60).json()
    assert len(reply["prompt_logprobs"]) == reply["usage"]["prompt_tokens"]
    assert all(len(row) == 1 for row in reply["prompt_logprobs"][1:])


def chunks_of(url, path, **body):
    with httpx.stream("POST", f"{url}{path}", json={"stream": True, **body}, timeout=60) as reply:
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("times", [1, 2])
def test_what_the_prompt_scored_comes_with_the_first_chunk_of_a_stream(toy_url, times):
    """The same rows and columns as without a stream, cached or not, the answer's behind the prompt's."""
    fields = {
        "prompt": "to be told",
        "max_tokens": 4,
        "temperature": 0,
        "prompt_logprobs": 1,
        "echo": True,
        "logprobs": 2,
    }
    for _ in range(times):
        (whole,) = complete(toy_url, **fields)["choices"]
        parts = [chunk["choices"][0] for chunk in chunks_of(toy_url, "/v1/completions", **fields)]
    assert parts[0]["prompt_logprobs"] == whole["prompt_logprobs"]
    assert not any("prompt_logprobs" in part for part in parts[1:])
    assert "".join(part["text"] for part in parts) == whole["text"]
    for column, values in whole["logprobs"].items():
        assert [value for part in parts if part["logprobs"] for value in part["logprobs"][column]] == values


def test_a_streamed_chats_prompt_has_logprobs_too(toy_url):
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "prompt_logprobs": 0, "seed": 1}
    whole = httpx.post(f"{toy_url}/v1/chat/completions", json=body, timeout=60).json()
    chunks = chunks_of(toy_url, "/v1/chat/completions", **body)
    assert chunks[0]["prompt_logprobs"] == whole["prompt_logprobs"]
    assert not any("prompt_logprobs" in chunk for chunk in chunks[1:])
