"""Clients that break the rules, on purpose or not: they get a status or lose their connection, the others get answers.

Beside every test a good client works and compares its numbers, and the memory of the server stays where it was.
"""

import gzip
import json
import socket
import struct
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from .conftest import Mlp
from .server import Raw, Server, infer_binary, infer_json, outputs_of, post
from .test_batching import eventually, random
from .test_http import resident

INFER = "/v2/models/mlp/infer"
LIVE = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\n".encode()
BODY = json.dumps(infer_json(x=np.ones((1, 128), np.float32))).encode()


class Good:
    """A client that goes on asking, and keeps what went wrong."""

    def __init__(self, server: Server, mlp: Mlp) -> None:
        self.answers, self.failures, self.going = 0, [], True
        self._thread = threading.Thread(target=self._work, args=(server, mlp))
        self._thread.start()

    def _work(self, server: Server, mlp: Mlp) -> None:
        try:
            while self.going:
                x = random(3, self.answers)
                answer = server.request(INFER, *infer_binary(x=x))
                np.testing.assert_allclose(outputs_of(answer)["output"], mlp(x), rtol=1e-4, atol=1e-6)
                self.answers += 1
        except BaseException as failure:
            self.failures.append(failure)

    def stop(self) -> None:
        """After at least one more answer."""
        seen = self.answers
        eventually(lambda: self.answers > seen + 1 or bool(self.failures))
        self.going = False
        self._thread.join()
        assert not self.failures


@pytest.fixture(autouse=True)
def others(server: Server, mlp: Mlp) -> Iterator[Good]:
    before = resident(server)
    good = Good(server, mlp)
    yield good
    good.stop()
    assert resident(server) - before < 40


# Two readers of the same bytes must not see different requests: what is ambiguous ends the connection.
@pytest.mark.parametrize(
    "head",
    [
        b"Content-Length: 5\r\n folded: 1\r\n",
        b"X: 1\r\n\tContent-Length: 5\r\nContent-Length: 6\r\n",
        b"Transfer-Encoding: xchunked\r\n",
        b"Transfer-Encoding: chunked, identity\r\n",
        b"Transfer-Encoding: gzip, chunked\r\n",
        b"Transfer-Encoding: identity\r\nContent-Length: 5\r\n",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n",
        b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n",
        b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        b"Content-Length: 5\r\nContent-Length: 6\r\n",
        b"Content-Length: 5, 6\r\n",
        b"Content-Length: +5\r\n",
        b"Content-Length: 0x5\r\n",
        b"Content-Length: 5 5\r\n",
        b"Content-Length: -5\r\n",
        b"Content-Length: 18446744073709551621\r\n",
        b"Content-Length:\r\n",
        b"Content-Length : 5\r\n",
        b"Transfer-Encoding : chunked\r\n",
        b"Transfer\x00-Encoding: chunked\r\n",
        b"Content-Length: 5\x00\r\n",
        b"X: a\x00b\r\nContent-Length: 5\r\n",
        b"X: a\rContent-Length: 5\r\n",
        b": no name\r\n",
        b"no colon\r\n",
        b"Content-Length: 5\n",
    ],
)
def test_ambiguous_framing_is_refused(server: Server, head: bytes) -> None:
    with server.connect() as raw:
        answer = raw.send(POST + head + b"\r\nhello" + LIVE).read()
        assert answer.status in (400, 501) and answer.headers["connection"] == "close"
        assert raw.closed() and raw._rest == b""


@pytest.mark.parametrize(
    "chunks",
    [
        b"-1\r\nx\r\n0\r\n\r\n",
        b"0x1\r\nx\r\n0\r\n\r\n",
        b" 1\r\nx\r\n0\r\n\r\n",
        b"ffffffffffffffff1\r\nx\r\n0\r\n\r\n",
        b"1\r\nxy\r\n0\r\n\r\n",
        b"1\nx\n0\n\n",
        b"1\r\nx\r\n0\r\nContent-Length: 9\r\n\r\n",
        b"1\r\nx\r\n0\r\nX y\r\n\r\n",
        b"\r\n",
    ],
)
def test_broken_chunks_are_refused(server: Server, chunks: bytes) -> None:
    with server.connect() as raw:
        answer = raw.send(POST + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + LIVE).read()
        assert (answer.status, answer.headers["connection"]) == (400, "close")
        assert raw.closed() and raw._rest == b""


def test_chunk_extensions_and_trailers_mean_nothing(server: Server) -> None:
    for size in (b"%x", b"%x;a=b", b'%x;a="b c";d', b"000%X"):
        chunk = size % len(BODY) + b"\r\n" + BODY + b"\r\n"
        request = POST + b"Transfer-Encoding: chunked\r\n\r\n" + chunk + b"0;e\r\nX-Digest: 9\r\n\r\n"
        with server.connect() as raw:
            assert raw.send(request + LIVE).read().status == 200
            assert raw.read().json() == {"live": True}


@pytest.mark.parametrize(
    "start",
    [
        b"GET / HTTP/0.9\r\n\r\n",
        b"GET / HTTP/2.0\r\n\r\n",
        b"GET /\r\n\r\n",
        b"GET  / HTTP/1.1\r\n\r\n",
        b"GET /a b HTTP/1.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(300),  # TLS
        b"\x00" * 100,
        b"GET / HTTP/1.1\n\n",
    ],
)
def test_what_is_no_request_is_400(server: Server, start: bytes) -> None:
    with server.connect() as raw:
        answer = raw.send(start).read()
        assert (answer.status, answer.headers["connection"]) == (400, "close")
        assert raw.closed()


def test_verbs_that_nobody_should_use(server: Server) -> None:
    with server.connect() as raw:
        for verb in ("OPTIONS", "TRACE", "DELETE", "PATCH", "BREW"):
            answer = raw.send(f"{verb} {INFER} HTTP/1.1\r\nHost: localhost\r\n\r\n").read()
            assert (answer.status, answer.headers["allow"]) == (405, "POST"), verb
        assert raw.send(b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n").read().status == 404
        assert raw.send(f"HEAD {INFER} HTTP/1.1\r\nHost: localhost\r\n\r\n").read(head=True).status == 405
        assert raw.send(LIVE).read().status == 200


def test_a_body_that_is_longer_than_announced_is_the_next_request(server: Server) -> None:
    with server.connect() as raw:
        raw.send(post(INFER, BODY) + b"more bytes than announced\r\n\r\n" + LIVE)
        assert raw.read().status == 200
        answer = raw.read()
        assert (answer.status, answer.headers["connection"]) == (400, "close")
        assert raw.closed() and raw._rest == b""


def test_a_body_that_is_shorter_than_announced(server: Server) -> None:
    request = post(INFER, BODY)[:-1]
    with server.connect() as raw:  # the client says that nothing more comes
        raw.send(request).socket.shutdown(socket.SHUT_WR)
        assert raw.closed()
    for _ in range(50):  # or goes away
        with server.connect() as raw:
            raw.send(request)
    eventually(lambda: server.metrics()["mctl_queue_rows"] == 0)


def test_numbers_and_names_in_json_that_are_no_good(server: Server) -> None:
    good = BODY.decode()
    for bad in (
        good.replace("1.0", "1e999", 1),
        good.replace("1.0", "-1e999", 1),
        good.replace("1.0", "NaN", 1),
        good.replace("1.0", "01", 1),
        good.replace("1.0", "[1.0]", 1),
        good.replace('"shape"', '"name":"y","shape"'),
        good.replace('{"inputs"', '{"inputs":[],"inputs"'),
        good.replace("[1, 128]", "[4294967296, 4294967296]"),
        good.replace("[1, 128]", "[-1, 128]"),
        good.replace('"x"', '"\\ud800"'),
        good + "{}",
    ):
        assert bad != good
        answer = server.request(INFER, bad.encode())
        assert answer.status == 400 and answer.json().keys() == {"error"}, bad[:100]
    broken = BODY.replace(b'"x"', b'"\xc3\x28"')
    assert server.request(INFER, broken).status == 400


def test_bombs(server: Server) -> None:
    bomb = gzip.compress(b"[" * (65 << 20), 1)
    assert server.request(INFER, bomb, {"Content-Encoding": "gzip"}).status == 413
    assert server.request(INFER, gzip.compress(bomb), {"Content-Encoding": "gzip"}).status == 400
    assert server.request(INFER, bomb, {"Content-Encoding": "gzip, gzip"}).status == 415
    million = json.dumps({"inputs": [{"name": "x", "shape": [1, 128], "datatype": "FP32", "data": [0] * 1_000_000}]})
    assert server.request(INFER, million.encode()).status == 400
    assert server.request(INFER, b'{"parameters":' + b'{"a":' * 1_000_000).status == 400


def test_heads_that_never_end(server: Server) -> None:
    with server.connect() as raw:
        raw.send(b"GET / HTTP/1.1\r\n")
        try:
            for number in range(100_000):
                raw.send(f"x-{number}: {'y' * 100}\r\n")
        except ConnectionError:
            pass  # the server's answer was there long ago
        else:
            assert raw.read().status == 400


def test_resets_while_requests_wait_run_or_are_answered(server: Server) -> None:
    """By a client of another address: what it has in the queue must not cost others their answers."""
    x = random(64)
    body, headers = infer_binary(x=x)
    request = post(INFER, body, *(f"{name}: {value}" for name, value in headers.items()))
    for pause in (0, 0.0005, 0.002, 0.02):
        for _ in range(20):
            raw = server.connect("127.0.0.2")
            raw.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            raw.send(request * 4)
            time.sleep(pause)
            raw.socket.close()
    eventually(lambda: server.metrics()["mctl_inflight_batches"] <= 1)


def test_connections_that_come_and_say_nothing(server: Server) -> None:
    before = server.metrics()["process_open_fds"]
    for _ in range(1000):
        server.connect().socket.close()
    eventually(lambda: server.metrics()["process_open_fds"] <= before + 2)


def test_a_hundred_that_drip(server: Server) -> None:
    """Each sends a byte at a time; none gets an answer before its request is whole."""
    dripping = [Raw(server.port) for _ in range(100)]
    for byte in post(INFER, BODY)[:20]:
        for raw in dripping:
            raw.send(bytes([byte]))
    for raw in dripping:
        raw.send(post(INFER, BODY)[20:])
    assert {raw.read().status for raw in dripping} == {200}
    for raw in dripping:
        raw.socket.close()


def test_clients_that_do_not_read(server: Server) -> None:
    """Answers pile up in the sockets, and no further; then the connections are reset, in the middle of an answer."""
    deaf = [Raw(server.port) for _ in range(30)]
    for raw in deaf:
        raw.socket.settimeout(0.01)
        try:
            while True:
                raw.send(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n" * 200)
        except (TimeoutError, BlockingIOError):
            pass
    for raw in deaf:
        raw.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        raw.socket.close()
