"""What `spolia cache` does to the cache of a running server. Imports nothing but typer: see the package's docstring."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from spolia.cli.flags import parse_size

__all__ = ["add_operator_commands"]

UrlOption = Annotated[str, typer.Option("--url", help="The server.")]
KeyOption = Annotated[
    str | None,
    typer.Option("--key", envvar="SPOLIA_API_KEY", help="An API key with admin = true, if the server wants one."),
]
ModelOption = Annotated[str | None, typer.Option("--model", help="Of its models, where it has several.")]
PromptArgument = Annotated[str | None, typer.Argument(metavar="[PROMPT]", help="Its text.")]
SessionOption = Annotated[str | None, typer.Option("--session", metavar="ID", help="Or a session's.")]
MessagesOption = Annotated[
    Path | None, typer.Option("--messages", metavar="FILE", help="Or a conversation: a JSON list of messages.")
]
ExactOption = Annotated[
    bool, typer.Option("--exact-kv", help="That of requests with exact_kv, where tiers keep KV in fewer bits.")
]
SaltOption = Annotated[str | None, typer.Option("--salt", help="The cache_salt of its requests.")]
_URL = "http://127.0.0.1:8000"


def add_operator_commands(app: typer.Typer) -> None:
    """Add them to `spolia cache`."""

    def post(path: str, url: str, key: str | None, **body: Any) -> None:
        from spolia.cli.operator import post

        post(path, url, key, body)

    def selected(
        prompt: str | None, session: str | None, messages: Path | None, model: str | None, salt: str | None
    ) -> dict[str, Any]:
        from spolia.cli.operator import selection

        return selection(prompt, session, messages, model, salt)

    @app.command()
    def lookup(
        prompt: PromptArgument = None,
        session: SessionOption = None,
        messages: MessagesOption = None,
        model: ModelOption = None,
        salt: SaltOption = None,
        exact_kv: ExactOption = False,
        url: UrlOption = _URL,
        key: KeyOption = None,
    ) -> None:
        """Show where a prompt's KV lies in a server, and why no more does."""
        post("lookup", url, key, **selected(prompt, session, messages, model, salt), exact_kv=exact_kv or None)

    @app.command()
    def warm(
        prompt: PromptArgument = None,
        session: SessionOption = None,
        messages: MessagesOption = None,
        pin: Annotated[bool, typer.Option("--pin", help="And keep it while anything else can go.")] = False,
        ttl: Annotated[float | None, typer.Option(metavar="SECONDS", help="For so long.")] = None,
        priority: Annotated[int | None, typer.Option(help="0 to 100; 50 is usual.")] = None,
        model: ModelOption = None,
        salt: SaltOption = None,
        exact_kv: ExactOption = False,
        url: UrlOption = _URL,
        key: KeyOption = None,
    ) -> None:
        """Have a running server compute a prompt ahead."""
        chosen = selected(prompt, session, messages, model, salt)
        post("warm", url, key, **chosen, pin=pin, ttl=ttl, priority=priority, exact_kv=exact_kv or None)

    @app.command()
    def move(
        to: Annotated[str, typer.Option("--to", metavar="TIER", help='Its name, or "device".')],
        prompt: PromptArgument = None,
        session: SessionOption = None,
        messages: MessagesOption = None,
        keep: Annotated[bool, typer.Option("--keep", help="On the device, too.")] = False,
        model: ModelOption = None,
        salt: SaltOption = None,
        exact_kv: ExactOption = False,
        url: UrlOption = _URL,
        key: KeyOption = None,
    ) -> None:
        """Have a server move a prompt's KV to a tier, or to the device."""
        chosen = selected(prompt, session, messages, model, salt)
        post("move", url, key, **chosen, to=to, keep=keep, exact_kv=exact_kv or None)

    @app.command()
    def compress(
        prompt: PromptArgument = None,
        session: SessionOption = None,
        messages: MessagesOption = None,
        tenant: Annotated[str | None, typer.Option(help="Or a tenant's.")] = None,
        model: ModelOption = None,
        salt: SaltOption = None,
        url: UrlOption = _URL,
        key: KeyOption = None,
    ) -> None:
        """Have a server's tiers keep exact KV in fewer bits: a prompt's, all of a --salt, or all."""
        chosen = selected(prompt, session, messages, model, salt)
        if not {"prompt", "session", "messages"} & chosen.keys() and tenant is None:
            chosen["all" if salt is None else "namespace"] = True
        post("compress", url, key, **chosen, tenant=tenant)

    @app.command()
    def pin(
        prompt: PromptArgument = None,
        messages: MessagesOption = None,
        ttl: Annotated[float | None, typer.Option(metavar="SECONDS", help="For so long.")] = None,
        model: ModelOption = None,
        salt: SaltOption = None,
        exact_kv: ExactOption = False,
        url: UrlOption = _URL,
        key: KeyOption = None,
    ) -> None:
        """Have a server keep a prompt's KV while anything else can go."""
        chosen = selected(prompt, None, messages, model, salt)
        post("pins", url, key, **chosen, ttl=ttl, exact_kv=exact_kv or None)

    @app.command()
    def unpin(
        number: Annotated[int, typer.Argument(metavar="ID", help="As `spolia cache pin` shows it.")],
        model: ModelOption = None,
        salt: SaltOption = None,
        url: UrlOption = _URL,
        key: KeyOption = None,
    ) -> None:
        """Lift a pin of a running server."""
        from spolia.cli.operator import unpin

        unpin(number, url, key, model, salt)

    @app.command()
    def config(
        policy: Annotated[str | None, typer.Option(help="Give content up in this order.")] = None,
        kv_memory: Annotated[
            int | None, typer.Option("--kv-memory", metavar="SIZE", parser=parse_size, help="Use so much memory.")
        ] = None,
        attach: Annotated[
            list[str] | None, typer.Option(metavar="TIER", help="Use this tier, too: a folder, host:SIZE, or a URL.")
        ] = None,
        detach: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Do without this tier.")] = None,
        model: ModelOption = None,
        url: UrlOption = _URL,
        key: KeyOption = None,
    ) -> None:
        """Show a server's cache settings, or change them, all or nothing."""
        from spolia.cli.operator import config

        config(url, key, model, policy=policy, kv_memory=kv_memory, attach=attach or [], detach=detach or [])
