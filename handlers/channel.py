"""Frames over a socket: 4 bytes header length, 8 bytes body length, a JSON header, a body (ARCHITECTURE.md)."""

import asyncio
import os
import socket
import struct
import sys
from collections import deque
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

import msgspec

MAX_HEADER = 1 << 20  # bytes
MAX_BODY = 1 << 30
_LENGTHS = struct.Struct("<IQ")
_BUFFER = 1 << 18  # frames up to this size are read by one call, larger ones into memory of their own
_PIECES = 512  # of one sendmsg; Linux takes 1024

Header = dict[str, Any]
Buffer = bytes | bytearray | memoryview


class BrokenPeer(Exception):
    """What came is no frame, or the peer is gone."""


def decode_lengths(data: Buffer, at: int = 0) -> tuple[int, int]:
    """Lengths of header and body. BrokenPeer where they are beyond the limits."""
    header, body = _LENGTHS.unpack_from(data, at)
    if header > MAX_HEADER or body > MAX_BODY:
        raise BrokenPeer(f"a frame of {header} + {body} bytes")
    return header, body


def decode_header(data: Buffer) -> Header:
    try:
        return msgspec.json.decode(data, type=Header)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BrokenPeer(f"a frame's header is no JSON object: {error}") from None


def encode_frame(header: Mapping[str, object], *parts: Buffer) -> list[memoryview]:
    """The frame's pieces; those of its body are not copied."""
    views = [memoryview(part).cast("B") for part in parts if len(part)]
    encoded = msgspec.json.encode(header)
    return [memoryview(_LENGTHS.pack(len(encoded), sum(map(len, views))) + encoded), *views]


def read_frame(sock: socket.socket) -> tuple[Header, bytearray]:
    """The next frame of a blocking socket. BrokenPeer where it ends."""
    header_size, body_size = decode_lengths(_read_exactly(sock, _LENGTHS.size))
    return decode_header(_read_exactly(sock, header_size)), _read_exactly(sock, body_size)


def write_frame(sock: socket.socket, header: Mapping[str, object], *parts: Buffer) -> None:
    """Sends a frame over a blocking socket."""
    for piece in encode_frame(header, *parts):
        sock.sendall(piece)


def _read_exactly(sock: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = sock.recv_into(view)
        if not count:
            raise BrokenPeer("the socket was closed")
        view = view[count:]
    return data


class Channel:
    """A socket's frames on an event loop: `on_frame(header, body)` for each, `on_end(why)` once no more will come.

    A body belongs to whoever gets it. What is sent is not copied: it must not change until it is gone.
    """

    def __init__(
        self,
        sock: socket.socket,
        loop: asyncio.AbstractEventLoop,
        on_frame: Callable[[Header, bytearray], None],
        on_end: Callable[[str], None],
    ) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._loop = loop
        self._on_frame = on_frame
        self._on_end = on_end
        self._process = os.getpid()
        self._view = memoryview(bytearray(_BUFFER))
        self._start = self._end = 0  # what of the buffer was not looked at yet
        self._large: bytearray | None = None  # of a frame that does not fit in: header and body
        self._large_header = self._filled = 0
        self._unsent: deque[memoryview] = deque()
        self._open = True
        loop.add_reader(sock.fileno(), self._readable)

    @property
    def unsent(self) -> int:
        """Bytes that the peer has not taken yet."""
        return sum(map(len, self._unsent))

    def send(self, header: Mapping[str, object], *parts: Buffer) -> None:
        """Queues a frame; nothing happens once the peer is gone."""
        self._refuse_a_fork()
        if not self._open:
            return
        idle = not self._unsent
        self._unsent.extend(encode_frame(header, *parts))
        if idle:
            self._write()
            if self._unsent and self._open:
                self._loop.add_writer(self._socket.fileno(), self._writable)

    def close(self) -> None:
        """Sends what can be sent at once, and lets go of the socket."""
        if self._open:
            self._end_with(None)

    def _end_with(self, why: str | None) -> None:
        self._open = False
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_writer(self._socket.fileno())
        self._socket.close()
        if why is not None:
            self._on_end(why)

    def _refuse_a_fork(self) -> None:
        """A child that a handler forked has nothing to say to the server; it ends where it comes back to the loop."""
        if os.getpid() != self._process:
            sys.stderr.write("a child that the handler forked came back into the handler's event loop: it is ended\n")
            sys.stderr.flush()
            os._exit(70)

    def _readable(self) -> None:
        self._refuse_a_fork()
        try:
            if self._large is not None:
                count = self._socket.recv_into(memoryview(self._large)[self._filled :])
                self._filled += count
            else:
                count = self._socket.recv_into(self._view[self._end :])
                self._end += count
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            count = 0
        if not count:
            self._end_with("the server is gone")
            return
        try:
            self._take_large() if self._large is not None else self._take_small()
        except BrokenPeer as error:
            self._end_with(f"the server sent {error}")

    def _take_large(self) -> None:
        assert self._large is not None
        if self._filled < len(self._large):
            return
        whole, self._large = self._large, None
        header = decode_header(memoryview(whole)[: self._large_header])
        del whole[: self._large_header]  # moves the start, copies nothing
        self._on_frame(header, whole)

    def _take_small(self) -> None:
        while self._open and self._end - self._start >= _LENGTHS.size:
            header_size, body_size = decode_lengths(self._view, self._start)
            at = self._start + _LENGTHS.size
            if at + header_size + body_size > self._end:
                if at - self._start + header_size + body_size > _BUFFER:
                    self._begin_large(at, header_size, body_size)
                break
            header = decode_header(self._view[at : at + header_size])
            self._start = at + header_size + body_size
            self._on_frame(header, bytearray(self._view[at + header_size : self._start]))
        rest = self._end - self._start
        if self._start:
            self._view[:rest] = bytes(self._view[self._start : self._end])
        self._start, self._end = 0, rest

    def _begin_large(self, at: int, header_size: int, body_size: int) -> None:
        self._large, self._large_header = bytearray(header_size + body_size), header_size
        self._filled = self._end - at
        self._large[: self._filled] = self._view[at : self._end]
        self._start = self._end

    def _writable(self) -> None:
        self._refuse_a_fork()
        self._write()
        if not self._unsent and self._open:
            self._loop.remove_writer(self._socket.fileno())

    def _write(self) -> None:
        while self._unsent:
            try:
                count = self._socket.sendmsg(islice(self._unsent, _PIECES))
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                self._unsent.clear()
                self._loop.call_soon(self._lost)
                return
            while count:
                first = self._unsent[0]
                if count < len(first):
                    self._unsent[0] = first[count:]
                    break
                count -= len(first)
                self._unsent.popleft()

    def _lost(self) -> None:
        if self._open:
            self._end_with("the server is gone")
