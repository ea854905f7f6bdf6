"""Models that were made of others: a base, and what it is told. And files that clients send to make models of.

    models/created/NAME.json    a recipe: the base, system prompt, template, parameters, first messages
    models/blobs/sha256-DIGEST  a file that a client sent
    models/NAME.gguf            the same file (a hard link), once a model was made of it; the base of NAME is then NAME

A base is never a model with another base: who makes a model of a made one gets its recipe, changed. So nothing of a
made model is lost with another, and all that have one base share its weights and its KV in memory.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from spolia.errors import InvalidRequest, ModelError
from spolia.models.cache_folder import write_atomically
from spolia.models.sources import BUILTINS, list_models, models_folder
from spolia.models.sources import remove as remove_file

if TYPE_CHECKING:
    from spolia.models.model import Model

__all__ = [
    "BlobWriter",
    "Recipe",
    "blob_path",
    "check_is_kept",
    "check_name",
    "list_recipes",
    "made_of",
    "read_recipe",
    "remove",
]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}(:[A-Za-z0-9][A-Za-z0-9._-]{0,63})?")
_DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")
_UNUSED_S = 86_400.0


class Recipe(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """
    Attributes:
        base: the name of the model that it is made of; its own, where it has a file of its own.
        system: what a conversation begins with that has no system message.
        template: Jinja, in place of the base's; empty: the base's.
        parameters: options where a request says nothing, as Ollama names them.
        messages: what each conversation goes on from, after its system message.
    """

    base: str
    system: str = ""
    template: str = ""
    parameters: dict[str, Any] = {}
    messages: list[dict[str, Any]] = []
    license: list[str] = []

    def dress(self, model: Model) -> Model:
        """The base, as it is to speak."""
        from spolia.models.chat_template import ChatTemplate

        template = model.chat_template
        if self.template:
            template = ChatTemplate(self.template) if template is None else template.with_source(self.template)
        if template is not None and (self.system or self.messages):
            template = template.prefaced(self.system, self.messages)
        return replace(model, chat_template=template)

    def write(self, name: str) -> None:
        """
        Raises:
            InvalidRequest: see `check_name`.
            ModelError: it cannot be kept.
        """
        with _told():
            write_atomically(_path(check_name(name)), msgspec.json.encode(self))

    @classmethod
    def of_blob(cls, name: str, digest: str, **fields: Any) -> Recipe:
        """The recipe of a model with a file of its own, which is put in its place.

        Raises:
            InvalidRequest: there is no such blob.
            ModelError: it is no model that can run here, or cannot be kept.
        """
        blob = blob_path(digest)
        if not blob.is_file():
            raise InvalidRequest(f"there is no blob {digest}; send it first: POST /api/blobs/{digest}", param="files")
        from spolia.models.model import load

        load(blob)
        path = models_folder() / f"{check_name(name)}.gguf"
        with _told(), tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as staging:
            linked = Path(staging) / path.name
            try:
                os.link(blob, linked)
            except OSError as error:
                if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EXDEV, errno.EMLINK):
                    raise
                linked = blob  # no hard links here: the blob itself becomes the model
            os.replace(linked, path)
        return cls(base=name, **fields)


def check_name(name: str) -> str:
    """`name`, if a made model may be called so.

    Raises:
        InvalidRequest: it is no plain name, or a built-in model's.
    """
    if not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"model is {name!r}; a model that is made here has a name of letters, digits, '.', '_' and '-', which "
            "begins with one of the first two, and a tag of these after ':' at most",
            param="model",
        )
    if name.lower() in BUILTINS:
        raise InvalidRequest(f"model is {name!r}, which is a built-in model's name; take another", param="model")
    return name


def read_recipe(name: str) -> Recipe | None:
    """None: no model of that name was made.

    Raises:
        ModelError: its file is broken.
    """
    if not _NAME.fullmatch(name):
        return None
    path = _path(name)
    try:
        return msgspec.json.decode(path.read_bytes(), type=Recipe)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise ModelError(f"{path} cannot be read: {error}; delete it, and make the model anew") from error


def list_recipes() -> dict[str, Recipe]:
    """By name; broken ones are left out."""
    found: dict[str, Recipe] = {}
    for path in sorted((models_folder() / "created").glob("*.json")):
        with contextlib.suppress(ModelError):
            if (recipe := read_recipe(path.name.removesuffix(".json"))) is not None:
                found[path.name.removesuffix(".json")] = recipe
    return found


def made_of(name: str) -> list[str]:
    """Names of the models that could not run without this one."""
    return [other for other, recipe in list_recipes().items() if recipe.base == name and other != name]


def check_is_kept(name: str) -> None:
    """
    Raises:
        ModelError: nothing of that name is in the models' folder, so it cannot be deleted there.
    """
    kept = (each for each in list_models() if each.path is not None or each.partial_bytes)
    if all(each.name != name for each in kept) and read_recipe(name) is None:
        raise ModelError(f"{name!r} is not in {models_folder()}; `spolia models` lists what is")


def remove(name: str) -> int:
    """Delete a model: its recipe, or its file; returns the bytes freed.

    Raises:
        ModelError: nothing of that name is there, others are made of it, or it cannot be deleted.
    """
    if others := made_of(name):
        raise ModelError(f"{name!r} is what {', '.join(others)} {'is' if len(others) == 1 else 'are'} made of; "
                         "delete that first")  # fmt: skip
    path = _path(name) if _NAME.fullmatch(name) else None
    is_made = path is not None and path.is_file()
    if path is not None and is_made and not (models_folder() / f"{name}.gguf").is_file():
        with _told():
            num_bytes = path.stat().st_size
            path.unlink()
        return num_bytes
    kept = models_folder() / f"{name}.gguf"
    blobs = [blob for blob in _blobs() if kept.is_file() and blob.samefile(kept) and blob.stat().st_nlink == 2]
    freed = remove_file(name)
    with _told():
        for each in (*blobs, *([path] if path is not None and is_made else [])):
            each.unlink(missing_ok=True)
    return freed


def blob_path(digest: str) -> Path:
    """Where the file of that digest is, if it is here.

    Raises:
        InvalidRequest: it is not like `sha256:` and 64 digits.
    """
    matched = _DIGEST.fullmatch(digest)
    if matched is None:
        raise InvalidRequest(f"digest is {digest!r}; it must be sha256: and 64 hexadecimal digits", param="digest")
    return models_folder() / "blobs" / f"sha256-{matched[1]}"


class BlobWriter:
    """A file that arrives piece by piece. Has its name once its digest was seen right; `close` in any case.

    Raises:
        InvalidRequest: the digest is malformed, or another than that of what arrived.
        ModelError: it cannot be kept.
    """

    def __init__(self, digest: str) -> None:
        self._path = blob_path(digest)
        self._hash = hashlib.sha256()
        with _told():
            self._path.parent.mkdir(parents=True, exist_ok=True)
            for blob in _blobs():  # nobody made a model of these, or of what is left of an upload
                with contextlib.suppress(FileNotFoundError):  # another upload is over, or has done it
                    stat = blob.stat()
                    if stat.st_nlink == 1 and time.time() - stat.st_mtime > _UNUSED_S:
                        blob.unlink()
            handle, partial = tempfile.mkstemp(dir=self._path.parent, prefix="sha256-", suffix=".partial")
        self._file = os.fdopen(handle, "wb")
        self._partial = Path(partial)

    def write(self, data: bytes) -> None:
        self._hash.update(data)
        with _told(self._path):
            self._file.write(data)

    def finish(self) -> None:
        """All of it is here."""
        digest = self._hash.hexdigest()
        if self._path.name != f"sha256-{digest}":
            raise InvalidRequest(
                f"what was sent has the digest sha256:{digest}, not {self._path.name}; send it again",
                param="digest",
            )
        with _told(self._path):
            self._file.flush()
            os.fsync(self._file.fileno())
            os.replace(self._partial, self._path)

    def close(self) -> None:
        self._file.close()
        self._partial.unlink(missing_ok=True)


def _blobs() -> Iterator[Path]:
    yield from (models_folder() / "blobs").glob("sha256-*")


def _path(name: str) -> Path:
    return models_folder() / "created" / f"{name}.json"


@contextlib.contextmanager
def _told(path: Path | None = None) -> Iterator[None]:
    """The system's refusal as a ModelError."""
    try:
        yield
    except OSError as error:
        place = error.filename or path or models_folder()
        raise ModelError(f"cannot keep {place}: {error.strerror}; make room, or see to its permissions") from error
