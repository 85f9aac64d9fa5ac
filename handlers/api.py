"""What a handler is written with: requests, routes, refusals, and what it knows when it starts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from ..bundle_format.contract import Contract
from .form import Part, parse_form

Function = TypeVar("Function", bound=Callable[..., Any])


class Route(NamedTuple):
    method: str
    path: str  # "/classify"; a segment `{name}` matches any one


def route(method: str, path: str) -> Callable[[Function], Function]:
    """Marks a method of the handler's class: requests with this verb and path go to it.

    It takes `request`, and as it likes `model` (the handler's own) and `models` (any of the server, by name). An
    `async def` awaits them; a plain `def` runs in a thread, where nothing is awaited.
    """
    if not path.startswith("/"):
        raise ValueError(f"the route `{path}` does not begin with `/`")

    def mark(function: Function) -> Function:
        function.__dict__.setdefault("_routes", []).append(Route(method.upper(), path))
        return function

    return mark


class Refused(Exception):
    """The answer is this HTTP status with one sentence. `param` and `code` are for OpenAI's error objects.

    What a model refuses (contract 400, no such model 404, queue full 503, deadline 504) is raised as this too.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code


class BadRequest(Refused):
    """The client's request cannot be used: 400."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(400, message, param=param, code=code)


@dataclass(frozen=True, slots=True)
class Context:
    """What a handler knows when it is made, once a process."""

    name: str  # of the model, and its version
    version: str
    contract: Contract
    assets: Path  # the folder with the files that belong to the handler
    properties: Mapping[str, Any] = field(default_factory=dict)


class Request:
    """One HTTP request. Names of headers are lower-case; of a query's repeated names the last one counts."""

    __slots__ = ("body", "client", "deadline", "headers", "id", "method", "parameters", "path", "query")

    def __init__(
        self,
        method: str,
        path: str,
        body: bytes | bytearray = b"",
        *,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        client: str = "",
        id: str = "",
        deadline: float = inf,
    ) -> None:
        self.method = method
        self.path = path
        self.body = body
        self.query = query or {}
        self.headers = headers or {}
        self.client = client
        self.id = id
        self.deadline = deadline  # of time.monotonic(), in seconds
        self.parameters: dict[str, str] = {}  # what `{name}` of the route matched

    async def json(self) -> Any:
        """The body as JSON. BadRequest where it is none."""
        return self.read_json()

    async def text(self) -> str:
        """The body as UTF-8. BadRequest where it is none."""
        return self.read_text()

    async def form(self) -> dict[str, Part]:
        """The parts of a form (multipart or urlencoded) by name. BadRequest where it is none."""
        return self.read_form()

    def read_json(self) -> Any:
        try:
            return msgspec.json.decode(self.body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BadRequest(f"the body is no JSON: {error}") from None

    def read_text(self) -> str:
        try:
            return self.body.decode()
        except UnicodeDecodeError as error:
            raise BadRequest(f"the body is no UTF-8: {error.reason} at byte {error.start}") from None

    def read_form(self) -> dict[str, Part]:
        try:
            return parse_form(self.headers.get("content-type", ""), bytes(self.body))
        except ValueError as error:
            raise BadRequest(str(error)) from None

    def plain(self) -> "PlainRequest":
        """The same request for a plain `def`."""
        made = PlainRequest(
            self.method,
            self.path,
            self.body,
            query=self.query,
            headers=self.headers,
            client=self.client,
            id=self.id,
            deadline=self.deadline,
        )
        made.parameters = self.parameters
        return made


class PlainRequest(Request):
    """What a handler that is a plain `def` gets: nothing is awaited."""

    __slots__ = ()

    def json(self) -> Any:
        return self.read_json()

    def text(self) -> str:  # type: ignore[override]
        return self.read_text()

    def form(self) -> dict[str, Part]:  # type: ignore[override]
        return self.read_form()
