"""Ending an answer where it first matches a regular expression.

The expression is matched byte by byte by an automaton, in time that is linear in the text: an expression that a client
sends cannot hold up the engine, as a backtracking matcher's could.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import TYPE_CHECKING

from spolia.errors import InvalidRequest
from spolia.generation.form_errors import explain_regex
from spolia.generation.text import TextStream, TextUpdate

if TYPE_CHECKING:
    from llguidance import LLMatcher

__all__ = ["PatternTextStream", "StopPattern"]


class StopPattern:
    """Looks for the first place at which a text matches.

    Args:
        pattern: in Rust's syntax, no look-around.

    Raises:
        InvalidRequest: it is no regular expression.
    """

    def __init__(self, pattern: str) -> None:
        from llguidance import LLMatcher, LLTokenizer

        tokenizer = LLTokenizer(_Bytes(), eos_token=[256], slices=[])  # type: ignore[arg-type]
        self.pattern = pattern
        # The expression by itself first: a message about what is put around it would puzzle.
        for wrapped in (pattern, f"(?s:.*)(?:{pattern})(?s:.*)"):
            matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_regex(wrapped), log_level=0)
            if matcher.is_error():
                where = explain_regex(pattern, matcher.get_error())
                raise InvalidRequest(f"stop_regex cannot be compiled: {where}", param="stop_regex")
        if matcher.is_accepting():
            raise InvalidRequest(
                f"stop_regex is {pattern!r}, which matches the empty text: every answer would be empty",
                param="stop_regex",
            )
        self._matcher: LLMatcher = matcher

    def fork(self) -> StopPattern:
        """Another, for a text of its own; none may have been fed to this one."""
        forked = copy(self)
        forked._matcher = self._matcher.deep_copy()
        return forked

    def feed(self, text: str) -> int | None:
        """Go on with `text`; how many of its characters there are to the end of the first match, or None."""
        for index, character in enumerate(text):
            for byte in character.encode():
                self._matcher.consume_token(byte)
            if self._matcher.is_accepting():
                return index + 1
        return None


class PatternTextStream(TextStream):
    """A `TextStream` that ends after the first match of a `StopPattern`, which stays in the text."""

    __slots__ = ("_pattern",)

    def __init__(
        self,
        token_bytes: Callable[[int], bytes],
        *,
        pattern: StopPattern,
        stop: tuple[str, ...] = (),
        keep_stop: bool = False,
    ) -> None:
        super().__init__(token_bytes, stop=stop, keep_stop=keep_stop)
        self._pattern = pattern

    def feed(self, token_id: int, *, may_stop: bool = True) -> TextUpdate:
        text, stop = super().feed(token_id, may_stop=may_stop)
        end = self._pattern.feed(text)
        if end is None or not may_stop:
            return TextUpdate(text, stop)
        return TextUpdate(text[:end], self._pattern.pattern)


class _Bytes:
    """A vocabulary of bytes, as llguidance wants it."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    eos_token_id = 256
    special_token_ids = (256,)
    tokens = (*(bytes([byte]) for byte in range(256)), b"\xff<end>")

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)
