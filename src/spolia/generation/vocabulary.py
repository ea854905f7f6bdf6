"""What processors need to know of a model's tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from spolia.generation.structured import GrammarCompiler

__all__ = ["Vocabulary"]


class Vocabulary:
    """A model's tokens, as far as text is turned into constraints on them. Any thread may call.

    Args:
        size: number of logits of a row; ids from `num_tokens` on mean nothing.
        encode: a text's ids, without the tokens that frame a prompt.
        token_bytes: the bytes of a token.
        is_special: whether a token steers and has no text.

    Attributes:
        grammars: compiles the forms that answers may be asked to have.
    """

    def __init__(
        self,
        size: int,
        *,
        eos_token_ids: Collection[int],
        encode: Callable[[str], list[int]],
        token_bytes: Callable[[int], bytes],
        is_special: Callable[[int], bool],
    ) -> None:
        self.size = size
        self.eos_token_ids = tuple(sorted(eos_token_ids))
        self.encode = encode
        self.token_bytes = token_bytes
        self.is_special = is_special
        self.grammars = GrammarCompiler(
            size, tokens=self._marked_tokens, eos_token_ids=self.eos_token_ids, encode=encode
        )
        self._along = lru_cache(maxsize=256)(self._find_along)
        self._containing = lru_cache(maxsize=64)(self._find_containing)

    def ids_containing(self, text: str) -> NDArray[np.int32]:
        """Tokens whose text has `text` in it, which is not empty. The first time takes a look at all of them."""
        return self._containing(text.encode())

    def ids_along(self, text: bytes) -> NDArray[np.int32]:
        """Tokens that begin with `text`, or that `text` begins with. The first time takes a look at all of them."""
        return self._along(text)

    def _find_along(self, text: bytes) -> NDArray[np.int32]:
        found = []
        for token_id in range(self.size):
            token = self.token_bytes(token_id)
            if token and (token.startswith(text) or text.startswith(token)) and not self.is_special(token_id):
                found.append(token_id)
        return np.array(found, np.int32)

    def _marked_tokens(self) -> list[bytes]:
        """Every token's bytes; a special one is marked as no text by a byte that UTF-8 does not have.

        That byte alone would be the beginning of every special token, and allowed where any of them is.
        """
        return [
            b"\xff" + (self.token_bytes(token_id) or b"<%d>" % token_id)
            if self.is_special(token_id)
            else self.token_bytes(token_id)
            for token_id in range(self.size)
        ]

    def _find_containing(self, wanted: bytes) -> NDArray[np.int32]:
        text, ends = self._joined
        places = [found.start() for found in re.finditer(re.escape(wanted), text)]
        return np.unique(np.searchsorted(ends, places, side="right")).astype(np.int32)

    @cached_property
    def _joined(self) -> tuple[bytes, NDArray[np.int64]]:
        """The text of all tokens, and where each ends; between them stands a byte that no text has."""
        texts = [b"" if self.is_special(id_) else self.token_bytes(id_) for id_ in range(self.size)]
        return b"\xff".join(texts) + b"\xff", np.cumsum([len(text) + 1 for text in texts])
