"""What clients can make the server hold: attacks that once worked, and random clients against a limit on memory."""

import contextlib
import gzip
import json
import random
import resource
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from .server import Raw, Server, infer_binary, infer_json, post
from .test_batching import eventually
from .test_http import resident

INFER = "/v2/models/mlp/infer"
LIVE = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
PAGE = b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n\r\n"
HEAD = f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\n"
BODY = json.dumps(infer_json(x=np.ones((1, 128), np.float32)))
TOKEN = "right-token"
BEARER = f"Authorization: Bearer {TOKEN}"
MIB = 1 << 20


@pytest.fixture(scope="module")
def null(mlp_bundle: Path) -> Iterator[Server]:
    with Server(mlp_bundle, "--null", ready=False) as server:
        yield server


@pytest.fixture(scope="module")
def protected(mlp_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    token = tmp_path_factory.mktemp("bounded") / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    with Server(mlp_bundle, "--null", "--token-file", str(token), "--max-clients-mb", "64", ready=False) as server:
        yield server


def push(raw: Raw, data: bytes) -> None:
    """As much of it as the server takes."""
    with contextlib.suppress(OSError):
        raw.send(data)


# --- who has no token
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("framing", ["Content-Length: 67108864", "Transfer-Encoding: chunked"])
@pytest.mark.parametrize("path", ["/v2/health/live", "/v2/health/ready", "/metrics", "/", "/nowhere", INFER])
@pytest.mark.parametrize("verb", ["POST", "GET"])
def test_a_stranger_gets_no_body_in(protected: Server, verb: str, path: str, framing: str) -> None:
    with protected.connect() as raw:
        answer = raw.send(f"{verb} {path} HTTP/1.1\r\nHost: localhost\r\n{framing}\r\n\r\n").read()
        assert 400 <= answer.status < 500 and answer.headers["connection"] == "close"


def test_strangers_leave_room_for_those_who_have_the_token(protected: Server) -> None:
    """97 of them send what they announce, others small bodies and heads that never end; it all stays in an eighth."""
    before = resident(protected)
    with contextlib.ExitStack() as stack:
        for number in range(300):
            raw = stack.enter_context(protected.connect(f"127.0.0.{2 + number % 100}"))
            raw.socket.settimeout(0.2)
            if number < 97:
                push(raw, b"POST /v2/health/live HTTP/1.1\r\nHost: localhost\r\nContent-Length: 67108864\r\n\r\n")
                push(raw, bytes(MIB))
            elif number % 2:
                push(raw, f"{HEAD}Content-Length: 65536\r\n\r\n".encode() + bytes(65535))
            else:
                push(raw, f"{HEAD}X: ".encode() + b"x" * 65000)
        assert resident(protected) - before < 8 + 300 * 16 / 1024 + 4
        large = infer_json(x=np.ones((64, 128), np.float32))
        headers = {"Authorization": f"Bearer {TOKEN}"}
        assert protected.request(INFER, json.dumps(large).encode(), headers).status == 200


# --- memory as bytes come
# ---------------------------------------------------------------------------------------------------------------------


def test_a_head_alone_takes_no_memory(null: Server) -> None:
    status = Path(f"/proc/{null.process.pid}/status")

    def size() -> int:
        return int(status.read_text().split("VmSize:")[1].split()[0]) // 1024

    before = size()
    with contextlib.ExitStack() as stack:
        for _ in range(64):
            stack.enter_context(null.connect()).send(f"{HEAD}Content-Length: 60000000\r\n\r\n123")
        assert null.request("/v2/health/live").status == 200
        assert size() - before < 64


def test_memory_that_cannot_be_had_is_a_503(mlp_bundle: Path) -> None:
    with Server(mlp_bundle, "--null", ready=False) as server:
        pid = server.process.pid
        size = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
        resource.prlimit(pid, resource.RLIMIT_AS, (size + 24 * MIB, resource.RLIM_INFINITY))
        for _ in range(3):
            answers = []
            with contextlib.ExitStack() as stack:
                for _ in range(4):
                    raw = stack.enter_context(server.connect())
                    push(raw, f"{HEAD}Content-Length: 60000000\r\n\r\n".encode() + bytes(10 * MIB))
                    raw.socket.settimeout(0.5)
                    with contextlib.suppress(TimeoutError):
                        answers.append(raw.read())
            assert answers and {answer.status for answer in answers} == {503}
            assert {answer.error for answer in answers} == {"the server is out of memory"}
            assert server.request(INFER, BODY.encode()).status == 200


@pytest.mark.parametrize(
    "endless",
    [b"1;" + b"e" * 1000, b"0\r\n" + b"X: trailer\r\n" * 80, b"0\r\nX: " + b"t" * 1000, b"1;e\r\nx\r\n" * 110],
)
def test_what_stands_beside_chunks_is_bounded(null: Server, endless: bytes) -> None:
    before = resident(null)
    start, rest = endless[:4], endless[4:]
    with null.connect() as raw:
        raw.send(f"{HEAD}Transfer-Encoding: chunked\r\n\r\n".encode() + start)
        for _ in range(1000):
            push(raw, rest if b"\r\n" not in rest else endless if endless.startswith(b"1") else endless[3:])
        assert raw.read().status == 400
    assert resident(null) - before < 4


def test_ids_are_bounded(null: Server) -> None:
    request = json.loads(BODY)
    assert null.request(INFER, json.dumps(request | {"id": "i" * 1024}).encode()).json()["id"] == "i" * 1024
    answer = null.request(INFER, json.dumps(request | {"id": "i" * 1025}).encode())
    assert (answer.status, answer.error) == (400, "id is not of at most 1024 bytes")
    name = json.dumps({"inputs": [{"name": "n" * 60000, "shape": [1], "datatype": "FP32", "data": [1]}]})
    assert len(null.request(INFER, name.encode()).body) < 8192  # nor does a refusal repeat all that was sent


# --- connections
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("started", [b"", b"POST / HTTP/1.1\r\n"])
def test_nobody_is_shut_out_by_connections(mlp_bundle: Path, started: bytes) -> None:
    """Idle ones, and such as are in the middle of a request, from one address: they go for another's, not for more."""
    with (
        Server(mlp_bundle, "--null", "--max-connections", "32", ready=False) as server,
        contextlib.ExitStack() as stack,
    ):
        kept = stack.enter_context(server.connect("127.0.0.3"))
        assert kept.send(PAGE).read().status == 200
        for _ in range(200):
            push(stack.enter_context(server.connect("127.0.0.2")), started)
        good = stack.enter_context(server.connect())
        assert good.send(post(INFER, BODY)).read().status == 200
        assert kept.send(PAGE).read().status == 200
        more = stack.enter_context(server.connect("127.0.0.2"))
        assert more.send(PAGE).read().status == (503 if started else 200)
        probe = stack.enter_context(server.connect("127.0.0.2"))
        assert probe.send(LIVE).read().status == 200


# --- whom it answers
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "request_",
    [
        b"GET /v2 HTTP/1.1\r\n\r\n",
        b"GET /v2 HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n",
        b"GET /v2 HTTP/1.1\r\nHost: localhost\r\nhost: other\r\n\r\n",
        b"GET /v2 HTTP/1.1\r\nHost: local host\r\n\r\n",
        b"GET http://user@localhost/v2 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        f"POST {INFER} HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n".encode(),
        f"{HEAD}Transfer-Encoding: chunked\r\n\r\n0\r\nX: 1\r\n 2\r\n\r\n".encode(),
        f"{HEAD}Transfer-Encoding: chunked\r\n\r\n0\r\nX: 1\r\n\tContent-Length: 9\r\n\r\n".encode(),
    ],
)
def test_rules_of_http(null: Server, request_: bytes) -> None:
    with null.connect() as raw:
        answer = raw.send(request_ + LIVE).read()
        assert (answer.status, answer.headers["connection"]) == (400, "close")
        assert raw.closed() and raw._rest == b""


def asked(server: Server, host: str, origin: str = "", target: str = "/v2") -> int:
    with server.connect() as raw:
        lines = f"GET {target} HTTP/1.1\r\nHost: {host}\r\n" + (f"Origin: {origin}\r\n" if origin else "")
        return raw.send(lines + "\r\n").read().status


def test_names_of_a_server_on_loopback(null: Server) -> None:
    own = ["localhost", f"localhost:{null.port}", f"127.0.0.1:{null.port}", "[::1]:99", "LocalHost"]
    assert {asked(null, host, origin) for host in own for origin in ("", f"http://{host}")} == {200}
    foreign = ["evil.example", f"evil.example:{null.port}", "localhost.evil.example", "192.0.2.1", ""]
    assert {asked(null, host) for host in foreign[:-1]} == {403}
    assert {asked(null, "localhost", origin) for origin in ("https://evil.example", "null", "file://")} == {403}
    assert asked(null, "localhost", target="http://evil.example/v2") == 403
    assert asked(null, "evil.example", target="http://localhost/v2") == 200  # the target counts (RFC 9112, 3.2.2)
    with null.connect() as raw:  # refused before a body is sent
        assert (
            raw.send(f"POST {INFER} HTTP/1.1\r\nHost: evil.example\r\nContent-Length: 99999\r\n\r\n").read().status
            == 403
        )


def test_names_of_other_servers(mlp_bundle: Path, protected: Server) -> None:
    assert asked(protected, "anything.example") == 401  # who has the token may call it as they like
    for options, statuses in (
        (["--allowed-hosts", "a.example,b.example"], (403, 200, 200)),
        (["--allowed-hosts", "*"], (200, 200, 200)),
        (["--host", "0.0.0.0"], (200, 200, 200)),
    ):
        with Server(mlp_bundle, "--null", *options, ready=False) as server:
            assert (asked(server, "localhost"), asked(server, "A.example:1"), asked(server, "b.example")) == statuses


# --- all of it together
# ---------------------------------------------------------------------------------------------------------------------


def random_client(server: Server, chance: random.Random) -> Raw:
    """A client that does one of the things that cost memory, and stays."""
    raw = server.connect(f"127.0.0.{chance.randint(2, 9)}")
    raw.socket.settimeout(0.05)
    size = int(2 ** chance.uniform(10, 25))
    compressed = gzip.compress(b'{"inputs":[{"name":"x","shape":[9],"datatype":"FP64","data":[' + b"1," * size, 1)
    binary, headers = infer_binary(x=np.ones((chance.randint(1, 1024), 128), np.float32))
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    chunk = b"%x\r\n%s\r\n" % (size, bytes(size))
    for data in chance.choice(
        [
            [f"{HEAD}Content-Length: {size + 1}\r\n\r\n".encode(), bytes(size)],
            [f"{HEAD}Transfer-Encoding: chunked\r\n\r\n".encode(), chunk, chunk],
            [f"{HEAD}X: ".encode(), b"x" * min(size, 60000)],
            [post(INFER, compressed, "Content-Encoding: gzip")],
            [post(INFER, "[" * size)],
            [f"{HEAD}{lines}Content-Length: {len(binary)}\r\n\r\n".encode() + binary] * 4,
            [b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n" * 400],
            [b"POST /v2/health/live HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999999\r\n\r\n", bytes(size)],
        ]
    ):
        push(raw, data)
    return raw


def test_random_clients_stay_within_the_limit(mlp_bundle: Path) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    with Server(mlp_bundle, "--null", "--max-clients-mb", "64", "--max-request-rows", "1024", ready=False) as server:
        clients: list[Raw] = []
        before = most = resident(server)
        for _ in range(150):
            clients.append(random_client(server, chance))
            if len(clients) > 60 or chance.random() < 0.1:
                clients.pop(chance.randrange(len(clients))).socket.close()
            most = max(most, resident(server))
        assert most - before <= 64, (seed, most - before)
        for raw in clients:
            raw.socket.close()
        eventually(lambda: server.request(INFER, BODY.encode()).status == 200)
        eventually(lambda: resident(server) - before < 16)
