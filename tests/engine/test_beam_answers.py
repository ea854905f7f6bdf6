"""Beam search through the engine: the same beams as on bare logits, sharing blocks."""

from __future__ import annotations

import numpy as np
import pytest

from spolia.engine import LLM, BeamParams
from spolia.errors import InvalidRequest
from spolia.generation import BeamSearch

from .toy import EOS, toy_engine, toy_logits

PROMPT = list(range(40))


def naive(params, final_ids):
    search = BeamSearch(params, final_ids)
    while not search.is_over:
        rows = []
        for beam in search.running:
            x = toy_logits(PROMPT + list(beam.token_ids))
            shifted = x - x.max()
            rows.append(shifted - np.float32(np.log(np.exp(shifted).sum(dtype=np.float64))))
        search.advance(np.array(rows))
    return search.answers


@pytest.mark.parametrize("num_blocks", [12, 64])
@pytest.mark.parametrize("params", [BeamParams(num_beams=4, max_tokens=20), BeamParams(num_beams=7, max_tokens=9)])
def test_beams_are_those_of_the_bare_logits(params, num_blocks):
    engine = toy_engine(eos_token_ids=[EOS], num_blocks=num_blocks)
    with LLM(engine) as llm:
        found = llm.beam_search(PROMPT, params)
    expected = naive(params, [EOS])
    assert [(beam.token_ids, beam.score) for beam in found] == [tuple(beam) for beam in expected]
    assert found[0].text == bytes(t for t in found[0].token_ids if t < 256).decode(errors="replace")


def test_beams_share_what_they_have_in_common():
    engine = toy_engine(num_blocks=64)
    with LLM(engine) as llm:
        llm.beam_search(PROMPT, BeamParams(num_beams=4, max_tokens=20))
        num_computed = llm.stats.counters.num_computed_tokens
    assert num_computed <= len(PROMPT) + 4 * 20  # a token a beam and step


def test_a_search_that_does_not_fit_is_refused():
    with LLM(toy_engine(max_context=64)) as llm, pytest.raises(InvalidRequest, match="context"):
        llm.beam_search([1] * 60, BeamParams(max_tokens=10))
