"""Pools that are made smaller while requests come: each ends, and an answer that has no room any more says so."""

from __future__ import annotations

import pytest

from spolia.engine import SamplingParams
from spolia.errors import InvalidRequest, Overloaded

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


@pytest.mark.parametrize("windows", [(None,), (None, 24), (24, 100), (None, 24, 24)])
@pytest.mark.parametrize("num_blocks", [5, 30, 300])
def test_a_cache_grows_as_far_as_it_says_and_no_further(windows, num_blocks, monkeypatch):
    engine = toy_engine(windows=windows, num_blocks=num_blocks, max_sequences=2, max_context=512)
    sizes, core = engine.sizes, engine.core
    block_bytes = sum(pool.shape[1] for pool in sizes.pools)
    fitting = sizes.resize(core, 4 * block_bytes)
    most = sizes.most_bytes(core.cache)
    with pytest.raises(InvalidRequest, match=f"can grow to {most}"):
        sizes.resize(core, most + 1)
    monkeypatch.setattr("spolia.engine.resizing.available_bytes", lambda: block_bytes)
    with pytest.raises(InvalidRequest, match=f"can grow to {5 * block_bytes}"):
        sizes.resize(core, 5 * block_bytes + 1)
    monkeypatch.undo()
    assert sizes.resize(core, most) >= fitting
    assert sizes.num_bytes(core.cache) == most == sizes.most_bytes(core.cache)
