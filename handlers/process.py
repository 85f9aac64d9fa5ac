"""The process that a handler runs in: requests come as frames, and calls of models and answers go as frames."""

import asyncio
import faulthandler
import gc
import os
import platform
import signal
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from math import inf
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from ..bundle_format.contract import Contract
from ..bundle_format.errors import HandlerError, MctlError
from . import answers
from .answers import Answer
from .api import Context, Refused, Request
from .channel import BrokenPeer, Buffer, Channel, Header, read_frame, write_frame
from .loading import load_application
from .routed import Application
from .tensors import Array, pack, unpack
from .unpacking import handler_files

DESCRIPTOR = "MCTL_HANDLER_FD"
_PART = 1 << 20  # bytes of a part of a stream, at most
_WINDOW_PARTS, _WINDOW_BYTES = 16, 1 << 20  # that the client has not taken yet


class Runtime:
    """The requests that are being handled, and the model calls that they wait for."""

    def __init__(
        self,
        sock: socket.socket,
        application: Application,
        contract: Contract,
        concurrency: int,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.ended: asyncio.Future[None] = loop.create_future()
        self._application = application
        self._contract = contract
        self._concurrency = concurrency
        self._loop = loop
        self._requests: dict[int, asyncio.Task[None]] = {}
        self._open: set[int] = set()  # those of them that were not answered yet
        self._windows: dict[int, _Window] = {}
        self._calls: dict[int, asyncio.Future[dict[str, Array]]] = {}
        self._last_call = 0
        self._draining = False
        self._channel = Channel(sock, loop, self._on_frame, self._on_end)
        application.resize(concurrency)

    def close(self) -> None:
        self._channel.close()

    # --- frames that come ----------------------------------------------------------------------------------------

    def _on_frame(self, header: Header, body: bytearray) -> None:
        kind = header.get("t")
        if kind == "request":
            self._begin(header, body)
        elif kind == "result":
            self._settle(header, body)
        elif kind == "ping":
            self._channel.send({"t": "pong", "n": header["n"]})
        elif kind == "more":
            if window := self._windows.get(header["id"]):
                window.acknowledge()
        elif kind == "cancel":
            if task := self._requests.get(header["id"]):
                task.cancel()
        elif kind == "drain":
            self._draining = True
            self._end_if_drained()

    def _on_end(self, why: str) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def _end_if_drained(self) -> None:
        if self._draining and not self._requests and not self.ended.done():
            self.ended.set_result(None)

    def _begin(self, header: Header, body: bytearray) -> None:
        id = header["id"]
        if len(self._open) >= self._concurrency:
            full = Refused(503, "the handler has no room")
            self._open.add(id)
            _Reply(self._channel, self._open, id).answer(answers.error_answer(header["path"], full))
            return
        self._open.add(id)
        task = self._loop.create_task(self._serve(header, body))
        self._requests[id] = task
        task.add_done_callback(lambda _: self._finished(id))

    def _finished(self, id: int) -> None:
        del self._requests[id]
        if id in self._open:  # cancelled before it began
            _Reply(self._channel, self._open, id).cancelled()
        self._end_if_drained()

    def _settle(self, header: Header, body: bytearray) -> None:
        future = self._calls.pop(header["call"], None)
        if future is None or future.done():
            return
        status = header.get("status", 200)
        if status != 200:
            future.set_exception(Refused(status, header.get("error") or "the model refused"))
            return
        try:
            future.set_result(unpack(header["outputs"], body))
        except (KeyError, ValueError) as error:
            future.set_exception(RuntimeError(f"the server sent outputs that cannot be read: {error}"))

    # --- one request ---------------------------------------------------------------------------------------------

    async def _serve(self, header: Header, body: bytearray) -> None:
        """Handles a request: one answer, or a stream's start, parts and end. Whatever happens, one of these is last."""
        reply, request = _Reply(self._channel, self._open, header["id"]), request_from(header, body)
        limit = asyncio.timeout(_seconds(header.get("deadline_ms")))
        try:
            async with limit:
                made = await self._application.handle(request, _Caller(self, reply.id))
                if isinstance(made, AsyncGenerator):
                    await self._stream(reply, made)
                else:
                    reply.answer(answers.answer_from(made))
        except asyncio.CancelledError:
            reply.cancelled()
        except BaseException as error:
            late = isinstance(error, TimeoutError) and limit.expired()
            reply.failed(request, Refused(504, "the deadline of the request has passed") if late else error)

    async def _stream(self, reply: "_Reply", items: AsyncGenerator[object, None]) -> None:
        """Sends what a generator yields, as fast as the client takes it."""
        window = self._windows[reply.id] = _Window()
        try:
            first = True
            async for item in items:
                if first:
                    reply.start(answers.stream_type(item))
                first = False
                view = memoryview(answers.part_from(item)).cast("B")
                for at in range(0, len(view), _PART):
                    await window.room()
                    reply.part(view[at : at + _PART], window)
            if first:
                reply.start("text/event-stream")
            reply.end()
        finally:
            self._windows.pop(reply.id, None)
            await _closed(items)

    # --- calls of models -----------------------------------------------------------------------------------------

    async def call(
        self, id: int, model: str, version: str, inputs: Mapping[str, object], timeout_ms: float | None
    ) -> dict[str, Array]:
        described, buffers = pack(self._contract if not model else None, inputs)
        self._last_call += 1
        call = self._last_call
        future: asyncio.Future[dict[str, Array]] = self._loop.create_future()
        self._calls[call] = future
        header = {"t": "call", "id": id, "call": call, "model": model, "version": version}
        self._channel.send({**header, "inputs": described, "timeout_ms": timeout_ms}, *buffers)
        try:
            return await future
        finally:
            if self._calls.pop(call, None) is not None:  # nobody waits for it any more
                self._channel.send({"t": "uncall", "id": id, "call": call})


class _Caller:
    """Calls of models for one request."""

    __slots__ = ("_id", "_runtime")

    def __init__(self, runtime: Runtime, id: int) -> None:
        self._runtime = runtime
        self._id = id

    async def call(
        self, model: str, version: str, inputs: Mapping[str, object], timeout_ms: float | None
    ) -> dict[str, Array]:
        return await self._runtime.call(self._id, model, version, inputs, timeout_ms)


class _Reply:
    """What goes back for one request: an answer, or a stream. What ends it frees the request's place."""

    def __init__(self, channel: Channel, open: set[int], id: int) -> None:
        self.id = id
        self._channel = channel
        self._open = open
        self._started = False

    def answer(self, answer: Answer) -> None:
        self._end({"t": "answer", "status": answer.status, "headers": answer.headers}, answer.body)

    def start(self, kind: str) -> None:
        self._started = True
        headers = [("content-type", kind), ("cache-control", "no-cache")]
        self._channel.send({"t": "start", "id": self.id, "status": 200, "headers": headers})

    def part(self, data: memoryview, window: "_Window") -> None:
        window.sent(len(data))
        self._channel.send({"t": "part", "id": self.id}, data)

    def end(self) -> None:
        self._end({"t": "end"})

    def cancelled(self) -> None:
        self._end({"t": "break", "error": "cancelled"}) if self._started else self.answer(Answer(499, [], b""))

    def failed(self, request: Request, error: BaseException) -> None:
        """Nothing is said twice: what fails after the end is only logged."""
        refused = refused_from(error, request)
        if self._started:
            self._end({"t": "break", "error": refused.message})
        else:
            self.answer(answers.error_answer(request.path, refused))

    def _end(self, header: Header, body: Buffer = b"") -> None:
        if self.id in self._open:
            self._open.discard(self.id)
            self._channel.send({**header, "id": self.id}, body)


class _Window:
    """Parts that were sent and not taken yet; the sender waits for room."""

    def __init__(self) -> None:
        self._sizes: deque[int] = deque()
        self._bytes = 0
        self._changed = asyncio.Event()

    async def room(self) -> None:
        while len(self._sizes) >= _WINDOW_PARTS or self._bytes >= _WINDOW_BYTES:
            self._changed.clear()
            await self._changed.wait()

    def sent(self, size: int) -> None:
        self._sizes.append(size)
        self._bytes += size

    def acknowledge(self) -> None:
        """The client has taken the oldest part."""
        if self._sizes:
            self._bytes -= self._sizes.popleft()
            self._changed.set()


def request_from(header: Header, body: bytearray) -> Request:
    """The request of a frame."""
    left = _seconds(header.get("deadline_ms"))
    return Request(
        header["method"],
        header["path"],
        body,
        query=dict(parse_qsl(header.get("query") or "", keep_blank_values=True)),
        headers=dict(header.get("headers") or ()),
        client=header.get("client") or "",
        id=header.get("request_id") or "",
        deadline=inf if left is None else time.monotonic() + left,
    )


def refused_from(error: BaseException, request: Request) -> Refused:
    """What the client is told of a failure; what it is not told goes to the log."""
    if isinstance(error, Refused):
        return error
    _log(f"request {request.id}: {request.method} {request.path} failed\n{_trace(error)}")
    return Refused(500, f"the handler failed on request {request.id}: the log says why")


async def _closed(items: AsyncGenerator[object, None]) -> None:
    """Ends a generator that may not be at its end; what it does then is logged, and told to nobody."""
    try:
        await items.aclose()
    except BaseException as error:
        _log(f"a stream's generator failed when it was closed\n{_trace(error)}")


def _log(text: str) -> None:
    """To the handler's log, unless the handler has closed it."""
    with suppress(Exception):
        sys.stderr.write(text)
        sys.stderr.flush()


def _trace(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


# --- the process's life -------------------------------------------------------------------------------------------


class Init(msgspec.Struct, kw_only=True):
    """The first frame: what to load. Fields that this version does not know are ignored."""

    name: str
    version: str
    handler: str  # a file, "stock:NAME", or "bundle": the bundle's own
    contract: Contract
    bundle: str = ""
    assets: str = ""
    properties: dict[str, Any] = {}
    concurrency: int = 16
    batch_size: int | None = None
    batch_delay_ms: float | None = None


def load(init: Init) -> Application:
    """The handler that the first frame asks for. HandlerError and other MctlErrors where it cannot be."""
    source, assets = handler_files(init.handler, init.bundle, init.assets)
    context = Context(init.name, init.version, init.contract, assets, init.properties)
    return load_application(source, context, batch_size=init.batch_size or 1, batch_delay_ms=init.batch_delay_ms or 0)


def ready_frame(application: Application) -> dict[str, object]:
    return {
        "t": "ready",
        "routes": [list(each) for each in application.routes],
        "stream": application.streams,
        "python": platform.python_version(),
    }


async def _run(sock: socket.socket, application: Application, init: Init) -> None:
    runtime = Runtime(sock, application, init.contract, init.concurrency, asyncio.get_running_loop())
    with suppress(asyncio.CancelledError):
        await runtime.ended
    runtime.close()


def main() -> None:
    """Loads the handler that the first frame names, says that it is ready, handles requests until it is told to end."""
    sock = socket.socket(fileno=int(os.environ.pop(DESCRIPTOR)))
    sock.set_inheritable(False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server, which gets it too, drains
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    try:
        header, _ = read_frame(sock)
        init = msgspec.convert(header, Init)
        application = load(init)
    except BrokenPeer:
        return
    except (MctlError, msgspec.ValidationError) as error:
        cause = error.__cause__ or error
        trace = _trace(cause) if isinstance(error, HandlerError) else ""
        hint = f" ({error.hint})" if isinstance(error, MctlError) and error.hint else ""
        write_frame(sock, {"t": "failed", "error": f"{error}{hint}"[:2000], "trace": trace[-20000:]})
        sys.exit(1)
    write_frame(sock, ready_frame(application))
    gc.collect()
    gc.freeze()  # what was loaded stays, and need not be looked at again
    asyncio.run(_run(sock, application, init))
    with suppress(Exception):
        sys.stdout.flush()
    os._exit(0)  # a thread of the handler that goes on does not hold the process back


if __name__ == "__main__":
    main()
