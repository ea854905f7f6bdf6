"""Encoding without holding up the event loop."""

from __future__ import annotations

import asyncio

from spolia.models import Tokenizer

__all__ = ["encode"]

# Encoding runs at some 4 MB/s: shorter texts cost less than the way to a thread and back.
_INLINE_CHARACTERS = 4096


async def encode(tokenizer: Tokenizer, text: str, *, add_special: bool = True) -> list[int]:
    """Token ids of `text`; a long one is encoded on another thread, so that streams do not wait for it."""
    if len(text) <= _INLINE_CHARACTERS:
        return tokenizer.encode(text, add_special=add_special)
    return await asyncio.to_thread(tokenizer.encode, text, add_special=add_special)
