"""Settings from flags, the environment and a file: which of them holds, and what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from spolia.cli.app import app
from spolia.errors import InvalidRequest

DEPLOY = Path(__file__).parents[1] / "deploy"


@pytest.fixture(autouse=True)
def _nothing_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("SPOLIA_CONFIG", raising=False)


def show(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["config", "show", "--json", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    shown: dict[str, Any] = json.loads(result.stdout)
    return shown


def wrong(*arguments: str) -> str:
    """The message of a command line that cannot be run."""
    try:
        result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    except InvalidRequest as error:
        return str(error)
    assert result.exit_code == 2
    return " ".join(result.output.split())


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "spolia.toml"
    path.write_text(text)
    return str(path)


def test_flags_come_before_the_environment_that_before_the_file_and_that_before_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = written(tmp_path, 'host = "file"\nport = 1\nthreads = 1\nkv_policy = "lfu"')
    monkeypatch.setenv("SPOLIA_PORT", "2")
    monkeypatch.setenv("SPOLIA_THREADS", "2")
    shown = show("serve", "--config", path, "--threads", "3")
    assert shown["threads"] == {"value": "3", "from": "flag"}
    assert shown["port"] == {"value": "2", "from": "environment SPOLIA_PORT"}
    assert shown["host"] == {"value": "file", "from": f"file {path}"}
    assert shown["kv_policy"] == {"value": "lfu", "from": f"file {path}"}
    assert shown["kv_dtype"] == {"value": "bf16", "from": "default"}
    assert shown["max_waiting"] == {"value": 1024, "from": "default"}


def test_a_section_is_for_its_command_alone(tmp_path: Path):
    path = written(tmp_path, "threads = 1\ntemperature = 0.5\n[chat]\nthreads = 2\nmodel = 'smollm2'")
    assert show("serve", "--config", path)["threads"]["value"] == "1"
    assert "temperature" not in show("serve", "--config", path)
    chat = show("chat", "--config", path)
    assert [chat[name]["value"] for name in ("threads", "temperature", "model")] == ["2", "0.5", "smollm2"]
    assert show("generate", "--config", path)["temperature"]["value"] == "0.5"


def test_the_file_is_looked_for_where_the_environment_says_and_else_at_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    home = tmp_path / "home" / "spolia" / "config.toml"
    home.parent.mkdir(parents=True)
    home.write_text("port = 1")
    assert show()["port"] == {"value": "1", "from": f"file {home}"}
    path = written(tmp_path, "port = 2")
    monkeypatch.setenv("SPOLIA_CONFIG", path)
    assert show()["port"] == {"value": "2", "from": f"file {path}"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("kv_memroy = 1", "kv_memroy, which is not a setting; did you mean kv_memory?"),
        ("[serv]\nport = 1", "[serv], which is not a setting; did you mean serve?"),
        ("[chat]\nhostt = 1", "hostt under [chat], which is not a setting; there are model, "),
        ("port = 1\nport = 2", "is not TOML"),
        ("[serve.port]\nx = 1", "port is a table"),
    ],
)
def test_what_no_command_knows_is_an_error_with_the_nearest_name(tmp_path: Path, text: str, words: str):
    path = written(tmp_path, text)
    for command in (["config", "show", "serve", "--config", path], ["serve", "--config", path, "smollm2"]):
        message = wrong(*command)
        assert words in message
        assert message.startswith(f"config: {path}")


def test_a_file_that_is_not_there_is_an_error_only_if_it_was_named(tmp_path: Path):
    assert "cannot be read: No such file" in wrong("serve", "--config", str(tmp_path / "none.toml"))


def test_a_wrong_value_says_where_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = written(tmp_path, 'models = ["smollm2"]\nkv_memory = "much"')
    assert f"'much' is not a size; write it like 2GiB, 512MiB or 65536 It is set by file {path}" in wrong(
        "serve", "--config", path
    )
    assert f"It is set by file {path}" in wrong("config", "show", "serve", "--config", path)
    monkeypatch.setenv("SPOLIA_PORT", "x")
    assert "It is set by environment SPOLIA_PORT" in wrong("serve", "smollm2")


def test_a_command_takes_what_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = written(tmp_path, 'models = ["one", "two"]\nkv_memory = "1MiB"\nprocessor = ["a=b:C"]\ncheck = true')
    monkeypatch.setenv("SPOLIA_PORT", "0")
    ran: dict[str, Any] = {}

    def run(models: list[str], **given: Any) -> None:
        ran.update(given, models=models)

    monkeypatch.setattr("spolia.cli.serve.run", run)
    result = CliRunner().invoke(app, ["serve", "--config", path], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert list(ran["models"]) == ["one", "two"]
    engine = ran["engine"].config()
    assert (engine.kv_memory, engine.processors, engine.check) == (1 << 20, ("a=b:C",), True)
    assert ran["server"].config().port == 0


def test_passwords_are_not_shown(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SPOLIA_KV_REMOTE", "valkey://me:secret@host/0")
    assert show()["kv_remote"]["value"] == "valkey://me:***@host/0"


def test_a_variable_that_is_nearly_one_of_ours_is_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SPOLIA_KV_MEMROY", "1GiB")
    result = CliRunner().invoke(app, ["config", "show"])
    assert "SPOLIA_KV_MEMROY in the environment is not a setting; did you mean SPOLIA_KV_MEMORY?" in result.stderr


def test_every_setting_of_the_deployed_file_is_one(tmp_path: Path):
    text = (DEPLOY / "spolia.toml").read_text()
    everything = text.replace("\n# kv_", "\nkv_").replace("# threads", "threads")
    everything = everything.replace("# keys", "keys").replace("# tls_", "tls_")
    path = written(tmp_path, everything)
    shown = show("serve", "--config", path)
    assert sum(setting["from"].startswith("file") for setting in shown.values()) == 11
