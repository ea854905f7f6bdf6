"""`spolia config show`: what is set, and by what."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import typer

from spolia.cli.configuration import likely_mistakes, settings_of

__all__ = ["show"]

_PASSWORD = re.compile(r"(?<=://)([^/@\s]*:)[^/@\s]+(?=@)")


def show(context: typer.Context, command: str, arguments: Sequence[str], *, as_json: bool) -> None:
    """Print the settings of `spolia COMMAND ARGUMENTS`. Passwords in URLs are left out.

    Raises:
        InvalidRequest, typer.BadParameter: as `settings_of`.
    """
    settings = [setting._replace(value=_shown(setting.value)) for setting in settings_of(context, command, arguments)]
    if as_json:
        print(json.dumps({name: {"value": value, "from": origin} for name, value, origin in settings}, indent=2))
    else:
        texts = [_text(value) for _, value, _ in settings]
        width, value_width = max(len(each.name) for each in settings), max(map(len, texts))
        for setting, text in zip(settings, texts, strict=True):
            print(f"{setting.name:<{width}}  {text:<{value_width}}  {setting.origin}")
    for name, meant in likely_mistakes(context):
        typer.echo(f"spolia: {name} in the environment is not a setting; did you mean {meant}?", err=True)


def _text(value: Any) -> str:
    if value is None or value == []:
        return "-"
    return " ".join(value) if isinstance(value, list) else str(value)


def _shown(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_shown(each) for each in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    return _PASSWORD.sub(r"\1***", str(value))
