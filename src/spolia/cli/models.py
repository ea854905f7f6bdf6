"""`spolia pull` and `spolia models`, and how it is shown that something has to be fetched first."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from spolia.models import Progress, list_models, models_folder, pull
from spolia.models import remove as remove_model

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

__all__ = ["fetch", "remove", "show"]


def fetch(source: str) -> Path:
    """The model's file or folder, on this machine; a bar on standard error if that takes anything, lines in a log.

    Raises:
        ModelError: there is no such model, or it cannot be had.
    """
    if not sys.stderr.isatty():
        return pull(source, progress=_Lines())
    with _bar() as bar:
        return pull(source, progress=bar)


def show() -> None:
    """A table of what has a name."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("model")
    table.add_column("size", justify="right")
    table.add_column("here")
    table.add_column("licence", overflow="fold")  # some are an address
    table.add_column("what it is")
    for listing in list_models():
        here = "yes" if listing.path else f"{listing.partial_bytes / 1e6:.0f} MB" if listing.partial_bytes else ""
        table.add_row(listing.name, f"{listing.num_bytes / 1e6:.0f} MB", here, listing.licence or "", listing.note)
    console = Console()
    console.print(table)
    console.print(f"\nin {models_folder()}", style="dim", highlight=False)


def remove(name: str) -> None:
    """
    Raises:
        ModelError: nothing of that name is here.
    """
    print(f"{name}: {remove_model(name) / 1e6:.0f} MB freed")


class _Lines:
    """A line for each thing that is being done: a log shows no bar, and silence looks like a hang."""

    def __init__(self) -> None:
        self._activity = ""

    def __call__(self, progress: Progress) -> None:
        if progress.activity != self._activity:
            self._activity = progress.activity
            done, total = progress.done_bytes / 1e6, progress.total_bytes / 1e6
            print(f"{progress.activity}: {done:.0f} of {total:.0f} MB are here", file=sys.stderr, flush=True)


class _Bar:
    """Made at the first report: mostly there is nothing to fetch, and then rich is not even imported."""

    def __init__(self) -> None:
        self._bar: Bar | None = None
        self._task: TaskID | None = None

    def __call__(self, progress: Progress) -> None:
        if self._bar is None or self._task is None:
            self._bar = _rich_bar()
            self._task = self._bar.add_task(progress.activity, total=progress.total_bytes)
            self._bar.start()
        self._bar.update(self._task, description=progress.activity, completed=progress.done_bytes)

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()


@contextmanager
def _bar() -> Iterator[_Bar]:
    bar = _Bar()
    try:
        yield bar
    finally:
        bar.stop()


def _rich_bar() -> Bar:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    return Bar(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)
