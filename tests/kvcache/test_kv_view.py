"""What people are shown of the cache is what it holds."""

import random

import numpy as np
from kvcache_world import World, random_prompt

from spolia.kvcache import GroupSpec, KVCache


def test_a_view_adds_up_to_the_ledger_and_the_tree_at_any_moment():
    rng = random.Random(5)
    world = World(GroupSpec(30), GroupSpec(16, window=33))
    for _ in range(200):
        if rng.random() < 0.5 and len(world.running) < 3:
            world.open(random_prompt(rng, 3, 60, []), rng.choice([b"one", b"other"]))
        elif world.running:
            sequence = rng.choice(world.running)
            if not sequence.num_pending:
                sequence.append(rng.randrange(3))
            if not world.step(sequence, rng.randrange(1, 40)) or rng.random() < 0.2:
                world.close(rng.choice(world.running))
        view = world.cache.view()
        for states, ledger in zip(view.blocks, world.cache.ledger(), strict=True):
            assert np.bincount(states, minlength=3).tolist() == [ledger.free, ledger.cached, ledger.leased]
        assert len(view.nodes) == view.num_nodes
        stored = world.cache.snapshot().stored
        assert sum(node.num_tokens for node in view.nodes) == sum(len(each.token_ids) for each in stored)
        for index, node in enumerate(view.nodes):
            parent = view.nodes[node.parent] if node.parent >= 0 else None
            assert node.parent < index
            assert node.start == (0 if parent is None else parent.start + parent.num_tokens)
            assert parent is None or parent.namespace == node.namespace


def test_a_small_view_keeps_parents_and_the_longest():
    cache = KVCache([GroupSpec(64)], clock=lambda: 0.0)
    for first, length in ((1, 40), (2, 10), (3, 20)):
        lease = cache.open(b"ns", [first] * length)
        cache.grow(lease, length)
        cache.commit(lease, [first] * length)
        lease.close()
    view = cache.view(max_nodes=2, num_first_ids=3)
    assert view.num_nodes == 3
    assert [(node.num_tokens, node.first_ids) for node in view.nodes] == [(40, (1, 1, 1)), (20, (3, 3, 3))]
