"""Tokens become text character by character, and never past a stop string."""

from __future__ import annotations

import random

import pytest

from spolia.generation import TextStream


def tokens(*pieces: bytes | str):
    return [piece.encode() if isinstance(piece, str) else piece for piece in pieces]


def stream_of(pieces, **options):
    return TextStream(pieces.__getitem__, **options)


def read(pieces, **options):
    """All updates of a stream; the last is what `finish` held back."""
    stream = stream_of(pieces, **options)
    shown = []
    for token_id in range(len(pieces)):
        text, stop = stream.feed(token_id)
        shown.append(text)
        if stop is not None:
            return shown, stop
    return [*shown, stream.finish()], None


def test_a_character_split_over_tokens_appears_when_it_is_complete():
    a, b, c, d = (bytes([byte]) for byte in "🪨".encode())
    assert read([b"x", a, b, c, d])[0] == ["x", "", "", "", "🪨", ""]


def test_an_incomplete_character_at_the_end_is_a_replacement_character():
    assert "".join(read(tokens(b"ok", "é".encode()[:1]))[0]) == "ok\ufffd"


@pytest.mark.parametrize("seed", range(20))
def test_the_parts_joined_are_all_bytes_decoded_at_once(seed):
    rng = random.Random(seed)
    data = b"".join(rng.choice(["a", "é", "語", "🪨", "\n"]).encode() for _ in range(40)) + rng.randbytes(20)
    cuts = sorted(rng.sample(range(len(data)), 25))
    pieces = [data[i:j] for i, j in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    shown, _ = read(pieces, stop=("never to be seen",))
    assert "".join(shown) == data.decode(errors="replace")


@pytest.mark.parametrize("pieces", [tokens("one EN", "D two"), tokens("one ", "E", "N", "D"), tokens("one END two")])
def test_a_stop_string_across_tokens_cuts_the_text_before_it(pieces):
    shown, stop = read(pieces, stop=("END",))
    assert "".join(shown) == "one "
    assert stop == "END"


def test_what_may_become_a_stop_string_is_held_back_and_released_when_it_does_not():
    assert read(tokens("a E", "N", "x", "E"), stop=("END",))[0] == ["a ", "", "ENx", "", "E"]


def test_a_stop_string_of_repeated_parts_is_found():
    """The held tail must be the longest, not the first, that may begin a stop string."""
    shown, stop = read(tokens("a", "a", "b", "a", "a", "a", "b", "c"), stop=("aabc",))
    assert "".join(shown) == "aaba"
    assert stop == "aabc"


def test_a_stop_string_may_be_kept():
    shown, _ = read(tokens("one EN", "D two"), stop=("END",), keep_stop=True)
    assert "".join(shown) == "one END"


def test_of_several_stop_strings_the_one_that_begins_first_wins_then_the_longest():
    assert read(tokens("x stop then END"), stop=("END", "stop"))[1] == "stop"
    assert read(tokens("x stopping"), stop=("stop", "stopping"))[1] == "stopping"


def test_a_stop_string_in_a_split_character_is_found():
    first, second = "é".encode()[:1], "é".encode()[1:]
    assert read([b"a", first, second], stop=("é",))[1] == "é"


def test_stop_strings_wait_until_they_are_allowed():
    stream = stream_of(tokens("END", " END"), stop=("END",))
    assert stream.feed(0, may_stop=False) == ("END", None)
    assert stream.feed(1) == (" ", "END")


@pytest.mark.parametrize("seed", range(50))
def test_any_text_ends_where_a_search_over_all_of_it_says(seed):
    rng = random.Random(seed)
    text = "".join(rng.choice("ab") for _ in range(60))
    stop = tuple("".join(rng.choice("ab") for _ in range(rng.randrange(2, 9))) for _ in range(3))
    pieces = []
    rest = text
    while rest:
        size = rng.randrange(1, 5)
        pieces.append(rest[:size].encode())
        rest = rest[size:]
    shown, found = read(pieces, stop=stop)
    # The oracle: after each token, does all the text so far contain a stop string?
    so_far = ""
    for piece in pieces:
        so_far += piece.decode()
        starts = [so_far.find(s) for s in stop if s in so_far]
        if starts:
            assert "".join(shown) == so_far[: min(starts)]
            assert found is not None
            return
    assert "".join(shown) == text
    assert found is None
