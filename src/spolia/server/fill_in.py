"""Prompts for models that were trained to fill in what is between two texts."""

from __future__ import annotations

from collections.abc import Sequence

from spolia.errors import InvalidRequest
from spolia.models import Tokenizer

__all__ = ["infill_ids"]


def infill_ids(
    tokenizer: Tokenizer, prompt: str | list[int], suffix: str, *, files: Sequence[tuple[str, str]] = ()
) -> list[int]:
    """The ids that ask a model which was trained for it for what stands between a text and its suffix.

    Args:
        files: name and text of others that it should know of; plain text where the model has no mark for them.

    Raises:
        InvalidRequest: this model was not; or the prompt is token ids.
    """
    special = tokenizer.special
    marks = (special.fim_prefix, special.fim_suffix, special.fim_middle)
    if None in marks:
        raise InvalidRequest(
            "suffix is given, but this model has no tokens for filling in; leave it out, or take a model for code",
            param="suffix",
        )
    if not isinstance(prompt, str):
        raise InvalidRequest("suffix needs a prompt that is text, not token ids", param="suffix")
    before, after = (tokenizer.encode(text, add_special=False, parse_special=False) for text in (prompt, suffix))
    first, second, third = (mark for mark in marks if mark is not None)
    bos = [special.bos] if tokenizer.adds_bos and special.bos is not None else []
    others: list[int] = []
    for name, text in files:
        if special.fim_file is None:
            others += tokenizer.encode(f"\n\n--- snippet ---\n\n{text}", add_special=False, parse_special=False)
        else:
            others += [special.fim_file]
            others += tokenizer.encode(f"{name}\n{text}\n", add_special=False, parse_special=False)
    return [*bos, *others, first, *before, second, *after, third]
