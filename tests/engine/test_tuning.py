"""The number of threads: the quickest of a few, found once and remembered, and again where the note is of no use."""

import json
import subprocess
import sys

import pytest

from spolia.engine.tuning import machine_key, quickest_num_threads
from spolia.kvcache import GroupSpec, KVCache

from .toy import ToyExecutable


class Machine(ToyExecutable):
    """A step takes what `step_s` says of its threads and tokens."""

    def __init__(self, step_s, waits=0.0):
        super().__init__()
        self.now = self.waited_s = 0.0
        self.step_s = step_s
        self.waits = waits  # of its threads' time
        self.num_steps = 0

    def run(self, step, logits, hidden=None, layers=None):
        seconds = self.step_s(self.num_threads, len(step.token_ids))
        self.now += seconds
        self.waited_s += seconds * self.num_threads * self.waits
        self.num_steps += 1

    def tune(self, most, notes, num_blocks=4, key="key"):
        cache = KVCache([GroupSpec(num_blocks)], clock=lambda: self.now)
        best = quickest_num_threads(self, cache, most, lambda: self.now, lambda: self.waited_s, key=key, notes=notes)
        (ledger,) = cache.ledger()
        assert ledger.free == num_blocks
        assert self.num_threads == best
        return best


def compute_bound(threads, tokens):
    return tokens / threads


def slow_to_meet(threads, tokens):
    """What eight threads do in a token's time, they need as long again to agree on."""
    return tokens / threads + 0.1 * threads


@pytest.mark.parametrize("most", [1, 2, 6, 64])
def test_where_threads_help_all_are_taken(tmp_path, most):
    assert Machine(compute_bound).tune(most, tmp_path / "note") == most


def test_where_many_are_slower_fewer_are_taken(tmp_path):
    machine = Machine(slow_to_meet)
    assert machine.tune(64, tmp_path / "note") == 4


def test_a_little_quicker_is_not_worth_it(tmp_path):
    assert Machine(lambda threads, tokens: 1 + threads / 100).tune(8, tmp_path / "note") == 8
    assert Machine(lambda threads, tokens: 1 + threads).tune(8, tmp_path / "other") == 1


def test_what_was_measured_while_cores_were_busy_neither_decides_nor_stays(tmp_path):
    note = tmp_path / "note"
    assert Machine(slow_to_meet, waits=0.1).tune(16, note) == 16
    assert not note.exists()
    assert Machine(slow_to_meet, waits=0.01).tune(16, note) == 4


def test_waiting_for_a_core_is_seen():
    """One core, two threads that want it: together they wait as long as they run."""
    code = """
import os, threading, time
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from spolia.engine.tuning import waited_for_cores_s
def spin(until=time.monotonic() + 1):
    import hashlib
    data = bytes(1 << 22)
    while time.monotonic() < until: hashlib.sha256(data)  # without the GIL
threads = [threading.Thread(target=spin) for _ in range(2)]
for thread in threads: thread.start()
while waited_for_cores_s() < 0.2 and any(thread.is_alive() for thread in threads): time.sleep(0.01)
print(waited_for_cores_s())
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert float(run.stdout) > 0.2


def test_it_is_measured_once(tmp_path):
    note = tmp_path / "threads" / "note"
    first, second = Machine(slow_to_meet), Machine(compute_bound)
    assert first.tune(16, note) == second.tune(16, note) == 4
    assert first.num_steps > 0 == second.num_steps


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"key": "4"}', b'{"key": 0}', b'{"key": 99}'])
def test_a_note_of_no_use_is_written_anew(tmp_path, content):
    note = tmp_path / "note"
    note.write_bytes(content)
    assert Machine(slow_to_meet).tune(16, note) == 4
    assert note.read_bytes() == b'{"key": 4}'


def test_where_nothing_can_be_remembered_it_works_all_the_same(tmp_path, caplog):
    (tmp_path / "file").touch()
    assert Machine(slow_to_meet).tune(16, tmp_path / "file" / "note") == 4
    assert "cannot be remembered" in caplog.text


def test_without_room_to_measure_all_are_taken(tmp_path):
    cache = KVCache([GroupSpec(1)], clock=lambda: 0.0)
    with cache.open(b"other", [1]) as lease:
        assert cache.grow(lease, 16) is not None
        machine = Machine(slow_to_meet)
        best = quickest_num_threads(
            machine, cache, 8, lambda: machine.now, lambda: machine.waited_s, key="key", notes=tmp_path / "note"
        )
        assert best == 8
    assert not (tmp_path / "note").exists()


def test_another_model_or_number_has_a_note_of_its_own(tmp_path):
    facts = [(b"a", "n", 4), (b"b", "n", 4), (b"a", "m", 4), (b"a", "n", 8)]
    assert len({machine_key(*each) for each in facts}) == 4
    notes = tmp_path / "notes"
    assert Machine(slow_to_meet).tune(16, notes, key="one") == 4
    assert Machine(compute_bound).tune(16, notes, key="two") == 16
    assert Machine(compute_bound).tune(16, notes, key="one") == 4


def test_only_so_many_are_remembered(tmp_path):
    notes = tmp_path / "notes"
    for number in range(300):
        Machine(compute_bound).tune(2, notes, key=str(number))
    assert list(json.loads(notes.read_bytes())) == [str(number) for number in range(44, 300)]
