"""Sealing extents so that only who has the key can read them, or make them: AES-256-GCM."""

from __future__ import annotations

import os
from pathlib import Path

from spolia.errors import InvalidRequest

from .extent import SEAL_BYTES, ExtentError, secret_at

__all__ = ["AesGcm", "read_key"]

_NONCE_BYTES = 12
_TAG_BYTES = 16
_KEY_BYTES = 32


class AesGcm:
    """Encrypts token ids and payload in place, and authenticates them with the rest of the header.

        header up to the layout | token ids, payload -> ciphertext | seal = nonce, tag, four zero bytes

    What is before the token ids stays readable: a folder can be listed without the key.

    Args:
        key: 32 bytes.

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
        start = secret_at(extent)
        nonce = os.urandom(_NONCE_BYTES)
        sealed = self._cipher.encrypt(nonce, extent[start:-SEAL_BYTES], bytes(extent[:start]))
        extent[start:-SEAL_BYTES] = sealed[:-_TAG_BYTES]
        extent[-SEAL_BYTES:] = (nonce + sealed[-_TAG_BYTES:]).ljust(SEAL_BYTES, b"\0")

    def unseal(self, extent: memoryview) -> None:
        start = secret_at(extent)
        seal = bytes(extent[-SEAL_BYTES:])
        nonce, tag = seal[:_NONCE_BYTES], seal[_NONCE_BYTES : _NONCE_BYTES + _TAG_BYTES]
        if any(seal[_NONCE_BYTES + _TAG_BYTES :]):
            raise ExtentError("it is not encrypted as it should be")
        try:
            ciphertext = bytes(extent[start:-SEAL_BYTES]) + tag
            extent[start:-SEAL_BYTES] = self._cipher.decrypt(nonce, ciphertext, bytes(extent[:start]))
        except self._invalid_tag:
            raise ExtentError("it does not open with this key") from None


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
