"""A model's thoughts told from its answer, by the tags around them."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from spolia.generation.history import History
from spolia.generation.processors.base import Logits

__all__ = ["ReasoningPart", "ReasoningSplitter", "ThinkingBudget"]

Ids = NDArray[np.int32]


class ReasoningPart(NamedTuple):
    """New text, of the thoughts and of the answer."""

    reasoning: str
    content: str


class ReasoningSplitter:
    """Splits a stream of text at the first pair of tags. The tags and the blank lines next to them go.

        <think>  thoughts  </think>  answer
        before ->  inside  ->        after

    Args:
        is_open: the text begins inside: the prompt ended with the opening tag.
    """

    def __init__(self, opening: str = "<think>", closing: str = "</think>", *, is_open: bool = False) -> None:
        self.opening = opening
        self.closing = closing
        self._state = "inside" if is_open else "before"
        self._held = ""
        self._strips = is_open  # white space that comes next is not shown

    @property
    def is_inside(self) -> bool:
        """Whether what comes next belongs to the thoughts."""
        return self._state == "inside"

    def feed(self, text: str) -> ReasoningPart:
        """Add text; what may be shown of it. The beginning of a tag is held back until it is one or not."""
        text = self._held + text
        self._held = ""
        reasoning = content = ""
        while text:
            if self._strips:
                text = text.lstrip()
                if not text:
                    break
                self._strips = False
            if self._state == "after":
                return ReasoningPart(reasoning, content + text)
            tag = self.opening if self._state == "before" else self.closing
            if self._state == "before" and not tag.startswith(text.lstrip()[: len(tag)]):
                self._state = "after"  # thoughts come first or not at all
                continue
            start = text.find(tag)
            if start < 0:
                shown, self._held = _hold_back(text, tag) if self._state == "inside" else ("", text)
                return ReasoningPart(reasoning + shown, content)
            if self._state == "inside":
                reasoning += text[:start].rstrip()
            self._state = "inside" if self._state == "before" else "after"
            self._strips = True
            text = text[start + len(tag) :]
        return ReasoningPart(reasoning, content)

    def finish(self) -> ReasoningPart:
        """What was held back, now that no more text comes."""
        held, self._held = self._held, ""
        return ReasoningPart(held.rstrip(), "") if self._state == "inside" else ReasoningPart("", held)


def _hold_back(text: str, tag: str) -> tuple[str, str]:
    """`text` without its end, where that may be white space before a tag, or the beginning of one."""
    for length in range(min(len(text), len(tag) - 1), 0, -1):
        if tag.startswith(text[-length:]):
            shown = text[:-length].rstrip()
            return shown, text[len(shown) :]
    shown = text.rstrip()
    return shown, text[len(shown) :]


class ThinkingBudget:
    """Ends thoughts that have become long: after `budget` tokens of them the closing tag is forced; a processor.

    Args:
        opening_ids, closing_ids: the tags' tokens.
        token_bytes: of any token; a character is not cut by the tag, so thoughts may be up to 3 tokens longer.
    """

    def __init__(
        self,
        budget: int,
        opening_ids: Sequence[int],
        closing_ids: Sequence[int],
        token_bytes: Callable[[int], bytes],
    ) -> None:
        self._budget = budget
        self._token_bytes = token_bytes
        self._opening = np.array(opening_ids, np.int32)
        self._closing = np.array(closing_ids, np.int32)

    def process(self, logits: Logits, rows: Sequence[History]) -> None:
        for row, history in zip(logits, rows, strict=True):
            forced = self._forced(history)
            if forced is not None:
                row[:] = -np.inf
                row[forced] = 0

    def _forced(self, history: History) -> int | None:
        """The token of the closing tag that is due; None: none."""
        start = self._start(history)
        if start is None:
            return None
        thoughts = history.ids[start:]
        if len(thoughts) < self._budget or _find(thoughts, self._closing) is not None:
            return None
        # The tag may be begun: how many of its tokens stand at the end already?
        for length in range(min(len(self._closing) - 1, len(thoughts)), 0, -1):
            if np.array_equal(thoughts[-length:], self._closing[:length]):
                return int(self._closing[length])
        decoder = getincrementaldecoder("utf-8")("replace")
        decoder.decode(b"".join(map(self._token_bytes, thoughts[-4:].tolist())))
        if decoder.getstate()[0] and len(thoughts) < self._budget + 3:  # in the middle of a character
            return None
        return int(self._closing[0])

    def _start(self, history: History) -> int | None:
        """Where thoughts begin: after an opening tag at the prompt's end, or at the answer's beginning."""
        width = len(self._opening)
        # White space may follow the tag in the prompt, and precede it in the answer.
        first = max(0, history.num_prompt_tokens - width - 2)
        found = _find(history.ids[first : history.num_prompt_tokens + width + 2], self._opening)
        return None if found is None else max(first + found + width, history.num_prompt_tokens)


def _find(ids: Ids, sequence: Ids) -> int | None:
    """Where `sequence` begins in `ids`; None: nowhere."""
    num_starts = len(ids) - len(sequence) + 1
    for start in np.flatnonzero(ids[: max(num_starts, 0)] == sequence[0]).tolist():
        if np.array_equal(ids[start : start + len(sequence)], sequence):
            return int(start)
    return None
