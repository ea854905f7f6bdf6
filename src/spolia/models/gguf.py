"""Reads GGUF files: metadata as plain Python values, tensors as views of the mapped file.

    magic, version, counts | metadata: key, type, value ... | tensors: name, dims, type, offset ... | padding | data

Nothing of the data is read here: a tensor's bytes come from the page cache when somebody looks at them. Everything that
the header says is checked against what the file can hold before it is believed, so that a truncated or corrupt file is
one `ModelError` in one line. A model may be split over shards named `-00001-of-00003.gguf`; naming any of them reads
them all.

Source: the GGUF specification, version 3 (version 2 differs only in what it allows).
"""

from __future__ import annotations

import logging
import math
import mmap
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from spolia.errors import ModelError
from spolia.kernels.program import Weight
from spolia.kernels.quants import TYPES, bytes_per_row

__all__ = ["GgufFile", "read_gguf"]

log = logging.getLogger(__name__)

_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_MAX_DIMS = 4
_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_U32, _U64 = _SCALARS[4], _SCALARS[10]
_TYPE_BY_ID = {kind.ggml_id: kind for kind in TYPES.values()}
# Only to name what is refused.
_REFUSED_TYPES = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class GgufFile:
    """What a GGUF model says.

    Attributes:
        paths: the file, or its shards in order.
        metadata: of the first shard; numbers, bools, strings and lists of them.
        tensors: by name, in the file's order; their data is mapped read-only.
    """

    paths: tuple[Path, ...]
    metadata: dict[str, Any]
    tensors: dict[str, Weight]


def read_gguf(path: Path) -> GgufFile:
    """Read the headers of `path` and of its other shards, if it has any.

    Raises:
        ModelError: the file is missing, truncated, corrupt, or holds a type that is not supported.
    """
    shards = [_read_file(shard) for shard in _shard_paths(path)]
    first = shards[0]
    _check_split(path, shards)
    tensors: dict[str, Weight] = {}
    for shard in shards:
        for name, weight in shard.tensors.items():
            if name in tensors:
                raise ModelError(f"{shard.paths[0]}: tensor {name!r} is in an earlier shard too")
            tensors[name] = weight
    total = first.metadata.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        raise ModelError(f"{path}: the shards hold {len(tensors)} tensors, split.tensors.count says {total}")
    return GgufFile(tuple(p for shard in shards for p in shard.paths), first.metadata, tensors)


def _shard_paths(path: Path) -> list[Path]:
    match = _SHARD.fullmatch(path.name)
    count = int(match["count"]) if match else 0
    if match is None or count == 0:
        return [path]
    return [path.with_name(f"{match['stem']}-{n:05d}-of-{count:05d}.gguf") for n in range(1, count + 1)]


def _check_split(path: Path, shards: list[GgufFile]) -> None:
    for number, shard in enumerate(shards):
        found = (shard.metadata.get("split.no", 0), shard.metadata.get("split.count", 0) or 1)
        if found != (number, len(shards)):
            raise ModelError(
                f"{shard.paths[0]}: is shard {found[0]} of {found[1]} (from 0), expected {number} of {len(shards)}"
                "; shards are named like model-00001-of-00003.gguf and lie in one folder"
            )


def _read_file(path: Path) -> GgufFile:
    cursor = _Cursor(path, _map(path))
    num_tensors, num_keys = _read_counts(cursor)
    metadata = _read_metadata(cursor, num_keys)
    tensors = _read_tensors(cursor, num_tensors, metadata)
    return GgufFile((path,), metadata, tensors)


def _map(path: Path) -> mmap.mmap:
    """The whole file, mapped for reading; the mapping lives as long as a view of it."""
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file") from None
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError:
        raise ModelError(f"{path}: not a GGUF file: it is empty") from None


def _read_counts(cursor: _Cursor) -> tuple[int, int]:
    """Check magic and version; return the numbers of tensors and of metadata keys."""
    magic = cursor.data[:4]
    if magic != b"GGUF":
        raise cursor.error(f"not a GGUF file: it begins with {magic!r}, expected b'GGUF'")
    cursor.offset = 4
    version = cursor.scalar(_U32)
    if version in (2 << 24, 3 << 24):
        raise cursor.error("a big-endian GGUF file; only little-endian ones are supported: convert it again")
    if version not in (2, 3):
        raise cursor.error(f"GGUF version {version} is not supported, only 2 and 3: convert it again")
    return cursor.scalar(_U64), cursor.scalar(_U64)


def _read_metadata(cursor: _Cursor, num_keys: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for index in range(num_keys):
        cursor.reading = f"metadata key {index + 1} of {num_keys}"
        key = cursor.string()
        cursor.reading = f"metadata key {key!r}"
        value = cursor.value(cursor.scalar(_U32))
        if key in metadata:
            log.warning("%s: metadata key %r is there twice; the first value counts", cursor.path, key)
        metadata.setdefault(key, value)
    return metadata


def _read_tensors(cursor: _Cursor, num_tensors: int, metadata: dict[str, Any]) -> dict[str, Weight]:
    """Read the tensor table, then cut the data that follows it."""
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise cursor.error(f"general.alignment is {alignment!r}, expected a power of two")
    entries = {}
    for index in range(num_tensors):
        cursor.reading = f"tensor {index + 1} of {num_tensors}"
        name = cursor.string()
        cursor.reading = f"tensor {name!r}"
        if name in entries:
            raise cursor.error(f"tensor {name!r} is there twice")
        entries[name] = _TensorEntry.read(cursor, name)

    start = _padded(cursor.offset, alignment)
    data = np.frombuffer(cursor.data, np.uint8)
    expected_offset = 0
    tensors = {}
    for name, entry in entries.items():
        # Tensors follow each other in order, as all readers demand: a corrupt size or offset cannot pass for another.
        if entry.offset != expected_offset:
            raise cursor.error(f"tensor {name!r} lies at offset {entry.offset} of the data, expected {expected_offset}")
        stop = start + entry.offset + entry.num_bytes
        if stop > len(data):
            raise cursor.error(
                f"truncated in tensor {name!r} ({entry.type} {list(entry.shape)}): the file has {len(data)} bytes, "
                f"it needs {stop}; fetch it again"
            )
        rows = data[stop - entry.num_bytes : stop].reshape(-1, entry.row_bytes)
        tensors[name] = Weight(name, entry.type, entry.shape, rows)
        expected_offset = _padded(entry.offset + entry.num_bytes, alignment)
    return tensors


def _padded(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


@dataclass(frozen=True, slots=True)
class _TensorEntry:
    type: str
    shape: tuple[int, ...]
    offset: int
    row_bytes: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape[:-1]) * self.row_bytes

    @classmethod
    def read(cls, cursor: _Cursor, name: str) -> _TensorEntry:
        num_dims = cursor.scalar(_U32)
        if not 1 <= num_dims <= _MAX_DIMS:
            raise cursor.error(f"tensor {name!r} has {num_dims} dimensions, expected 1 to {_MAX_DIMS}")
        shape = tuple(reversed([cursor.scalar(_U64) for _ in range(num_dims)]))  # the file has the fastest first
        type_id = cursor.scalar(_U32)
        offset = cursor.scalar(_U64)
        if type_id not in _TYPE_BY_ID:
            type_name = _REFUSED_TYPES.get(type_id, "unknown")
            raise cursor.error(
                f"tensor {name!r} is of type {type_name} (number {type_id}); supported are {', '.join(TYPES)}"
            )
        if 0 in shape:
            raise cursor.error(f"tensor {name!r} of shape {list(shape)} is empty")
        type_name = _TYPE_BY_ID[type_id].name
        try:
            return cls(type_name, shape, offset, bytes_per_row(type_name, shape[-1]))
        except ValueError as error:
            raise cursor.error(f"tensor {name!r}: {error}") from None


class _Cursor:
    """A place in the mapped header, which moves on with each read and never leaves the file."""

    __slots__ = ("data", "offset", "path", "reading")

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.offset = 0
        self.reading = "the header"  # for messages

    def error(self, message: str) -> ModelError:
        return ModelError(f"{self.path}: {message}")

    def _need(self, num_bytes: int) -> None:
        left = len(self.data) - self.offset
        if num_bytes > left:
            raise self.error(
                f"truncated or corrupt in {self.reading}: {num_bytes} bytes expected at byte {self.offset}, {left} left"
            )

    def scalar(self, kind: struct.Struct) -> Any:
        self._need(kind.size)
        (value,) = kind.unpack_from(self.data, self.offset)
        self.offset += kind.size
        return value

    def string(self) -> str:
        return next(self._strings(1))

    def value(self, type_id: int) -> Any:
        if type_id == _STRING:
            return self.string()
        if type_id == _ARRAY:
            return self._array(self.scalar(_U32), self.scalar(_U64))
        if type_id in _SCALARS:
            return self.scalar(_SCALARS[type_id])
        raise self.error(f"{self.reading} has value type {type_id}, which GGUF does not define: the file is corrupt")

    def _array(self, type_id: int, count: int) -> list[Any]:
        if type_id == _STRING:
            self._need(count * _U64.size)  # before a corrupt count is believed
            return list(self._strings(count))
        if type_id not in _SCALARS:
            raise self.error(f"{self.reading} is an array of value type {type_id}; supported are numbers and strings")
        kind = _SCALARS[type_id]
        self._need(count * kind.size)
        values = np.frombuffer(self.data, np.dtype(kind.format), count, self.offset)
        self.offset += values.nbytes
        return list(values.tolist())

    def _strings(self, count: int) -> Iterator[str]:
        """The next `count` strings. A vocabulary has 10^5 of them: the loop keeps to local names."""
        data, end, offset, unpack = self.data, len(self.data), self.offset, _U64.unpack_from
        for _ in range(count):
            start = offset + 8
            if start > end:
                self.offset = offset
                self._need(8)
            (length,) = unpack(data, offset)
            offset = start + length
            if offset > end:
                self.offset = start
                self._need(length)
            try:
                text = str(data[start:offset], "utf-8")
            except UnicodeDecodeError:
                raise self.error(f"{self.reading} holds a string that is not UTF-8, at byte {start}") from None
            self.offset = offset
            yield text
