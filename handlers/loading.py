"""A handler from its name or file: which of the three forms it is, and one of it made."""

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from ..bundle_format.errors import HandlerError
from ..bundle_format.manifest import STOCK
from .api import Context
from .routed import Application, RoutedApplication
from .torchserve import TorchServeApplication, provide_ts

# Names of handlers that are mctl's own, and where they are.
STOCK_HANDLERS = {
    "text-embedding": ".stock.embedding:TextEmbedding",
    "text-classification": ".stock.text:TextClassification",
    "token-classification": ".stock.text:TokenClassification",
    "image-classification": ".stock.images:ImageClassification",
}

_FORMS = (
    "define a class with a method marked `@route(…)`, a class with `handle(self, data, context)`, or a function "
    "`handle(data, context)`: `mctl handler new` writes an example"
)


def load_application(source: str, context: Context, *, batch_size: int = 1, batch_delay_ms: float = 0) -> Application:
    """Makes the handler `stock:NAME`, or that of a Python file. HandlerError where it cannot be made."""
    if source.startswith(STOCK):
        return RoutedApplication(_made(stock_class(source.removeprefix(STOCK)), source, context), context)
    path = Path(source)
    module = _import_file(path)
    if (found := _routed_class(module)) is not None:
        return RoutedApplication(_made(found, path.name, context), context)
    entry = _torchserve_entry(module, path)
    return TorchServeApplication(entry, context, batch_size=batch_size, batch_delay_ms=batch_delay_ms, file=path)


def stock_class(name: str) -> type:
    """The class of a handler that is mctl's own. HandlerError for a name that is none."""
    if name not in STOCK_HANDLERS:
        raise HandlerError(f"there is no stock handler `{name[:80]}`", f"there are {', '.join(STOCK_HANDLERS)}")
    module, _, attribute = STOCK_HANDLERS[name].partition(":")
    try:
        found: type = getattr(importlib.import_module(module, __package__), attribute)
    except ImportError as error:
        raise HandlerError(f"the handler `{name}` needs `{error.name}`", f"`pip install {error.name}`") from error
    return found


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise HandlerError(f"there is no file `{path}`", "give a Python file, or `stock:NAME`")
    provide_ts()
    full = path.resolve()
    if str(full.parent) not in sys.path:
        sys.path.insert(0, str(full.parent))
    name = full.stem if full.stem not in sys.modules else f"mctl_handler_{full.stem}"
    spec = importlib.util.spec_from_file_location(name, full)
    if spec is None or spec.loader is None:
        raise HandlerError(f"`{path.name}` is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    _guarded(f"`{path.name}` cannot be imported", path.name, lambda: spec.loader.exec_module(module))  # type: ignore[union-attr]
    return module


def _routed_class(module: ModuleType) -> type | None:
    """The class that the module defines with routes; HandlerError for more than one."""
    found = [
        value
        for value in vars(module).values()
        if inspect.isclass(value)
        and value.__module__ == module.__name__
        and any(hasattr(member, "_routes") for _, member in inspect.getmembers(value, inspect.isfunction))
    ]
    found = [each for each in found if not any(other is not each and issubclass(other, each) for other in found)]
    if len(found) > 1:
        names = ", ".join(each.__name__ for each in found)
        raise HandlerError(f"the handler's file defines several classes with routes: {names}", "keep one of them")
    return found[0] if found else None


def _torchserve_entry(module: ModuleType, path: Path) -> Callable[..., Any] | type:
    """What TorchServe would call: the module's `handle`, else its one class with a method `handle`."""
    if callable(entry := getattr(module, "handle", None)):
        return entry  # type: ignore[no-any-return]
    classes = [
        value
        for value in vars(module).values()
        if inspect.isclass(value) and value.__module__ == module.__name__ and hasattr(value, "handle")
    ]
    if not classes:
        raise HandlerError(f"`{path.name}` holds no handler", _FORMS)
    if len(classes) > 1:
        names = ", ".join(each.__name__ for each in classes)
        raise HandlerError(f"`{path.name}` defines several classes with `handle`: {names}", "keep one of them")
    return classes[0]


def _made(found: type, name: str, context: Context) -> Any:
    def make() -> Any:
        return found(context)

    return _guarded(f"`{found.__name__}(context)` of `{name}` failed", name, make)


def _guarded(what: str, file: str, run: Callable[[], Any]) -> Any:
    """What the user's code returns; HandlerError with the exception and its place in the file. Its cause is kept."""
    try:
        return run()
    except (HandlerError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise HandlerError(f"{what}: {describe(error)}{_place(error, file)}") from error


def describe(error: BaseException) -> str:
    """`ValueError: what it says`, in one line."""
    text = " ".join(str(error).split())[:400]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _place(error: BaseException, file: str) -> str:
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).name == file]
    return f" ({file}:{lines[-1]})" if lines else ""
