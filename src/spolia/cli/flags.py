"""Flags by what they set, each written once: see `expansion`.

A flag left out is None, so every default has one home: the settings' class, or the subcommand's defaults here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spolia.cli.configuration import use_file
from spolia.errors import InvalidRequest, SpoliaError
from spolia.sizes import parse_bytes

if TYPE_CHECKING:
    from spolia.engine import EngineConfig, SamplingParams
    from spolia.server import ServerConfig

__all__ = [
    "CHAT_DEFAULTS",
    "GENERATE_DEFAULTS",
    "ConfigFlag",
    "EngineFlags",
    "SamplingFlags",
    "ServerFlags",
    "no_answer",
    "parse_size",
    "parse_url",
    "size_text",
]

# The likeliest answer: the same words for whoever tries it.
GENERATE_DEFAULTS: dict[str, Any] = {"max_tokens": 512, "temperature": 0.0}
CHAT_DEFAULTS: dict[str, Any] = {"max_tokens": 1024, "temperature": 0.7}


def parse_size(text: str) -> int:
    """Bytes of "2GiB", "512m", "1.5 GB" or "65536".

    Raises:
        typer.BadParameter: anything else.
    """
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def no_answer(place: str, error: Exception) -> SpoliaError:
    """What to say when no server is running at a URL."""
    told = str(error) or type(error).__name__
    return SpoliaError(f"{place} does not answer ({told}); is `spolia serve` running there? --url says where")


def parse_url(text: str) -> str:
    """A server's address, without the `/v1` that clients of OpenAI's have after it.

    Raises:
        InvalidRequest: it is none.
    """
    scheme, separator, rest = text.partition("://")
    if scheme not in ("http", "https") or not separator or not rest.strip("/"):
        raise InvalidRequest(
            f"--url is {text!r}; it must be a server's address, such as http://127.0.0.1:8000", param="url"
        )
    return text.rstrip("/").removesuffix("/v1")


def _defaults(name: str) -> str:
    return f"Default: {GENERATE_DEFAULTS[name]:g}; for chat {CHAT_DEFAULTS[name]:g}."


ConfigFlag = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        envvar="SPOLIA_CONFIG",
        show_envvar=False,
        is_eager=True,
        callback=use_file,
        help="Take flags that are not given from this TOML file, as `spolia config show --help` says.",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFlags:
    """Fields are those of `EngineConfig`."""

    kv_dtype: Annotated[
        str | None,
        typer.Option(
            "--kv-dtype",
            metavar="TYPE",
            help="Keep keys and values as bf16 (default), f16 or f32; or int8: half the memory, nearly the same "
            "answers.",
        ),
    ] = None
    kv_memory: Annotated[
        int | None,
        typer.Option(
            "--kv-memory",
            metavar="SIZE",
            parser=parse_size,
            help="Memory for the KV cache, like 2GiB. Default: what it can use, up to a quarter of what is available.",
        ),
    ] = None
    kv_policy: Annotated[
        str | None,
        typer.Option(
            "--kv-policy",
            metavar="NAME",
            help="What goes first when the cache is full: lru (default), lfu, slru, s3fifo, fifo, ttl, priority, cost, "
            "lifecycle, or your own as package.module:Class.",
        ),
    ] = None
    kv_host: Annotated[
        int | None,
        typer.Option(
            "--kv-host",
            metavar="SIZE",
            parser=parse_size,
            help="Memory for KV that --kv-memory had to give up. Default: none.",
        ),
    ] = None
    kv_disk: Annotated[
        str | None,
        typer.Option(
            "--kv-disk",
            metavar="DIR",
            help="Keep KV in this folder, too: it outlives the process. Default: in memory only.",
        ),
    ] = None
    kv_disk_size: Annotated[
        int | None,
        typer.Option(
            "--kv-disk-size",
            metavar="SIZE",
            parser=parse_size,
            help="Most that --kv-disk may hold, like 20GiB. Default: half of what is free there.",
        ),
    ] = None
    kv_remote: Annotated[
        str | None,
        typer.Option(
            "--kv-remote",
            metavar="URL",
            help="Share KV with other servers through valkey://HOST, s3://BUCKET/PREFIX, or your own "
            "package.module:Class.",
        ),
    ] = None
    kv_offload_dtype: Annotated[
        str | None,
        typer.Option(
            "--kv-offload-dtype",
            metavar="TYPE",
            help="How host, disk and remote keep KV: exact (default), or smaller and not quite what was computed: int8 "
            "(half the bytes), int4 (a third). Answers tell how many tokens that was.",
        ),
    ] = None
    kv_encrypt: Annotated[
        str | None,
        typer.Option(
            "--kv-encrypt",
            metavar="KEY",
            help="Encrypt what leaves memory with the key at file:PATH or env:NAME, 32 bytes or 64 hex digits.",
        ),
    ] = None
    kv_ttl_s: Annotated[
        float | None,
        typer.Option(
            "--kv-ttl",
            metavar="SECONDS",
            help="Drop what nobody has used for so long from --kv-disk, and from a --kv-remote by URL. Default: never.",
        ),
    ] = None
    kv_write: Annotated[
        str | None,
        typer.Option(
            "--kv-write",
            metavar="WHEN",
            help="Write to disk and remote write_through (as computed; default), write_back (when it leaves memory) or "
            "selective (when two requests have used it).",
        ),
    ] = None
    kv_fetch: Annotated[
        str | None,
        typer.Option(
            "--kv-fetch",
            metavar="HOW",
            help="Requests wait for KV from other tiers: planned (while that is sooner than computing; default), wait, "
            "timeout (a second at most) or best_effort (not at all).",
        ),
    ] = None
    num_threads: Annotated[
        int | None,
        typer.Option("--threads", help="Compute threads. Default: one per physical core, or fewer if quicker."),
    ] = None
    max_context: Annotated[
        int | None,
        typer.Option(
            "--max-context", help="Most tokens of a prompt and its answer. Default: the model's own, or as many as fit."
        ),
    ] = None
    stream_interval_ms: Annotated[
        float | None,
        typer.Option(
            "--stream-interval",
            metavar="MS",
            help="Streams get new text at most this often, in milliseconds. Default: 16. 0: each token on its own.",
        ),
    ] = None
    speculation: Annotated[
        str | None,
        typer.Option(
            "--speculation",
            metavar="KIND",
            help="Guess tokens ahead, which changes no answer: prompt, tree, auto (either), or off. Default: off.",
        ),
    ] = None
    draft_model: Annotated[
        str | None,
        typer.Option(
            "--draft-model",
            metavar="MODEL",
            help="A smaller model with the same tokens that writes ahead where that pays. Default: none.",
        ),
    ] = None
    processors: Annotated[
        list[str] | None,
        typer.Option(
            "--processor",
            metavar="NAME=MODULE:CLASS",
            help="A logits processor of your own, which requests may name; may be repeated.",
        ),
    ] = None
    check: Annotated[
        bool | None, typer.Option("--check", help="Verify every invariant of the cache after each step. Slow.")
    ] = None

    def config(self) -> EngineConfig:
        """
        Raises:
            InvalidRequest: a value that is not allowed.
        """
        from spolia.engine import EngineConfig

        given = _given(self)
        if "processors" in given:
            given["processors"] = tuple(given["processors"])
        return EngineConfig(**given)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingFlags:
    """Fields are those of `SamplingParams`, kinds of `StructuredOutput`, and `more`: others, as NAME=VALUE."""

    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", "-n", help=f"Most tokens to generate. {_defaults('max_tokens')}")
    ] = None
    temperature: Annotated[
        float | None,
        typer.Option(
            "--temperature", "-t", help=f"0 takes the most likely token each time. {_defaults('temperature')}"
        ),
    ] = None
    top_k: Annotated[int | None, typer.Option("--top-k", help="Only the k most likely tokens. Default: all.")] = None
    top_p: Annotated[
        float | None,
        typer.Option("--top-p", help="Only the likeliest tokens of this total probability. Default: 1, all."),
    ] = None
    min_p: Annotated[
        float | None,
        typer.Option("--min-p", help="Only tokens this likely relative to the likeliest. Default: 0, all."),
    ] = None
    seed: Annotated[
        int | None, typer.Option("--seed", help="The same seed gives the same answer. Default: a new one each time.")
    ] = None
    stop: Annotated[
        list[str] | None, typer.Option("--stop", metavar="TEXT", help="End at this text; may be repeated.")
    ] = None
    repetition_penalty: Annotated[
        float | None,
        typer.Option("--repeat-penalty", help="Above 1, what was said becomes less likely. Default: 1, off."),
    ] = None
    presence_penalty: Annotated[
        float | None, typer.Option("--presence-penalty", help="Taken off the logit of what the answer has. Default: 0.")
    ] = None
    frequency_penalty: Annotated[
        float | None, typer.Option("--frequency-penalty", help="Taken off for each time that it has it. Default: 0.")
    ] = None
    json_schema: Annotated[
        str | None,
        typer.Option("--json-schema", metavar="SCHEMA", help="The answer is JSON of this schema: its text, or @FILE."),
    ] = None
    regex: Annotated[str | None, typer.Option("--regex", help="The answer matches this regular expression.")] = None
    grammar: Annotated[
        str | None,
        typer.Option(
            "--grammar", metavar="GRAMMAR", help="The answer follows this grammar, GBNF or Lark: text, or @FILE."
        ),
    ] = None
    more: Annotated[
        list[str] | None,
        typer.Option(
            "--param",
            metavar="NAME=VALUE",
            help="Any other field of SamplingParams, such as typical_p=0.9 or bad_words='[\"foo\"]'; may be repeated.",
        ),
    ] = None

    def params(self, **defaults: Any) -> SamplingParams:
        """With this subcommand's `defaults` for what was not given.

        Raises:
            InvalidRequest: a value that is not allowed.
        """
        from spolia.engine import SamplingParams

        given = _given(self)
        more = dict(_parameter(text) for text in given.pop("more", ()))
        form = {
            "json": _text_or_file(given.pop("json_schema", None)),
            "regex": given.pop("regex", None),
            "grammar": _text_or_file(given.pop("grammar", None)),
        }
        if any(form.values()):
            more["structured_outputs"] = form
        given["stop"] = tuple(given.get("stop", ()))
        return SamplingParams(**{**defaults, **given, **more})

    def body(self, **defaults: Any) -> dict[str, Any]:
        """As fields of a request to a server."""
        given = _given(self)
        more = dict(_parameter(text) for text in given.pop("more", ()))
        return {**defaults, **given, **more}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFlags:
    """Fields are those of `ServerConfig`; `keep_alive_s` as it was typed."""

    host: Annotated[
        str | None, typer.Option("--host", help="Address to listen on. Default: 127.0.0.1, this machine only.")
    ] = None
    port: Annotated[int | None, typer.Option("--port", help="Default: 8000; 0 takes a free one.")] = None
    memory_bytes: Annotated[
        int | None,
        typer.Option(
            "--memory",
            metavar="SIZE",
            parser=parse_size,
            help="Memory for all models, weights and KV, like 8GiB. Default: what is available.",
        ),
    ] = None
    keep_alive_s: Annotated[
        str | None,
        typer.Option(
            "--keep-alive",
            metavar="DURATION",
            help="Unload a model after so long without a request, like 5m. Default: when another needs its memory.",
        ),
    ] = None
    max_waiting: Annotated[
        int | None,
        typer.Option("--max-waiting", help="Requests that may queue; the next is answered 429. Default: 1024."),
    ] = None
    warm: Annotated[
        Path | None,
        typer.Option(
            "--warm", metavar="FILE", help="Compute these prompts first: a JSON body of /v1/cache/warm a line."
        ),
    ] = None
    keys: Annotated[
        Path | None,
        typer.Option("--keys", metavar="FILE", help="TOML file of API keys. Default: nobody is asked for one."),
    ] = None
    tls_cert: Annotated[
        Path | None, typer.Option("--tls-cert", metavar="FILE", help="Certificate chain in PEM: HTTPS.")
    ] = None
    tls_key: Annotated[
        Path | None, typer.Option("--tls-key", metavar="FILE", help="The certificate's private key.")
    ] = None
    max_body_bytes: Annotated[
        int | None,
        typer.Option("--max-body", metavar="SIZE", parser=parse_size, help="Largest request body. Default: 32MiB."),
    ] = None
    request_timeout_s: Annotated[
        float | None,
        typer.Option("--request-timeout", metavar="SECONDS", help="Longest that an answer may take. Default: 3600."),
    ] = None
    traces: Annotated[
        str | None,
        typer.Option(
            "--traces", metavar="URL", help="Send OpenTelemetry traces there (OTLP), like http://HOST:4318/v1/traces."
        ),
    ] = None
    kv_events: Annotated[
        str | None,
        typer.Option(
            "--kv-events",
            metavar="ENDPOINT",
            help="Publish what the cache stores and gives up over ZMQ, like tcp://*:5557.",
        ),
    ] = None
    kv_events_replay: Annotated[
        str | None,
        typer.Option(
            "--kv-events-replay", metavar="ENDPOINT", help="Where those events can be asked for again, over ZMQ."
        ),
    ] = None
    mcp: Annotated[
        Path | None,
        typer.Option(
            "--mcp", metavar="FILE", help='MCP servers whose tools chat requests with "mcp" may use. Default: none.'
        ),
    ] = None
    slot_save_path: Annotated[
        Path | None,
        typer.Option(
            "--slot-save-path", metavar="DIR", help="Where llama.cpp's clients may save slots. Default: nowhere."
        ),
    ] = None

    def config(self) -> ServerConfig:
        """
        Raises:
            InvalidRequest: a value that is not allowed.
        """
        from spolia.server import ServerConfig, parse_duration

        given = _given(self)
        try:
            if self.keep_alive_s is not None:
                given["keep_alive_s"] = parse_duration(self.keep_alive_s)
            return ServerConfig(**given)
        except SpoliaError:
            raise
        except ValueError as error:
            raise InvalidRequest(str(error)) from None


def _text_or_file(value: str | None) -> str | None:
    """A flag's own text, or that of the file which it names after an @."""
    if value is None or not value.startswith("@"):
        return value
    try:
        return Path(value[1:]).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{value[1:]!r} cannot be read: {error}") from None


def _parameter(text: str) -> tuple[str, Any]:
    """ "top_h=0.4" as a name and a value: JSON, or else text."""
    from spolia.engine import SamplingParams

    name, equals, value = text.partition("=")
    known = [field.name for field in fields(SamplingParams)]
    if not equals or name not in known:
        from difflib import get_close_matches

        near = get_close_matches(name, known, 3, 0.5)
        meant = f"did you mean {' or '.join(near)}?" if near else f"names are {', '.join(known)}"
        raise typer.BadParameter(f"--param takes NAME=VALUE, and {text!r} is no such thing; {meant}")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def _given(flags: EngineFlags | SamplingFlags | ServerFlags) -> dict[str, Any]:
    values = {field.name: getattr(flags, field.name) for field in fields(flags)}
    return {name: value for name, value in values.items() if value is not None}


def size_text(num_bytes: int) -> str:
    """As `parse_size` reads it, rounded."""
    value, units = float(num_bytes), iter(["B", "KiB", "MiB", "GiB", "TiB"])
    unit = next(units)
    while value >= 1024 and unit != "TiB":
        value, unit = value / 1024, next(units)
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
