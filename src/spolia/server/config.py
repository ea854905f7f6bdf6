"""The server's own settings; what the engine needs is in `EngineConfig`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["ServerConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Checked at birth.

    Attributes:
        host: address to listen on. The default is reachable from this machine only.
        port: 0 lets the system choose one.
        max_waiting: requests that may wait for their first step; the next one is answered 429.
        max_body_bytes: a longer request body is answered 413 and not read to its end.
        body_timeout_s: a body that takes longer to arrive is answered 408.
        request_timeout_s: an answer that takes longer, queueing included, is ended where it is: finish_reason "length",
            stop_reason "request_timeout"; one that has not begun is answered 504.
        memory_bytes: for all models, weights and KV; None: what the system has available.
        keep_alive_s: for how long a model stays in memory without a request; None: until its memory is wanted.
        load_wait_s: how long a request waits for its model to be loaded; then it is answered 503, with the reason.
        keys: file of API keys, see `server.access.keys`; None asks nobody for one.
        traces: URL of a collector of OpenTelemetry's, OTLP over HTTP, that gets a trace an answer; None: nobody does.
        mcp: file of MCP servers, see `server.mcp.config`; None: there are none.
        slot_save_path: folder of the files that llama.cpp's clients save slots to, made if it is not there; None: they
            cannot.
        kv_events: ZMQ endpoint at which events of the caches are published; None: nowhere.
        kv_events_replay: ZMQ endpoint at which they can be asked for again; None: nowhere.
        tls_cert: certificate chain in PEM, with which the server speaks HTTPS; None: HTTP.
        tls_key: its private key.
        warm: file of prompts that are computed when a model was loaded, see `server.warming`; None: none are.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    max_waiting: int = 1024
    max_body_bytes: int = 32 << 20
    body_timeout_s: float = 60.0
    request_timeout_s: float = 3600.0
    memory_bytes: int | None = None
    keep_alive_s: float | None = None
    load_wait_s: float = 600.0
    keys: Path | None = None
    traces: str | None = None
    mcp: Path | None = None
    slot_save_path: Path | None = None
    kv_events: str | None = None
    kv_events_replay: str | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    warm: Path | None = None

    def __post_init__(self) -> None:
        if not self.host:  # the system would take it for every address
            raise ValueError("host is empty; name an address, such as 127.0.0.1, or 0.0.0.0 for every one")
        for name, low, high in (
            ("port", 0, 65535),
            ("max_waiting", 1, 1 << 20),
            ("max_body_bytes", 1024, 1 << 40),
            ("body_timeout_s", 0.01, 86_400),
            ("request_timeout_s", 0.01, 7 * 86_400),
            ("load_wait_s", 0, 86_400),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise ValueError(f"{name} is {value}; allowed are {low} to {high}")
        if self.traces is not None and not self.traces.startswith(("http://", "https://")):
            raise ValueError(f"traces is {self.traces!r}; it must be a URL such as http://127.0.0.1:4318/v1/traces")
        for name in ("kv_events", "kv_events_replay"):
            endpoint = getattr(self, name)
            if endpoint is not None and "://" not in endpoint:
                raise ValueError(f"{name} is {endpoint!r}; it must be an endpoint such as tcp://127.0.0.1:5557")
        if self.kv_events is None and self.kv_events_replay is not None:
            raise ValueError("kv_events_replay is given without kv_events, so there is nothing to ask for; give both")
        if self.memory_bytes is not None and self.memory_bytes < 1:
            raise ValueError(f"memory_bytes is {self.memory_bytes}; it must be at least 1")
        if self.keep_alive_s is not None and not self.keep_alive_s >= 0:
            raise ValueError(f"keep_alive_s is {self.keep_alive_s}; it must be 0 or more seconds, or None for no limit")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key belong together: give both, or neither")
        for name in ("tls_cert", "tls_key"):
            path = getattr(self, name)
            if path is not None and not path.is_file():
                raise ValueError(f"{name} is {path}, where there is no file")
