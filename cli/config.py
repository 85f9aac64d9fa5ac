"""Options from mctl.toml, or from [tool.mctl] in pyproject.toml, in the current folder or one above it."""

import difflib
import inspect
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand

from ..bundle_format.errors import UsageError
from . import console

Value = bool | str | list[str]

GATE = ("build", "export", "compile", "parity")  # the verbs that keys outside of a verb's own table are for
_MODEL_FILES = ("model", "against")  # options of the form MODEL.py[:NAME]


@dataclass(frozen=True, slots=True)
class Option:
    """What the file may say of an option."""

    many: bool = False  # several values
    is_path: bool = False  # meant from the file's folder
    yes: str = ""  # the word that `true` stands for; "" where there is none


Options = Mapping[str, Option]


class Configured(TyperCommand):
    """A command whose options come from the configuration file where the command line does not give them.

    `--standalone` may stand alone, where a command has it.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words = ["--standalone=yes" if word == "--standalone" else word for word in args]
        if {"--help", "-h"} & set(args):
            return super().parse_args(ctx, words)
        known = {name: _options(command) for name, command in ctx.parent.command.commands.items()}
        found = load(Path(), self.name or "", known)
        if found is None:
            return super().parse_args(ctx, words)
        ctx.default_map = found.options
        if found.options:
            console.say(f"options from `{found.path}`: {', '.join(name.replace('_', '-') for name in found.options)}")
        try:
            return super().parse_args(ctx, words)
        except typer.BadParameter as error:
            name = getattr(error.param, "name", None)
            if name not in found.options or any(word.startswith(f"--{name}".replace("_", "-")) for word in words):
                raise
            raise UsageError(f"`{found.path}`: `{name.replace('_', '-')}`: {error.message.rstrip('.')}") from error


def _options(command: Any) -> dict[str, Option]:
    annotations = {name: str(each.annotation) for name, each in inspect.signature(command.callback).parameters.items()}
    return {
        parameter.name: Option(
            many=getattr(parameter, "multiple", False),
            is_path=parameter.name in _MODEL_FILES or "pathlib" in annotations.get(parameter.name, ""),
            yes="yes" if parameter.name == "standalone" else "",
        )
        for parameter in command.params
        if parameter.name
    }


@dataclass(frozen=True, slots=True)
class Found:
    """A configuration file, and what it says for one verb: option name -> value."""

    path: Path
    options: dict[str, Value]


def load(folder: Path, verb: str, known: Mapping[str, Options]) -> Found | None:
    """What the nearest file in `folder` or above it says for `verb`; None where there is none.

    Keys are the options' names, with `-` or `_`. Those outside of a table are for the verbs of the gate that have them
    (`output` is the bundle); a table `[VERB]` is for that verb alone and wins. `known` are the options of each verb.
    UsageError names the file and the key that is not understood.
    """
    place = _nearest(folder)
    if place is None:
        return None
    path, table = place
    own = {key: item for key, item in table.items() if key in known and isinstance(item, dict)}
    shared = {key: item for key, item in table.items() if key not in own}
    gate = {name: option for each in GATE for name, option in known.get(each, {}).items()}
    options: dict[str, Value | None] = {}
    for key, item in shared.items():
        name, value = _option(path, key, item, gate)
        if verb in GATE and name in known[verb] and not (name == "output" and verb == "export"):
            options[name] = value
    for each, items in own.items():
        for key, item in items.items():
            name, value = _option(path, key, item, known[each])
            options |= {name: value} if each == verb else {}
    return Found(path, {name: value for name, value in options.items() if value is not None})


def _nearest(folder: Path) -> tuple[Path, Mapping[str, Any]] | None:
    for path in _candidates(folder):
        if path.name == "mctl.toml":
            return path, _parsed(path)
        tools = _parsed(path).get("tool", {})
        table = tools.get("mctl") if isinstance(tools, dict) else None
        if table is not None and not isinstance(table, dict):
            raise UsageError(f"`tool.mctl` in `{path}` is no table", "write it as `[tool.mctl]`")
        if table is not None:
            return path, table
    return None


def _candidates(folder: Path) -> Iterator[Path]:
    """The files that are there, the nearest first, up to the top of the repository; mctl.toml wins."""
    shown = folder
    for above in [folder.resolve(), *folder.resolve().parents]:
        yield from (shown / name for name in ("mctl.toml", "pyproject.toml") if (above / name).is_file())
        if (above / ".git").exists():
            return
        shown = shown / ".."


def _parsed(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise UsageError(f"cannot read `{path}`: {error}") from error


def _option(path: Path, key: str, item: Any, known: Options) -> tuple[str, Value | None]:
    """The option's name and value; None: as if it was not there."""
    name = key.replace("-", "_")
    if name not in known:
        near = [found.replace("_", "-") for found in difflib.get_close_matches(name, known, n=3)]
        everything = ", ".join(f"`{option.replace('_', '-')}`" for option in sorted(known))
        hint = f"did you mean {' or '.join(f'`{n}`' for n in near)}?" if near else f"keys are {everything}"
        raise UsageError(f"`{path}`: unknown key `{key}`", hint)
    option = known[name]
    items = item if isinstance(item, list) else [item]
    if not all(isinstance(each, str | int | float) for each in items):
        raise UsageError(f"`{path}`: `{key}` is neither text, a number, true or false, nor a list of those")
    if isinstance(item, list) and not option.many:
        raise UsageError(f"`{path}`: `{key}` takes one value, not a list")
    if option.yes and isinstance(item, bool):
        return name, option.yes if item else None
    words = [str(path.parent / str(each)) if option.is_path else str(each) for each in items]
    if option.many:
        return name, words
    return name, item if isinstance(item, bool) else words[0]
