"""Options from a file and from the environment, and `kvcs config show`.

A flag wins over a variable of the environment, that over the file, and that over the default. The
file is TOML: a table for each command, ``[token.make]`` for one in a group, with the options' long
names as keys. Variables are ``KVCS_``, the command and the option: ``KVCS_RELAY_CACHE_MIB``.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Protocol, cast

import typer

from kvcs.cli.frame import command
from kvcs.cli.output import Output
from kvcs.errors import FileError, UsageError

FILE_VARIABLE = "KVCS_CONFIG_FILE"
"""Variable that names the file where ``--config`` does not."""

TOKEN_VARIABLE = "KVCS_TOKEN"
"""Variable of the environment that may hold an authorization token."""

PREFIX = "KVCS_"

OTHER_VARIABLES = frozenset(
    {FILE_VARIABLE, TOKEN_VARIABLE, "KVCS_EVENT_LOOP", "KVCS_DEBUG"}
    # Those of the tests, which run the command too.
    | {"KVCS_FUZZ_SCALE", "KVCS_KILLS", "KVCS_MOVES", "KVCS_RETRIEVALS", "KVCS_RUNS"}
)
"""Variables that are no option of a command."""

MAX_CONFIG_OCTETS = 1 << 20
"""Longest file that is read."""

TRUE, FALSE = frozenset({"1", "true", "yes", "on"}), frozenset({"0", "false", "no", "off"})

SECRET_WORDS = ("token", "secret", "password")
"""An option with one of them in its name holds a secret, unless it names a file."""

MASK = "***"


class Parameter(Protocol):
    """What is used of one parameter of a command."""

    name: str
    opts: list[str]
    param_type_name: str
    multiple: bool
    is_flag: bool
    default: Any

    def process_value(self, ctx: typer.Context, value: Any) -> Any:
        """The value as the command gets it."""


@dataclass(slots=True)
class Settings:
    """What the file and the environment say, checked against what the commands know."""

    values: dict[str, Any] = field(default_factory=dict)
    """By command and parameter, for Typer; those of a group are nested."""

    origins: dict[tuple[str, str], str] = field(default_factory=dict)
    """Where each value is from: by command (``token make``) and key."""

    def by_command(self) -> dict[tuple[str, ...], dict[str, Any]]:
        """Values by parameter, of each command that something is said of, by its words."""
        found: dict[tuple[str, ...], dict[str, Any]] = {}
        for name, _ in self.origins:
            words = tuple(name.split())
            table = self.values
            for word in words:
                table = table[word]
            found[words] = table
        return found


def commands(root: typer.core.TyperGroup) -> dict[tuple[str, ...], Any]:
    """Every command by its words; all of them are imported."""
    found: dict[tuple[str, ...], Any] = {}
    context = typer.Context(root)

    def walk(group: Any, words: tuple[str, ...]) -> None:
        for name in group.list_commands(context):
            each = group.get_command(context, name)
            if hasattr(each, "commands"):
                walk(each, (*words, name))
            else:
                found[(*words, name)] = each

    walk(root, ())
    return found


def options(of: Any) -> dict[str, Parameter]:
    """Options of a command by key, which is the long name without its dashes."""
    keys: dict[str, Parameter] = {}
    for parameter in of.params:
        if parameter.param_type_name == "option":
            keys[max(parameter.opts, key=len).lstrip("-")] = parameter
    return keys


def load(
    root: typer.core.TyperGroup, path: Path | None, environment: Mapping[str, str]
) -> Settings:
    """Read the file and the environment.

    Args:
        root: `kvcs` with all its commands.
        path: the file; None takes that of the environment, if there is one.
        environment: its variables.

    Raises:
        FileError: the file cannot be read or is no TOML.
        UsageError: a key or a variable is not known, or has a value of a wrong kind.
    """
    settings = Settings()
    if path is None and environment.get(FILE_VARIABLE):
        path = Path(environment[FILE_VARIABLE])
    named = [
        name
        for name in sorted(environment)
        if name.startswith(PREFIX) and name not in OTHER_VARIABLES
    ]
    if path is None and not named:
        # What the commands know takes importing them all.
        return settings
    known = commands(root)
    if path is not None:
        _take(settings, known, _read(path), (), str(path))
    variables = {
        PREFIX + "_".join((*words, key)).upper().replace("-", "_"): (words, key, parameter)
        for words, each in known.items()
        for key, parameter in options(each).items()
    }
    for name in named:
        if name not in variables:
            raise UsageError(f"${name} is no setting of kvcs; `kvcs config show` lists them")
        words, key, parameter = variables[name]
        text = environment[name]
        value: object = text
        if parameter.is_flag:
            value = _truth(text, name)
        elif parameter.multiple:
            value = text.split()
        _put(settings, words, key, parameter, value, f"${name}")
    return settings


def _take(
    settings: Settings,
    known: Mapping[tuple[str, ...], Any],
    table: Mapping[str, Any],
    words: tuple[str, ...],
    origin: str,
) -> None:
    """Take over one table of the file."""
    of = known.get(words)
    keys = {} if of is None else options(of)
    for key, value in table.items():
        inner = (*words, key)
        if of is None and any(each[: len(inner)] == inner for each in known):
            if not isinstance(value, dict):
                raise UsageError(f"{origin}: {'.'.join(inner)} is a command: write a table")
            _take(settings, known, value, inner, origin)
        elif key not in keys:
            raise UsageError(f"{origin}: unknown key {'.'.join(inner)!r}")
        else:
            where = f"{origin}: {'.'.join(inner)}"
            _put(settings, words, key, keys[key], _text(value, keys[key], where), origin)


def _text(value: object, parameter: Parameter, where: str) -> object:
    """A value of the file in the form in which a flag's would come."""
    if parameter.is_flag:
        if isinstance(value, bool):
            return value
        raise UsageError(f"{where} must be true or false")
    if parameter.multiple:
        each = value if isinstance(value, list) else [value]
        return [_text_of(one, where) for one in each]
    return _text_of(value, where)


def _text_of(value: object, where: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise UsageError(f"{where} must be a string or a number, not {value!r}")
    return str(value)


def _truth(text: str, name: str) -> bool:
    word = text.strip().lower()
    if word not in TRUE | FALSE:
        raise UsageError(f"${name} must be true or false, not {text!r}")
    return word in TRUE


def _put(
    settings: Settings,
    words: tuple[str, ...],
    key: str,
    parameter: Parameter,
    value: object,
    origin: str,
) -> None:
    table = settings.values
    for word in words:
        table = table.setdefault(word, {})
    table[parameter.name] = value
    settings.origins[" ".join(words), key] = origin


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_CONFIG_OCTETS + 1)
        if len(data) > MAX_CONFIG_OCTETS:
            raise FileError(f"{path}: longer than {MAX_CONFIG_OCTETS} octets")
        return tomllib.loads(data.decode())
    except OSError as exc:
        raise FileError(f"{path}: {exc.strerror or exc}") from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise FileError(f"{path}: no TOML: {exc}") from exc


def said(ctx: typer.Context, flags: Sequence[str]) -> dict[str, Any]:
    """Options that flags give, by parameter, as the command would get them.

    Args:
        ctx: context of the command.
        flags: what stands behind it.

    Raises:
        typer.TyperException: there is no such option, or a value does not fit it.
    """
    of: Any = ctx.command
    given, _, _ = of.make_parser(ctx).parse_args(args=list(flags))
    return {
        each.name: each.process_value(ctx, given[each.name])
        for each in options(of).values()
        if each.name in given
    }


def rows(
    ctx: typer.Context, settings: Settings, wanted: tuple[str, ...], flags: list[str]
) -> Iterator[dict[str, Any]]:
    """Effective values: command, key, value, origin.

    Args:
        ctx: context of `kvcs` itself.
        settings: from `load`.
        wanted: words that the commands begin with; all where empty.
        flags: what stands behind the command, where it is a single one.

    Raises:
        UsageError: there is no such command, or a value does not fit its option.
    """
    known = commands(cast(typer.core.TyperGroup, ctx.command))
    chosen = {words: of for words, of in known.items() if words[: len(wanted)] == wanted}
    if not chosen:
        raise UsageError(f"there is no command {' '.join(wanted)!r}")
    if flags and len(chosen) > 1:
        raise UsageError("options go behind one command: kvcs config show relay --cache-mib 64")
    for words, of in chosen.items():
        inner = typer.Context(of, parent=ctx, info_name=words[-1])
        given = said(inner, flags)
        table: Any = settings.values
        for word in words:
            table = table.get(word, {})
        for key, parameter in options(of).items():
            origin = settings.origins.get((" ".join(words), key), "default")
            value = table.get(parameter.name, parameter.default)
            if parameter.name in given:
                value, origin = given[parameter.name], "flag"
            elif origin != "default":
                value = parameter.process_value(inner, value)
            yield {
                "command": " ".join(words),
                "key": key,
                "value": _shown(key, value),
                "origin": origin,
            }
    if os.environ.get(TOKEN_VARIABLE):
        yield {"command": "", "key": "token", "value": MASK, "origin": f"${TOKEN_VARIABLE}"}


def _shown(key: str, value: object) -> object:
    """A value as it may be shown: JSON's kinds, secrets masked."""
    if isinstance(value, list | tuple):
        return [_shown(key, each) for each in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    secret = any(word in key for word in SECRET_WORDS) and not isinstance(value, Path)
    return MASK if secret and value != "" else str(value)


def _written(value: object) -> str:
    """A value as a file or a variable would have it."""
    if isinstance(value, list):
        return " ".join(map(_written, value))
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None else str(value)


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    group = typer.Typer(
        name="config",
        help="Options from a file and from the environment.",
        rich_markup_mode=None,
    )
    app.add_typer(group)

    @command(
        group,
        "show",
        context_settings={"ignore_unknown_options": True},
    )
    def show(
        output: Output,
        ctx: typer.Context,
        words: Annotated[
            list[str] | None,
            typer.Argument(metavar="[COMMAND] [OPTIONS]", help="One command; all by default."),
        ] = None,
    ) -> None:
        """Print the effective value of every option, and where it is from.

        Behind it may stand a command, and options of it: kvcs config show relay --cache-mib 64.
        Secrets are masked.
        """
        given = words or []
        first = next((at for at, word in enumerate(given) if word.startswith("-")), len(given))
        root = cast(typer.Context, ctx.find_root())
        found = list(rows(root, root.obj, tuple(given[:first]), given[first:]))
        if not output.as_json:
            found = [{**row, "value": _written(row["value"])} for row in found]
        output.table(("command", "key", "value", "origin"), found)
