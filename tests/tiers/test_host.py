"""What host memory promises beyond the contract of `test_backends.py`."""

from __future__ import annotations

import numpy as np

from spolia.tiers import HostBackend, host

from .test_backends import SIZE, keys_of, values_of


def test_a_put_whose_room_is_promised_to_another_is_refused(monkeypatch):
    """The second begins when the first has its room and has not stored yet."""
    backend = HostBackend(SIZE + SIZE // 2)
    second = []

    def copying(*args):
        if not second:
            second.append(None)
            second[0] = backend.put(keys_of(1, 1), values_of(1, 1))
        return frombuffer(*args)

    frombuffer = np.frombuffer
    monkeypatch.setattr(host.np, "frombuffer", copying)
    assert backend.put(keys_of(1), values_of(1)) == [True]
    assert second == [[False]]
    assert backend.exists(keys_of(2)) == [True, False]
