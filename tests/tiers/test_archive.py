"""Listing, verifying, exporting and importing what a folder holds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from spolia.cli import folder as commands
from spolia.errors import InvalidRequest
from spolia.kvcache import namespace_key
from spolia.tiers import (
    AesGcm,
    Checksum,
    FolderBackend,
    conversations,
    export_conversation,
    family,
    import_conversation,
    open_extent,
    verify_folder,
)

from .samples import extent_of, headers
from .test_backends import SIZE, read

OTHER = namespace_key(model="other")


def store(folder: FolderBackend, extents_of, sealer=None) -> None:
    folder.put([header.key for header in extents_of], [extent_of(header, sealer) for header in extents_of])


@pytest.fixture
def folder(tmp_path):
    """Two conversations of 5 and 3 blocks, the first in two cache groups."""
    made = FolderBackend(tmp_path / "kv")
    store(made, headers(5))
    store(made, headers(5, group=1))
    store(made, headers(3, seed=1))
    return made


def name_of(folder: FolderBackend, num_tokens: int) -> str:
    return next(one.digest.hex()[:12] for one in conversations(folder) if one.num_tokens == num_tokens)


def test_conversations_are_chains_to_their_last_blocks(folder):
    found = {one.num_tokens: one for one in conversations(folder)}
    assert found.keys() == {80, 48}
    assert found[80].num_bytes == 10 * SIZE
    assert found[48].num_bytes == 3 * SIZE
    assert all(one.is_whole for one in found.values())


def test_a_conversation_without_its_beginning_is_told(folder):
    folder.delete([headers(3, seed=1)[0].key])
    assert {one.num_tokens: one.is_whole for one in conversations(folder)} == {80: True, 48: False}
    with pytest.raises(InvalidRequest, match="beginning"):
        export_conversation(folder, name_of(folder, 48), Path("unused"))


@pytest.mark.parametrize("sealer", [Checksum(), AesGcm(bytes(32))], ids=lambda sealer: sealer.name)
def test_what_is_exported_here_is_imported_there(tmp_path, sealer):
    here, there = FolderBackend(tmp_path / "here"), FolderBackend(tmp_path / "there")
    store(here, headers(5), sealer)
    store(here, headers(3, seed=1), sealer)
    export_conversation(here, name_of(here, 80), tmp_path / "file")
    assert import_conversation(there, tmp_path / "file", sealer=sealer) == 5
    assert [one.num_tokens for one in conversations(there)] == [80]
    for header, value in zip(headers(5), read(there, [header.key for header in headers(5)]), strict=True):
        open_extent(memoryview(bytearray(value)), sealer, header.key)


def test_a_file_of_another_namespace_is_refused_unless_forced(tmp_path, folder):
    other = FolderBackend(tmp_path / "other")
    store(other, headers(2, namespace=OTHER))
    export_conversation(other, name_of(other, 32), tmp_path / "file")
    with pytest.raises(InvalidRequest, match="another model, KV type, cache salt"):
        import_conversation(folder, tmp_path / "file")
    assert import_conversation(folder, tmp_path / "file", is_forced=True) == 2


def test_a_damaged_file_is_refused_whole(tmp_path, folder):
    path = tmp_path / "file"
    export_conversation(folder, name_of(folder, 80), path)
    good = path.read_bytes()
    there = FolderBackend(tmp_path / "there")
    for damaged in (good[:-1], good[: len(good) // 2], good[:20], b"", b"not one of ours", _flipped(good)):
        path.write_bytes(damaged)
        with pytest.raises(InvalidRequest):
            import_conversation(there, path)
    assert there.health().num_entries == 0


def _flipped(data: bytes) -> bytes:
    flipped = bytearray(data)
    flipped[len(data) // 2] ^= 1
    return bytes(flipped)


def test_an_existing_file_is_not_written_over(tmp_path, folder):
    (tmp_path / "file").write_text("letters")
    with pytest.raises(InvalidRequest, match="File exists"):
        export_conversation(folder, name_of(folder, 80), tmp_path / "file")
    assert (tmp_path / "file").read_text() == "letters"


def test_verifying_removes_what_is_damaged_and_nothing_else(folder):
    keys = [header.key for header in headers(5)]
    path = Path(folder._path(keys[2]))
    path.write_bytes(path.read_bytes()[:-5])
    (folder.folder / "spolia-kv-1" / "tmp" / "1-1-1.part").write_bytes(b"torn")
    report = verify_folder(folder)
    assert [name for name, _ in report.refused] == [keys[2].hex()]
    assert (report.num_good, report.num_swept) == (12, 1)
    assert folder.exists(keys) == [True, True, False, True, True]
    assert verify_folder(folder).refused == ()


def test_the_commands_say_what_there_is(folder, tmp_path, capsys):
    commands.ls(folder.folder)
    assert [line.split()[1:3] for line in capsys.readouterr().out.splitlines()] == [["48", "tokens"], ["80", "tokens"]]
    commands.du(folder.folder)
    assert "13 blocks" in capsys.readouterr().out
    assert commands.verify(folder.folder, None)
    assert "13 blocks are good" in capsys.readouterr().out
    commands.export(folder.folder, name_of(folder, 48), tmp_path / "file")
    commands.import_file(tmp_path / "new", tmp_path / "file", None, is_forced=False)
    assert "3 blocks imported" in capsys.readouterr().out
    commands.clear(folder.folder, OTHER.hex(), with_sessions=False)
    commands.clear(folder.folder, "", with_sessions=False)
    assert capsys.readouterr().out == "0 blocks deleted\n13 blocks deleted\n"


def test_verify_says_no_where_something_was_damaged(folder, capsys):
    Path(folder._path(headers(1)[0].key)).write_bytes(b"x" * 400)
    assert not commands.verify(folder.folder, None)
    assert "removed" in capsys.readouterr().out


def test_a_folder_that_is_not_ours_is_refused_and_stays_as_it_is(tmp_path):
    (tmp_path / "letters.txt").write_text("mine")
    for command in (lambda: commands.clear(tmp_path, "", with_sessions=False), lambda: commands.verify(tmp_path, None)):
        with pytest.raises(InvalidRequest, match="not a folder that --kv-disk has used"):
            command()
    assert [path.name for path in tmp_path.iterdir()] == ["letters.txt"]


def test_what_goes_with_a_conversation_ends_where_others_branch_off():
    trunk = headers(4)
    one, two = (
        [
            replace(header, parent=trunk[1].digest if header.start == 0 else header.parent)
            for header in headers(3, seed=s)
        ]
        for s in (1, 2)
    )
    known = [*trunk, *one, *two]
    chain = [header.digest for header in trunk]

    def gone(*args, **kwargs):
        return [header for header in known if header.digest in family(known, *args, **kwargs)]

    assert gone(chain, 0, is_alone=True) == trunk[2:]
    assert gone(chain, 3, is_alone=True) == trunk[3:]
    assert gone(chain[:2], 0, is_alone=True) == []  # others go on from there
    assert gone(chain[:2], 0, is_alone=False) == known
    assert gone(chain[:2], 1, is_alone=False) == known[1:]
    assert gone([*chain[:2], one[0].digest], 0, is_alone=False) == one
    assert gone([], 0, is_alone=False) == []
