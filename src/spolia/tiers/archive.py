"""A conversation's KV as one file, to carry to another machine.

    magic, version, number of extents | size, extent | size, extent | ...          sizes are 8 bytes, little-endian

The extents are as they lie in the folder, sealed, from the first block of the conversation to its last. A reader checks
each as a tier does, so a file that was cut off, altered or put together is refused as a whole.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from spolia.errors import InvalidRequest

from .backend import ListableBackend, StorageBackend
from .extent import Checksum, ExtentError, ExtentHeader, Sealer, open_extent
from .folder import FolderBackend

__all__ = [
    "Conversation",
    "conversations",
    "export_conversation",
    "family",
    "find_headers",
    "headers",
    "import_conversation",
    "pack_archive",
    "read_archive",
    "unpack_archive",
    "write_archive",
]

_MAGIC = b"SPOLIAKX"
_HEAD = struct.Struct("<8sII")
_SIZE = struct.Struct("<Q")
_VERSION = 1

_NUM_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Conversation:
    """A chain of blocks that no other goes on from.

    Attributes:
        digest: of its last block: its name.
        num_bytes: of all its extents, those included that it shares with others.
        used_s: seconds since the epoch.
        is_whole: no block before the last is missing, so that all of it can be restored.
    """

    digest: bytes
    namespace: bytes
    layout: str
    num_tokens: int
    num_bytes: int
    used_s: float
    is_whole: bool


def headers(folder: FolderBackend) -> Iterator[tuple[ExtentHeader, int, float]]:
    """(header, bytes, last use) of each extent that has a header; the payloads are not read."""
    for key, size, used_s in folder.entries():
        header = folder.read_header(key)
        if header is not None and header.key == key:
            yield header, size, used_s


def conversations(folder: FolderBackend) -> list[Conversation]:
    """The most recently used first."""
    found: dict[bytes, ExtentHeader] = {}
    sizes: dict[bytes, int] = {}
    used: dict[bytes, float] = {}
    for header, size, used_s in headers(folder):
        found[header.digest] = header
        sizes[header.digest] = sizes.get(header.digest, 0) + size
        used[header.digest] = max(used.get(header.digest, 0.0), used_s)
    parents = {header.parent for header in found.values()}
    made = []
    for digest, last in found.items():
        if digest in parents:
            continue
        chain = _chain(found, last)
        made.append(
            Conversation(
                digest=digest,
                namespace=last.namespace,
                layout=last.layout,
                num_tokens=last.start + len(last.ids),
                num_bytes=sum(sizes[header.digest] for header in chain),
                used_s=max(used[header.digest] for header in chain),
                is_whole=chain[0].start == 0,
            )
        )
    return sorted(made, key=lambda conversation: -conversation.used_s)


def export_conversation(folder: FolderBackend, name: str, path: Path) -> Conversation:
    """Write the conversation whose digest begins with `name` (hexadecimal) to a file.

    Raises:
        InvalidRequest: there is not exactly one, it has gaps, or the file cannot be written.
    """
    matching = [one for one in conversations(folder) if one.digest.hex().startswith(name)]
    if len(matching) != 1:
        raise InvalidRequest(
            f"{len(matching)} conversations are called {name!r}...; `spolia cache ls` shows what there is",
            param="conversation",
        )
    (conversation,) = matching
    if not conversation.is_whole:
        raise InvalidRequest(f"the beginning of conversation {name} is gone, so it is of no use", param="conversation")
    found = [(header, size) for header, size, _ in headers(folder)]
    chain = _chain({header.digest: header for header, _ in found}, _last(found, conversation.digest))
    wanted = {header.digest for header in chain}
    parts = sorted(
        ((header, size) for header, size in found if header.digest in wanted),
        key=lambda part: (part[0].start, part[0].group),
    )
    try:
        with path.open("xb") as file:
            file.write(_HEAD.pack(_MAGIC, _VERSION, len(parts)))
            for header, size in parts:
                extent = memoryview(bytearray(size))
                (count,) = folder.get_into([header.key], [extent])
                if count is None:
                    raise InvalidRequest(f"block {header.key.hex()} has gone meanwhile; try again")
                file.write(_SIZE.pack(count))
                file.write(extent[:count])
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be written: {error.strerror}", param="file") from error
    return conversation


def import_conversation(
    folder: FolderBackend, path: Path, *, sealer: Sealer | None = None, is_forced: bool = False
) -> int:
    """Put a file's blocks into the folder; how many there were. Nothing is put unless all of them are good.

    What a window had passed and memory had given up, a server's file has not, and the next token needs it not.

    Args:
        is_forced: also if no other block in the folder is of its namespace.

    Raises:
        InvalidRequest: the file is damaged, is no such file, or is of another model, KV type, salt or machine kind
            than what the folder holds.
    """
    parts = list(_read(path, sealer or Checksum()))
    namespaces = set() if is_forced else {header.namespace for header, _, _ in headers(folder)}
    for header, _ in parts:
        if namespaces and header.namespace not in namespaces:
            raise InvalidRequest(
                f"{path} is of namespace {header.namespace.hex()[:16]} ({header.layout}); nothing in the folder is: "
                "another model, KV type, cache salt or instruction set. No engine that uses this folder would find it; "
                "--force imports it all the same",
                param="file",
            )
    filled = [(header, extent) for header, extent in parts if header.payload_bytes]
    for header, extent in filled:
        if folder.put([header.key], [extent]) != [True]:
            raise InvalidRequest("the folder has no room for it; raise --size", param="size")
    return len(filled)


def write_archive(path: Path, extents: Sequence[bytearray], sealer: Sealer) -> int:
    """Put extents that have no seal yet, in the order of their blocks, into a file of this kind; the file's bytes.

    Raises:
        InvalidRequest: it cannot be written.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with partial.open("wb") as file:
            num_bytes = sum(map(file.write, _packed(extents, sealer)))
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise InvalidRequest(f"{path.name} cannot be written: {error.strerror}", param="file") from error
    return num_bytes


def read_archive(path: Path, sealer: Sealer) -> list[tuple[ExtentHeader, memoryview]]:
    """Header and extent, readable, of each block of such a file, checked.

    Raises:
        InvalidRequest: it cannot be read, is no such file, is damaged, or cannot be opened with this sealer.
    """
    return [(header, opened) for _, header, opened in _opened(_frames(path), sealer, str(path))]


def _read(path: Path, sealer: Sealer) -> Iterator[tuple[ExtentHeader, memoryview]]:
    for extent, header, _ in _opened(_frames(path), sealer, str(path)):
        yield header, extent


def _opened(
    frames: Iterator[memoryview], sealer: Sealer, path: str
) -> Iterator[tuple[memoryview, ExtentHeader, memoryview]]:
    """Each extent as it is in the file, its header, and the extent readable."""
    known: set[bytes] = set()
    for index, extent in enumerate(frames):
        opened = memoryview(bytearray(extent))
        try:
            header, _ = open_extent(opened, sealer)
        except ExtentError as error:
            raise InvalidRequest(f"block {index} of {path} is refused: {error}", param="file") from None
        if header.start and header.parent not in known:
            raise InvalidRequest(f"block {index} of {path} does not follow from one before it", param="file")
        known.add(header.digest)
        yield extent, header, opened


def pack_archive(extents: Sequence[bytearray], sealer: Sealer) -> bytes:
    """The content of a file of extents that have no seal yet, in the order of their blocks. Seals them in place."""
    return b"".join(_packed(extents, sealer))


def _packed(extents: Sequence[bytearray], sealer: Sealer) -> Iterator[bytes | bytearray]:
    yield _HEAD.pack(_MAGIC, _VERSION, len(extents))
    for extent in extents:
        sealer.seal(memoryview(extent))
        yield _SIZE.pack(len(extent))
        yield extent


def unpack_archive(content: bytes, sealer: Sealer) -> list[tuple[ExtentHeader, memoryview]]:
    """Header and extent, readable, of each block of such a file's content, checked.

    Raises:
        InvalidRequest: it is no such file, is damaged, or cannot be opened with this sealer.
    """
    frames = _split(memoryview(content), "the file")
    return [(header, opened) for _, header, opened in _opened(frames, sealer, "the file")]


def _frames(path: Path) -> Iterator[memoryview]:
    try:
        data = memoryview(path.read_bytes())
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror}", param="file") from error
    yield from _split(data, str(path))


def _split(data: memoryview, path: str) -> Iterator[memoryview]:
    if len(data) < _HEAD.size or data[:8] != _MAGIC:
        raise InvalidRequest(f"{path} is not a file of `spolia cache export`", param="file")
    _, version, count = _HEAD.unpack_from(data)
    if version != _VERSION:
        raise InvalidRequest(f"{path} is of version {version}; this Spolia reads version {_VERSION}", param="file")
    offset = _HEAD.size
    for index in range(count):
        if offset + _SIZE.size > len(data):
            raise InvalidRequest(f"{path} ends after {index} of its {count} blocks", param="file")
        (size,) = _SIZE.unpack_from(data, offset)
        offset += _SIZE.size
        yield data[offset : offset + size]
        offset += size


def find_headers(
    backend: StorageBackend, namespaces: Collection[bytes] | None = None
) -> dict[bytes, ExtentHeader | None] | None:
    """By key, what a backend holds of some namespaces; None: of all, and then headers are not read.

    Returns:
        None if it cannot say what it holds.
    """
    if not isinstance(backend, ListableBackend):
        return None
    keys = [entry.key for entry in backend.entries()]
    if namespaces is None:
        return dict.fromkeys(keys)
    with ThreadPoolExecutor(_NUM_AT_ONCE) as threads:  # some backends are far away
        headers = threads.map(backend.read_header, keys)
        return {
            key: header
            for key, header in zip(keys, headers, strict=True)
            if header is not None and header.namespace in namespaces
        }


def family(headers: Iterable[ExtentHeader], chain: Sequence[bytes], num_kept: int, *, is_alone: bool) -> set[bytes]:
    """The digests of what goes if a conversation goes: its blocks, from its end back to where others branch off.

        kept | b1 | b2 | b3 | ... the conversation
                   `--- others                      goes: b3 and on; unless `is_alone`, what goes on from its end, too

    Args:
        headers: all that there is.
        chain: the digests of the conversation's blocks.
        num_kept: the first so many stay.
        is_alone: what goes on from its end stays, and so do the blocks that lead there.
    """
    children: dict[bytes, set[bytes]] = {}
    for header in headers:
        children.setdefault(header.parent, set()).add(header.digest)
    doomed: set[bytes] = set()
    pending = [] if is_alone or not chain else [chain[-1]]
    while pending:
        doomed.add(digest := pending.pop())
        pending += children.get(digest, set()) - doomed
    for digest in reversed(chain[num_kept:]):
        if not children.get(digest, set()) <= doomed:
            break
        doomed.add(digest)
    return doomed


def _chain(found: dict[bytes, ExtentHeader], last: ExtentHeader) -> list[ExtentHeader]:
    """From the first block that is there to `last`, without gaps."""
    chain = [last]
    while (before := found.get(chain[-1].parent)) is not None:
        chain.append(before)
    return chain[::-1]


def _last(found: list[tuple[ExtentHeader, int]], digest: bytes) -> ExtentHeader:
    return next(header for header, _ in found if header.digest == digest)
