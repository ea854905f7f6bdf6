"""Encryption: nobody reads or makes an extent without the key."""

from __future__ import annotations

import os

import pytest

from spolia.errors import InvalidRequest
from spolia.tiers import AesGcm, Checksum, ExtentError, open_extent, read_key

from .samples import extent_of, headers, payload_of

KEY = bytes(range(32))


def test_neither_payload_nor_token_ids_are_in_the_extent_and_two_seals_of_it_differ():
    (header,) = headers(1)
    one, other = extent_of(header, AesGcm(KEY)), extent_of(header, AesGcm(KEY))
    payload = payload_of(header)
    assert payload[:64] not in bytes(one)
    assert header.token_ids[:16] not in bytes(one)
    assert bytes(one) != bytes(other)


def test_another_key_does_not_open_it():
    (header,) = headers(1)
    with pytest.raises(ExtentError, match="does not open with this key"):
        open_extent(extent_of(header, AesGcm(KEY)), AesGcm(KEY[::-1]), header.key)


def test_sealed_and_encrypted_are_never_taken_for_each_other():
    (header,) = headers(1)
    with pytest.raises(ExtentError):
        open_extent(extent_of(header, Checksum()), AesGcm(KEY), header.key)
    with pytest.raises(ExtentError):
        open_extent(extent_of(header, AesGcm(KEY)), Checksum(), header.key)


def test_a_key_comes_from_a_file_or_the_environment(tmp_path, monkeypatch):
    (tmp_path / "raw").write_bytes(KEY)
    (tmp_path / "hex").write_text(KEY.hex() + "\n")
    monkeypatch.setenv("KV_KEY", KEY.hex())
    for source in (f"file:{tmp_path}/raw", f"file:{tmp_path}/hex", "env:KV_KEY"):
        assert read_key(source) == KEY


@pytest.mark.parametrize("source", ["", "KEY", "file:", "env:", "file:/nowhere/key", "env:NO_SUCH_NAME", "vault:key"])
def test_a_source_without_a_key_is_refused(source):
    with pytest.raises(InvalidRequest):
        read_key(source)


def test_a_key_of_the_wrong_length_is_refused_and_not_shown(monkeypatch):
    monkeypatch.setitem(os.environ, "KV_KEY", "hunter2")
    with pytest.raises(InvalidRequest, match="has 7 bytes; give 32") as caught:
        read_key("env:KV_KEY")
    assert "hunter2" not in str(caught.value)
