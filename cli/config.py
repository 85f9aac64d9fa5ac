"""Options of `mctl build` from mctl.toml, or from [tool.mctl] in pyproject.toml, in the current folder."""

import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..bundle_format.errors import UsageError
from .compile import Standaloneable

Value = bool | str | list[str]


class Configured(Standaloneable):
    """A command whose options come from the configuration file where the command line does not give them."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--help" not in args:
            many = {parameter.name or "": getattr(parameter, "multiple", False) for parameter in self.params}
            ctx.default_map = load(Path(), many)
        return super().parse_args(ctx, args)


def load(folder: Path, known: Mapping[str, bool]) -> dict[str, Value]:
    """Option name -> value; `known` are the options' names, and whether each may be given more than once.

    Keys are the options' names, with `-` or `_`. UsageError names the file and the key that is not understood.
    """
    path, table = _table(folder)
    return {name: value for key, item in table.items() for name, value in [_option(path, key, item, known)]}


def _table(folder: Path) -> tuple[Path, Mapping[str, Any]]:
    """mctl.toml wins; both missing is an empty table."""
    path = folder / "mctl.toml"
    if path.is_file():
        return path, _parsed(path)
    path = folder / "pyproject.toml"
    if not path.is_file():
        return path, {}
    tools = _parsed(path).get("tool", {})
    table = tools.get("mctl", {}) if isinstance(tools, dict) else {}
    if not isinstance(table, dict):
        raise UsageError("`tool.mctl` in `pyproject.toml` is no table", "write it as `[tool.mctl]`")
    return path, table


def _parsed(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise UsageError(f"cannot read `{path.name}`: {error}") from error


def _option(path: Path, key: str, item: Any, known: Mapping[str, bool]) -> tuple[str, Value]:
    name = key.replace("-", "_")
    if name not in known:
        near = [found.replace("_", "-") for found in difflib.get_close_matches(name, known, n=3)]
        everything = ", ".join(f"`{option.replace('_', '-')}`" for option in sorted(known))
        hint = f"did you mean {' or '.join(f'`{n}`' for n in near)}?" if near else f"keys are {everything}"
        raise UsageError(f"`{path.name}`: unknown key `{key}`", hint)
    items = item if isinstance(item, list) else [item]
    if not all(isinstance(each, str | int | float) for each in items):
        raise UsageError(f"`{path.name}`: `{key}` is neither text, a number, true or false, nor a list of those")
    if known[name]:
        return name, [str(each) for each in items]
    if isinstance(item, list):
        raise UsageError(f"`{path.name}`: `{key}` takes one value, not a list")
    return name, item if isinstance(item, bool) else str(item)
