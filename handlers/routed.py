"""Handlers with routes: a request finds its method, which gets what its parameters name."""

import asyncio
import inspect
import re
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any, NamedTuple, Protocol
from urllib.parse import unquote

from ..bundle_format.errors import HandlerError
from .api import Context, Refused, Request, Route
from .models import Caller, Models, PlainCaller, PlainModels

_GIVEN = ("request", "model", "models")


class Application(Protocol):
    """A handler that was made: it says which routes it has, and turns a request into what becomes the answer."""

    routes: tuple[Route, ...]
    streams: bool

    async def handle(self, request: Request, caller: Caller) -> object: ...

    def resize(self, concurrency: int) -> None: ...


class _Bound(NamedTuple):
    route: Route
    pattern: re.Pattern[str]
    function: Callable[..., Any]
    names: tuple[str, ...]


class RoutedApplication:
    """A class whose methods are marked with `@route`."""

    def __init__(self, handler: object, context: Context) -> None:
        self._own = re.compile(
            rf"/predictions/{re.escape(context.name)}(/{re.escape(context.version)}(?=/|$))?"
            rf"|/v2/models/{re.escape(context.name)}(/versions/[^/]+)?(?=/)"
        )
        self._bound = [_bind(handler, *each) for each in _marked(type(handler))]
        self.routes = tuple(each.route for each in self._bound)
        self.streams = any(_is_generator(each.function) for each in self._bound)
        self._threads = ThreadPoolExecutor(1, "handler")

    def resize(self, concurrency: int) -> None:
        """Plain `def`s of this many requests run at the same time."""
        self._threads = ThreadPoolExecutor(min(concurrency, 64), "handler")

    async def handle(self, request: Request, caller: Caller) -> object:
        bound = self._find(request)
        if inspect.iscoroutinefunction(bound.function):
            return await bound.function(**_arguments(bound.names, request, Models(caller)))
        if inspect.isasyncgenfunction(bound.function):
            return bound.function(**_arguments(bound.names, request, Models(caller)))
        return await self._in_thread(bound, request, caller)

    def _find(self, request: Request) -> _Bound:
        """The method for a request. Refused: 404, or 405 where only the verb is another."""
        path = request.path.rstrip("/") or "/"
        own = self._own.match(path)
        below = path[own.end() :] if own else path
        method = "GET" if request.method == "HEAD" else request.method
        fits = [(each, found) for each in self._bound if (found := each.pattern.fullmatch(below))]
        for bound, found in fits:
            if bound.route.method == method:
                request.parameters.update({name: unquote(text) for name, text in found.groupdict().items()})
                return bound
        if own and method == "POST" and below == ("/predict" if path.startswith("/v2/") else ""):
            for bound in self._bound:
                if bound.route.method == "POST":
                    return bound
        if fits:
            allowed = ", ".join(bound.route.method for bound, _ in fits)
            raise Refused(405, f"`{path}` takes {allowed}, not {request.method}")
        raise Refused(404, f"the handler has no `{path}`")

    async def _in_thread(self, bound: _Bound, request: Request, caller: Caller) -> object:
        loop = asyncio.get_running_loop()
        plain = PlainCaller(caller, loop)
        arguments = _arguments(bound.names, request.plain(), PlainModels(plain))
        made = await run_in_thread(loop, self._threads, plain, lambda: bound.function(**arguments))
        return self._items(made, plain) if inspect.isgenerator(made) else made

    async def _items(self, made: Iterator[object], plain: PlainCaller) -> AsyncIterator[object]:
        """The items of a plain generator, each made in the thread."""
        loop, end = asyncio.get_running_loop(), object()
        while (item := await run_in_thread(loop, self._threads, plain, lambda: next(made, end))) is not end:
            yield item


async def run_in_thread(
    loop: asyncio.AbstractEventLoop, threads: ThreadPoolExecutor, plain: PlainCaller, run: Callable[[], object]
) -> object:
    """What `run` returns. A cancelled one is waited for, as nothing stops a thread; its calls of models fail."""
    variables = copy_context()
    work = loop.run_in_executor(threads, lambda: _without_stop_iteration(lambda: variables.run(run)))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        plain.stop()
        if not work.done():
            await asyncio.wait([work])
        if not work.cancelled():
            work.exception()  # is nobody's
        raise


def _without_stop_iteration(run: Callable[[], object]) -> object:
    """A future cannot hold StopIteration, nor should SystemExit of a handler end the process."""
    try:
        return run()
    except StopIteration as error:
        raise RuntimeError("the handler raised StopIteration") from error
    except SystemExit as error:
        raise RuntimeError(f"the handler called exit({error.code})") from error


def _marked(handler: type) -> list[tuple[str, Route]]:
    """Names of methods with their routes, in the order in which they were written."""
    found: dict[str, list[Route]] = {}
    for base in reversed(handler.__mro__):
        for name, member in vars(base).items():
            if hasattr(member, "_routes"):
                found[name] = member._routes
    return [(name, each) for name, routes in found.items() for each in routes]


def _bind(handler: object, name: str, wanted: Route) -> _Bound:
    function = getattr(handler, name)
    names = tuple(inspect.signature(function).parameters)
    for each in names:
        if each not in _GIVEN:
            raise HandlerError(
                f"`{name}` takes `{each}`, which nobody gives", f"a route takes {', '.join(_GIVEN)}, by these names"
            )
    pieces = re.split(r"\{(\w+)\}", wanted.path.rstrip("/") or "/")
    pattern = "".join(f"(?P<{piece}>[^/]+)" if at % 2 else re.escape(piece) for at, piece in enumerate(pieces))
    return _Bound(wanted, re.compile(pattern), function, names)


def _arguments(names: tuple[str, ...], request: Request, models: Any) -> dict[str, Any]:
    given = {"request": request, "model": models.own, "models": models}
    return {name: given[name] for name in names}


def _is_generator(function: Callable[..., Any]) -> bool:
    return inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function)
