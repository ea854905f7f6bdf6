"""One configuration model: what a flag sets can stand in a file, or in the environment, as well.

    spolia serve --kv-memory 2GiB         a flag
    SPOLIA_KV_MEMORY=2GiB                 a variable of the environment
    kv_memory = "2GiB"                    a line of the file
                                          the default

The first of these that is there wins. The names are the flags', with `_` for `-`; `models` are those to serve. What
stands at the top of the file is for every command that has such a flag, and under `[serve]` for that one alone. The
file is the one that `--config` or SPOLIA_CONFIG names, else ~/.config/spolia/config.toml, if it is there.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import typer
from typer.core import TyperCommand

from spolia.cli.expansion import flag_names
from spolia.errors import InvalidRequest

__all__ = ["ConfiguredCommand", "Setting", "likely_mistakes", "read_default_map", "settings_of", "use_file"]

CONFIGURED = ("serve", "chat", "generate")
_PREFIX = "SPOLIA_"
# Said on the command line only: they are about one question, or about the file itself.
_NOT_CONFIGURED = frozenset({"config", "help", "key", "prompt", "url"})


class ConfiguredCommand(TyperCommand):
    """A command whose flags may come from the environment or the file; it has to declare `--config`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        params: list[Any] = self.params
        for param in params:
            if _is_configured(self, param):
                param.envvar = _PREFIX + param.name.upper()
                param.show_envvar = False  # one rule; the help would be twice as long

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As click's. A wrong value that was not typed says where it stands."""
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            name = None if error.param is None else error.param.name
            if name is not None and (place := _place(ctx, error.param)) is not None:
                error.message = f"{error.message} It is set by {place}."
            raise


class Setting(NamedTuple):
    """
    Attributes:
        value: None: whatever the settings' class makes of it.
        origin: "flag", "environment SPOLIA_X", "file PATH" or "default".
    """

    name: str
    value: Any
    origin: str


def use_file(context: typer.Context, value: Path | None) -> Path | None:
    """The callback of `--config`, called before other flags are looked at, given or not."""
    if not context.resilient_parsing:
        context.default_map = read_default_map(value, str(context.info_name), context)
        for name, meant in likely_mistakes(context):
            typer.echo(f"spolia: {name} in the environment is not a setting; did you mean {meant}?", err=True)
    return value


def read_default_map(path: Path | None, command: str, context: typer.Context) -> dict[str, Any]:
    """What the file says for `command`, by the names of its parameters.

    Args:
        path: None looks where the file is by default.

    Raises:
        InvalidRequest: it cannot be read, is not TOML, or has a key that no command knows.
    """
    path = path if path is not None else _default_path()
    if path is None:
        return {}
    context.meta["spolia.config"] = path
    known = _known(context)
    anywhere = sorted({name for names in known.values() for name in names})
    shared: dict[str, Any] = {}
    own: dict[str, Any] = {}
    for name, value in _read(path).items():
        if isinstance(value, dict):
            _require(path, f"[{name}]", name, known)
            for inner, inner_value in value.items():
                _require(path, f"{inner} under [{name}]", inner, known[name])
                if name == command:
                    own[inner] = _plain(path, inner, inner_value)
        else:
            _require(path, name, name, anywhere)
            if name in known[command]:
                shared[name] = _plain(path, name, value)
    return shared | own


def settings_of(context: typer.Context, command: str, arguments: Sequence[str]) -> Iterator[Setting]:
    """What `spolia COMMAND ARGUMENTS` would be run with, and where each value comes from.

    Raises:
        InvalidRequest: as `read_default_map`, and for a command that is not configured.
        typer.BadParameter: a value that is not allowed. A flag that is none is a usage error of click's.
    """
    if command not in CONFIGURED:
        raise InvalidRequest(f"{command!r} has no configuration; these have: {', '.join(CONFIGURED)}")
    root = context.find_root()
    subcommand: Any = root.command.get_command(root, command)  # type: ignore[attr-defined]
    inner = subcommand.make_context(command, [], parent=root, resilient_parsing=True)
    inner.resilient_parsing = False  # which would swallow what it does not know, and all that comes after it
    given, left, _ = subcommand.make_parser(inner).parse_args(list(arguments))
    inner.resilient_parsing = True
    if left:
        raise InvalidRequest(f"{command} takes no {left[0]!r}; `spolia {command} --help` lists what it takes")
    file = next(param for param in subcommand.params if param.name == "config")
    chosen = file.process_value(inner, file.consume_value(inner, given)[0])
    inner.default_map = read_default_map(chosen, command, inner)
    defaults = {"log_format": "text", **_defaults()}
    for param in subcommand.params:
        if not _is_configured(subcommand, param):
            continue
        value, source = param.consume_value(inner, given)
        if source.name != "DEFAULT":
            inner.set_parameter_source(param.name, source)
            try:
                param.process_value(inner, value)
            except typer.BadParameter as error:
                error.message = f"{error.message} It is set by {_place(inner, param) or 'the command line'}."
                raise
            yield Setting(param.name, value, _place(inner, param) or "flag")
        else:
            yield Setting(param.name, defaults.get(param.name), "default")


def likely_mistakes(context: typer.Context) -> list[tuple[str, str]]:
    """Variables of the environment that are none of ours but spelt nearly like one: (that, the one meant)."""
    strange = [name for name in os.environ if name.startswith(_PREFIX)]
    names = {_PREFIX + name.upper() for names in _known(context).values() for name in names} if strange else set()
    strange = [name for name in strange if name not in names]
    if not strange:
        return []
    from difflib import get_close_matches

    return [(name, near[0]) for name in strange if (near := get_close_matches(name, sorted(names), 1, 0.85))]


def _is_configured(command: Any, param: Any) -> bool:
    if param.name in _NOT_CONFIGURED or param.is_eager:
        return False
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    return param.param_type_name == "option" or len(arguments) == 1


def _known(context: typer.Context) -> dict[str, list[str]]:
    """The names that each command has."""
    root = context.find_root()
    commands: dict[str, Any] = {name: root.command.get_command(root, name) for name in CONFIGURED}  # type: ignore[attr-defined]
    return {
        name: [param.name for param in command.params if _is_configured(command, param)]
        for name, command in commands.items()
    }


def _place(context: Any, param: Any) -> str | None:
    """Where a value stands that was not typed; None if it was."""
    source = context.get_parameter_source(param.name)
    if source is not None and source.name == "ENVIRONMENT":
        return f"environment {param.envvar}"
    if source is not None and source.name == "DEFAULT_MAP":
        return f"file {context.meta['spolia.config']}"
    return None


def _default_path() -> Path | None:
    folder = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    path = folder / "spolia" / "config.toml"
    return path if path.is_file() else None


def _read(path: Path) -> dict[str, Any]:
    import tomllib

    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"config: {path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    except tomllib.TOMLDecodeError as error:
        raise InvalidRequest(f"config: {path} is not TOML: {error}") from None


def _plain(path: Path, name: str, value: Any) -> Any:
    """A value as if it had been typed, so that flags' own parsers read it."""
    if isinstance(value, list):
        return [str(each) for each in value]
    if isinstance(value, dict):
        raise InvalidRequest(f"config: {path}: {name} is a table; it must be a value")
    return value if isinstance(value, bool) else str(value)


def _require(path: Path, shown: str, name: str, known: Iterable[str]) -> None:
    if name in known:
        return
    from difflib import get_close_matches

    near = get_close_matches(name, known, 1, 0.5)
    meant = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
    raise InvalidRequest(f"config: {path} has {shown}, which is not a setting; {meant}")


def _defaults() -> dict[str, Any]:
    """By the parameter's name."""
    from spolia.cli.flags import EngineFlags, ServerFlags  # which import this module
    from spolia.engine import EngineConfig
    from spolia.server import ServerConfig

    return {
        name: settings.__dataclass_fields__[field].default
        for flags, settings in ((EngineFlags, EngineConfig), (ServerFlags, ServerConfig))
        for name, field in flag_names(flags).items()
    }
