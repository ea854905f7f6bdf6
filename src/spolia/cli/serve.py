"""`spolia serve`: models over HTTP."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from spolia.cli.flags import EngineFlags, ServerFlags
from spolia.cli.models import fetch
from spolia.cli.recording import Recording
from spolia.engine import AsyncEngine, EngineConfig
from spolia.errors import InvalidRequest, SpoliaError
from spolia.models import check_source, list_models
from spolia.server import listen, log_fields, read_keys, read_mcp_file, set_up_logging

__all__ = ["run"]

# What forms need is made when a model can answer: it holds the interpreter, and who waits for the model comes first.
_FORMS_AFTER_S = 1.0


def run(
    sources: Sequence[str],
    *,
    name: str | None,
    engine: EngineFlags,
    server: ServerFlags,
    log_format: str | None,
    record: Path | None = None,
    pinned: Sequence[str] = (),
) -> None:
    """Serve until a signal; see `spolia.server.serve`.

    Args:
        sources: loaded at the start as far as there is room; none: those on this machine, each by its first request.
        pinned: of the names, those that stay in memory.

    Raises:
        ModelError: the model cannot be had or read.
        InvalidRequest: a flag that is impossible.
        SpoliaError: the address cannot be had.
    """
    if len(sources) > 1 and name is not None:
        raise InvalidRequest("--name is for one model; each of several goes by its own", param="name")
    if len(sources) > 1 and record is not None:
        raise InvalidRequest("--record is for one model; serve each from a process of its own", param="record")
    if not sources and name is not None:
        raise InvalidRequest("--name is for one model; name it", param="name")
    names = [name or _name(source) for source in sources]
    if len(set(names)) < len(names):
        raise InvalidRequest(f"the models are called {', '.join(names)}; each needs a name of its own", param="model")
    if unknown := sorted(set(pinned) - set(names)):
        raise InvalidRequest(
            f"--pin {unknown[0]}: the models are called {', '.join(names) or '(none given)'}", param="pin"
        )
    if log_format not in (None, "text", "json"):
        raise InvalidRequest(f"log_format is {log_format!r}; it must be text or json", param="log_format")
    for source in sources:
        check_source(source)
    set_up_logging("json" if log_format == "json" else "text")
    config = engine.config()
    settings = server.config()
    if settings.mcp is not None:
        read_mcp_file(settings.mcp)
        if find_spec("mcp") is None:
            raise InvalidRequest("--mcp needs the SDK of MCP: pip install 'spolia[mcp]'", param="mcp")
    if settings.keys is not None:
        read_keys(settings.keys)
    if settings.warm is not None:
        from spolia.server.warming import read_prompts

        read_prompts(settings.warm)  # what is wrong with it is told before anything takes time
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
        {"model": ",".join(names) or "those that are here", "url": f"{scheme}://{shown}:{port}/v1"},
    )
    # Loading begins before the web framework is imported: each takes about half a second of start-up.
    first = (
        _in_background(partial(_load_first, sources[0], config, recording, settings.memory_bytes)) if sources else None
    )

    from spolia.server import ModelSource, serve

    def source_of(source: str, called: str, loading: Future[AsyncEngine] | None = None) -> ModelSource:
        return ModelSource(
            load=partial(_load, source, config, recording),
            size_bytes=partial(_size_bytes, source, config),
            is_pinned=called in pinned,
            config=config,
            loading=loading,
        )

    def library() -> dict[str, ModelSource]:
        if sources:
            return {}
        return {each.name: source_of(each.name, each.name) for each in list_models() if each.path is not None}

    models = {
        called: source_of(source, called, first if index == 0 else None)
        for index, (source, called) in enumerate(zip(sources, names, strict=True))
    }
    is_at_rest = serve(models, settings, listener, library=library)
    if recording is not None:
        recording.close()
    if not is_at_rest:
        # Asked to end while the model loads: a thread in native code must not come back to a dying interpreter.
        logging.shutdown()
        os._exit(0)


def _load(source: str, config: EngineConfig, recording: Recording | None, kv_bytes: int | None) -> AsyncEngine:
    fetch(source)
    if kv_bytes is not None and config.kv_memory is None:
        config = replace(config, kv_memory=kv_bytes)
    if config.draft_model is not None:
        fetch(str(config.draft_model))
    engine = AsyncEngine(source, config, observer=recording)
    engine.warm_forms(after_s=_FORMS_AFTER_S)
    return engine


def _load_first(
    source: str, config: EngineConfig, recording: Recording | None, memory_bytes: int | None
) -> AsyncEngine:
    """As `_load`, with the share of the memory that the server's shelf gives to a model that finds it empty."""
    if memory_bytes is None:
        return _load(source, config, recording, None)
    from spolia.server.shelf import kv_share

    return _load(source, config, recording, kv_share(memory_bytes - _size_bytes(source, config)))


def _size_bytes(source: str, config: EngineConfig) -> int:
    """What it takes in memory at least; packed weights are about as large as those in the file."""
    path = fetch(source)
    files = path.glob("*.safetensors") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files) + (config.kv_memory or 0)


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
