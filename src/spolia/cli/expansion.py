"""Classes of flags as parameters of subcommands, so that a flag is written once.

    @dataclass
    class EngineFlags:
        num_threads: Annotated[int | None, typer.Option("--threads", help="...")] = None
        check: ...

    @expanded
    def bench(source: ..., engine: Annotated[EngineFlags, Only("num_threads")]) -> None: ...

Typer sees `bench(source, threads)`, and the function gets an `EngineFlags`. A field that is not among `Only`'s keeps
its default; without `Only` all are flags.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from typer.models import OptionInfo

__all__ = ["Only", "expanded", "flag_names"]


class Only:
    """Which of a class's fields are flags of a subcommand, in the class's order."""

    def __init__(self, *fields: str) -> None:
        self.fields = fields


def flag_names(flags: type) -> dict[str, str]:
    """By the name of the parameter (`threads`, of `--threads`), the field (`num_threads`)."""
    return {name: field for name, (field, _) in _flags(flags).items()}


def expanded(command: Callable[..., None]) -> Callable[..., None]:
    """`command` as typer is to see it."""
    hints = get_type_hints(command, include_extras=True)
    parameters: list[inspect.Parameter] = []
    classes: dict[str, tuple[type, dict[str, str]]] = {}
    for parameter in inspect.signature(command).parameters.values():
        hint = hints[parameter.name]
        flags, *notes = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        if not is_dataclass(flags) or not isinstance(flags, type):
            parameters.append(parameter.replace(annotation=hint, kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        found = _flags(flags)
        for only in (note.fields for note in notes if isinstance(note, Only)):
            found = {name: pair for name, pair in found.items() if pair[0] in only}
            assert len(found) == len(only), f"{flags.__name__} has not all of {only}"
        classes[parameter.name] = flags, {name: field for name, (field, _) in found.items()}
        for name, (_, annotation) in found.items():
            parameters.append(
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
            )

    @functools.wraps(command)
    def run(**given: Any) -> None:
        for name, (flags, by_parameter) in classes.items():
            given[name] = flags(**{field: given.pop(parameter) for parameter, field in by_parameter.items()})
        command(**given)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _flags(flags: type) -> dict[str, tuple[str, Any]]:
    """By the parameter's name: the field's, and its annotation for typer."""
    hints = get_type_hints(flags, include_extras=True)
    return {_parameter_name(hints[field.name]): (field.name, hints[field.name]) for field in fields(flags)}


def _parameter_name(hint: Any) -> str:
    option = next(note for note in get_args(hint)[1:] if isinstance(note, OptionInfo))
    # Typer takes the first spelling for the default until it sees that it is in an annotation.
    spellings = [option.default, *(option.param_decls or ())]
    return next(text[2:].replace("-", "_") for text in spellings if isinstance(text, str) and text.startswith("--"))
