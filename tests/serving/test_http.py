"""Bytes on the wire: what clients may send, what they must not, and how slow they may be."""

import gzip
import json
import socket
import time
from pathlib import Path

import numpy as np
import pytest

from .server import Raw, Server, infer_json, post

INFER = "/v2/models/mlp/infer"
LIVE = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
def body() -> str:
    return json.dumps(infer_json(x=np.ones((1, 128), np.float32)))


def resident(server: Server) -> int:
    """MiB of the front process."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) // 1024


def test_pipelined_requests_of_which_the_middle_one_is_bad(server: Server, body: str) -> None:
    good, bad = post(INFER, body, "x-request-id: good"), post(INFER, "{nonsense", "x-request-id: bad")
    with server.connect() as raw:
        raw.send(good + bad + good + LIVE + good)
        answers = [raw.read() for _ in range(5)]
    assert [answer.status for answer in answers] == [200, 400, 200, 200, 200]
    assert [answers[i].headers["x-request-id"] for i in (0, 1, 2)] == ["good", "bad", "good"]


def test_many_pipelined_requests(server: Server, body: str) -> None:
    with server.connect() as raw:
        raw.send(post(INFER, body) * 50)
        assert {raw.read().status for _ in range(50)} == {200}


def test_broken_framing_ends_the_connection_after_an_answer(server: Server) -> None:
    for text in (
        b"nonsense\r\n\r\n",
        b"GET / HTTP/3.0\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST /v2/models/mlp/infer HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /\x00 HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nBad Header\r\n\r\n",
    ):
        with server.connect() as raw:
            answer = raw.send(text + LIVE).read()
            assert (answer.status, answer.headers["connection"]) == (400, "close"), text
            assert raw.closed()


def test_one_byte_at_a_time(server: Server, body: str) -> None:
    with server.connect() as raw:
        raw.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        chunked = f"{len(body):x};ext=1\r\n{body}\r\n0\r\nTrailer: 1\r\n\r\n"
        head = f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        for byte in (head + chunked).encode():
            raw.send(bytes([byte]))
        assert raw.read().status == 200
        for byte in head.encode() + b"0\r\n\r\n":
            raw.send(bytes([byte]))
        assert raw.read().status == 400


def test_targets_with_a_host_and_http_1_0(server: Server) -> None:
    with server.connect() as raw:
        assert (
            raw.send("GET http://localhost:99/v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n").read().status == 200
        )
        assert raw.send("GET http://localhost HTTP/1.1\r\nHost: localhost\r\n\r\n").read().status == 200
    with server.connect() as raw:
        keep = raw.send("GET /v2 HTTP/1.0\r\nConnection: keep-alive\r\n\r\n").read()
        assert keep.headers["connection"] == "keep-alive"
        assert raw.send("GET /v2 HTTP/1.0\r\n\r\n").read().headers["connection"] == "close"
        assert raw.closed()


def test_continue_is_sent_when_the_body_is_awaited(server: Server, body: str) -> None:
    head = f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: "
    with server.connect() as raw:
        assert raw.send(f"{head}{len(body)}\r\n\r\n").read().status == 100
        assert raw.send(body).read().status == 200
    with server.connect() as raw:
        assert raw.send(f"{head}{65 << 20}\r\n\r\n").read().status == 413


def test_large_bodies_are_refused_before_they_are_read(server: Server) -> None:
    with server.connect() as raw:
        answer = raw.send(f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {10 << 40}\r\n\r\n").read()
        assert (answer.status, answer.headers["connection"]) == (413, "close")
    before = resident(server)
    with server.connect() as raw:
        raw.send(f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        chunk = b"100000\r\n" + bytes(1 << 20) + b"\r\n"
        for _ in range(65):
            raw.send(chunk)
        assert raw.read().status == 413
    assert server.request(INFER, b"x" * (66 << 20)).status == 413  # by a client that sends all of it first
    assert resident(server) - before < 200


def test_heads_over_the_limit(mlp_bundle: Path) -> None:
    with Server(mlp_bundle, "--null", "--max-header-kb", "2", ready=False) as server:
        with server.connect() as raw:
            assert raw.send("GET /v2 HTTP/1.1\r\nHost: localhost\r\nX: " + "x" * 1000 + "\r\n\r\n").read().status == 200
            assert raw.send("GET /v2 HTTP/1.1\r\nHost: localhost\r\n" + "X: 1\r\n" * 1000).read().status == 400
        with server.connect() as raw:
            raw.send("GET /" + "x" * 3000)
            assert raw.read().status == 400
        with server.connect() as raw:  # all of it is there at once
            assert raw.send("GET /v2 HTTP/1.1\r\nHost: localhost\r\n" + "X: 1\r\n" * 350 + "\r\n").read().status == 400


def test_slow_clients(mlp_bundle: Path) -> None:
    with Server(mlp_bundle, "--null", "--idle-timeout", "1", ready=False) as server:
        idle, slow, drip = server.connect(), server.connect(), server.connect()
        began = time.monotonic()
        slow.send(f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\nabc")
        for byte in b"GET /":
            drip.send(bytes([byte]))
            time.sleep(0.1)
        answer = slow.read()
        assert (answer.status, answer.error) == (408, "the request did not come in time")
        assert drip.read().status == 408
        assert idle.socket.recv(100) == b""
        assert time.monotonic() - began > 0.9
        with server.connect() as kept:  # a request has the whole time, however long the connection was idle
            time.sleep(0.7)
            kept.send(LIVE[:10])
            time.sleep(0.7)
            assert kept.send(LIVE[10:]).read().status == 200


def test_a_client_that_does_not_read(mlp_bundle: Path) -> None:
    with Server(mlp_bundle, "--null", "--idle-timeout", "1", ready=False) as server:
        before = resident(server)
        raw = Raw(server.port)
        raw.socket.settimeout(0.5)
        request = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"
        with pytest.raises((TimeoutError, ConnectionError)):
            while True:
                raw.send(request * 1000)
        assert server.request("/v2/health/live").status == 200
        assert resident(server) - before < 50


def test_connections_over_the_limit_are_told(mlp_bundle: Path) -> None:
    with Server(mlp_bundle, "--null", "--max-connections", "4", ready=False) as server:
        held = [server.connect() for _ in range(4)]
        for raw in held:
            assert raw.send(LIVE + b"GET /").read().status == 200
        with server.connect() as extra:
            answer = extra.send("GET /v2 HTTP/1.1\r\nHost: localhost\r\n\r\n").read()
            assert (answer.status, answer.headers["retry-after"], answer.error) == (503, "1", "too many connections")
        held.pop().socket.close()
        time.sleep(0.1)
        with server.connect() as extra:
            assert extra.send(LIVE).read().status == 200


def test_a_thousand_idle_connections(server: Server, body: str) -> None:
    before = resident(server)
    idle = [server.connect() for _ in range(1000)]
    with server.connect() as raw:
        assert raw.send(post(INFER, body)).read().status == 200
    assert resident(server) - before < 40
    for raw in idle:
        raw.socket.close()


def test_a_client_that_closes_its_half_gets_its_answer(server: Server, body: str) -> None:
    with server.connect() as raw:
        raw.send(post(INFER, body))
        raw.socket.shutdown(socket.SHUT_WR)
        assert raw.read().status == 200


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"a":' * 100_000,
        json.dumps({"inputs": [{"name": "x", "shape": [1, 128], "datatype": "FP32", "data": [0] * 1_000_000}]}),
        '{"inputs":[{"name":"x","shape":[9223372036854775807,9223372036854775807],"datatype":"FP32","data":[]}]}',
        '{"inputs":[{"name":"x","shape":[18446744073709551617],"datatype":"FP32","data":[]}]}',
        '{"inputs":[{"name":"x","shape":[1,128],"datatype":"FP32","data":[1e999]}]}',
        '{"inputs":[{"name":"x","name":"x"}]}',
        '{"inputs":[' + "{}," * 200_000 + "{}]}",
        '{"id":"' + "x" * 1_000_000 + '"}',
        "\xff\xfe",
        "\x00",
    ],
)
def test_hostile_json(server: Server, text: str) -> None:
    before = resident(server)
    answer = server.request(INFER, text.encode("latin-1"))
    assert answer.status == 400 and answer.json().keys() == {"error"}
    assert resident(server) - before < 40


def test_hostile_sizes(server: Server) -> None:
    for length in ("99999999999999999999", "-5", "12abc", "1000000"):
        assert server.request(INFER, b"{}", {"Inference-Header-Content-Length": length}).status == 400
    for size in (2**63 - 1, -1, 512.5, "512"):
        request = {
            "inputs": [{"name": "x", "shape": [1, 128], "datatype": "FP32", "parameters": {"binary_data_size": size}}]
        }
        text = json.dumps(request).encode()
        assert server.request(INFER, text, {"Inference-Header-Content-Length": str(len(text))}).status == 400
    assert server.request(INFER, gzip.compress(b""), {"Content-Encoding": "gzip"}).status == 400
