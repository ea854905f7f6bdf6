"""Subcommands and their flags. Imports nothing but typer: see the package's docstring."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from spolia.cli.configuration import ConfiguredCommand
from spolia.cli.expansion import Only, expanded
from spolia.cli.flags import ConfigFlag, EngineFlags, SamplingFlags, ServerFlags
from spolia.cli.folder_app import add_folder_commands
from spolia.cli.operator_app import add_operator_commands
from spolia.errors import InvalidRequest, SpoliaError

__all__ = ["app", "main"]

# Plain help: rich's would triple the time to show it.
app = typer.Typer(
    name="spolia",
    help="LLM inference whose first-class citizen is the KV cache.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
config_app = typer.Typer(help="Look at the settings.", rich_markup_mode=None, no_args_is_help=True)
cache_app = typer.Typer(
    help="Look into the cache, of a server or in a folder.", rich_markup_mode=None, no_args_is_help=True
)
models_app = typer.Typer(help="List the models that have a name, or remove one.", rich_markup_mode=None)
app.add_typer(models_app, name="models")
app.add_typer(cache_app, name="cache")
app.add_typer(config_app, name="config")
add_folder_commands(cache_app)
add_operator_commands(cache_app)

_ONLY = (
    "Which of decode_b1, prefill_1024, warm_2048, decode_4000, batch_128_64, shared_prefix and multiturn to run, with "
    "commas; beginnings will do. Default: all."
)


def _model_names(incomplete: str) -> list[str]:
    """For the shell: names, and beginnings of paths are the shell's own."""
    from spolia.models import list_models

    return [listing.name for listing in list_models() if listing.name.startswith(incomplete)]


ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A name that `spolia models` lists, a path, or hf:owner/repo[/file].",
        autocompletion=_model_names,
    ),
]

# What a process that answers one person takes of the engine's flags, and what a conversation takes of the sampling's.
LocalEngineFlags = Annotated[
    EngineFlags,
    Only(
        "kv_dtype",
        "kv_memory",
        "kv_disk",
        "kv_disk_size",
        "num_threads",
        "max_context",
        "speculation",
        "draft_model",
        "check",
    ),
]
TalkFlags = Annotated[
    SamplingFlags,
    Only(
        "max_tokens",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "seed",
        "stop",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "more",
    ),
]


def main() -> None:
    """Run the command line and exit: 0 done, 1 failed, 2 asked for something impossible."""
    try:
        try:
            app()
        finally:
            sys.stdout.flush()  # here, where it can be told; at the interpreter's end it would be a traceback
    except SpoliaError as error:
        if os.environ.get("SPOLIA_DEBUG"):
            raise
        print(f"spolia: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, InvalidRequest) else 1)
    except OSError as error:
        if os.environ.get("SPOLIA_DEBUG") or error.filename is not None:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left to write would fail again
        print(f"spolia: the output cannot be written: {error.strerror or error}", file=sys.stderr)
        sys.exit(1)


def _show_version(wanted: bool) -> None:
    if wanted:
        from spolia import __version__

        print(f"spolia {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


@app.command(cls=ConfiguredCommand)
@expanded
def serve(
    *,
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL]...",
            help="Names that `spolia models` lists, paths, or hf:owner/repo[/file]. They are loaded in this order "
            "while there is room, and else by their first request. Default: all that are here, by their first request.",
            autocompletion=_model_names,
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="What clients call the model. Default: MODEL, or its file's name.")
    ] = None,
    pin: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Never unload this model; may be repeated.")
    ] = None,
    server: ServerFlags,
    log_format: Annotated[str | None, typer.Option(metavar="FORM", help="Log as text (default) or json.")] = None,
    record: Annotated[
        Path | None,
        typer.Option(help="Append each request to this trace, for `spolia sim`. It holds no text, nor token ids."),
    ] = None,
    engine: EngineFlags,
    config: ConfigFlag = None,
) -> None:
    """Serve models over HTTP, and a page at /: a chat, and the cache.

    OpenAI's, Anthropic's, Ollama's and llama.cpp's clients work unchanged.

    Ctrl-C finishes what runs, and twice aborts it.
    """
    from spolia.cli.serve import run

    run(models or [], name=name, engine=engine, server=server, log_format=log_format, record=record, pinned=pin or [])


@app.command(cls=ConfiguredCommand)
@expanded
def generate(
    *,
    model: ModelArgument,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help='The prompt; "-" reads it from standard input.')],
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    system: Annotated[str | None, typer.Option(help="A system message before the prompt.")] = None,
    sampling: SamplingFlags,
    engine: LocalEngineFlags,
    config: ConfigFlag = None,
) -> None:
    """Answer one PROMPT. The text goes to standard output, figures to standard error."""
    from spolia.cli.generate import run

    run(model, prompt, raw=raw, system=system, sampling=sampling, engine=engine)


@app.command(cls=ConfiguredCommand)
@expanded
def chat(
    *,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="A name that `spolia models` lists, a path, or hf:owner/repo[/file]; with --url, one of the server's.",
            autocompletion=_model_names,
        ),
    ] = None,
    url: Annotated[str | None, typer.Option(help="Talk to a model of this server, not of this process.")] = None,
    key: Annotated[
        str | None, typer.Option(envvar="SPOLIA_API_KEY", help="An API key, if the server wants one.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="A system message before the conversation.")] = None,
    sampling: TalkFlags,
    engine: LocalEngineFlags,
    config: ConfigFlag = None,
) -> None:
    """Talk to MODEL. One line is one message; each answer shows how much of the conversation was reused."""
    from spolia.cli.chat import run, run_remote

    if url is not None:
        run_remote(url, model=model, key=key, system=system, sampling=sampling, engine=engine)
    elif model is None:
        raise InvalidRequest("name a model, such as smollm2, or a running server with --url", param="model")
    else:
        run(model, system=system, sampling=sampling, engine=engine)


@config_app.command("show", context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def show_config(
    context: typer.Context,
    command: Annotated[str, typer.Argument(metavar="[COMMAND]", help="serve, chat or generate.")] = "serve",
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Print each setting of COMMAND (serve), and whether a flag, the environment, the file or the default says so.

    What follows COMMAND is taken as its own command line. A setting may be given as a flag (--kv-memory 2GiB), in the
    environment (SPOLIA_KV_MEMORY=2GiB), or in a TOML file (kv_memory = "2GiB"; under [serve] for serve alone), which
    --config or SPOLIA_CONFIG names; else it is ~/.config/spolia/config.toml. The first that is there wins.
    """
    from spolia.cli.config import show

    show(context, command, context.args, as_json=as_json)


@app.command()
def top(
    url: Annotated[str, typer.Option(help="The server.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Of its models. Default: the first.")] = None,
    key: Annotated[
        str | None, typer.Option(envvar="SPOLIA_API_KEY", help="An API key with admin = true, if the server wants one.")
    ] = None,
    interval: Annotated[float, typer.Option(metavar="SECONDS", min=0.1, help="Between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Show it once and exit.")] = False,
) -> None:
    """Watch a server: pools, tiers, what is cached, requests. Ctrl-C ends."""
    from spolia.cli.top import run

    run(url, model=model, key=key, interval_s=interval, once=once)


@app.command()
def ps(
    url: Annotated[str, typer.Option(help="The server.")] = "http://127.0.0.1:8000",
    key: Annotated[
        str | None, typer.Option(envvar="SPOLIA_API_KEY", help="An API key, if the server wants one.")
    ] = None,
) -> None:
    """Show a server's models, their memory, and until when they stay."""
    from spolia.cli.ps import run

    run(url, key=key)


@app.command()
def pull(model: ModelArgument) -> None:
    """Fetch MODEL, check it, and print where it is."""
    from spolia.cli.models import fetch

    print(fetch(model))


@models_app.callback(invoke_without_command=True)
def models(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        from spolia.cli.models import show

        show()


@models_app.command("rm")
def remove(name: Annotated[str, typer.Argument(metavar="NAME", help="As `spolia models` lists it.")]) -> None:
    """Delete a model's file from the cache folder."""
    from spolia.cli.models import remove

    remove(name)


@cache_app.command()
def explain(
    request: Annotated[str, typer.Argument(metavar="REQUEST", help="The id of an answer, or its x-request-id.")],
    url: Annotated[str, typer.Option(help="The server.")] = "http://127.0.0.1:8000",
) -> None:
    """Show where a prompt's KV came from; why the rest was computed."""
    from spolia.cli.cache import explain

    explain(request, url)


@cache_app.command()
def lint(
    model: Annotated[str | None, typer.Argument(metavar="[MODEL]", help="Check this model's chat template.")] = None,
    traffic: Annotated[
        Path | None, typer.Option(help="Check recorded chat requests: a JSON body a line, in their order.")
    ] = None,
) -> None:
    """Find what makes prompts differ from earlier ones (then exits 1)."""
    from spolia.cli.cache import lint

    if not lint(model, traffic):
        raise typer.Exit(1)


@app.command()
def sim(
    trace: Annotated[
        Path, typer.Argument(metavar="TRACE", help="A file of `serve --record`, Mooncake's or agent sessions; .gz too.")
    ],
    policy: Annotated[str, typer.Option(help="Policies, with commas. Default: all.")] = "",
    sizes: Annotated[
        str, typer.Option(help="Cache sizes in tokens, with commas, like 64k,1.5M. Default: up to all of the trace.")
    ] = "",
    spread: Annotated[
        float, typer.Option(help="Sessions without a date begin at random within so many hours.", min=0)
    ] = 4.0,
    seed: Annotated[int, typer.Option(help="Of when they begin.")] = 0,
    png: Annotated[Path | None, typer.Option(help="Draw the miss-ratio curve into this file.")] = None,
) -> None:
    """Replay TRACE through the cache without a model.

    Prints hit rates by policy and size, and the miss-ratio curve.
    """
    from spolia.cli.sim import run

    run(trace, policies=_listed(policy), sizes=_listed(sizes), spread_s=3600 * spread, seed=seed, png=png)


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


@app.command()
@expanded
def bench(
    *,
    source: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Serve this model for the run, where there is no --url.")
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(help="A server with OpenAI's /v1/completions, Spolia or not; /v1 at the end is optional."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Its model. Default: the first that it lists.")] = None,
    vocab: Annotated[int | None, typer.Option(help="Vocabulary size. Default: what the server says, or 32000.")] = None,
    only: Annotated[str, typer.Option(help=_ONLY)] = "",
    concurrency: Annotated[int, typer.Option(help="Streams at once in the batch workloads.", min=1)] = 16,
    seed: Annotated[int, typer.Option(help="Of the prompts.")] = 7,
    roofline: Annotated[
        bool,
        typer.Option(
            "--roofline", help="MODEL's kernels instead: where a step's time goes, beside this machine's limits."
        ),
    ] = False,
    label: Annotated[str, typer.Option(help="Put into each line of JSON.")] = "",
    engine: Annotated[EngineFlags, Only("kv_dtype", "kv_memory", "num_threads", "max_context")],
) -> None:
    """Measure a server with KV-cache workloads. Prints a line of JSON for each, and a table."""
    from spolia.cli.bench import Target, run

    if roofline:
        from spolia.cli.roofline import run as run_roofline

        run_roofline(source, engine=engine)
        return
    run(
        Target(source=source, url=url, model=model, vocab_size=vocab, engine=engine),
        only=[name for name in only.split(",") if name],
        concurrency=concurrency,
        seed=seed,
        label=label,
    )
