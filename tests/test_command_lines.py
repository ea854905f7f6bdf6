"""Command lines that are wrong say in a line what to do; the shell completes those that are not finished."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from spolia.cli.app import app
from spolia.errors import SpoliaError

# What is typed, and what the message says to do about it.
WRONG = {
    "serv smollm2": "Did you mean 'serve'?",
    "serve --kv-memroy 1GiB smollm2": "--kv-memory",
    "serve smollm2 --kv-memory lots": "write it like 2GiB, 512MiB or 65536",
    "serve smollm2 --port 99999": "allowed are 0 to 65535",
    "serve smollm2 --host nowhere.invalid": "choose another with --host or --port",
    "serve smollm2 --keys /dev/null": "each is a table [[keys]] with a name and a key",
    "serve smollm2 --keys /nonexistent": "the key file /nonexistent cannot be read",
    "serve smollm2 --tls-cert /dev/null": "give both, or neither",
    "serve smollm2 --kv-dtype int3": "it must be one of bf16, f16, f32",
    "serve smollm2 --log-format xml": "it must be text or json",
    "serve smollm2 --config /nonexistent.toml": "/nonexistent.toml cannot be read",
    "serve smollm2 --kv-events 5557": "an endpoint such as tcp://127.0.0.1:5557",
    "serve smollm2 --traces localhost": "a URL such as http://127.0.0.1:4318/v1/traces",
    "serve smollm2 --threads 0": "it must be at least 1",
    "serve smollm2 --speculation maybe": "it must be one of off, prompt, tree, auto",
    "serve smollm2 --processor foo": "write NAME=module:Class",
    "serve smollm2 --kv-disk-size 1GiB": "kv_disk names no folder; name one",
    "generate smollm2": "Missing argument 'PROMPT'",
    "generate smollm2 hi --temperature -1": "it must be from 0 to 100",
    "generate smollm2 hi --param typicalp=1": "did you mean typical_p",
    "generate smollm2 hi --json-schema @/nonexistent": "'/nonexistent' cannot be read",
    "pull smollm": "Did you mean smollm2?",
    "top --url http://127.0.0.1:1": "--url says where",
    "cache lint": "name a model, whose chat template is checked, or recorded requests with --traffic",
    "cache verify /nonexistent": "/nonexistent is not a folder that --kv-disk has used",
    "bench": "name a model to serve, or a running server with --url",
    "models rm nothing": "`spolia models` lists what is",
    "serve nosuch": "no model is called 'nosuch'",
    "serve /nonexistent/model.gguf": "there is no file or folder /nonexistent/model.gguf",
    "serve smollm2 --warm /nonexistent": 'name a file with {"prompt"',
    "serve smollm2 --warm /etc/passwd": "is no prompt to warm",
    "cache lookup --messages /nonexistent": "name a file with a JSON list of messages",
    "cache lookup --messages /etc/passwd": "/etc/passwd is no JSON",
    "cache lookup hi --url notaurl": "it must be a server's address, such as http://127.0.0.1:8000",
    "ps --url notaurl": "--url is 'notaurl'",
    "top --once --url ftp://x": "--url is 'ftp://x'",
    "chat --url notaurl": "--url is 'notaurl'",
    "config show serve --bogus": "No such option: --bogus",
    "config show serve --port=1 --bogus=2": "No such option: --bogus",
    "config show generate smollm2 hi there": "generate takes no 'there'",
    "config show nothing": "these have: serve, chat, generate",
}


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_command_line_says_what_to_do(line: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("spolia.cli.serve.set_up_logging", lambda form: None)
    try:
        result = CliRunner().invoke(app, line.split(), catch_exceptions=False)
    except SpoliaError as error:
        said = str(error)
    else:
        assert result.exit_code == 2
        said = " ".join(result.output.split())
    assert WRONG[line] in said
    assert "Traceback" not in said
    assert len(said) < 600


def complete(shell: str, typed: str) -> str:
    """What the shell's function gets from us when Tab is pressed after `typed`."""
    words = typed.split(" ")
    environment = {
        **os.environ,
        "_SPOLIA_COMPLETE": f"complete_{shell}",
        "COMP_WORDS": typed,
        "COMP_CWORD": str(len(words) - 1),
        "_TYPER_COMPLETE_ARGS": typed,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    code = "import sys; sys.argv = ['spolia']; from spolia.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=False
    ).stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_shell_completes_commands_flags_and_models(shell: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("SPOLIA_CACHE", str(tmp_path))
    assert "serve" in complete(shell, "spolia se")
    assert "--kv-memory" in complete(shell, "spolia serve --kv-m")
    assert "smollm2" in complete(shell, "spolia chat smo")


def test_the_script_for_bash_is_one_that_bash_takes(tmp_path: Path):
    command = tmp_path / "spolia"
    command.write_text(f"#!{sys.executable}\nfrom spolia.cli import main\nmain()\n")
    command.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    typed = """
        eval "$(_SPOLIA_COMPLETE=source_bash spolia)"
        COMP_WORDS=(spolia serve --kv-pol) COMP_CWORD=2
        _spolia_completion spolia
        echo "${COMPREPLY[@]}"
    """
    shown = subprocess.run(
        ["bash", "-c", typed], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert shown.stdout.strip() == "--kv-policy", shown.stderr
