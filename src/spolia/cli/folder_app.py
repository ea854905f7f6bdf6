"""What `spolia cache` has to look after a folder. Imports nothing but typer: see the package's docstring."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["add_folder_commands"]

DirArgument = Annotated[Path, typer.Argument(metavar="DIR", help="What --kv-disk names.")]
KeyOption = Annotated[
    str | None,
    typer.Option("--kv-encrypt", metavar="KEY", help="file:PATH or env:NAME, where its key is, if it is encrypted."),
]


def add_folder_commands(app: typer.Typer) -> None:
    """Add them to `spolia cache`."""

    @app.command()
    def ls(folder: DirArgument) -> None:
        """List the conversations whose KV is in DIR, the most recently used first."""
        from spolia.cli.folder import ls

        ls(folder)

    @app.command()
    def du(folder: DirArgument) -> None:
        """Show how much DIR holds, by namespace."""
        from spolia.cli.folder import du

        du(folder)

    @app.command()
    def verify(folder: DirArgument, key: KeyOption = None) -> None:
        """Read all of DIR and remove what is damaged or unfinished. Exits with 1 if anything was damaged."""
        from spolia.cli.folder import verify

        if not verify(folder, key):
            raise typer.Exit(1)

    @app.command()
    def export(
        folder: DirArgument,
        conversation: Annotated[str, typer.Argument(metavar="ID", help="As `spolia cache ls` shows it.")],
        file: Annotated[Path, typer.Argument(metavar="FILE", help="To make.")],
    ) -> None:
        """Write one conversation's KV to FILE, for another machine to import."""
        from spolia.cli.folder import export

        export(folder, conversation, file)

    @app.command("import")
    def import_(
        folder: DirArgument,
        file: Annotated[Path, typer.Argument(metavar="FILE", help="Of `spolia cache export`.")],
        key: KeyOption = None,
        force: Annotated[bool, typer.Option("--force", help="Also if DIR holds nothing of its namespace.")] = False,
    ) -> None:
        """Put the KV of FILE into DIR. A file that is damaged or of another model is refused."""
        from spolia.cli.folder import import_file

        import_file(folder, file, key, is_forced=force)

    @app.command()
    def clear(
        folder: DirArgument,
        namespace: Annotated[str, typer.Option(help="Only this one, as `spolia cache du` shows it.")] = "",
        sessions: Annotated[bool, typer.Option("--sessions", help="And all sessions that are kept there.")] = False,
    ) -> None:
        """Delete the KV that DIR holds."""
        from spolia.cli.folder import clear

        clear(folder, namespace, with_sessions=sessions)
