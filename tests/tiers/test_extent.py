"""What an extent promises: the payload that was stored under a key, or a refusal."""

import numpy as np
import pytest

from spolia.tiers import AesGcm, Checksum, ExtentError, ExtentHeader, KeyChain, key_of, open_extent

from .samples import extent_of, headers, payload_of

SEALERS = [Checksum(), AesGcm(bytes(range(32)))]


@pytest.fixture(params=SEALERS, ids=lambda sealer: sealer.name)
def sealer(request):
    return request.param


def test_what_was_sealed_comes_back(sealer):
    for header in headers(3):
        found, payload = open_extent(extent_of(header, sealer), sealer, header.key)
        assert payload.tobytes() == payload_of(header)
        assert found.key == header.key == key_of(header.encode())
        assert (found.start, found.ids.tolist(), found.layout) == (header.start, header.ids.tolist(), header.layout)


def test_any_flipped_bit_is_refused(sealer):
    (header,) = headers(1)
    good = extent_of(header, sealer)
    rng = np.random.default_rng(0)
    header_bits = range(8 * len(header.encode()))
    for bit in [*header_bits, *rng.integers(8 * len(header.encode()), 8 * len(good), 500).tolist()]:
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        if bad == good:
            continue
        with pytest.raises(ExtentError):
            open_extent(memoryview(bad), sealer, header.key)


def test_any_truncation_or_extension_is_refused(sealer):
    (header,) = headers(1)
    good = extent_of(header, sealer)
    for size in [0, 1, 31, 127, 128, 300, len(good) // 2, len(good) - 32, len(good) - 1]:
        with pytest.raises(ExtentError):
            open_extent(good[:size], sealer, header.key)
    with pytest.raises(ExtentError):
        open_extent(memoryview(bytes(good) + b"\0"), sealer, header.key)


def test_a_swapped_extent_is_refused(sealer):
    one, other = headers(2)
    with pytest.raises(ExtentError, match="another key"):
        open_extent(extent_of(one, sealer), sealer, other.key)


def test_an_older_version_is_refused(sealer):
    (header,) = headers(1)
    bad = bytearray(extent_of(header, sealer))
    bad[8] = 0
    sealer.seal(memoryview(bad))
    with pytest.raises(ExtentError, match="version 0"):
        open_extent(memoryview(bad), sealer, header.key)


@pytest.mark.parametrize("field", ["parent", "token_ids", "namespace"])
def test_a_header_that_does_not_name_its_own_content_is_refused(field):
    (header,) = headers(1)
    fields = {name: getattr(header, name) for name in header.__slots__}
    forged = ExtentHeader(**{**fields, field: fields[field][:-1] + b"?"})
    with pytest.raises(ExtentError):
        open_extent(extent_of(forged), Checksum(), header.key)


def test_keys_differ_by_namespace_group_and_every_token_before():
    ids = np.arange(48, dtype=np.int32)
    other = ids.copy()
    other[0] = 7
    chains = [KeyChain(b"a"), KeyChain(b"b"), KeyChain(b"a")]
    for chain, tokens in zip(chains, [ids, ids, other], strict=True):
        chain.extend(tokens)
    assert len({digest for chain in chains for digest in chain.digests}) == 9
    assert headers(1, group=0)[0].key != headers(1, group=1)[0].key


def test_a_chain_that_grows_by_and_by_is_the_same_as_one_made_at_once():
    ids = np.arange(100, dtype=np.int32)
    at_once, grown = KeyChain(b"a"), KeyChain(b"a")
    at_once.extend(ids)
    for length in range(101):
        grown.extend(ids[:length])
    assert grown.digests == at_once.digests
    assert len(grown.digests) == 6


def test_keys_are_the_same_in_every_process():
    chain = KeyChain(b"namespace")
    chain.extend(np.arange(32, dtype=np.int32))
    assert chain.digests[1].hex() == "685fbff0a6e808bd90f1d19819567c271b7aadd719ce004bdcae66368385d0d4"
