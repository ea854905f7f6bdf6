"""The commands of docs/server.md are answered, by a server whose model is the toy."""

from __future__ import annotations

import asyncio
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from server.harness import chatty_engine, serving

TEXT = (Path(__file__).parents[1] / "docs" / "server.md").read_text()
COMMANDS = [
    re.sub(r"\n +", " ", block.strip()) for block in re.findall(r"^    curl (?:.*\n)(?:    .*\n)*", TEXT, re.MULTILINE)
]


@pytest.fixture(scope="module")
def url():
    engine = chatty_engine(num_blocks=64)
    with serving({"smollm2": engine}) as url:
        yield url
    asyncio.run(engine.aclose())


def test_the_page_has_commands():
    assert len(COMMANDS) == 6


@pytest.mark.parametrize(
    "command", COMMANDS, ids=lambda command: command.split()[1].removeprefix("http://127.0.0.1:8000")
)
def test_a_command_is_answered(url, command):
    parts = shlex.split(command.replace("http://127.0.0.1:8000", url))
    result = subprocess.run(
        [*parts, "--silent", "--show-error", "--fail-with-body"], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_flags_that_are_named_are_there():
    help_text = "".join(
        subprocess.run([sys.executable, "-m", "spolia", *command, "--help"], capture_output=True, text=True).stdout
        for command in ([], ["serve"])
    )
    for flag in set(re.findall(r"--[a-z][a-z-]+", TEXT)):
        assert flag in help_text, flag
