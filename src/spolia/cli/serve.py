"""`spolia serve`: models over HTTP."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from spolia.cli.flags import EngineFlags
from spolia.cli.models import fetch
from spolia.cli.recording import Recording
from spolia.engine import AsyncEngine
from spolia.errors import InvalidRequest, SpoliaError
from spolia.server import ServerConfig, listen, log_fields, read_keys, set_up_logging

__all__ = ["run"]


def run(
    sources: Sequence[str],
    *,
    name: str | None,
    engine: EngineFlags,
    server: Mapping[str, Any],
    log_format: str | None,
    record: Path | None = None,
) -> None:
    """Serve until a signal; see `spolia.server.serve`.

    Args:
        server: fields of `ServerConfig`; None for what was not given.

    Raises:
        ModelError: the model cannot be had or read.
        InvalidRequest: a flag that is impossible.
        SpoliaError: the address cannot be had.
    """
    if len(sources) > 1 and name is not None:
        raise InvalidRequest("--name is for one model; each of several goes by its own", param="name")
    if len(sources) > 1 and record is not None:
        raise InvalidRequest("--record is for one model; serve each from a process of its own", param="record")
    names = [name or _name(source) for source in sources]
    if len(set(names)) < len(names):
        raise InvalidRequest(f"the models are called {', '.join(names)}; each needs a name of its own", param="model")
    if log_format not in (None, "text", "json"):
        raise InvalidRequest(f"log_format is {log_format!r}; it must be text or json", param="log_format")
    set_up_logging("json" if log_format == "json" else "text")
    config = engine.config()
    try:
        settings = ServerConfig(**{key: value for key, value in server.items() if value is not None})
        if settings.keys is not None:
            read_keys(settings.keys)  # what is wrong with it is told before anything takes time
    except SpoliaError:
        raise
    except ValueError as error:
        raise InvalidRequest(str(error)) from None
    try:
        listener = listen(settings)
    except OSError as error:
        raise SpoliaError(
            f"cannot listen on {settings.host} port {settings.port}: {error.strerror}; "
            "choose another with --host or --port"
        ) from None
    recording = None if record is None else Recording(record)
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    scheme = "http" if settings.tls_cert is None else "https"
    log_fields(
        logging.getLogger("spolia.server"),
        "listening",
        {"model": ",".join(names), "url": f"{scheme}://{shown}:{port}/v1"},
    )
    # Loading begins before the web framework is imported: each takes about half a second of start-up.
    loading = _in_background([partial(_load, source, config, recording) for source in sources])

    from spolia.server import serve

    serve(dict(zip(names, loading, strict=True)), settings, listener)
    if recording is not None:
        recording.close()
    if not all(future.done() for future in loading):
        # Asked to end while the model loads: a thread in native code must not come back to a dying interpreter.
        logging.shutdown()
        os._exit(0)


def _load(source: str, config: Any, recording: Recording | None) -> AsyncEngine:
    fetch(source)
    return AsyncEngine(source, config, observer=recording)


def _name(source: str) -> str:
    """What clients call it: the source, or a file's name without its folders and suffix."""
    path = Path(source)
    return path.name.removesuffix(".gguf") if path.exists() else source


def _in_background(builds: Sequence[Callable[[], AsyncEngine]]) -> list[Future[AsyncEngine]]:
    """What each of `builds` returns or raises, on a thread that does not keep the process alive.

    One after the other: each engine takes its share of the memory that the ones before it have left.
    """
    futures: list[Future[AsyncEngine]] = [Future() for _ in builds]

    def run() -> None:
        for build, future in zip(builds, futures, strict=True):
            try:
                future.set_result(build())
            except BaseException as error:
                future.set_exception(error)

    threading.Thread(target=run, name="spolia-load", daemon=True).start()
    return futures
