"""A conversation with its forks, and what can be told of its last answer: `spolia chat` without a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from spolia.engine import Ledger
from spolia.errors import InvalidRequest

__all__ = ["Messages", "Talk", "cache_bar", "explained"]

Messages: TypeAlias = list[dict[str, str]]

_WIDTH = 60
_SIGNS = {"shared": "▓", "device": "█", "computed": "░"}
_TIER_SIGN = "▒"


class Talk:
    """Conversations by name, one of which is open. Each has its own messages; what they have in common is cached once.

    Args:
        opening: what each begins with, such as a system message.
    """

    def __init__(self, opening: Messages) -> None:
        self._opening = list(opening)
        self._by_name: dict[str, Messages] = {"main": list(opening)}
        self.name = "main"

    @property
    def messages(self) -> Messages:
        return self._by_name[self.name]

    def take(self, question: str, answer: str) -> None:
        self.messages.extend([{"role": "user", "content": question}, {"role": "assistant", "content": answer}])

    def asked(self, question: str) -> Messages:
        """What the model is to answer."""
        return [*self.messages, {"role": "user", "content": question}]

    def reset(self) -> None:
        self._by_name[self.name] = list(self._opening)

    def rewind(self, count: str) -> str:
        """Take back the last exchanges; returns the first question that was taken back.

        Raises:
            InvalidRequest: there are not so many.
        """
        num_exchanges = (len(self.messages) - len(self._opening)) // 2
        if not (count or "1").isdecimal() or not 1 <= int(count or 1) <= num_exchanges:
            raise InvalidRequest(f"/rewind {count}: there are {num_exchanges} exchanges; say how many to take back")
        start = len(self.messages) - 2 * int(count or 1)
        question = self.messages[start]["content"]
        del self.messages[start:]
        return question

    def fork(self, name: str) -> str:
        """Go on in a copy; returns its name.

        Raises:
            InvalidRequest: the name is taken.
        """
        name = name or f"fork-{len(self._by_name)}"
        if name in self._by_name:
            raise InvalidRequest(f"/fork {name}: there is one of that name; /open {name} goes there")
        self._by_name[name] = list(self.messages)
        self.name = name
        return name

    def open(self, name: str) -> None:
        """
        Raises:
            InvalidRequest: there is none of that name.
        """
        if name not in self._by_name:
            raise InvalidRequest(f"/open {name}: there is none of that name; there are {', '.join(self._by_name)}")
        self.name = name

    def listing(self) -> str:
        """A line each, the open one marked."""
        counts = {name: (len(messages) - len(self._opening)) // 2 for name, messages in self._by_name.items()}
        return "\n".join(
            f"{'*' if name == self.name else ' '} {name}: {count} exchange{'' if count == 1 else 's'}"
            for name, count in counts.items()
        )


def explained(ranges: Sequence[tuple[int, int, str, str | None]], divergence: int | None, text_around: str) -> str:
    """Where the context of an answer came from, and why the rest was computed.

    Args:
        ranges: of prompt tokens: start, stop, where their KV came from, and the reason if it was computed.
        divergence: the token at which reuse ended, if it did, with the text around it.
    """
    total = max((stop for _, stop, _, _ in ranges), default=1)
    bar = ""
    lines = []
    for start, stop, source, reason in ranges:
        bar += _SIGNS.get(source, _TIER_SIGN) * (round(_WIDTH * stop / total) - len(bar))
        why = "" if reason is None else f": {reason.replace('_', ' ')}"
        lines.append(f"tokens {start} to {stop}: {source}{why}")
    if divergence is not None:
        lines.append(f"reuse ended at token {divergence}, around {text_around!r}")
    legend = "█ cached  ▓ in use by another  ▒ from another tier  ░ computed"
    return "\n".join([bar, legend, *lines])


def cache_bar(ledgers: Sequence[Ledger]) -> str:
    """What the pools hold, a line a group."""
    lines = []
    for ledger in ledgers:
        leased, cached = (round(_WIDTH * count / ledger.total) for count in (ledger.leased, ledger.cached))
        bar = "▓" * leased + "█" * cached
        lines.append(f"{bar:·<{_WIDTH}} {ledger.leased} in use ▓, {ledger.cached} cached █, {ledger.free} free")
    return "\n".join(lines)
