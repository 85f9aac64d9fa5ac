"""A handler and its files, as the user names them, for a bundle to carry."""

import ast
import importlib.metadata
import platform
import re
from collections.abc import Sequence
from pathlib import Path

from ..bundle_format.archive import Data
from ..bundle_format.errors import HandlerError, UsageError
from ..bundle_format.handler_files import HandlerFiles
from ..bundle_format.layout import HANDLER, path_fault
from ..bundle_format.manifest import STOCK, Handler
from .loading import STOCK_HANDLERS, stock_class

_PACKAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def collect(handler: str, assets: Sequence[Path]) -> HandlerFiles:
    """The handler (a file, or the name of one of mctl's own) with its files; folders with all that is in them.

    UsageError where something is not there, HandlerError where the file is no Python or needs what is not installed.
    """
    files = _asset_files(assets)
    members: tuple[tuple[str, Data], ...] = tuple((f"{HANDLER}{name}", path) for name, path in files)
    named = tuple(name for name, _ in members)
    python = platform.python_version()
    if (name := stock_name(handler)) is not None:
        stock_class(name)
        return HandlerFiles(Handler(source=f"{STOCK}{name}", assets=named, python=python), members)
    path = Path(handler)
    if not path.is_file():
        raise UsageError(
            f"there is no handler `{handler}`", f"give a Python file, or one of {', '.join(STOCK_HANDLERS)}"
        )
    source = f"{HANDLER}{path.name}"
    if source in named:
        raise UsageError(f"`{path.name}` is the handler, and the name of an asset too")
    record = Handler(source=source, assets=named, requirements=requirements_of(path), python=python)
    return HandlerFiles(record, ((source, path), *members))


def stock_name(handler: str) -> str | None:
    """The name of one of mctl's own handlers, with or without `stock:`; None for a file."""
    if handler.startswith(STOCK):
        return handler.removeprefix(STOCK)
    return handler if handler in STOCK_HANDLERS and not Path(handler).exists() else None


def requirements_of(path: Path) -> tuple[str, ...]:
    """What the file's list `requirements` names, with the versions that are installed: `tokenizers==0.23.3`."""
    try:
        tree = ast.parse(path.read_bytes(), path.name)
    except (SyntaxError, ValueError) as error:
        raise HandlerError(f"`{path.name}` is no Python: {error}") from None
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(getattr(each, "id", "") == "requirements" for each in node.targets):
            return tuple(map(_installed, _texts(path, node.value)))
    return ()


def _texts(path: Path, value: ast.expr) -> list[str]:
    try:
        found = ast.literal_eval(value)
    except ValueError:
        found = None
    if not isinstance(found, list | tuple) or not all(isinstance(each, str) for each in found):
        raise HandlerError(f"`requirements` of `{path.name}` is no list of texts", 'write `requirements = ["numpy"]`')
    return list(found)


def _installed(requirement: str) -> str:
    name = _PACKAGE.match(requirement.strip())
    if name is None:
        raise HandlerError(f"`{requirement[:80]}` of the handler's requirements is no package's name")
    try:
        return f"{name[0]}=={importlib.metadata.version(name[0])}"
    except importlib.metadata.PackageNotFoundError:
        raise HandlerError(
            f"the handler needs `{name[0]}`, which is not installed", f"`pip install {name[0]}`"
        ) from None


def _asset_files(assets: Sequence[Path]) -> list[tuple[str, Path]]:
    """Files by the paths that they will have beside the handler."""
    found: dict[str, Path] = {}
    for asset in assets:
        if not asset.exists():
            raise UsageError(f"there is no file `{asset}`", "`--asset` takes a file or a folder")
        inside = sorted(path for path in asset.rglob("*") if path.is_file()) if asset.is_dir() else [asset]
        for path in inside:
            name = path.relative_to(asset.parent).as_posix()
            if fault := path_fault(name):
                raise UsageError(f"`{name[:80]}` cannot be a file of a bundle: {fault}")
            if name in found:
                raise UsageError(f"two assets have the name `{name}`", "give each a name of its own")
            found[name] = path
    return list(found.items())
