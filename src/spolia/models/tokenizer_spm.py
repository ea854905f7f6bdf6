"""SentencePiece's BPE restated as merges, which is the form that the `tokenizers` library runs.

SentencePiece stores no merges. It joins, again and again, the two neighbours whose joint is the piece of highest score,
the leftmost first among equals. So *any* two pieces whose joint is a piece may merge, at the priority of the joint:

    pieces  a  b  c  ab  bc  abc      merges, best score first   a+b  b+c  a+bc  ab+c

A merge list has one priority an entry where SentencePiece has one a piece, but that loses nothing: of the ways to form
one piece, BPE of the piece's own characters reaches one at most, so two never compete. Only different pieces of equal
score, which trained vocabularies do not have, would fall back to the order of their ids.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from spolia.models.cache_folder import cache_folder, write_atomically

__all__ = ["merges_from_scores"]

_CHECKSUM_BYTES = 32


def merges_from_scores(pieces: Sequence[str], scores: NDArray[np.float32]) -> list[tuple[str, str]]:
    """Every merge that the scored vocabulary allows, best first.

    A quarter of a million pieces take over a second to work out and a fifth of one to read back, so where each joint
    is cut is kept in the user's cache folder under a digest of the vocabulary.

    Args:
        pieces: the normal pieces, without control, byte and user-defined ones, which never take part in a merge.
        scores: [num_pieces] log probabilities; higher merges first.
    """
    key = hashlib.blake2b("\0".join(pieces).encode(), digest_size=_CHECKSUM_BYTES)
    key.update(scores.astype("<f4").tobytes())
    path = cache_folder() / "tokenizers" / f"{key.hexdigest()}.cuts"
    cuts = _read_cuts(path, key.digest())
    if cuts is None:
        cuts = _find_cuts(pieces, scores)
        payload = cuts[0].tobytes() + cuts[1].tobytes()
        with contextlib.suppress(OSError):  # nowhere to keep it: the next start pays the second again, no more is lost
            write_atomically(path, _checksum(key.digest(), payload) + payload)
    indices, offsets = cuts
    joints = map(pieces.__getitem__, indices.tolist())
    return [(joint[:offset], joint[offset:]) for joint, offset in zip(joints, offsets.tolist(), strict=True)]


Cuts = tuple[NDArray[np.int32], NDArray[np.uint16]]  # which piece, and after how many of its characters


def _find_cuts(pieces: Sequence[str], scores: NDArray[np.float32]) -> Cuts:
    known = set(pieces)
    indices: list[int] = []
    offsets: list[int] = []
    for index in np.argsort(-scores, kind="stable").tolist():
        piece = pieces[index]
        for offset in range(1, len(piece)):
            if piece[:offset] in known and piece[offset:] in known:
                indices.append(index)
                offsets.append(offset)
    return np.array(indices, np.int32), np.array(offsets, np.uint16)


def _read_cuts(path: Path, key: bytes) -> Cuts | None:
    try:
        content = path.read_bytes()
    except OSError:
        return None
    checksum, payload = content[:_CHECKSUM_BYTES], content[_CHECKSUM_BYTES:]
    if checksum != _checksum(key, payload):  # torn or altered: a miss, never an answer
        return None
    count = len(payload) // (4 + 2)
    return np.frombuffer(payload, np.int32, count), np.frombuffer(payload, np.uint16, count, offset=4 * count)


def _checksum(key: bytes, payload: bytes) -> bytes:
    return hashlib.blake2b(payload, key=key, digest_size=_CHECKSUM_BYTES).digest()
