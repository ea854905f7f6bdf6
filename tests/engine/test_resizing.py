"""Pools that are made smaller while requests come: each ends, and an answer that has no room any more says so."""

from __future__ import annotations

import pytest

from spolia.engine import SamplingParams
from spolia.errors import Overloaded

from .toy import run, submit, toy_answer, toy_engine

PROMPT = list(range(40))


def shrunk(engine, num_blocks):
    engine.core.cache.resize([num_blocks])
    engine.core.note_resized()


def test_a_request_admitted_before_and_submitted_after_is_refused_alone():
    engine = toy_engine(num_blocks=64)
    admit = engine.admission.admit
    large = admit(PROMPT, SamplingParams(temperature=0.0, max_tokens=400), request_id="large")
    small = admit(PROMPT, SamplingParams(temperature=0.0, max_tokens=20), request_id="small")
    shrunk(engine, 8)
    engine.core.submit(large)
    engine.core.submit(small)
    assert engine.core.has_work
    ends = {}
    while engine.core.has_work:
        ends.update(engine.core.step())
    assert isinstance(ends["large"], Overloaded)
    assert "made smaller" in str(ends["large"])
    assert ends["small"].output.token_ids == tuple(toy_answer(PROMPT, 20))


@pytest.mark.parametrize(("num_blocks", "fits"), [(18, False), (36, True)])
def test_a_pair_needs_room_for_both(num_blocks, fits):
    """Forty tokens and 200 of an answer fill 15 blocks, and those of the other of the pair 13 more."""
    engine = toy_engine(num_blocks=64, max_context=512)
    params = SamplingParams(temperature=0.0, max_tokens=200, guidance_scale=2.0, ignore_eos=True)
    request = submit(engine, PROMPT, params)
    (sequence,) = engine.core.in_flight
    shrunk(engine, num_blocks)
    assert engine.core.can_end(sequence) is fits
    if fits:
        assert len(run(engine)[request.request_id].token_ids) == 200
