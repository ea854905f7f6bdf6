"""What the local folder promises beyond the contract: survives kills, strangers, and whatever happens to the disk."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from spolia.errors import InvalidRequest, StorageUnavailable
from spolia.tiers import Checksum, ExtentError, FolderBackend, open_extent

from .samples import headers
from .test_backends import SIZE, keys_of, read, values_of


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def fill(folder, count=3, capacity=None):
    backend = FolderBackend(folder, capacity)
    backend.put(keys_of(count), values_of(count))
    return backend


def test_what_is_there_survives_a_restart_with_its_order(tmp_path):
    backend = fill(tmp_path, 4)
    backend.touch(keys_of(4))
    again = FolderBackend(tmp_path, 4 * SIZE)
    assert again.exists(keys_of(4)) == [True] * 4
    again.put(keys_of(2, 9), values_of(2, 9))
    assert again.exists(keys_of(4)) == [True, True, False, False]


def test_a_lower_quota_at_the_next_start_is_kept(tmp_path):
    fill(tmp_path, 4)
    assert FolderBackend(tmp_path, 2 * SIZE).health().num_bytes == 2 * SIZE
    assert sum(path.stat().st_size for path in files_in(tmp_path)) == 2 * SIZE


def test_what_is_not_ours_is_left_alone(tmp_path):
    (tmp_path / "letters.txt").write_text("mine")
    backend = fill(tmp_path)
    shard = next(path for path in (tmp_path / "spolia-kv-1").iterdir() if path.name != "tmp")
    (shard / "notes.kv").write_text("mine, too")
    again = FolderBackend(tmp_path, 2 * SIZE)
    again.delete(keys_of(3))
    assert (tmp_path / "letters.txt").read_text() == "mine"
    assert (shard / "notes.kv").read_text() == "mine, too"
    assert backend.health().capacity_bytes is None


def test_two_processes_share_a_folder(tmp_path):
    one, other = FolderBackend(tmp_path), FolderBackend(tmp_path)
    one.put(keys_of(2), values_of(2))
    assert other.exists(keys_of(2)) == [True, True]
    assert read(other, keys_of(2)) == [bytes(value) for value in values_of(2)]
    other.delete(keys_of(1))
    assert read(one, keys_of(2)) == [None, bytes(values_of(2)[1])]


def test_together_they_keep_the_quota_by_and_by(tmp_path):
    capacity = 20 * SIZE
    one, other = FolderBackend(tmp_path, capacity), FolderBackend(tmp_path, capacity)
    for seed in range(60):
        backend = one if seed % 2 else other
        backend.put(keys_of(1, seed), values_of(1, seed))
    total = sum(path.stat().st_size for path in files_in(tmp_path))
    assert total <= capacity + 2 * (capacity // 8 + SIZE)


def test_a_file_has_its_name_only_when_it_is_whole(tmp_path, monkeypatch):
    backend = FolderBackend(tmp_path)
    seen = []
    write = os.write

    def slow_write(descriptor, data):
        seen.extend(path for path in files_in(tmp_path) if path.suffix == ".kv")
        return write(descriptor, data[: len(data) // 3 + 1])

    monkeypatch.setattr(os, "write", slow_write)
    backend.put(keys_of(1), values_of(1))
    assert seen == []
    assert read(backend, keys_of(1)) == [bytes(values_of(1)[0])]


WRITER = textwrap.dedent("""
    import sys
    sys.path.insert(0, sys.argv[2])
    from tiers.test_backends import keys_of, values_of
    from spolia.tiers import FolderBackend
    backend = FolderBackend(sys.argv[1])
    samples = [(keys_of(8, seed), values_of(8, seed)) for seed in range(20)]
    print("ready", flush=True)
    while True:
        for keys, values in samples:
            backend.put(keys, values)
            backend.delete(keys)
""")


def test_a_writer_killed_at_any_moment_leaves_no_bad_value_and_no_file(tmp_path):
    for kill in range(10):
        arguments = [sys.executable, "-c", WRITER, str(tmp_path), str(Path(__file__).parents[1])]
        with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout.readline() == "ready\n"
            time.sleep(0.01 + 0.007 * kill)
            writer.send_signal(signal.SIGKILL)
        backend = FolderBackend(tmp_path)
        assert list((tmp_path / "spolia-kv-1" / "tmp").iterdir()) == []
        for seed in range(20):
            for header, value in zip(headers(8, seed=seed), read(backend, keys_of(8, seed)), strict=True):
                if value is not None:
                    open_extent(memoryview(bytearray(value)), Checksum(), header.key)


def test_what_a_living_process_is_writing_is_not_swept(tmp_path, monkeypatch):
    backend = FolderBackend(tmp_path)
    write = os.write

    def sweeping_write(descriptor, data):
        if data:
            assert FolderBackend(tmp_path).sweep() == 0
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", sweeping_write)
    backend.put(keys_of(1), values_of(1))
    monkeypatch.undo()
    assert read(backend, keys_of(1)) == [bytes(values_of(1)[0])]


@pytest.mark.parametrize("damage", ["truncated", "empty", "flipped", "swapped", "grown"])
def test_a_damaged_file_is_never_taken_for_its_extent(tmp_path, damage):
    backend = fill(tmp_path)
    keys = keys_of(3)
    path, other = Path(backend._path(keys[0])), Path(backend._path(keys[1]))
    data = bytearray(path.read_bytes())
    match damage:
        case "truncated":
            path.write_bytes(data[: SIZE // 2])
        case "empty":
            path.write_bytes(b"")
        case "flipped":
            data[SIZE // 2] ^= 1
            path.write_bytes(data)
        case "swapped":
            path.write_bytes(other.read_bytes())
        case "grown":
            path.write_bytes(bytes(data) + b"more")
    (value,) = read(backend, keys[:1])
    if value is not None:
        with pytest.raises(ExtentError):
            open_extent(memoryview(bytearray(value)), Checksum(), keys[0])


def test_a_full_disk_makes_room_among_our_own(tmp_path, monkeypatch):
    backend = fill(tmp_path, 4)
    write = os.write

    def full(descriptor, data):
        if len(files_in(tmp_path)) > 4:  # the one being written among them
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", full)
    assert backend.put(keys_of(1, 9), values_of(1, 9)) == [True]
    assert backend.exists(keys_of(4)) == [False, False, True, True]
    assert read(backend, keys_of(1, 9)) == [bytes(values_of(1, 9)[0])]


def test_a_disk_full_of_other_things_is_said_and_leaves_no_part(tmp_path, monkeypatch):
    backend = FolderBackend(tmp_path)

    def full(descriptor, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(StorageUnavailable, match="No space left"):
        backend.put(keys_of(1), values_of(1))
    monkeypatch.undo()
    assert files_in(tmp_path) == []
    assert backend.put(keys_of(1), values_of(1)) == [True]


@pytest.mark.parametrize("error", [errno.EACCES, errno.EROFS, errno.EIO])
def test_a_folder_that_refuses_is_said(tmp_path, monkeypatch, error):
    backend = fill(tmp_path)
    opened = os.open

    def refuse(path, *arguments, **options):
        if str(path).startswith(str(tmp_path)):
            raise OSError(error, os.strerror(error), str(path))
        return opened(path, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(StorageUnavailable, match=os.strerror(error)):
        read(backend, keys_of(1))
    with pytest.raises(StorageUnavailable, match=os.strerror(error)):
        backend.put(keys_of(1, 9), values_of(1, 9))


def test_a_deleted_folder_is_made_again(tmp_path):
    backend = fill(tmp_path / "kv")
    shutil.rmtree(tmp_path / "kv")
    assert read(backend, keys_of(3)) == [None] * 3
    assert backend.put(keys_of(2, 9), values_of(2, 9)) == [True, True]
    assert read(backend, keys_of(2, 9)) == [bytes(value) for value in values_of(2, 9)]
    assert backend.health().num_bytes == 2 * SIZE


def test_a_folder_that_cannot_be_is_refused_at_the_start(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequest, match=r"file/kv cannot be used: Not a directory; choose another"):
        FolderBackend(tmp_path / "file" / "kv")


def test_others_cannot_read_the_files(tmp_path):
    fill(tmp_path)
    assert {path.stat().st_mode & 0o077 for path in files_in(tmp_path)} == {0}


def test_entries_are_listed_the_least_recently_used_first(tmp_path):
    backend = fill(tmp_path, 3)
    backend.touch(keys_of(3))
    assert [entry.key for entry in backend.entries()] == keys_of(3)[::-1]
    assert {entry.num_bytes for entry in backend.entries()} == {SIZE}


def test_what_nobody_used_for_too_long_goes_at_the_start_and_by_and_by(tmp_path):
    now_s = time.time()
    backend = FolderBackend(tmp_path, ttl_s=100, clock=lambda: now_s)
    backend.put(keys_of(3), values_of(3))
    now_s += 90
    backend.touch(keys_of(1))
    now_s += 20  # 110 s since the put, 20 s since the touch
    backend.put(keys_of(1, 9), values_of(1, 9))
    assert backend.exists(keys_of(3)) == [True, False, False]
    now_s += 200
    assert FolderBackend(tmp_path, ttl_s=100, clock=lambda: now_s).health().num_entries == 0


def test_files_that_go_while_the_folder_is_listed_take_no_others_with_them(tmp_path, monkeypatch):
    backend = fill(tmp_path, 40)
    gone = []
    scandir = os.scandir

    def listed_late(folder):
        entries = list(scandir(folder))
        for entry in entries[: len(gone) < 3]:
            if entry.is_file():
                os.unlink(entry.path)
                gone.append(entry.path)
        return iter(entries)

    monkeypatch.setattr(os, "scandir", listed_late)
    assert len(list(backend.entries())) == 40 - len(gone)
    assert gone
