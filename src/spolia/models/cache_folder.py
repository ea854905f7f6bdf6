"""Where Spolia keeps what it can fetch or work out again: model files, verified digests, derived tables."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

__all__ = ["cache_folder", "write_atomically"]


def cache_folder() -> Path:
    """The user's cache folder for Spolia; it may not exist yet.

    `SPOLIA_CACHE` names it outright; otherwise it is `spolia` inside `XDG_CACHE_HOME`, or inside the platform's usual
    place (`~/Library/Caches` on macOS, `~/.cache` elsewhere).
    """
    if own := os.environ.get("SPOLIA_CACHE"):
        return Path(own).expanduser()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg).expanduser() / "spolia"
    return Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "spolia"


def write_atomically(path: Path, content: bytes) -> None:
    """Write a small file so that a reader finds the old content or the new, never a part.

    Raises:
        OSError: the folder cannot be made or written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
