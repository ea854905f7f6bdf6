"""Looking through what a folder holds: what is whole stays, what is not goes."""

from __future__ import annotations

from typing import NamedTuple

from .extent import Checksum, ExtentError, Sealer, open_extent
from .folder import FolderBackend

__all__ = ["VerifyReport", "verify_folder"]


class VerifyReport(NamedTuple):
    """What was found.

    Attributes:
        refused: (key in hex, what was wrong) of each extent that was removed.
        num_swept: files that killed writers had left behind.
    """

    num_good: int
    num_bytes: int
    refused: tuple[tuple[str, str], ...]
    num_swept: int


def verify_folder(folder: FolderBackend, sealer: Sealer | None = None) -> VerifyReport:
    """Read every extent and remove those that are not what they were sealed as.

    Raises:
        StorageUnavailable: the folder cannot be read.
    """
    sealer = sealer or Checksum()
    num_swept = folder.sweep()
    num_good = num_bytes = 0
    refused = []
    for key, size, _ in folder.entries():
        extent = memoryview(bytearray(size))
        (read,) = folder.get_into([key], [extent])
        if read is None:
            continue  # gone meanwhile
        try:
            open_extent(extent[:read], sealer, key)
        except ExtentError as error:
            refused.append((key.hex(), str(error)))
            folder.delete([key])
        else:
            num_good += 1
            num_bytes += read
    return VerifyReport(num_good, num_bytes, tuple(refused), num_swept)
