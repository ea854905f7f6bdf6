"""What a request may have done to its prompt."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from engine.toy import toy_answer
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
