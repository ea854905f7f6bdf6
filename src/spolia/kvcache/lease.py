"""A running sequence's hold on the cache: what `KVCache.open` returns, and the only thing that can be released."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Literal, NamedTuple

from ..errors import LeaseError
from .explain import NOBODY, Beneficiary, PrefixHit
from .int_buffer import Ids, IntBuffer
from .radix_tree import Cursor
from .wishes import Outcome, Wish

if TYPE_CHECKING:
    from .cache import KVCache

__all__ = ["BlockCopy", "Lease"]


class BlockCopy(NamedTuple):
    """Copy the first `num_tokens` tokens of block `src` to block `dst` of group `group`, before the step."""

    group: int
    src: int
    dst: int
    num_tokens: int


class Lease:
    """Blocks for one sequence, from its first token to as far as it has reserved.

        tokens     |  committed: in the tree, shared   |  reserved: slots of our own  |
                   0                     num_computed_tokens            num_reserved_tokens
        table      [ b0   b1   b2   b3   b4 ]            a window group's begins with -1

    Made by `KVCache.open`. `close` it, once, or use it as a context manager; what was committed stays in the tree.

    Attributes:
        hit: what was reused at the start, and why no more.
        num_shared_tokens: of the reused, those in blocks that other leases held when it was opened.
        beneficiary: who it is for: what makes room for it remembers that.
        wishes: how long its content is worth keeping.
        num_reserved_tokens: tokens [0, num_reserved_tokens) have slots.
        is_open: until it is closed.

    The others are the cache's:
        cursor: its place in the tree.
        tables: per group, block ids by absolute block index.
        first_blocks: per group, index of the first block that is still held; before it, the table has -1.
        tail_is_shared: whether the last block belongs to another writer; only from `open` to the first `grow`.
        borrowed: (group, block ids) held as sources of copies until the next commit.
        to_count: what its hit will be counted as when it first grows; None: it has been, or is nobody's request.
    """

    __slots__ = (
        "_cache",
        "beneficiary",
        "borrowed",
        "cursor",
        "first_blocks",
        "hit",
        "is_open",
        "num_reserved_tokens",
        "num_shared_tokens",
        "tables",
        "tail_is_shared",
        "to_count",
        "wishes",
    )

    def __init__(
        self,
        cache: KVCache,
        hit: PrefixHit,
        cursor: Cursor,
        tables: list[IntBuffer],
        first_blocks: list[int],
        *,
        beneficiary: Beneficiary = NOBODY,
        wishes: Sequence[Wish] = (),
    ) -> None:
        self.hit = hit
        self.num_shared_tokens = 0
        self.beneficiary = beneficiary
        self.wishes = tuple(wishes)
        self.is_open = True
        self.num_reserved_tokens = cursor.position
        self.cursor = cursor
        self.tables = tables
        self.first_blocks = first_blocks
        self.tail_is_shared = cursor.position % cache.block_size > 0
        self.borrowed: list[tuple[int, Ids]] = []
        self.to_count: Literal["asked", "resumed"] | None = None
        self._cache = cache

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV is in the blocks: reused or committed."""
        return self.cursor.position

    def block_table(self, group: int) -> Ids:
        """Block id by absolute block index, int32; -1 where a window group's block slid out.

        A view that is valid until the next call with this lease; do not write to it.
        """
        self.require_open()
        return self.tables[group].view

    def close(self, outcome: Outcome = Outcome.TURN) -> None:
        """Give the blocks back. The committed tokens stay in the tree, evictable.

        Args:
            outcome: how the sequence ended; what retention makes of it is the policy's.

        Raises:
            LeaseError: if it was closed before.
        """
        self._cache.release(self, outcome)

    def require_open(self) -> None:
        """Raise LeaseError if this lease was closed."""
        if not self.is_open:
            raise LeaseError(f"this lease of {self.num_computed_tokens} tokens was released; open another")

    def __enter__(self) -> Lease:
        self.require_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.is_open:
            self.close()
