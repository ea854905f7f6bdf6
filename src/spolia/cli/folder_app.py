"""What `spolia cache` has to look after a folder. Imports nothing but typer: see the package's docstring."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["add_folder_commands"]

DirArgument = Annotated[Path, typer.Argument(metavar="DIR", help="What --kv-disk names.")]
PlaceArgument = Annotated[str, typer.Argument(metavar="DIR|URL", help="What --kv-disk names, or a running server.")]
ModelOption = Annotated[str | None, typer.Option("--model", help="Of a server's models, where it has several.")]
ApiKeyOption = Annotated[
    str | None,
    typer.Option("--key", envvar="SPOLIA_API_KEY", help="An API key with admin = true, if the server wants one."),
]
KeyOption = Annotated[
    str | None,
    typer.Option("--kv-encrypt", metavar="KEY", help="file:PATH or env:NAME, where its key is, if it is encrypted."),
]


def add_folder_commands(app: typer.Typer) -> None:
    """Add them to `spolia cache`."""

    @app.command()
    def ls(folder: DirArgument) -> None:
        """List the conversations whose KV is in DIR, the latest used first."""
        from spolia.cli.folder import ls

        ls(folder)

    @app.command()
    def du(folder: DirArgument) -> None:
        """Show how much DIR holds, by namespace."""
        from spolia.cli.folder import du

        du(folder)

    @app.command()
    def verify(folder: DirArgument, key: KeyOption = None) -> None:
        """Read all of DIR and remove what is damaged or unfinished.

        Exits with 1 if anything was damaged.
        """
        from spolia.cli.folder import verify

        if not verify(folder, key):
            raise typer.Exit(1)

    @app.command()
    def export(
        place: PlaceArgument,
        conversation: Annotated[
            str, typer.Argument(metavar="ID", help="As `spolia cache ls` shows it; of a server, a session's.")
        ],
        file: Annotated[Path, typer.Argument(metavar="FILE", help="To make.")],
        exact_kv: Annotated[
            bool, typer.Option("--exact-kv", help="Of a server: that of requests with exact_kv.")
        ] = False,
        model: ModelOption = None,
        api_key: ApiKeyOption = None,
    ) -> None:
        """Write one conversation's KV to FILE, to import elsewhere."""
        from spolia.cli import folder, operator

        if operator.is_server(place):
            operator.export(place, api_key, conversation, model, file, exact_kv=exact_kv)
        else:
            folder.export(Path(place), conversation, file)

    @app.command("import")
    def import_(
        place: PlaceArgument,
        file: Annotated[Path, typer.Argument(metavar="FILE", help="Of `spolia cache export`.")],
        key: KeyOption = None,
        force: Annotated[bool, typer.Option("--force", help="Also if DIR holds nothing of its namespace.")] = False,
        model: ModelOption = None,
        api_key: ApiKeyOption = None,
    ) -> None:
        """Put the KV of FILE into DIR, or into a server.

        One that is damaged or of another model is refused.
        """
        from spolia.cli import folder, operator

        if operator.is_server(place):
            operator.import_file(place, api_key, model, file)
        else:
            folder.import_file(Path(place), file, key, is_forced=force)

    @app.command()
    def clear(
        place: PlaceArgument,
        namespace: Annotated[str, typer.Option(help="Only this one, as `spolia cache du` shows it.")] = "",
        sessions: Annotated[bool, typer.Option("--sessions", help="And all sessions that are kept in DIR.")] = False,
        prefix: Annotated[str | None, typer.Option(help="Of a server: only what begins with this text.")] = None,
        session: Annotated[str | None, typer.Option(help="Of a server: only this session's.")] = None,
        tenant: Annotated[str | None, typer.Option(help="Of a server: only this tenant's.")] = None,
        salt: Annotated[str | None, typer.Option(help="Of a server: only that of this cache_salt.")] = None,
        pinned: Annotated[bool, typer.Option("--pinned", help="Of a server: also what is pinned.")] = False,
        model: ModelOption = None,
        api_key: ApiKeyOption = None,
    ) -> None:
        """Delete the KV of DIR, or of a server: device and tiers."""
        from spolia.cli import folder, operator

        if not operator.is_server(place):
            folder.clear(Path(place), namespace, with_sessions=sessions)
            return
        body: dict[str, object] = {"prompt": prefix, "session": session, "tenant": tenant, "cache_salt": salt}
        if prefix is session is tenant is None:
            body["all" if salt is None else "namespace"] = True
        operator.clear(place, api_key, {**body, "model": model, "pinned": pinned})
