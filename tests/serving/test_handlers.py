"""Handlers behind the server: their paths, streams, refusals and ends, beside clients that check their numbers."""

import contextlib
import http.client
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from . import faulty
from .server import Answer, Server, infer_json, post
from .test_metrics import documented

HANDLER = """
import asyncio, json, os, resource, signal, time
from pathlib import Path
import numpy as np
from mctl.handlers import BadRequest, Response, route

class Handler:
    def __init__(self, context):
        self.kept = []
        print("made for", context.name, context.version)

    @route("POST", "/triple")
    async def triple(self, request, model):
        values = (await request.json())["values"]
        return {"y": (await model(x=[[1, value] for value in values]))["y"][:, 0].tolist()}

    @route("GET", "/seen/{thing}")
    async def seen(self, request):
        return {"thing": request.parameters["thing"], "query": dict(request.query), "headers": dict(request.headers),
                "client": request.client, "id": request.id, "path": request.path}

    @route("POST", "/seen/{thing}")
    async def body(self, request):
        return {"length": len(request.body), "sum": sum(request.body)}

    @route("POST", "/do/{what}")
    async def do(self, request, model, models):
        given = json.loads(bytes(request.body) or b"null")
        made = getattr(self, request.parameters["what"])(given, model, models)
        return made if hasattr(made, "__aiter__") else await made

    # what goes well
    async def pid(self, *_): return {"pid": os.getpid()}
    async def lines(self, given, *_):
        for number in range(given): yield {"n": number}
    async def parts(self, given, *_):
        for number in range(given["count"]):
            Path(given["mark"]).write_text(str(number))
            yield bytes([number % 251]) * given["size"]
    async def answer(self, given, *_): return Response(given["status"], given["headers"], given["body"])
    async def other(self, given, model, models):
        return {"y": (await models[given["model"]](x=[[1, given["value"]]]))["y"].tolist()}

    # what does not
    async def fail(self, *_): raise ValueError("a secret")
    async def refuse(self, *_): raise BadRequest("no, because")
    async def contract(self, given, model, models): return await model(x=np.zeros((1, 2), np.float32))
    async def slow_model(self, given, model, models): return {"y": (await model(x=[[6, given]]))["y"].tolist()}
    async def crash_model(self, given, model, models): return {"y": (await model(x=[[2, 0]]))["y"].tolist()}
    async def die(self, *_): os.kill(os.getpid(), signal.SIGSEGV)
    async def die_once(self, given, *_):
        if Path(given).exists(): return {"pid": os.getpid()}
        Path(given).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    async def leave(self, *_): os._exit(0)
    async def block(self, given, *_):
        time.sleep(given)
        return "turns again"
    async def orphan(self, given, *_):
        if os.fork() == 0:
            Path(given).write_text(str(os.getpid()))
            time.sleep(1000)
        return {}
    async def leak(self, *_):
        resource.setrlimit(resource.RLIMIT_NOFILE, (300, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        while True: self.kept.append(os.open("/dev/null", os.O_RDONLY))
    async def huge(self, given, *_): return bytes(given << 20)
    async def recurse(self, *_): return await self.recurse()
    async def wait(self, given, *_):
        Path(given + ".here").touch()
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            Path(given).touch()
            raise
    async def for_ever(self, given, *_):
        try:
            while True: yield b"x" * 65536
        finally:
            Path(given).touch()
    async def breaks(self, *_):
        yield "one"
        raise ValueError("in the middle")
    async def stays(self, *_):
        while True:
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                pass
"""


@pytest.fixture(scope="module")
def handler(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("handler") / "handler.py"
    path.write_text(HANDLER)
    return path


def options(handler: Path, *more: str) -> list[str]:
    return ["--handler", str(handler), "--handler-python", sys.executable, *more]


@pytest.fixture(scope="module")
def server(faulty_bundle: Path, handler: Path) -> Iterator[Server]:
    """Two handler processes."""
    with Server(faulty_bundle, *options(handler, "--handlers", "2")) as running:
        yield running


def do(server: Server, what: str, given: object = None, **headers: str) -> Answer:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return server.request(f"/do/{what}", json.dumps(given).encode(), named)


def triple(server: Server, *values: int) -> Answer:
    return server.request("/triple", json.dumps({"values": values}).encode())


def eventually(holds: Callable[[], object]) -> None:
    for _ in range(3000):
        if holds():
            return
        time.sleep(0.01)
    raise AssertionError("it never held")


def all_live(server: Server) -> bool:
    return server.metrics()['mctl_handler_processes{state="starting"}'] == 0


def test_the_front_page_lists_its_paths(server: Server) -> None:
    lines = server.request("/").body.decode().splitlines()
    paths = ["POST /predictions/faulty", "POST /triple", "GET /seen/{thing}", "POST /seen/{thing}", "POST /do/{what}"]
    assert set(paths) <= set(lines)
    assert set(paths) <= set(server.request("/", headers={"Accept": "application/json"}).json()["paths"])


@contextlib.contextmanager
def beside(server: Server) -> Iterator[list[int]]:
    """A client whose numbers have to be right, whatever happens meanwhile; the list grows with its answers."""
    stop, wrong, answers = threading.Event(), [], [0]

    def run() -> None:
        value = 0
        while not stop.is_set():
            value += 1
            answer = triple(server, value, value + 7)
            if answer.status != 200 or answer.json() != {"y": [3 * value + 1, 3 * value + 22]}:
                wrong.append(answer)
            answers[0] += 1

    client = threading.Thread(target=run)
    client.start()
    try:
        yield answers
        before = answers[0]
        eventually(lambda: answers[0] > before + 2)  # it still goes on
    finally:
        stop.set()
        client.join()
    assert not wrong, wrong[:3]


# --- paths


@pytest.mark.parametrize(
    "path",
    [
        "/triple",
        "/predictions/faulty",
        "/predictions/faulty/1",
        "/predictions/faulty/triple",
        "/predictions/faulty/1/triple/",
        "/v2/models/faulty/predict",
        "/v2/models/faulty/versions/1/predict",
    ],
)
def test_paths_of_a_handler(server: Server, path: str) -> None:
    answer = server.request(path, b'{"values": [5, -2]}')
    assert (answer.status, answer.json()) == (200, {"y": [16, -5]})
    assert answer.headers["content-type"] == "application/json" and answer.headers["x-request-id"]


@pytest.mark.parametrize(
    ("verb", "path", "status", "allow"),
    [
        ("GET", "/triple", 405, "POST"),
        ("PUT", "/seen/x", 405, "GET, HEAD, POST"),
        ("GET", "/predictions/faulty", 405, "POST"),
        ("GET", "/v2/models/faulty/predict", 405, "POST"),
        ("POST", "/predictions/faulty/nothing", 404, None),
        ("POST", "/predictions/another", 404, None),
        ("POST", "/predictions/faulty/2", 404, None),
        ("POST", "/nothing", 404, None),
        ("POST", "/triple/more", 404, None),
    ],
)
def test_paths_that_are_not_there(server: Server, verb: str, path: str, status: int, allow: str | None) -> None:
    answer = server.request(path, b"{}", verb=verb)
    assert answer.status == status and answer.error
    assert answer.headers.get("allow") == allow


def test_what_a_handler_sees(server: Server) -> None:
    headers = {"X-Request-Id": "mine", "X-Mixed": "a b", "Connection": "close"}
    seen = server.request("/seen/a%20b?k=1&k2=%C3%A9", headers=headers).json()
    assert seen["thing"] == "a b" and seen["query"] == {"k": "1", "k2": "é"}
    assert seen["id"] == "mine" and seen["client"].startswith("127.0.0.1:") and seen["path"] == "/seen/a%20b"
    assert seen["headers"]["x-mixed"] == "a b" and "connection" not in seen["headers"]


def test_bodies_of_all_kinds(server: Server) -> None:
    import gzip

    data = np.random.default_rng(0).bytes(1_000_000)
    expected = {"length": len(data), "sum": sum(data)}
    assert server.request("/seen/x", data).json() == expected
    assert server.request("/seen/x", gzip.compress(data), {"Content-Encoding": "gzip"}).json() == expected
    with server.connect() as raw:
        chunks = b"%x\r\n%s\r\n0\r\n\r\n" % (len(data), data)
        raw.send(b"POST /seen/x HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks)
        assert raw.read().json() == expected
        raw.send("HEAD /seen/x HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert raw.read(head=True).status == 200
        raw.send(post("/triple", '{"values": [1]}'))
        assert raw.read().json() == {"y": [4]}


def test_answers_of_all_kinds(server: Server) -> None:
    given = {"status": 201, "headers": {"X-One": "1", "Content-Type": "text/x"}, "body": "made"}
    answer = do(server, "answer", given, x_request_id="abc")
    assert (answer.status, answer.body, answer.headers["x-one"]) == (201, b"made", "1")
    assert answer.headers["content-type"] == "text/x" and answer.headers["x-request-id"] == "abc"
    for status in (204, 304, 404, 418, 503):
        with server.connect() as raw:  # the connection stays in step
            body = json.dumps({"status": status, "headers": {}, "body": "x"})
            raw.send(post("/do/answer", body) + post("/triple", '{"values": [2]}'))
            assert raw.read().status == status
            assert raw.read().json() == {"y": [7]}
    for headers in ({"X-Bad": "a\r\nSet-Cookie: b"}, {"no token": "a"}, {"": "a"}):
        bad = do(server, "answer", {"status": 200, "headers": headers, "body": ""})
        assert bad.status == 500 and "set-cookie" not in bad.headers


def test_large_bodies_are_refused_by_their_heads(server: Server) -> None:
    for path, status in (("/seen/x", 200), ("/predictions/faulty/nothing", 404), ("/predictions/gone", 404)):
        with server.connect() as raw:
            head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n"
            raw.send(head + "Expect: 100-continue\r\n\r\n")
            if status == 200:
                assert raw.read().status == 100
                raw.send(bytes(1_000_000))
            assert raw.read().status == status


def test_tensors_and_handlers_share_a_model(server: Server) -> None:
    x = np.array([[1, 4]])
    answer = server.request(faulty.INFER, json.dumps(infer_json(x=x)).encode())
    assert answer.json()["outputs"][0]["data"] == [13]
    assert do(server, "other", {"model": "faulty", "value": 9}).json() == {"y": [[28]]}


# --- refusals


def test_failures_say_no_more_than_they_should(server: Server) -> None:
    answer = do(server, "fail", None, x_request_id="q17")
    assert answer.status == 500 and b"secret" not in answer.body and "q17" in answer.error
    eventually(lambda: any("[faulty]" in line and "a secret" in line for line in server.lines))
    assert (do(server, "refuse").status, do(server, "refuse").error) == (400, "no, because")


def test_what_the_model_refuses_reaches_the_client(server: Server) -> None:
    answer = do(server, "contract")
    assert answer.status == 400 and "input 'x'" in answer.error and "float32" in answer.error
    assert do(server, "other", {"model": "gone", "value": 1}).status == 404
    assert do(server, "crash_model").status == 500
    eventually(lambda: triple(server, 1).status == 200)
    assert do(server, "slow_model", 600, x_mctl_timeout_ms="200").status == 504


@pytest.mark.parametrize("value", ["0", "-1", "x", "99999999999"])
def test_timeouts_that_are_none(server: Server, value: str) -> None:
    assert do(server, "pid", None, x_mctl_timeout_ms=value).status == 400


def test_a_late_answer_is_504_and_the_coroutine_is_told(server: Server, tmp_path: Path) -> None:
    mark = tmp_path / "cancelled"
    answer = do(server, "wait", str(mark), x_mctl_timeout_ms="300")
    assert answer.status == 504 and "deadline" in answer.error
    eventually(mark.exists)


def test_a_client_that_goes_away_ends_what_it_asked_for(server: Server, tmp_path: Path) -> None:
    mark = tmp_path / "cancelled"
    with server.connect() as raw:
        raw.send(post("/do/wait", json.dumps(str(mark))))
        eventually(Path(f"{mark}.here").exists)
        assert not mark.exists()
    eventually(mark.exists)
    eventually(lambda: server.metrics()["mctl_handler_running_requests"] == 0)


# --- streams


def stream(server: Server, what: str, given: object) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("POST", f"/do/{what}", json.dumps(given))
    answer = connection.getresponse()
    answer.held = connection  # type: ignore[attr-defined]  # closed with it
    return answer


def test_a_stream_keeps_its_order(server: Server) -> None:
    answer = stream(server, "lines", 300)
    assert answer.getheader("content-type") == "text/event-stream" and answer.getheader("x-request-id")
    events = [json.loads(line.removeprefix("data: ")) for line in answer.read().decode().split("\n\n") if line]
    assert events == [{"n": number} for number in range(300)]


def test_a_stream_leaves_its_connection_in_step(server: Server) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    for _ in range(3):
        connection.request("POST", "/do/lines", "2")
        assert connection.getresponse().read() == b'data: {"n":0}\n\ndata: {"n":1}\n\n'
        connection.request("POST", "/triple", '{"values": [3]}')
        assert json.loads(connection.getresponse().read()) == {"y": [10]}
    connection.close()


def test_a_stream_over_http_1_0_ends_with_its_connection(server: Server) -> None:
    with server.connect() as raw:
        raw.send(b"POST /do/lines HTTP/1.0\r\nContent-Length: 1\r\n\r\n2")
        data = b""
        while piece := raw.socket.recv(65536):
            data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    assert b"chunked" not in head and body == b'data: {"n":0}\n\ndata: {"n":1}\n\n'


def test_a_slow_reader_is_bounded(server: Server, tmp_path: Path) -> None:
    """A generator runs no further ahead of its client than the sockets' buffers and the window hold."""
    mark = tmp_path / "made"
    size, count = 1 << 19, 100
    answer = stream(server, "parts", {"count": count, "size": size, "mark": str(mark)})
    eventually(mark.exists)
    last = -1
    while (made := int(mark.read_text() or 0)) != last:  # until it stands still
        last = made
        time.sleep(0.5)
    assert made < 60
    assert answer.read() == b"".join(bytes([number % 251]) * size for number in range(count))
    assert int(mark.read_text()) == count - 1


def test_a_client_that_leaves_a_stream_ends_it(server: Server, tmp_path: Path) -> None:
    mark = tmp_path / "closed"
    answer = stream(server, "for_ever", str(mark))
    assert answer.read(200_000) == b"x" * 200_000 and not mark.exists()
    answer.held.close()  # type: ignore[attr-defined]
    answer.close()
    eventually(mark.exists)


def test_a_stream_without_an_end_has_a_deadline(server: Server, tmp_path: Path) -> None:
    mark = tmp_path / "closed"
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("POST", "/do/for_ever", json.dumps(str(mark)), {"x-mctl-timeout-ms": "500"})
    with pytest.raises((http.client.IncompleteRead, ConnectionError)):
        connection.getresponse().read()
    eventually(mark.exists)


def test_a_stream_that_fails_breaks_off(server: Server) -> None:
    with pytest.raises(http.client.IncompleteRead) as failure:
        stream(server, "breaks", None).read()
    assert failure.value.partial == b"data: one\n\n"


# --- bad handlers


def test_a_process_that_dies_takes_no_other_request_with_it(server: Server, tmp_path: Path) -> None:
    with beside(server):
        first = do(server, "die_once", str(tmp_path / "once"))
        assert first.status == 200  # it ran again, in another process
        answer = do(server, "die")
        assert answer.status == 500 and "twice" in answer.error
        eventually(lambda: all_live(server))
        assert do(server, "leave").status == 500
        eventually(lambda: all_live(server))
    restarts = server.metrics()['mctl_handler_restarts_total{reason="crash"}']
    assert restarts == 5
    assert any("a handler ended by signal 11" in line for line in server.lines)
    assert any("a handler ended by exit code 0" in line for line in server.lines)


def test_what_a_process_started_ends_with_it(server: Server, tmp_path: Path) -> None:
    mark = tmp_path / "child"
    assert do(server, "orphan", str(mark)).status == 200
    eventually(lambda: mark.exists() and mark.read_text())
    child = Path("/proc", mark.read_text())
    while child.exists():  # its parent is one of the two
        do(server, "die")
    eventually(lambda: all_live(server))


def test_bad_answers_and_leaks_stay_in_their_process(server: Server) -> None:
    with beside(server):
        answer = do(server, "huge", 80)
        assert answer.status == 500 and answer.error == "the handler's answer has 83886080 bytes, allowed 67108864"
        assert len(do(server, "huge", 60).body) == 60 << 20
        assert do(server, "recurse").status == 500
        assert {do(server, "leak").status for _ in range(4)} == {500}  # there is no descriptor left
    assert triple(server, 1).json() == {"y": [4]}


def test_a_blocked_loop_is_told_of_and_replaced(faulty_bundle: Path, handler: Path) -> None:
    with Server(faulty_bundle, *options(handler, "--handlers", "2", "--handler-timeout", "2")) as server:
        with beside(server):
            assert do(server, "block", 1000).status == 500
        assert server.metrics()['mctl_handler_restarts_total{reason="stuck"}'] == 2
        assert any("blocks its event loop" in line for line in server.lines)
        assert any(line.startswith("[faulty]") and " in block" in line for line in server.lines)  # its stack


def test_a_request_that_does_not_end_is_ended_with_its_process(faulty_bundle: Path, handler: Path) -> None:
    with Server(faulty_bundle, *options(handler, "--handler-timeout", "1")) as server:
        assert do(server, "stays", None, x_mctl_timeout_ms="100").status == 504
        eventually(lambda: server.metrics()['mctl_handler_restarts_total{reason="stuck"}'] == 1)
        eventually(lambda: triple(server, 1).status == 200)


def test_what_has_no_room_waits_its_turn(faulty_bundle: Path, handler: Path) -> None:
    """One request at a time, and a queue: none is lost."""
    with Server(faulty_bundle, *options(handler, "--handler-concurrency", "1")) as server:
        results: list[Answer] = []
        clients = [threading.Thread(target=lambda v=value: results.append(triple(server, v))) for value in range(20)]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        assert sorted(answer.json()["y"][0] for answer in results) == [3 * value + 1 for value in range(20)]


def test_metrics_are_as_documented(server: Server) -> None:
    triple(server, 1)
    text = server.request("/metrics").body.decode()
    found = {family.name: family for family in text_string_to_metric_families(text)}
    expected = documented(handler=True)
    assert {name: family.type for name, family in found.items()} == {name: kind for name, (kind, _) in expected.items()}
    for name, family in found.items():
        for sample in family.samples:
            assert set(sample.labels) - {"le", "model", "version"} == expected[name][1], sample


# --- several models

ECHO = """
from mctl.handlers import route

class Echo:
    def __init__(self, context): self.name = context.name
    @route("POST", "/v1/echo")
    async def echo(self, request): return {"from": self.name}
    @route("POST", "/ROUTE")
    async def ask(self, request, models):
        return {"y": (await models["faulty"](x=[[1, 9]]))["y"].tolist()}
"""


@pytest.fixture(scope="module")
def other_bundle(faulty_library: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model by another name."""
    return faulty.bundle(faulty_library, tmp_path_factory.mktemp("other") / "other.pt2", name="other")


@pytest.fixture(scope="module")
def pair(faulty_bundle: Path, other_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two models whose handlers share one path, and have one each."""
    folder = tmp_path_factory.mktemp("pair")
    words = ["--handler-python", sys.executable]
    for name, route in (("other", "mine"), ("faulty", "yours")):
        (folder / f"{name}.py").write_text(ECHO.replace("ROUTE", route))
        words += ["--handler", f"{name}={folder / name}.py"]
    with Server(other_bundle, str(faulty_bundle), *words) as running:
        eventually(lambda: running.request("/v2/health/ready").status == 200)
        yield running


def test_a_handler_asks_another_model(pair: Server) -> None:
    for path in ("/mine", "/predictions/other/mine", "/yours", "/predictions/faulty/yours"):
        assert pair.request(path, b"").json() == {"y": [[28]]}, path
    assert pair.request("/predictions/other/yours", b"").status == 404


def test_a_shared_path_goes_by_the_model_that_the_body_names(pair: Server) -> None:
    for name in ("other", "faulty"):
        answer = pair.request("/v1/echo", json.dumps({"model": name, "input": "x"}).encode())
        assert answer.json() == {"from": name}
    for body in (b'{"model": "gone"}', b"{}", b"x"):
        error = pair.request("/v1/echo", body).json()["error"]
        assert error["code"] == "model_not_found" and error["type"] == "invalid_request_error" and error["message"]


def test_one_bare_route_is_one_models(faulty_bundle: Path, other_bundle: Path, handler: Path) -> None:
    words = ["--handler", f"other={handler}", "--handler", f"faulty={handler}", "--handler-python", sys.executable]
    with Server(other_bundle, str(faulty_bundle), *words) as server:
        eventually(lambda: any("is that of both" in line for line in server.lines))
        eventually(lambda: server.request("/v2/health/ready").status == 200)
        assert server.request("/seen/a").json()["thing"] == "a"  # that of the one that was there first


# --- processes that do not keep to the protocol

STUB = """#!{python}
import json, os, socket, struct, sys, time

sock = socket.socket(fileno=int(os.environ["MCTL_HANDLER_FD"]))
stream = sock.makefile("rb")

def send(header, body=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    sock.sendall(struct.pack("<IQ", len(text), len(body)) + text + body)

def receive():
    lengths = stream.read(12)
    if len(lengths) < 12: sys.exit()
    header, body = struct.unpack("<IQ", lengths)
    return json.loads(stream.read(header)), stream.read(body)

def call(id, number, x=b"\\1" + bytes(15), shape=(1, 2)):
    tensor = {{"name": "x", "dtype": "INT64", "shape": shape}}
    send({{"t": "call", "id": id, "call": number, "model": "", "version": "", "inputs": [tensor]}}, x)

def results(count):
    found = []
    while len(found) < count:
        header, _ = receive()
        if header["t"] == "ping": send({{"t": "pong", "n": header["n"]}})
        if header["t"] == "result": found.append(header["status"])
    return found

def act(what, id):
    answer = {{"t": "answer", "id": id, "status": 200, "headers": []}}
    start = {{"t": "start", "id": id, "status": 200, "headers": []}}
    part, end = {{"t": "part", "id": id}}, {{"t": "end", "id": id}}
    if what == "fine": send(answer, b"fine")
    if what == "garbage": sock.sendall(b"\\xff" * 100)
    if what == "no-json": send(b"x")
    if what == "unknown": send({{"t": "hello"}})
    if what == "closes": sock.shutdown(socket.SHUT_WR); time.sleep(1000)
    if what == "large-part": send(start); send(part, bytes((1 << 20) + 1))
    if what == "twice": send(answer, b"first"); send(answer, b"second")
    if what == "stranger": send({{**answer, "id": 999999}}, b"x"); send(answer, b"mine")
    if what == "part-first": send(part, b"x"); send(answer, b"whole")
    if what == "end-first": send(end)
    if what == "answers-its-stream": send(start); send(part, b"x"); send(answer, b"y")
    if what == "starts-twice": send(start); send(part, b"a"); send(start); send(part, b"b"); send(end)
    if what == "same-call": call(id, 1); call(id, 1); send(answer, json.dumps(sorted(results(2))).encode())
    if what == "many-calls":
        for number in range(1100): call(id, number)
        send(answer, json.dumps(sorted(set(results(1100)))).encode())
    if what == "call-of-another": call(id + 999, 1); send(answer, json.dumps(results(1)).encode())
    if what == "large-call": call(id, 1, bytes(80 << 20), (5 << 20, 2)); send(answer, json.dumps(results(1)).encode())
    if what == "boolean":
        send({{"t": "call", "id": id, "call": 1, "inputs": [{{"name": "x", "dtype": "BOOL", "shape": [1]}}]}}, b"\\2")
        send(answer, json.dumps(results(1)).encode())

receive()
send({{"t": "ready", "routes": [["POST", "/act"]]}})
while True:
    header, body = receive()
    if header["t"] == "request": act(body.decode(), header["id"])
    if header["t"] == "ping": send({{"t": "pong", "n": header["n"]}})
    if header["t"] == "drain": sys.exit()
"""


@pytest.fixture(scope="module")
def stub(faulty_bundle: Path, handler: Path) -> Iterator[Server]:
    """Its handler is not mctl's Python, but a program that sends what it is told to."""
    program = handler.with_name("stub")
    program.write_text(STUB.format(python=sys.executable))
    program.chmod(0o755)
    words = ["--handler", str(handler), "--handler-python", str(program), "--handler-timeout", "60"]
    with Server(faulty_bundle, *words) as running:
        yield running


def act(server: Server, what: str) -> Answer:
    eventually(lambda: server.request("/act", b"fine").body == b"fine")
    return server.request("/act", what.encode())


@pytest.mark.parametrize("what", ["garbage", "no-json", "unknown", "closes"])
def test_a_process_that_breaks_the_protocol_is_replaced(stub: Server, what: str) -> None:
    before = stub.metrics()['mctl_handler_restarts_total{reason="broken"}']
    answer = act(stub, what)
    assert answer.status == 500 and "twice" in answer.error
    assert stub.metrics()['mctl_handler_restarts_total{reason="broken"}'] == before + 2


@pytest.mark.parametrize(
    ("what", "body"),
    [
        ("twice", b"first"),
        ("stranger", b"mine"),
        ("part-first", b"whole"),
        ("starts-twice", b"ab"),
        ("same-call", b"[200, 400]"),
        ("call-of-another", b"[404]"),
        ("large-call", b"[413]"),
        ("boolean", b"[400]"),
    ],
)
def test_what_has_no_place_is_passed_over_or_refused(stub: Server, what: str, body: bytes) -> None:
    before = stub.metrics()['mctl_handler_restarts_total{reason="broken"}']
    answer = act(stub, what)
    assert (answer.status, answer.body) == (200, body)
    assert stub.metrics()['mctl_handler_restarts_total{reason="broken"}'] == before


def test_many_calls_at_once_are_all_answered(stub: Server) -> None:
    """How many of them find no room depends on how fast the model is."""
    answer = act(stub, "many-calls")
    assert answer.status == 200 and {200} <= set(answer.json()) <= {200, 503}


def test_streams_that_cannot_be(stub: Server) -> None:
    assert act(stub, "end-first").status == 500
    for what in ("large-part", "answers-its-stream"):
        with pytest.raises(http.client.IncompleteRead):
            act(stub, what)


# --- life


def test_a_server_drains_its_handlers(faulty_bundle: Path, handler: Path, tmp_path: Path) -> None:
    with Server(faulty_bundle, *options(handler)) as server:
        pid = do(server, "pid").json()["pid"]
        answers: list[Answer] = []
        waits = threading.Thread(target=lambda: answers.append(do(server, "slow_model", 1500)))
        waits.start()
        eventually(lambda: server.metrics()["mctl_handler_running_requests"] == 1)
        server.process.send_signal(signal.SIGTERM)
        waits.join()
        assert answers[0].status == 200
        server.process.wait(40)
        assert not Path(f"/proc/{pid}").exists()


def test_handlers_end_with_a_server_that_is_killed(faulty_bundle: Path, handler: Path) -> None:
    server = Server(faulty_bundle, *options(handler))
    pid = do(server, "pid").json()["pid"]
    server.process.kill()
    server.process.wait()
    eventually(lambda: not Path(f"/proc/{pid}").exists())


def test_a_server_whose_spawner_ends_goes_on_with_tensors(faulty_bundle: Path, handler: Path) -> None:
    with Server(faulty_bundle, *options(handler)) as server:
        spawner = next(pid for pid in server.workers() if Path(f"/proc/{pid}/comm").read_text() == "mctl-spawner\n")
        os.kill(spawner, signal.SIGKILL)
        eventually(lambda: triple(server, 1).status == 503)
        assert "handler" in server.request("/v2/health/ready").error
        x = np.array([[1, 4]])
        assert server.request("/v2/models/faulty/stats").status == 200
        assert server.request(faulty.INFER, json.dumps(infer_json(x=x)).encode()).status == 200


# --- what cannot be served

FAILS_AT_START = """
from mctl.handlers import route

class Handler:
    def __init__(self, context): raise ValueError("at the start")
    @route("POST", "/a")
    async def a(self, request): pass
"""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import nothing_of_that_name\n", "nothing_of_that_name"),
        (FAILS_AT_START, "at the start"),
        ("import os\nos._exit(5)\n", "exit code 5"),
        ("x = 1\n", "handler.py"),
        ("def f(:\n", "handler.py"),
    ],
    ids=["import", "init", "exit", "empty", "syntax"],
)
def test_handlers_that_do_not_start(
    faulty_bundle: Path, tmp_path: Path, refusal: Callable[..., tuple[int, str]], text: str, said: str
) -> None:
    path = tmp_path / "handler.py"
    path.write_text(text)
    code, stderr = refusal(faulty_bundle, *options(path))
    assert code == 1 and said in stderr.splitlines()[-1], stderr
    assert stderr.splitlines()[-1].startswith("error: ")


def test_options_that_cannot_be(
    faulty_bundle: Path, handler: Path, tmp_path: Path, refusal: Callable[..., tuple[int, str]]
) -> None:
    code, stderr = refusal(faulty_bundle, "--handler", str(tmp_path / "gone.py"))
    assert code == 2 and "cannot read the handler" in stderr
    code, stderr = refusal(faulty_bundle, "--handler", f"another={handler}")
    assert code == 2 and "not served" in stderr
    code, stderr = refusal(faulty_bundle, "--handler", str(handler), "--handler", str(handler))
    assert code == 2 and "whose handler" in stderr
    code, stderr = refusal(faulty_bundle, "--handler", str(handler), "--handler-python", str(tmp_path / "python9"))
    assert code == 1 and "python9" in stderr


def test_routes_that_would_hide_the_server(
    faulty_bundle: Path, tmp_path: Path, refusal: Callable[..., tuple[int, str]]
) -> None:
    path = tmp_path / "handler.py"
    path.write_text(HANDLER.replace('"/triple"', '"/v2/health/live"'))
    code, stderr = refusal(faulty_bundle, *options(path))
    assert code == 2 and "would hide a path of the server's own" in stderr
