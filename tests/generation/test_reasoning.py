"""Thoughts are told from answers, however the text is cut, and end when they have to."""

from __future__ import annotations

import random

import numpy as np
import pytest

from spolia.generation import History, ReasoningSplitter
from spolia.generation.reasoning import ThinkingBudget

CASES = [
    ("<think>\nhm, 2 < 3\n</think>\n\nIt is 3.", False, "hm, 2 < 3", "It is 3."),
    ("hm\n</think>\n\nIt is 3.", True, "hm", "It is 3."),
    ("It is <think>3</think>.", False, "", "It is <think>3</think>."),
    ("  <think>a</think>b</think>c", False, "a", "b</think>c"),
    ("<think></think>b", False, "", "b"),
    ("<think>never ends", False, "never ends", ""),
    ("no tag at all", False, "", "no tag at all"),
    ("never ends </thin", True, "never ends </thin", ""),
    ("<thinker>", False, "", "<thinker>"),
    ("<thin", False, "", "<thin"),
    ("  \n indented", False, "", "  \n indented"),
    ("", True, "", ""),
]


@pytest.mark.parametrize(("text", "is_open", "reasoning", "content"), CASES)
def test_thoughts_and_answer_are_told_apart_however_the_text_is_cut(text, is_open, reasoning, content):
    rng = random.Random(0)
    for _ in range(30):
        splitter = ReasoningSplitter(is_open=is_open)
        parts = []
        rest = text
        while rest:
            length = rng.randrange(1, 6)
            parts.append(splitter.feed(rest[:length]))
            rest = rest[length:]
        parts.append(splitter.finish())
        assert "".join(part.reasoning for part in parts) == reasoning
        assert "".join(part.content for part in parts) == content


def test_an_answers_text_is_not_held_back_once_it_has_begun():
    splitter = ReasoningSplitter()
    splitter.feed("<think>a</think>")
    assert splitter.feed("b <").content == "b <"


# Of three bytes, a token each.
EURO = {10: b"\xe2", 11: b"\x82", 12: b"\xac"}


def drawn(budget, prompt, answer):
    """What the model comes to say if it would say `answer`, between the tags (1, 2) and (3, 4, 5)."""
    processor = ThinkingBudget(budget, (1, 2), (3, 4, 5), lambda token_id: EURO.get(token_id, b"x"))
    said = []
    for token_id in answer:
        row = np.zeros((1, 20), np.float32)
        row[0, token_id] = 1
        processor.process(row, [History.of(prompt, said, vocab_size=20)])
        said.append(int(row.argmax()))
    return said


def test_thoughts_are_closed_when_their_budget_is_spent():
    assert drawn(3, [9], [1, 2, *[7] * 8]) == [1, 2, 7, 7, 7, 3, 4, 5, 7, 7]
    assert drawn(0, [9], [1, 2, *[7] * 5]) == [1, 2, 3, 4, 5, 7, 7]


def test_thoughts_that_the_prompt_has_opened_count_too():
    assert drawn(2, [9, 1, 2], [7] * 7) == [7, 7, 3, 4, 5, 7, 7]
    assert drawn(2, [9, 1, 2, 8], [7] * 7) == [7, 7, 3, 4, 5, 7, 7]


def test_no_character_is_cut():
    assert drawn(2, [1, 2], [7, 10, 11, 12, 7, 7, 7]) == [7, 10, 11, 12, 3, 4, 5]
    assert drawn(1, [1, 2], [10, 10, 10, 10, 10, 7, 7]) == [10, 10, 10, 10, 3, 4, 5]  # which never becomes one
    assert drawn(3, [1, 2], [10, 11, 12, 7, 7, 7]) == [10, 11, 12, 3, 4, 5]


def test_thoughts_that_end_in_time_are_left_alone_and_so_is_what_is_none():
    closed = [1, 2, 7, 3, 4, 5, *[7] * 6]
    assert drawn(3, [9], closed) == closed
    assert drawn(3, [9], [7] * 10) == [7] * 10
    assert drawn(3, [1, 2, *[8] * 9], [7] * 10) == [7] * 10  # an earlier turn's thoughts
