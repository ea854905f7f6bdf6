"""Sealing extents so that only who has the key can read them, or make them: AES-256-GCM."""

from __future__ import annotations

import os
from pathlib import Path

from spolia.errors import InvalidRequest

from .extent import SEAL_BYTES, ExtentError

__all__ = ["AesGcm", "read_key"]

_NONCE_BYTES = 12
_TAG_BYTES = 16
_KEY_BYTES = 32


class AesGcm:
    """Encrypts the payload in place and authenticates payload and header, the key of the extent among it.

        payload -> ciphertext      seal = nonce, tag, four zero bytes

    The header stays readable: a folder can be listed without the key. Its token ids are there, too.

    Raises:
        InvalidRequest: the package `cryptography` is not installed.
    """

    name = "aes-256-gcm"

    def __init__(self, key: bytes) -> None:
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError:
            raise InvalidRequest(
                "kv_encrypt needs the package cryptography: pip install 'spolia[encrypt]'", param="kv_encrypt"
            ) from None
        self._cipher = AESGCM(key)
        self._invalid_tag = InvalidTag

    def seal(self, extent: memoryview) -> None:
        payload_at = _payload_at(extent)
        nonce = os.urandom(_NONCE_BYTES)
        sealed = self._cipher.encrypt(nonce, extent[payload_at:-SEAL_BYTES], bytes(extent[:payload_at]))
        extent[payload_at:-SEAL_BYTES] = sealed[:-_TAG_BYTES]
        extent[-SEAL_BYTES:] = (nonce + sealed[-_TAG_BYTES:]).ljust(SEAL_BYTES, b"\0")

    def unseal(self, extent: memoryview, payload_at: int) -> None:
        seal = bytes(extent[-SEAL_BYTES:])
        nonce, tag = seal[:_NONCE_BYTES], seal[_NONCE_BYTES : _NONCE_BYTES + _TAG_BYTES]
        if any(seal[_NONCE_BYTES + _TAG_BYTES :]):
            raise ExtentError("it is not encrypted as it should be")
        try:
            ciphertext = bytes(extent[payload_at:-SEAL_BYTES]) + tag
            extent[payload_at:-SEAL_BYTES] = self._cipher.decrypt(nonce, ciphertext, bytes(extent[:payload_at]))
        except self._invalid_tag:
            raise ExtentError("it does not open with this key") from None


def _payload_at(extent: memoryview) -> int:
    """Where the payload of an extent begins, by its own header."""
    return int.from_bytes(extent[10:12], "little")


def read_key(source: str) -> bytes:
    """The 32 bytes that `file:PATH` or `env:NAME` holds, raw or as 64 hexadecimal digits.

    Raises:
        InvalidRequest: there is no such key; never says what was there instead.
    """
    kind, _, name = source.partition(":")
    if kind == "file" and name:
        try:
            data = Path(name).read_bytes()
        except OSError as error:
            raise InvalidRequest(f"the key file {name} cannot be read: {error.strerror}", param="kv_encrypt") from error
    elif kind == "env" and name:
        if name not in os.environ:
            raise InvalidRequest(f"the environment has no {name} to take the key from", param="kv_encrypt")
        data = os.environb[os.fsencode(name)]
    else:
        raise InvalidRequest(
            f"kv_encrypt is {source!r}; write file:PATH or env:NAME, where the key is", param="kv_encrypt"
        )
    if len(data) == _KEY_BYTES:
        return data
    try:
        key = bytes.fromhex(data.decode().strip())
    except (UnicodeDecodeError, ValueError):
        key = b""
    if len(key) != _KEY_BYTES:
        raise InvalidRequest(
            f"the key in {source} has {len(data)} bytes; give 32, or 64 hexadecimal digits "
            "(such as from: openssl rand -hex 32)",
            param="kv_encrypt",
        )
    return key
