"""`spolia serve`: one model over HTTP."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
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
    source: str,
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
    served_name = name or _name(source)
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    scheme = "http" if settings.tls_cert is None else "https"
    log_fields(
        logging.getLogger("spolia.server"),
        "listening",
        {"model": served_name, "url": f"{scheme}://{shown}:{port}/v1"},
    )
    # Loading begins before the web framework is imported: each takes about half a second of start-up.
    loading = _in_background(lambda: _load(source, config, recording))

    from spolia.server import serve

    serve({served_name: loading}, settings, listener)
    if recording is not None:
        recording.close()
    if not loading.done():
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


def _in_background(build: Callable[[], AsyncEngine]) -> Future[AsyncEngine]:
    """What `build` returns or raises, on a thread that does not keep the process alive."""
    future: Future[AsyncEngine] = Future()

    def run() -> None:
        try:
            future.set_result(build())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="spolia-load", daemon=True).start()
    return future
