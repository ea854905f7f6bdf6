"""A naive model of what the cache promises: memory whose slots say which prefix's KV was written there last.

KV at a position depends on the whole prefix up to it, so a slot holds the digest of that prefix. `World` plays the
engine: it runs the copies, writes what a step computes, and after each operation `check` reads back every slot that the
tree or a lease claims. A block shared wrongly, overwritten, copied too late or freed too early is a wrong digest.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from spolia.kvcache import GroupSpec, KVCache, Lease, Outcome, RetentionPolicy, Wish

BLOCK = 16


class FakeClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


NO_DIGESTS = np.empty(0, np.int64)


def prefix_digests(namespace: bytes, token_ids, before: int | None = None) -> np.ndarray:
    """One integer per position: a digest of the namespace and all tokens up to and including it (after `before`)."""
    digest = hash(namespace) if before is None else int(before)
    digests = []
    for token in np.asarray(token_ids).tolist():
        digest = hash((digest, token))
        digests.append(digest)
    return np.array(digests, np.int64)


@dataclass(eq=False)
class Running:
    """A sequence that the world is computing."""

    namespace: bytes
    token_ids: np.ndarray  # int32
    lease: Lease
    digests: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.digests = prefix_digests(self.namespace, self.token_ids)

    @property
    def num_pending(self) -> int:
        return len(self.token_ids) - self.lease.num_computed_tokens

    def append(self, token: int) -> None:
        self.token_ids = np.append(self.token_ids, np.int32(token))
        self.digests = prefix_digests(self.namespace, self.token_ids)


class World:
    """`thorough`: read back the whole memory at every step, not only when `check` is called."""

    def __init__(
        self,
        *groups: GroupSpec,
        policy: RetentionPolicy | None = None,
        event_capacity: int = 4_096,
        thorough: bool = True,
    ) -> None:
        self.thorough = thorough
        self.clock = FakeClock()
        self.cache = KVCache(groups, clock=self.clock, policy=policy, event_capacity=event_capacity)
        self.memory = [np.zeros((group.num_blocks, BLOCK), np.int64) for group in groups]
        self.running: list[Running] = []

    def open(self, token_ids, namespace: bytes = b"ns", wishes: Sequence[Wish] = ()) -> Running:
        token_ids = np.asarray(token_ids, np.int32)
        expected = self.longest_usable(namespace, token_ids)
        assert self.cache.probe(namespace, token_ids) == expected
        lease = self.cache.open(namespace, token_ids, wishes=wishes)
        assert lease.hit.num_tokens == lease.num_computed_tokens == expected
        sequence = Running(namespace, token_ids, lease)
        self.running.append(sequence)
        return sequence

    def step(self, sequence: Running, num_tokens: int | None = None) -> bool:
        """Compute the next `num_tokens` pending tokens (all, if None); False if there is no room."""
        start = sequence.lease.num_computed_tokens
        stop = len(sequence.token_ids) if num_tokens is None else min(start + num_tokens, len(sequence.token_ids))
        before = self.cache.ledger()
        copies = self.cache.grow(sequence.lease, stop)
        if copies is None:
            assert [entry.leased for entry in self.cache.ledger()] == [entry.leased for entry in before]
            return False
        for group, src, dst, size in copies:
            self.memory[group][dst, :size] = self.memory[group][src, :size]
        for group, memory in enumerate(self.memory):
            table = sequence.lease.block_table(group)
            self.read_window(sequence, group, start)
            for position in range(start, stop):
                memory[table[position // BLOCK], position % BLOCK] = sequence.digests[position]
        if self.thorough:
            self.check_memory()  # before the commit: what was written hurt nobody
        self.cache.commit(sequence.lease, sequence.token_ids[start:stop])
        return True

    def bring_in(self, token_ids, namespace: bytes = b"ns", num_spare: int = 0) -> bool:
        """As a restore of whole blocks that has, of window groups, what the end looks at and `num_spare` blocks before.

        Returns:
            Whether there was room.
        """
        ids = np.asarray(token_ids, np.int32)
        stop = len(ids) // BLOCK
        lease = self.cache.open_restore(namespace, np.append(ids[: stop * BLOCK], np.int32(0)), whole_blocks=True)
        sequence = Running(namespace, ids[: stop * BLOCK], lease)
        start, is_taken = lease.num_computed_tokens, True
        assert start % BLOCK == 0
        if start < stop * BLOCK:
            groups = range(len(self.memory))
            firsts = [max(0, self.cache.first_needed_block(group, stop * BLOCK) - num_spare) for group in groups]
            firsts = [
                0 if spec.window is None else first for spec, first in zip(self.cache.groups, firsts, strict=True)
            ]
            is_taken = self.cache.grow_sparse(lease, stop * BLOCK, firsts)
            if is_taken:
                for group, memory in enumerate(self.memory):
                    for index in range(max(start // BLOCK, firsts[group]), stop):
                        block = lease.block_table(group)[index]
                        memory[block] = sequence.digests[index * BLOCK : (index + 1) * BLOCK]
                self.check_memory()
                self.cache.commit(lease, sequence.token_ids[start:])
                assert self.cache.probe(namespace, np.append(sequence.token_ids, np.int32(0))) == stop * BLOCK
        lease.close()
        return is_taken

    def read_window(self, sequence: Running, group: int, position: int) -> None:
        """A token at `position` reads its own sequence's KV, whole and right."""
        window = self.cache.groups[group].window
        table = sequence.lease.block_table(group)
        for p in range(0 if window is None else max(0, position - window + 1), position):
            assert self.memory[group][table[p // BLOCK], p % BLOCK] == sequence.digests[p]

    def close(self, sequence: Running, outcome: Outcome = Outcome.TURN) -> None:
        self.running.remove(sequence)
        sequence.lease.close(outcome)

    def compute(self, token_ids, namespace: bytes = b"ns", chunk: int | None = None) -> Running:
        """Open, compute everything, stay open."""
        sequence = self.open(token_ids, namespace)
        while sequence.num_pending:
            assert self.step(sequence, chunk)
            if self.thorough:
                self.check()
        return sequence

    def remember(self, token_ids, namespace: bytes = b"ns", chunk: int | None = None) -> int:
        """Compute and close; returns how many tokens were reused."""
        sequence = self.compute(token_ids, namespace, chunk)
        self.close(sequence)
        if self.thorough:
            self.check()
        return sequence.lease.hit.num_tokens

    def longest_usable(self, namespace: bytes, token_ids: np.ndarray) -> int:
        """By trying every length: what is in the tree for all its tokens, and in each group for its window."""
        tree = self.cache._tree
        path, matched = tree.match(namespace, token_ids)
        for length in range(min(matched, max(0, len(token_ids) - 1)), 0, -1):
            nodes = [node for node in path if node.start < length]
            served = True
            for group, spec in enumerate(self.cache.groups):
                start = 0 if spec.window is None else max(0, length - spec.window + 1)
                table = tree.path_table(nodes, group, 0, length)
                served = served and (table[start // BLOCK :] >= 0).all()
            if served:
                return length
        return 0

    def check(self) -> None:
        self.cache.check()
        self.check_memory()
        for sequence in self.running:
            for group in range(len(self.memory)):
                self.read_window(sequence, group, sequence.lease.num_computed_tokens)

    def check_memory(self) -> None:
        """Every slot that a tree node claims holds the KV of the node's own prefix."""
        known = {}  # node -> digests of its blocks' tokens, from the start of its first block
        for node in self.cache._tree.nodes():
            head = known.get(node.parent, NO_DIGESTS)
            own = prefix_digests(node.namespace, node.token_ids, head[-1] if len(head) else None)
            digests = np.concatenate((head[len(head) - node.start % BLOCK :], own))
            known[node] = digests
            whole = np.append(digests, np.zeros(-len(digests) % BLOCK, np.int64)).reshape(-1, BLOCK)
            meant = np.arange(whole.size).reshape(whole.shape) < len(digests)
            for group, memory in enumerate(self.memory):
                blocks = node.blocks[group].view
                assert (memory[blocks] == whole)[meant & (blocks >= 0)[:, None]].all()

    def stored(self) -> set[tuple[bytes, tuple[int, ...]]]:
        """All (namespace, whole sequence to a node's end) of the tree."""
        return {
            (node.namespace, tuple(np.concatenate([part.token_ids for part in list(node.ancestry())[::-1]]).tolist()))
            for node in self.cache._tree.nodes()
        }


def random_prompt(rng: random.Random, alphabet: int, longest: int, known: list[np.ndarray]) -> np.ndarray:
    """A fresh prompt, or one that begins like a known one: small alphabets force splits."""
    fresh = np.array([rng.randrange(alphabet) for _ in range(rng.randrange(1, longest))], np.int32)
    if known and rng.random() < 0.6:
        base = rng.choice(known)
        return np.concatenate([base[: rng.randrange(len(base) + 1)], fresh])[:longest]
    return fresh
