"""`spolia cache ls | du | verify | export | import | clear`: looking after a folder of KV."""

from __future__ import annotations

import time
from collections import defaultdict
from pathlib import Path

from spolia.cli.flags import size_text
from spolia.engine.session_files import SESSIONS_FOLDER
from spolia.errors import InvalidRequest
from spolia.tiers import (
    AesGcm,
    Checksum,
    DocumentFolder,
    ExtentError,
    FolderBackend,
    Sealer,
    conversations,
    export_conversation,
    headers,
    import_conversation,
    read_key,
    verify_folder,
)

__all__ = ["clear", "du", "export", "import_file", "ls", "verify"]


def ls(path: Path) -> None:
    """A line for each conversation, the most recently used first."""
    for one in conversations(_open(path)):
        age = _age(time.time() - one.used_s)
        gap = "" if one.is_whole else "  (its beginning is gone)"
        print(f"{one.digest.hex()[:12]}  {one.num_tokens:>8} tokens  {size_text(one.num_bytes):>10}  {age:>8}{gap}")


def du(path: Path) -> None:
    """Blocks and bytes by namespace, and in all."""
    blocks: dict[tuple[str, str], int] = defaultdict(int)
    sizes: dict[tuple[str, str], int] = defaultdict(int)
    for header, size, _ in headers(_open(path)):
        owner = header.namespace.hex()[:12], header.layout
        blocks[owner] += 1
        sizes[owner] += size
    for owner in sorted(sizes, key=lambda owner: -sizes[owner]):
        print(f"{owner[0]}  {owner[1]:<24} {blocks[owner]:>8} blocks  {size_text(sizes[owner]):>10}")
    print(f"{'total':<38} {sum(blocks.values()):>8} blocks  {size_text(sum(sizes.values())):>10}")
    num_sessions = len(_sessions(path).names())
    if num_sessions:
        print(f"{num_sessions} sessions")


def verify(path: Path, key: str | None) -> bool:
    """Remove what is damaged or was left behind; False if anything was damaged."""
    report = verify_folder(_open(path, sweep=False), _sealer(key))
    for name, reason in report.refused:
        print(f"removed {name[:12]}: {reason}")
    sessions = _sessions(path, key)
    damaged, num_unfinished = [], sessions.sweep()
    for name in sessions.names():
        try:
            sessions.read(name)
        except ExtentError as error:
            damaged.append(name)
            print(f"removed {name}: {error}")
            sessions.delete(name)
    print(
        f"{report.num_good} blocks are good ({size_text(report.num_bytes)}), "
        f"{len(report.refused)} damaged ones and {report.num_swept} unfinished files were removed"
    )
    num_sessions = len(sessions.names())
    if num_sessions or damaged or num_unfinished:
        print(f"{num_sessions} sessions are good, {len(damaged)} damaged and {num_unfinished} unfinished were removed")
    return not report.refused and not damaged


def export(path: Path, conversation: str, file: Path) -> None:
    """Write one conversation's KV to a file."""
    done = export_conversation(_open(path), conversation, file)
    print(f"{file}: {done.num_tokens} tokens, {size_text(file.stat().st_size)}")


def import_file(path: Path, file: Path, key: str | None, *, is_forced: bool) -> None:
    """Put a file's KV into a folder."""
    count = import_conversation(_open(path, make=True), file, sealer=_sealer(key), is_forced=is_forced)
    print(f"{count} blocks imported")


def clear(path: Path, namespace: str, *, with_sessions: bool = False) -> None:
    """Delete all blocks, or those of a namespace, and all sessions if these are to go, too."""
    folder = _open(path)
    keys = [entry.key for entry in folder.entries()]
    if namespace:
        keys = [header.key for header, _, _ in headers(folder) if header.namespace.hex().startswith(namespace)]
    folder.delete(keys)
    print(f"{len(keys)} blocks deleted")
    if with_sessions:
        sessions = _sessions(path)
        names = sessions.names()
        for name in names:
            sessions.delete(name)
        print(f"{len(names)} sessions deleted")


def _open(path: Path, *, make: bool = False, sweep: bool = True) -> FolderBackend:
    """
    Raises:
        InvalidRequest: nothing of Spolia's is there.
    """
    if not make and not (path / "spolia-kv-1").is_dir():
        raise InvalidRequest(f"{path} is not a folder that --kv-disk has used", param="dir")
    return FolderBackend(path, sweep=sweep)


def _sessions(path: Path, key: str | None = None) -> DocumentFolder:
    return DocumentFolder(path / SESSIONS_FOLDER, sealer=_sealer(key))


def _sealer(key: str | None) -> Sealer:
    return Checksum() if key is None else AesGcm(read_key(key))


def _age(seconds: float) -> str:
    for limit, divisor, unit in ((120, 1, "s"), (7_200, 60, "min"), (172_800, 3_600, "h")):
        if seconds < limit:
            return f"{max(0, seconds) / divisor:.0f} {unit}"
    return f"{seconds / 86_400:.0f} d"
