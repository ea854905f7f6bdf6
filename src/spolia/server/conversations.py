"""Which earlier conversation a chat request goes on from, and where it says something else.

A log of the conversations that were answered lately, found by their messages: each message list has a digest, each
prefix of it too, and the longest prefix of a new request that the log knows leads to the conversation it goes on from.
What differs in the first message after that is named by its field.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple, TypeAlias

import msgspec

__all__ = ["Conversation", "ConversationLog", "Difference", "compare_messages", "history"]

Message: TypeAlias = Mapping[str, Any]

_MAX_CONVERSATIONS = 256
_MAX_BYTES = 16 << 20


def history(messages: Sequence[Message], **settings: Any) -> list[Message]:
    """What a prompt is rendered from, as the log takes it: settings such as `tools`, then the messages."""
    return [settings, *messages]


class Difference(NamedTuple):
    """Where one history departs from another.

    Attributes:
        message: index of the first message that differs, in its history: 0 are the settings.
        field: the field that does, as a path, such as "content" or "tool_calls[0].function.arguments".
        kind: "changed", "dropped" or "added" (the field, or the message), or "reordered": the same JSON, written in
            another order.
        position: of the first character that differs, in a text that was changed.
    """

    message: int
    field: str
    kind: str
    position: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Conversation:
    """A chat request that was answered.

    Attributes:
        messages: its history.
        num_tokens: of prompt and answer that are in the cache.
        reply: the answer's text, as the client got it.
    """

    id: str
    namespace: bytes
    messages: Sequence[Message]
    num_tokens: int
    reply: str


class ConversationLog:
    """The last conversations, up to a number and a size. One event loop."""

    def __init__(self, max_conversations: int = _MAX_CONVERSATIONS, max_bytes: int = _MAX_BYTES) -> None:
        self._max_conversations = max_conversations
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._held: OrderedDict[str, tuple[Conversation, list[bytes], int]] = OrderedDict()
        self._by_digest: dict[bytes, Conversation] = {}

    def add(self, conversation: Conversation) -> None:
        digests, num_bytes = _digests(conversation.namespace, conversation.messages)
        self._held[conversation.id] = conversation, digests, num_bytes
        self._num_bytes += num_bytes
        for digest in digests:
            self._by_digest[digest] = conversation
        while len(self._held) > self._max_conversations or self._num_bytes > self._max_bytes:
            _, (gone, its_digests, its_bytes) = self._held.popitem(last=False)
            self._num_bytes -= its_bytes
            for digest in its_digests:
                if self._by_digest.get(digest) is gone:
                    del self._by_digest[digest]

    def closest(self, namespace: bytes, messages: Sequence[Message]) -> Conversation | None:
        """The latest conversation of the longest common beginning, of at least one message; else the latest of all."""
        digests, _ = _digests(namespace, messages)
        for digest in reversed(digests):
            if digest in self._by_digest:
                return self._by_digest[digest]
        mine = (held for held, _, _ in reversed(self._held.values()) if held.namespace == namespace)
        return next(mine, None)

    def continued(self, namespace: bytes, messages: Sequence[Message]) -> Conversation | None:
        """The conversation that these messages go on from, word for word; None if there is none."""
        earlier = self.closest(namespace, messages)
        if earlier is None or list(messages[: len(earlier.messages)]) != list(earlier.messages):
            return None
        return earlier if self.difference(earlier, messages) is None else None

    @staticmethod
    def difference(earlier: Conversation, messages: Sequence[Message]) -> Difference | None:
        """Where `messages` say something else than that conversation and its reply; None if they go on from it."""
        expected = [*earlier.messages, {"role": "assistant", "content": earlier.reply}]
        difference = compare_messages(expected, messages)
        if difference is None or difference.message >= len(messages):
            return None
        if difference.message == len(expected):
            return None
        if difference.message == len(expected) - 1 and len(messages) > difference.message:
            role = messages[difference.message].get("role")
            if role != "assistant":  # it asks again from here: the reply is not part of its history
                return None
        return difference


def compare_messages(earlier: Sequence[Message], later: Sequence[Message]) -> Difference | None:
    """The first difference; None if both are equal. A list that ends sooner has its next message "dropped"."""
    for index, (before, after) in enumerate(zip(earlier, later, strict=False)):
        for field, kind, position in _field_differences(before, after, ""):
            return Difference(index, field, kind, position)
    if len(earlier) == len(later):
        return None
    return Difference(min(len(earlier), len(later)), "", "dropped" if len(later) < len(earlier) else "added")


def _field_differences(before: Any, after: Any, path: str) -> Iterator[tuple[str, str, int | None]]:
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in [*before, *(key for key in after if key not in before)]:
            inner = f"{path}.{key}" if path else str(key)
            if _is_absent(before, key) and _is_absent(after, key):
                continue
            if _is_absent(after, key):
                yield inner, "dropped", None
            elif _is_absent(before, key):
                yield inner, "added", None
            else:
                yield from _field_differences(before[key], after[key], inner)
        if list(before) != list(after) and path and before == after:
            yield path, "reordered", None
    elif isinstance(before, list) and isinstance(after, list):
        for index, (one, other) in enumerate(zip(before, after, strict=False)):
            yield from _field_differences(one, other, f"{path}[{index}]")
        if len(before) != len(after):
            kind = "dropped" if len(after) < len(before) else "added"
            yield f"{path}[{min(len(before), len(after))}]", kind, None
    elif before != after:
        yield path, *_text_difference(before, after)


def _is_absent(message: Mapping[str, Any], key: str) -> bool:
    """A field that is empty says as much as one that is not there."""
    return message.get(key) in (None, "", [])


def _text_difference(before: Any, after: Any) -> tuple[str, int | None]:
    if not (isinstance(before, str) and isinstance(after, str)):
        return "changed", None
    if _same_json(before, after):
        return "reordered", None
    pairs = zip(before, after, strict=False)
    return "changed", next((i for i, (one, other) in enumerate(pairs) if one != other), min(len(before), len(after)))


def _same_json(before: str, after: str) -> bool:
    if not (before.lstrip()[:1] in ("{", "[") and after.lstrip()[:1] in ("{", "[")):
        return False
    try:
        return bool(json.loads(before) == json.loads(after))
    except ValueError:
        return False


def _digests(namespace: bytes, messages: Sequence[Message]) -> tuple[list[bytes], int]:
    """A digest of each prefix of the list, and the messages' size."""
    digest = blake2b(namespace, digest_size=16)
    digests = []
    num_bytes = 0
    for message in messages:
        encoded = msgspec.json.encode(message)
        num_bytes += len(encoded)
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
        digests.append(digest.digest())
    return digests, num_bytes
