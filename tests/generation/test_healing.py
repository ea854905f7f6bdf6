"""A prompt's last token may be written by other tokens, as long as its bytes come about."""

from __future__ import annotations

import numpy as np

from spolia.generation import Healing, History, Vocabulary

PIECES = [b"http", b"https", b"://", b":", b"h", b"tt", b"p:", b"x", b"<end>", b""]
VOCABULARY = Vocabulary(
    len(PIECES),
    eos_token_ids=(8,),
    encode=lambda _: [],
    token_bytes=PIECES.__getitem__,
    is_special=lambda token_id: token_id == 8,
)


def allowed(prefix, said):
    row = np.zeros((1, len(PIECES)), np.float32)
    Healing(prefix, VOCABULARY).process(row, [History.of([7], said, vocab_size=len(PIECES))])
    return [PIECES[i] for i in np.flatnonzero(row[0] > -np.inf)]


def test_tokens_that_go_on_with_the_text_or_write_a_part_of_it_are_allowed():
    assert allowed(b"http", []) == [b"http", b"https", b"h"]
    assert allowed(b"http", [4]) == [b"tt"]
    assert allowed(b"http", [4, 5]) == [b"p:"]


def test_once_the_text_stands_everything_is_allowed():
    assert len(allowed(b"http", [1])) == len(PIECES)
    assert len(allowed(b"http", [4, 5, 6, 7])) == len(PIECES)
