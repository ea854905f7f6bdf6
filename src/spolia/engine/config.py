"""The engine's settings, checked at birth. `spolia serve`'s flags derive from these fields."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from spolia.errors import InvalidRequest
from spolia.kernels import BACKENDS, KvDtype, KvRounding
from spolia.tiers import FetchPolicy, WritePolicy

__all__ = ["EngineConfig"]

_MAX_THREADS = 1024
_MAX_INTERVAL_MS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine; None means measured at start.

    Attributes:
        kv_dtype: how keys and values are kept: "bf16", "f16", "f32", or in half the bytes "int8", which moves answers a
            little. What it does to the model is measured at the start, and refused if it is much.
        kv_memory: bytes for all KV pools; None: a quarter of the memory that is available, and no more than
            `max_sequences` sequences of `max_context` tokens could fill.
        kv_policy: what goes first when the cache is full: a key of `kvcache.POLICIES`, or `package.module:Class`.
        num_threads: None: one per physical core that this process may use, or fewer if that was quicker when the model
            first ran here.
        max_context: most tokens of a prompt and its answer; None: the model's own limit, or less if fewer fit in the
            pools.
        max_batch_tokens: token budget of a step. Long prompts are computed in pieces of at most this.
        max_sequences: most sequences that run at a time, each of which needs a token a step; more wait.
        stream_interval_ms: `AsyncEngine`'s streams get what was generated at most this often, but for an answer's first
            token and its end, which come at once. 0: every token on its own.
        kv_disk: folder in which KV outlives the process; None: none does.
        kv_disk_size: bytes in that folder; None: half of what is free there, what it holds already included.
        kv_ttl_s: seconds after which blocks that nobody used leave folder, Valkey server and object store; None: never.
        kv_remote: a cache server that several engines share: a URL (valkey://, redis://, s3://, ...), or
            "package.module:Class" of a `tiers.StorageBackend`; None: none.
        kv_encrypt: where the key is that extents are sealed with, "file:PATH" or "env:NAME"; None: only checksums.
        kv_host: bytes of memory for KV that the pools had to give up; None: none.
        kv_offload_dtype: how blocks are kept in host, disk and remote: "exact", or in fewer bits, "int8" or "int4".
            What comes back from fewer bits is not quite what was computed; answers tell how many tokens that was.
        kv_write: when blocks are written below memory: "write_through" (as they are computed), "write_back" (when they
            have to leave memory), "selective" (when they have served `kv_min_uses` requests).
        kv_min_uses: see `kv_write`.
        kv_fetch: who waits for KV from other tiers: "planned" (as long as that is sooner than computing it), "wait",
            "timeout" (for `kv_fetch_timeout_s` at most), "best_effort" (nobody).
        kv_fetch_timeout_s: see `kv_fetch`.
        speculation: guess tokens ahead and check several in one step, which changes no answer: "prompt" (what followed
            the same words earlier in the text), "tree" (what followed the same text in the cache), "auto" (either, and
            what followed the same words in the tenant's other texts), or "off" (only what the answer's form forces).
        draft_model: a smaller model with the same tokens, which writes ahead where that pays; None: none does. Its KV
            takes its part of `kv_memory`.
        backend: a key of `kernels.BACKENDS`: "cpu", or "reference" (slow, exact numpy).
        cache_salt: engine-wide secret mixed into every namespace, so that nobody outside can guess keys.
        processors: makers of logits processors that requests may use by name, as "NAME=module:Class".
        check: verify every invariant of the cache after each step. Slow.
    """

    kv_dtype: KvDtype = "bf16"
    kv_memory: int | None = None
    kv_policy: str = "lru"
    num_threads: int | None = None
    max_context: int | None = None
    max_batch_tokens: int = 256
    max_sequences: int = 64
    stream_interval_ms: float = 16.0
    kv_disk: str | Path | None = None
    kv_disk_size: int | None = None
    kv_ttl_s: float | None = None
    kv_remote: str | None = None
    kv_encrypt: str | None = None
    kv_host: int | None = None
    kv_offload_dtype: Literal["exact"] | KvRounding = "exact"
    kv_write: WritePolicy = "write_through"
    kv_min_uses: int = 2
    kv_fetch: FetchPolicy = "planned"
    kv_fetch_timeout_s: float = 1.0
    speculation: str = "off"
    draft_model: str | Path | None = None
    backend: str = "cpu"
    cache_salt: str = ""
    processors: tuple[str, ...] = ()
    check: bool = False

    def __post_init__(self) -> None:
        if self.kv_dtype not in get_args(KvDtype):
            raise InvalidRequest(
                f"kv_dtype is {self.kv_dtype!r}; it must be one of {', '.join(get_args(KvDtype))}", param="kv_dtype"
            )
        for name, allowed in (
            ("kv_offload_dtype", ("exact", *get_args(KvRounding))),
            ("kv_write", get_args(WritePolicy)),
            ("kv_fetch", get_args(FetchPolicy)),
        ):
            if getattr(self, name) not in allowed:
                raise InvalidRequest(
                    f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(allowed)}", param=name
                )
        if self.kv_ttl_s is not None and not 0 < self.kv_ttl_s < math.inf:
            raise InvalidRequest(
                f"kv_ttl_s is {self.kv_ttl_s}; it must be a number of seconds above 0", param="kv_ttl_s"
            )
        if not 0 <= self.kv_fetch_timeout_s < math.inf:
            raise InvalidRequest(
                f"kv_fetch_timeout_s is {self.kv_fetch_timeout_s}; it must be a number of seconds, 0 or more",
                param="kv_fetch_timeout_s",
            )
        if self.backend not in BACKENDS:
            raise InvalidRequest(
                f"backend is {self.backend!r}; it must be one of {', '.join(BACKENDS)}", param="backend"
            )
        if self.speculation not in ("off", "prompt", "tree", "auto"):
            raise InvalidRequest(
                f"speculation is {self.speculation!r}; it must be one of off, prompt, tree, auto", param="speculation"
            )
        if self.draft_model is not None and self.speculation == "off":
            raise InvalidRequest(
                f"draft_model is {str(self.draft_model)!r}, but speculation is off; set it to auto, or leave the draft "
                "model out",
                param="draft_model",
            )
        for entry in self.processors:
            name, equals, path = entry.partition("=") if isinstance(entry, str) else ("", "", "")
            if not (equals and name.isidentifier() and ":" in path):
                raise InvalidRequest(
                    f"processors holds {entry!r}; write NAME=module:Class, such as quiet=my_package.processors:Quiet",
                    param="processors",
                )
        for name in (
            "kv_memory",
            "num_threads",
            "max_context",
            "max_batch_tokens",
            "max_sequences",
            "kv_disk_size",
            "kv_host",
            "kv_min_uses",
        ):
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise InvalidRequest(f"{name} is {value!r}; it must be an integer", param=name)
            if value < 1:
                raise InvalidRequest(f"{name} is {value}; it must be at least 1", param=name)
        interval = self.stream_interval_ms
        if isinstance(interval, bool) or not isinstance(interval, int | float) or not 0 <= interval <= _MAX_INTERVAL_MS:
            raise InvalidRequest(
                f"stream_interval_ms is {interval!r}; it must be a number from 0 to {_MAX_INTERVAL_MS}",
                param="stream_interval_ms",
            )
        if self.kv_disk is None and self.kv_disk_size is not None:
            raise InvalidRequest(
                f"kv_disk_size is {self.kv_disk_size}, but kv_disk names no folder; name one", param="kv_disk_size"
            )
        if self.num_threads is not None and self.num_threads > _MAX_THREADS:
            raise InvalidRequest(
                f"num_threads is {self.num_threads}; it must be {_MAX_THREADS} at most, and more than the machine has "
                "cores only slows it down",
                param="num_threads",
            )
