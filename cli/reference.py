"""docs/commands.md, made from the commands' signatures."""

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import typer
from typer.models import ArgumentInfo, OptionInfo

from .main import app

HEAD = """# Commands

Made from the commands; `mctl VERB --help` says the same.
"""
_TAKEN = {int: "N", float: "X", Path: "PATH", str: "TEXT"}


def reference() -> str:
    """The page, in Markdown."""
    return "\n".join([HEAD, *_sections(app, "mctl")])


def _sections(group: typer.Typer, name: str) -> Iterator[str]:
    """Of each command that does something."""
    for info in group.registered_commands:
        if info.callback is not None and not info.hidden:
            verb = info.name or info.callback.__name__.replace("_", "-")
            yield _section(info.callback, f"{name} {verb}")
    for below in group.registered_groups:
        if below.typer_instance is not None:
            yield from _sections(below.typer_instance, f"{name} {below.name or below.typer_instance.info.name}")


def _section(function: Callable[..., object], name: str) -> str:
    rows = list(_rows(function))
    table = ["| | |", "|---|---|", *rows, ""] if rows else []
    return "\n".join([f"## {name}\n", f"{inspect.getdoc(function)}\n", *table])


def _rows(function: Callable[..., object]) -> Iterator[str]:
    hints = get_type_hints(function, include_extras=True)
    for parameter in inspect.signature(function).parameters.values():
        annotated = get_args(hints[parameter.name])
        info = next((each for each in annotated if isinstance(each, ArgumentInfo | OptionInfo)), None)
        if info is not None and not info.hidden:
            yield f"| `{_cell(_named(parameter.name, annotated[0], info))}` | {_cell(info.help or '')} |"


def _cell(text: str) -> str:
    return text.replace("|", r"\|")


def _named(name: str, kind: Any, info: ArgumentInfo | OptionInfo) -> str:
    """A flag with what it takes, or an argument."""
    if isinstance(info, ArgumentInfo):
        return str(info.metavar or name.upper())
    flags = [text for text in info.param_decls or () if text.startswith("-")] or ["--" + name.replace("_", "-")]
    taken = info.metavar or _taken(kind)
    return ", ".join(flags) + (f" {taken}" if taken else "")


def _taken(kind: Any) -> str:
    """What a flag of this type takes; empty: nothing."""
    if get_origin(kind) in (Union, UnionType):
        kind = next(each for each in get_args(kind) if each is not NoneType)
    if get_origin(kind) is Literal:
        return "|".join(map(str, get_args(kind)))
    if get_origin(kind) in (list, tuple):
        return _taken(get_args(kind)[0])
    return _TAKEN.get(kind, "")
