"""A smaller model with the same tokens that writes ahead of the one that answers.

    the sequence's buffer    | known tokens ................... | d0 d1 d2 |     written where they will be checked
    the smaller model's KV   | true, committed .... | it lags   | d0 d1    |     the last draft is never read

It has KV pools and a cache of its own: a conversation's next turn finds it there, and it takes no block from the model
that answers. It reads what it lacks in pieces, one a step; a sequence for which its pools have no room does without.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from spolia.engine.request import Sequence
from spolia.errors import InvalidRequest
from spolia.generation import Acceptance, Guess, RowSampling, Sampler
from spolia.kernels import BLOCK_SIZE, BlockCopy, Executable, StepInputs
from spolia.kvcache import KVCache, Lease, Outcome
from spolia.models import Tokenizer

__all__ = ["DraftModel", "check_vocabularies"]

_SOURCE = "model"
_NO_IDS: NDArray[np.int32] = np.empty(0, np.int32)
# How certain it is, as the lengths of agreement that `Acceptance` tells apart.
_CERTAINTIES = (0, 1, 2, 3, 4, 6, 9, 13, 17, 33)


@dataclass(slots=True, eq=False)
class _Reader:
    """How far the smaller model has come with a sequence.

    Attributes:
        num_read: tokens that it has KV of; all true but for the drafts, while these are unchecked.
        first_draft: the position of `drafts`, what it wrote last; `certainties` say how sure it was.
    """

    lease: Lease
    num_read: int
    num_slots: int
    first_draft: int = 0
    drafts: list[int] = field(default_factory=list)
    certainties: list[int] = field(default_factory=list)


class DraftModel:
    """Drafts with a model. The engine's thread owns it.

    Args:
        executable: with pools bound, of the sizes that `cache` was made with.
        vocab_size: of the model that answers; of ids beyond it none is drafted.
        max_batch_tokens: most tokens to read in a step.
        max_context: most tokens that the smaller model is made for.
    """

    def __init__(
        self, executable: Executable, cache: KVCache, *, vocab_size: int, max_batch_tokens: int, max_context: int
    ) -> None:
        self.cache = cache
        self._executable = executable
        self._vocab_size = min(vocab_size, executable.vocab_size)
        self._sampler = Sampler(self._vocab_size)
        self._max_batch_tokens = max_batch_tokens
        self._max_context = max_context
        self._readers: dict[str, _Reader] = {}

    def num_unread(self, sequence: Sequence) -> int:
        """Tokens to read before it can write."""
        reader = self._readers.get(sequence.request.request_id)
        return sequence.num_tokens - (0 if reader is None else reader.num_read)

    def note(self, sequence: Sequence, acceptance: Acceptance) -> None:
        """See which of its last drafts for this sequence came true; the KV of those is kept."""
        reader = self._readers.get(sequence.request.request_id)
        if reader is None or not reader.drafts:
            return
        true = sequence.token_ids[reader.first_draft : sequence.num_tokens].tolist()
        num_right = 0
        for draft, certainty, token_id in zip(reader.drafts, reader.certainties, true, strict=False):
            is_right = draft == token_id
            acceptance.learn(_SOURCE, certainty, is_right=is_right)
            acceptance.learn("any of model", 0, is_right=is_right)
            if not is_right:
                break
            num_right += 1
        reader.num_read = min(reader.num_read, reader.first_draft + num_right)
        reader.drafts, reader.certainties = [], []

    def draft(self, sequences: Seq[Sequence], acceptances: Seq[Acceptance], most: int, worth: float) -> list[Guess]:
        """Write up to `most` tokens for each sequence, as long as their chance is at least `worth`.

        Returns:
            A guess each; empty for those of which it has not read all, or for which there is no room.
        """
        guesses = [Guess([], [], _SOURCE) for _ in sequences]
        entries: list[tuple[int, _Reader, int]] = []  # index, reader, where its rows end
        # How far each is read: the last draft is not, and the last token of an answer is not drafted.
        limits = [
            min(sequence.num_tokens + most - 1, self._max_context, len(sequence.token_ids) - 2)
            for sequence in sequences
        ]
        copies: list[BlockCopy] = []
        budget = self._max_batch_tokens
        for index, sequence in enumerate(sequences):
            if sequence.num_tokens > limits[index]:
                continue
            reader = self._reader(sequence)
            stop = min(sequence.num_tokens, reader.num_read + budget)
            if stop <= reader.num_read or not self._reserve(reader, limits[index], copies):
                continue
            budget -= stop - reader.num_read
            entries.append((index, reader, stop))
        while entries:
            logits = self._run(sequences, entries, copies)
            copies = []
            writing = []
            for index, reader, stop in entries:
                sequence = sequences[index]
                reader.num_read = stop
                if stop <= sequence.num_tokens:
                    self._commit(reader, sequence, stop)
                if stop >= sequence.num_tokens:
                    writing.append((index, reader, stop))
            if not writing:
                break
            rows = [_row(sequences[index], stop) for index, _, stop in writing]
            samples = self._sampler.sample(logits, rows)
            entries = []
            for (index, reader, stop), token_id, logprobs in zip(
                writing, samples.token_ids, samples.logprobs, strict=True
            ):
                if token_id is None or logprobs is None:
                    continue
                sequence, guess = sequences[index], guesses[index]
                certainty = _CERTAINTIES[min(int(math.exp(logprobs.logprob) * 10), 9)]
                chance = acceptances[index].chance(_SOURCE, certainty) * (guess.chances[-1] if guess.chances else 1.0)
                if not guess.ids:
                    reader.first_draft = stop
                guess.ids.append(token_id)
                guess.chances.append(chance)
                reader.drafts.append(token_id)
                reader.certainties.append(certainty)
                if chance >= worth and stop < limits[index]:
                    sequence.token_ids[stop] = token_id
                    entries.append((index, reader, stop + 1))
        return guesses

    def release(self, sequence: Sequence) -> None:
        """The sequence has ended; what was read of it stays in the cache."""
        reader = self._readers.pop(sequence.request.request_id, None)
        if reader is not None:
            true = reader.first_draft if reader.drafts else reader.num_read
            self._commit(reader, sequence, min(true, reader.num_read, sequence.num_tokens), is_last=True)
            reader.lease.close(Outcome.TURN)

    def _reader(self, sequence: Sequence) -> _Reader:
        request = sequence.request
        reader = self._readers.get(request.request_id)
        if reader is None:
            lease = self.cache.open(request.namespace, sequence.known_ids, label=request.request_id)
            start = lease.num_computed_tokens
            reader = self._readers[request.request_id] = _Reader(lease, start, start)
        return reader

    def _reserve(self, reader: _Reader, num_tokens: int, copies: list[BlockCopy]) -> bool:
        if num_tokens > reader.num_slots:
            num_slots = -(-num_tokens // BLOCK_SIZE) * BLOCK_SIZE
            more = self.cache.grow(reader.lease, num_slots)
            if more is None:
                return False
            copies += [BlockCopy(copy.group, copy.src, copy.dst, copy.num_tokens) for copy in more]
            reader.num_slots = num_slots
        return True

    def _commit(self, reader: _Reader, sequence: Sequence, stop: int, *, is_last: bool = False) -> None:
        """Let others find tokens up to `stop`, which are true, a block at a time."""
        known = reader.lease.num_computed_tokens
        if stop > known and (is_last or stop // BLOCK_SIZE > known // BLOCK_SIZE):
            self.cache.commit(reader.lease, sequence.token_ids[known:stop])

    def _run(
        self, sequences: Seq[Sequence], entries: Seq[tuple[int, _Reader, int]], copies: Seq[BlockCopy]
    ) -> NDArray[np.float32]:
        """Compute the rows that end at each entry's stop; logits after those that reach the end of what is known."""
        ids = [sequences[index].token_ids[reader.num_read : stop] for index, reader, stop in entries]
        positions = [np.arange(reader.num_read, stop, dtype=np.int32) for _, reader, stop in entries]
        row_starts = np.concatenate([[0], np.cumsum([len(each) for each in ids])]).astype(np.int32)
        num_columns = max(-(-stop // BLOCK_SIZE) for _, _, stop in entries)
        tables = []
        for group in range(len(self.cache.groups)):
            table = np.full((len(entries), num_columns), -1, np.int32)
            for row, (_, reader, _) in enumerate(entries):
                blocks = reader.lease.block_table(group)[:num_columns]
                table[row, : len(blocks)] = blocks
            tables.append(table)
        at_end = [stop >= sequences[index].num_tokens for index, _, stop in entries]
        logits = np.empty((sum(at_end), self._executable.vocab_size), np.float32)
        step = StepInputs(
            token_ids=np.concatenate(ids),
            positions=np.concatenate(positions),
            row_starts=row_starts,
            block_tables=tuple(tables),
            logit_rows=row_starts[1:][at_end] - 1,
            copies=tuple(copies),
        )
        self._executable.run(step, logits)
        return np.ascontiguousarray(logits[:, : self._vocab_size])


def _row(sequence: Sequence, position: int) -> RowSampling:
    """As the answer's token there will be drawn, with the same random number, but for its processors."""
    row = sequence.next_row()
    return RowSampling(replace(row.params, logprobs=0), row.seed, position, _NO_IDS)


def check_vocabularies(tokenizer: Tokenizer, drafting: Tokenizer, name: str) -> None:
    """Make sure that each id means the same to both models.

    Raises:
        InvalidRequest: one does not; says which.
    """
    for token_id in range(min(tokenizer.vocab_size, drafting.vocab_size)):
        ours, theirs = tokenizer.token_bytes(token_id), drafting.token_bytes(token_id)
        if ours != theirs:
            raise InvalidRequest(
                f"draft_model is {name!r}, whose token {token_id} is {theirs!r} where the model's own is {ours!r}; a "
                "model that drafts must have the same tokens: take a smaller one of the same family",
                param="draft_model",
            )
