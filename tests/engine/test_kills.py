"""Promise 4 under `kill -9`: an engine that is killed at any moment leaves a folder that the next one can trust.

A child process runs the toy over a folder, computing conversations turn by turn, and checks each answer against what
the toy would say alone and cold; the parent kills it at random moments, in the middle of writes mostly. `SPOLIA_KILLS`
sets how often (50 in a thorough run).
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from spolia.engine import SamplingParams
from spolia.tiers import FolderBackend, Tier, verify_folder

from .toy import answer, toy_answer, toy_engine

NUM_KILLS = int(os.environ.get("SPOLIA_KILLS", "12"))
NUM_TURNS = 6


def talk(folder: Path) -> None:
    """The child: conversations for ever. Prints a line for each answer, with the tokens it restored."""
    engine = toy_engine(tiers=[Tier("disk", FolderBackend(folder))], clock=time.monotonic, num_blocks=128)
    rng = random.Random(os.getpid())
    print("ready", flush=True)
    while True:
        conversation = random.Random(rng.randrange(3))
        ids = [conversation.randrange(256) for _ in range(100)]
        for _ in range(NUM_TURNS):
            output = answer(engine, ids, SamplingParams(temperature=0.0, max_tokens=16))
            assert list(output.token_ids) == toy_answer(ids, 16), "an answer changed"
            print(output.num_restored_tokens.get("disk", 0), flush=True)
            ids = [*ids, *output.token_ids, *(conversation.randrange(256) for _ in range(20))]
        engine.core.cache.clear()


def test_an_engine_killed_at_any_moment_never_leaves_a_wrong_answer_or_a_stray_file(tmp_path):
    rng = random.Random(0)
    num_restored = 0
    code = f"from engine.test_kills import talk; from pathlib import Path; talk(Path({str(tmp_path)!r}))"
    paths = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    for _ in range(NUM_KILLS):
        with subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": paths},
        ) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n", child.stderr.read() if child.stderr else ""
            time.sleep(rng.uniform(0.0, 0.15))
            assert child.poll() is None, child.stderr.read() if child.stderr else ""
            child.send_signal(signal.SIGKILL)
            num_restored += sum(int(line) for line in child.stdout.read().splitlines() if line.isdigit())
    assert num_restored > 0
    folder = FolderBackend(tmp_path)
    report = verify_folder(folder)
    assert report.refused == ()
    assert report.num_good > 10
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".kv"}
    assert sum(path.stat().st_size for path in files) == report.num_bytes == folder.health().num_bytes
