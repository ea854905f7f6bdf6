"""Between the engine and the tiers: what is in line decides what a tier will have."""

from __future__ import annotations

import numpy as np
import pytest

from spolia.tiers import Encoding, Mover, Tier

from .faults import FaultyBackend
from .samples import PAYLOAD_BYTES, extent_of, headers

BLOCK = np.zeros(PAYLOAD_BYTES, np.uint8)


@pytest.fixture
def line():
    """A tier that hangs, and its mover."""
    backend = FaultyBackend()
    tier = Tier("host", backend, stall_s=600)
    encoding = Encoding("test/f32", (PAYLOAD_BYTES,))
    mover = Mover([tier], encodings=[encoding])
    backend.hang()
    yield backend, tier, mover, encoding
    backend.resume()
    mover.close()


def test_what_is_dropped_after_it_was_handed_over_is_gone_and_can_be_handed_over_again(line):
    backend, tier, mover, encoding = line
    first, second = headers(2)
    for header in (first, second):
        assert mover.store(tier, header.encode(), 0, BLOCK, encoding)
        assert mover.has(tier, header.key)
    mover.discard(tier, [first.key, second.key])
    assert not mover.has(tier, first.key)  # else what is evicted now would be lost
    assert mover.store(tier, first.encode(), 0, BLOCK, encoding)
    assert mover.has(tier, first.key)
    assert mover.num_pending == 2
    backend.resume()
    assert mover.flush(20)
    assert list(backend.values) == [first.key]
    assert (mover.has(tier, first.key), mover.has(tier, second.key)) == (True, False)


def test_who_drops_something_hears_when_it_is_gone(line):
    backend, tier, mover, _ = line
    (header,) = headers(1)
    backend.values[header.key] = bytes(extent_of(header))
    told = mover.discard(tier, [header.key])
    assert not told.done()
    backend.resume()
    told.result(20)
    assert backend.values == {}


def test_a_block_that_is_read_while_it_is_dropped_is_not_taken_for_there():
    (header,) = headers(1)
    key, extent = header.key, extent_of(header)

    class Dropped(FaultyBackend):
        def get_into(self, keys, buffers):
            sizes = super().get_into(keys, buffers)
            tier.delete([key])  # another thread's
            return sizes

    backend = Dropped()
    backend.values[key] = bytes(extent)
    tier = Tier("host", backend)
    (payload,) = tier.get_into([key], [memoryview(bytearray(len(extent)))])
    assert payload is not None
    assert not tier.knows(key)
