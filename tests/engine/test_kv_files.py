"""One conversation's KV in a file and back, of models that look back over a window: what it passed may be gone."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from spolia.engine.kv_files import put_in, take_out
from spolia.errors import InvalidRequest
from spolia.kernels import BLOCK_SIZE
from spolia.tiers import (
    Checksum,
    FolderBackend,
    HostBackend,
    Tier,
    TierUse,
    conversations,
    export_conversation,
    import_conversation,
    pack_archive,
    payload_of,
    read_archive,
    unpack_archive,
)

from .test_tiering import CONVERSATION, EXACT_NAMESPACE, assert_right, settle, tokens
from .toy import answer, toy_engine

WINDOWS = [(None, 40), (40,), (None, 40, 100)]
LONG = (len(CONVERSATION) + 7) // BLOCK_SIZE * BLOCK_SIZE


def carried(engine, prompt) -> list:
    """What a file of it holds when it is opened elsewhere."""
    extents = take_out(engine.core, EXACT_NAMESPACE, prompt, engine.core.tiering.blocks.exact)
    parts = unpack_archive(pack_archive(extents, Checksum()), Checksum())
    return [(header, payload_of(header, extent)) for header, extent in parts]


def taken_in(engine, parts) -> int:
    return put_in(engine.core, EXACT_NAMESPACE, parts, engine.core.tiering.blocks.exact)[1]


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("pressure", [False, True], ids=["all is there", "what the window passed is gone"])
def test_a_conversation_beyond_the_window_is_carried_to_another_engine(windows, pressure):
    engine = toy_engine(windows=windows, num_blocks=[64 if window is None else 22 for window in windows])
    output = answer(engine, CONVERSATION)
    conversation = [*CONVERSATION, *output.token_ids]
    if pressure:
        answer(engine, tokens(150, 5))
    parts = carried(engine, conversation)
    assert len(parts) == LONG // BLOCK_SIZE * len(windows)
    assert any(not payload.nbytes for _, payload in parts) == pressure
    other = toy_engine(windows=windows)
    assert taken_in(other, parts) == LONG
    turn = [*conversation, *range(20)]
    warm = answer(other, turn)
    assert_right(warm, turn, windows)
    assert warm.num_cached_tokens == LONG


def test_it_goes_into_an_engine_that_has_a_part_of_it_already():
    windows = (None, 40)
    engine = toy_engine(windows=windows, num_blocks=[64, 22])
    answer(engine, CONVERSATION)
    answer(engine, tokens(150, 5))
    parts = carried(engine, CONVERSATION)
    for length in (20, 100, 290):
        other = toy_engine(windows=windows)
        answer(other, CONVERSATION[:length])
        assert taken_in(other, parts) == len(CONVERSATION) // BLOCK_SIZE * BLOCK_SIZE
        assert_right(answer(other, CONVERSATION), CONVERSATION, windows)


def test_a_file_without_what_the_next_token_needs_is_refused():
    windows = (None, 40)
    engine = toy_engine(windows=windows)
    answer(engine, CONVERSATION)
    parts = carried(engine, CONVERSATION)
    header, payload = parts[-1]
    with pytest.raises(InvalidRequest, match="blocks are of 0 bytes"):
        taken_in(toy_engine(windows=windows), [*parts[:-1], (header, payload[:0])])


def sparse_file(path: Path, windows) -> None:
    """Of an engine whose memory has given up what the window has passed."""
    engine = toy_engine(windows=windows, num_blocks=[64 if window is None else 22 for window in windows])
    answer(engine, CONVERSATION)
    answer(engine, tokens(150, 5))
    extents = take_out(engine.core, EXACT_NAMESPACE, CONVERSATION, engine.core.tiering.blocks.exact)
    path.write_bytes(pack_archive(extents, Checksum()))


@pytest.mark.parametrize("windows", WINDOWS)
def test_a_file_without_what_a_window_has_passed_goes_into_a_folder_and_is_used_from_there(tmp_path: Path, windows):
    sparse_file(tmp_path / "file", windows)
    folder = FolderBackend(tmp_path / "kv")
    num_blocks = import_conversation(folder, tmp_path / "file")
    assert num_blocks == len(list(folder.entries())) < 288 // BLOCK_SIZE * len(windows)
    engine = toy_engine(windows=windows, tiers=[Tier("disk", folder, stall_s=60)], clock=time.monotonic)
    output = answer(engine, CONVERSATION)
    assert_right(output, CONVERSATION, windows)
    assert output.num_restored_tokens == {"disk": 288}
    engine.core.close()


def test_a_folders_file_of_it_goes_into_an_engine(tmp_path: Path):
    windows = (40, None)  # the group that is complete need not be the first
    sparse_file(tmp_path / "file", windows)
    folder = FolderBackend(tmp_path / "kv")
    import_conversation(folder, tmp_path / "file")
    (one,) = conversations(folder)
    export_conversation(folder, one.digest.hex(), tmp_path / "again")
    parts = [(header, payload_of(header, extent)) for header, extent in read_archive(tmp_path / "again", Checksum())]
    engine = toy_engine(windows=windows)
    assert taken_in(engine, parts) == 288
    assert_right(answer(engine, CONVERSATION), CONVERSATION, windows)
    with pytest.raises(InvalidRequest, match="without gaps"):
        taken_in(engine, [part for part in parts if part[0].start != 160])


def test_what_a_window_has_passed_moves_to_a_tier_while_memory_has_it():
    backend = HostBackend(1 << 20)
    use = TierUse(Tier("host", backend, stall_s=60), "write_back")
    engine = toy_engine(windows=(None, 40), tiers=[use], clock=time.monotonic)
    answer(engine, CONVERSATION)
    assert engine.core.tiering.transfers.send(EXACT_NAMESPACE, CONVERSATION, "host") == 288
    engine.core.tiering.tiers.offloader.pump(engine.core.cache, None)  # there is room for all of it
    settle(engine)
    engine.core.cache.clear()
    output = answer(engine, CONVERSATION)
    assert_right(output, CONVERSATION, (None, 40))
    assert output.num_restored_tokens == {"host": 288}
