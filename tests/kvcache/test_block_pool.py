"""The pool's books, through its public surface."""

import random

import numpy as np
import pytest

from spolia.errors import BlockNotHeldError
from spolia.kvcache import BlockPool, Ledger


def ids(*values):
    return np.array(values, np.int32)


def test_take_gives_distinct_blocks_or_nothing():
    pool = BlockPool(4)
    taken = pool.take(3)
    assert len(set(taken.tolist())) == 3
    assert pool.take(2) is None
    assert pool.ledger() == Ledger(free=1, cached=0, leased=3, total=4)


def test_a_double_free_raises_at_the_free():
    pool = BlockPool(2)
    taken = pool.take(1)
    pool.release(taken)
    with pytest.raises(BlockNotHeldError):
        pool.release(taken)
    assert pool.ledger().free == 2


def test_giving_up_a_block_that_no_node_keeps_raises():
    pool = BlockPool(2)
    taken = pool.take(1)
    with pytest.raises(BlockNotHeldError):
        pool.drop(taken)


@pytest.mark.parametrize("hold", [BlockPool.hold, BlockPool.keep])
def test_a_free_block_can_only_be_taken(hold):
    with pytest.raises(BlockNotHeldError):
        hold(BlockPool(2), ids(0))


def test_a_block_is_leased_then_cached_then_free():
    pool = BlockPool(1)
    block = pool.take(1)
    pool.keep(block)
    assert pool.ledger().leased == 1
    pool.release(block)
    assert pool.ledger().cached == 1
    pool.hold(block)
    assert pool.ledger().leased == 1
    pool.drop(block)
    assert pool.ledger().leased == 1
    pool.release(block)
    assert pool.ledger().free == 1


def test_the_books_balance_and_agree_with_a_recount_under_random_use():
    rng = random.Random(5)
    pool = BlockPool(20)
    leases, nodes = np.zeros(20, np.int32), np.zeros(20, np.int32)
    for _ in range(2_000):
        act = rng.choice(["take", "hold", "release", "keep", "drop"])
        if act == "take":
            taken = pool.take(rng.randrange(4))
            if taken is not None:
                leases[taken] += 1
            continue
        allowed = {"release": leases > 0, "drop": nodes > 0}.get(act, (leases + nodes) > 0)
        candidates = np.flatnonzero(allowed).tolist()
        chosen = np.array(rng.sample(candidates, min(len(candidates), rng.randrange(4))), np.int32)
        getattr(pool, act)(chosen)
        (leases if act in ("hold", "release") else nodes)[chosen] += 1 if act in ("hold", "keep") else -1
        pool.check(leases, nodes)
