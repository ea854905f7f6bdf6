"""Token healing: a prompt's last token is taken back and written again as the model would have cut it.

A prompt that ends in the middle of a word, or in "http:", makes the model see a token that no text has before what
should follow. So that token is left to the model, which must begin with its text.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spolia.generation.history import History
from spolia.generation.processors.base import Logits
from spolia.generation.vocabulary import Vocabulary

__all__ = ["Healing"]


class Healing:
    """Holds the beginning of an answer to some bytes; a processor.

    Args:
        prefix: what the answer's first bytes are; the last token that writes them may go on.
    """

    def __init__(self, prefix: bytes, vocabulary: Vocabulary) -> None:
        self._prefix = prefix
        self._vocabulary = vocabulary

    def process(self, logits: Logits, rows: Sequence[History]) -> None:
        for row, history in zip(logits, rows, strict=True):
            written = b"".join(map(self._vocabulary.token_bytes, history.generated_ids[: len(self._prefix)].tolist()))
            left = self._prefix[len(written) :]
            if left:
                allowed = self._vocabulary.ids_along(left)
                values = row[allowed]
                row[:] = -np.inf
                row[allowed] = values
