"""Exact blocks of tiers in fewer bits: what is left alone, and why."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import pytest

from engine.toy import ToyCodec
from spolia.tiers import (
    SEAL_BYTES,
    Checksum,
    Encoding,
    ExtentHeader,
    FolderBackend,
    HostBackend,
    Sealer,
    Tier,
    compress,
    find_headers,
)
from spolia.tiers.aead import AesGcm
from spolia.tiers.keys import link, root_digest

MINE, ROUNDED = b"e" * 32, b"r" * 32
BYTES = 2 * ToyCodec().payload_bytes(0)
EXACT = Encoding("toy", (BYTES,))


class Fussy(ToyCodec):
    """Cannot write blocks that begin with a nine."""

    def encode(self, group, block):
        return None if block[0] == 9 else super().encode(group, block)


USUAL = Encoding("toy/int8", (BYTES,), Fussy())


def chain(namespace: bytes, firsts: Sequence[int], group: int = 0) -> list[tuple[ExtentHeader, bytes]]:
    """One block after the other: each one's header and payload, which begins with the number given."""
    parent, made = root_digest(namespace), []
    for index, first in enumerate(firsts):
        ids = np.full(16, index, "<i4").tobytes()
        header = ExtentHeader(namespace, parent, link(parent, ids), group, 16 * index, ids, "toy", BYTES)
        made.append((header, bytes([first, 0, 0, 0]) * (BYTES // 4)))
        parent = header.digest
    return made


def fill(tier: Tier, blocks: Sequence[tuple[ExtentHeader, bytes]]) -> None:
    for header, payload in blocks:
        assert tier.put([header.key], [memoryview(bytearray(header.encode() + payload + bytes(SEAL_BYTES)))]) == 1


def run(*tiers: Tier, kept: Sequence[bytes] = (), exact: Encoding = EXACT, usual: Encoding = USUAL):
    found = {tier: list((find_headers(tier.backend, {MINE}) or {}).values()) for tier in tiers}
    return compress(found, {MINE: ROUNDED}, exact, usual, kept)


def keys(firsts: Sequence[int], namespace: bytes = ROUNDED) -> list[bytes]:
    return [header.key for header, _ in chain(namespace, firsts)]


@pytest.mark.parametrize("sealer", [Checksum(), AesGcm(os.urandom(32))], ids=["checksum", "encrypted"])
def test_a_chain_gets_the_names_that_rounded_kv_has(tmp_path, sealer: Sealer):
    tier = Tier("disk", FolderBackend(tmp_path), sealer=sealer)
    fill(tier, blocks := chain(MINE, [1, 2, 3]))
    report = run(tier)["disk"]
    assert (report.num_blocks, report.num_skipped) == (3, 0)
    assert report.num_bytes_before == 3 * EXACT.extent_bytes[0]
    assert report.num_bytes_after == 3 * USUAL.extent_bytes[0]
    assert tier.count(keys([1, 2, 3])) == 3
    assert tier.backend.exists([header.key for header, _ in blocks]) == [False] * 3
    buffer = np.empty(USUAL.extent_bytes[0], np.uint8)
    (payload,) = tier.get_into([keys([1, 2, 3])[2]], [buffer.data])
    assert payload is not None
    assert set(payload.view("<i2").tolist()) == {3}
    assert sum(file.stat().st_size for file in tmp_path.rglob("*.kv")) == report.num_bytes_after


def test_what_goes_on_from_a_block_that_stays_stays_too(tmp_path):
    tier = Tier("host", HostBackend(1 << 20))
    fill(tier, blocks := chain(MINE, [1, 9, 3, 4]))
    report = run(tier)["host"]
    assert (report.num_blocks, report.num_skipped) == (1, 3)
    assert tier.backend.exists([header.key for header, _ in blocks]) == [False, True, True, True]
    assert tier.count(keys([1, 9, 3, 4])) == 1


def test_a_chain_without_its_beginning_stays_and_one_that_is_split_between_tiers_does_not():
    host, disk = Tier("host", HostBackend(1 << 20)), Tier("disk", HostBackend(1 << 20))
    blocks = chain(MINE, [1, 2, 3])
    fill(disk, blocks[1:2])
    fill(host, blocks[2:])
    assert [report.num_skipped for report in run(host, disk).values()] == [1, 1]
    fill(host, blocks[:1])
    reports = run(host, disk)
    assert [(report.num_blocks, report.num_skipped) for report in reports.values()] == [(2, 0), (1, 0)]
    assert host.backend.exists(keys([1, 2, 3])) == [True, False, True]
    assert disk.backend.exists(keys([1, 2, 3])) == [False, True, False]


def test_a_damaged_block_is_dropped_and_none_is_made_of_it(tmp_path):
    tier = Tier("disk", FolderBackend(tmp_path))
    fill(tier, chain(MINE, [1]))
    (file,) = tmp_path.rglob("*.kv")
    content = bytearray(file.read_bytes())
    content[-SEAL_BYTES - 1] ^= 1
    file.write_bytes(content)
    report = run(tier)["disk"]
    assert (report.num_blocks, report.num_skipped) == (0, 1)
    assert tier.count(keys([1])) == 0


def test_where_there_is_no_room_the_exact_block_stays():
    class Full(HostBackend):
        def put(self, keys, values):
            return [False] * len(keys) if is_full else super().put(keys, values)

    is_full = False
    tier = Tier("host", Full(1 << 20))
    fill(tier, blocks := chain(MINE, [1, 2]))
    is_full = True
    report = run(tier)["host"]
    assert (report.num_blocks, report.num_skipped, report.num_bytes_before) == (0, 2, 0)
    assert tier.backend.exists([header.key for header, _ in blocks]) == [True, True]


def test_what_is_kept_is_there_in_both_ways():
    tier = Tier("host", HostBackend(1 << 20))
    fill(tier, blocks := chain(MINE, [1, 2]))
    report = run(tier, kept=[blocks[0][0].digest])["host"]
    assert tier.backend.exists([header.key for header, _ in blocks]) == [True, False]
    assert tier.count(keys([1, 2])) == 2
    assert report.num_bytes_after == EXACT.extent_bytes[0] + 2 * USUAL.extent_bytes[0]


@pytest.mark.parametrize("where", ["one tier", "two tiers"])
def test_a_block_of_several_groups_goes_as_a_whole_or_not_at_all(where):
    """One group's block has values that fit in no fewer bits: the other's must not be all that is left of it."""
    host, disk = Tier("host", HostBackend(1 << 20)), Tier("disk", HostBackend(1 << 20))
    two = {"exact": Encoding("toy", (BYTES, BYTES)), "usual": Encoding("toy/int8", (BYTES, BYTES), Fussy())}
    groups = [chain(MINE, [1, 2, 3], group=0), chain(MINE, [1, 9, 3], group=1)]
    for tier, blocks in zip([host, disk if where == "two tiers" else host], groups, strict=True):
        fill(tier, blocks)
    reports = run(host, disk, **two)
    assert sum(each.num_blocks for each in reports.values()) == 2
    assert sum(each.num_skipped for each in reports.values()) == 4
    for tier, blocks in zip([host, disk if where == "two tiers" else host], groups, strict=True):
        assert tier.backend.exists([header.key for header, _ in blocks]) == [False, True, True]
