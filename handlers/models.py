"""What a handler calls: models by name, from coroutines and from threads."""

import asyncio
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, Protocol

from .tensors import Array


class Caller(Protocol):
    """Carries calls to models: over frames to the server, or to a session in this process."""

    async def call(
        self, model: str, version: str, inputs: Mapping[str, object], timeout_ms: float | None
    ) -> dict[str, Array]: ...


class Model:
    """A model of the server; `await model(input_ids=…)` gives its outputs by name, as numpy arrays.

    Inputs are numpy arrays, torch tensors or numbers in lists, named as in the contract. Refused where the model
    refuses; its status is what the client gets unless the handler catches it.
    """

    __slots__ = ("_caller", "_name", "_version")

    def __init__(self, caller: Caller, name: str = "", version: str = "") -> None:
        self._caller = caller
        self._name = name
        self._version = version

    async def __call__(self, /, **inputs: object) -> dict[str, Array]:
        return await self._caller.call(self._name, self._version, inputs, None)

    async def call(self, inputs: Mapping[str, object], *, timeout_ms: float | None = None) -> dict[str, Array]:
        """The same with inputs in a dict, and less time than the request has left."""
        return await self._caller.call(self._name, self._version, inputs, timeout_ms)

    def version(self, version: str) -> "Model":
        """One version of it, whatever the traffic rules say."""
        return Model(self._caller, self._name, version)


class Models:
    """The models of the server by name: `models["reranker"]`."""

    __slots__ = ("_caller",)

    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    def __getitem__(self, name: str) -> Model:
        return Model(self._caller, name)

    @property
    def own(self) -> Model:
        """The model that the handler belongs to."""
        return Model(self._caller)


class PlainCaller:
    """Calls from a thread, each waited for there; `stop` ends the one that waits and refuses others."""

    def __init__(self, caller: Caller, loop: asyncio.AbstractEventLoop) -> None:
        self._caller = caller
        self._loop = loop
        self._waiting: Future[dict[str, Array]] | None = None
        self._stopped = False

    def call(self, name: str, version: str, inputs: Mapping[str, object], timeout_ms: float | None) -> dict[str, Array]:
        if self._stopped:
            raise asyncio.CancelledError
        self._waiting = asyncio.run_coroutine_threadsafe(
            self._caller.call(name, version, inputs, timeout_ms), self._loop
        )
        return self._waiting.result()

    def stop(self) -> None:
        self._stopped = True
        if self._waiting is not None:
            self._waiting.cancel()


class PlainModel:
    """A model for a plain `def`: `model(input_ids=…)` returns its outputs."""

    __slots__ = ("_caller", "_name", "_version")

    def __init__(self, caller: PlainCaller, name: str = "", version: str = "") -> None:
        self._caller = caller
        self._name = name
        self._version = version

    def __call__(self, /, **inputs: object) -> dict[str, Array]:
        return self._caller.call(self._name, self._version, inputs, None)

    def call(self, inputs: Mapping[str, object], *, timeout_ms: float | None = None) -> dict[str, Array]:
        return self._caller.call(self._name, self._version, inputs, timeout_ms)

    def version(self, version: str) -> "PlainModel":
        return PlainModel(self._caller, self._name, version)


class PlainModels:
    """The models of the server for a plain `def`."""

    __slots__ = ("_caller",)

    def __init__(self, caller: PlainCaller) -> None:
        self._caller = caller

    def __getitem__(self, name: str) -> PlainModel:
        return PlainModel(self._caller, name)

    @property
    def own(self) -> PlainModel:
        return PlainModel(self._caller)


AnyModels = Models | PlainModels
Outputs = dict[str, Any]
