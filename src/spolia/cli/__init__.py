"""The `spolia` command.

`app` declares every subcommand and its flags; what a subcommand does is in the module of its name, imported when it is
run, so that `spolia --help` loads neither the engine nor the server.
"""

from __future__ import annotations

from spolia.cli.app import main

__all__ = ["main"]
