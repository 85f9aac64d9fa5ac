"""The handler process: requests, model calls, streams, cancelling, bounds and its end, by a front in Python."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from .front import Front, started

GOOD = """
import asyncio, dataclasses, threading, time
import numpy as np
from mctl.handlers import BadRequest, Refused, Response, route

@dataclasses.dataclass
class Point:
    x: int

class Good:
    def __init__(self, context):
        self.context = context
        self.gate = asyncio.Event()
        self.told = []

    @route("POST", "/double")
    async def double(self, request, model):
        return {"y": (await model(x=(await request.json())["x"]))["y"]}

    @route("POST", "/plain")
    def plain(self, request, model):
        print("in", threading.current_thread().name)
        return model(x=request.json()["x"])["y"]

    @route("POST", "/chain")
    async def chain(self, request, model, models):
        first = await model(x=[[1.0, 2.0]])
        other = await models["reranker"].version("2").call({"ids": [[3, 4]], "x": first["y"]}, timeout_ms=50)
        return {name: value for name, value in other.items()}

    @route("GET", "/answers/{kind}")
    async def answers(self, request):
        kind = request.parameters["kind"]
        if kind == "refuse":
            raise BadRequest("no such luck")
        if kind == "teapot":
            raise Refused(418, "a teapot")
        if kind == "raise":
            raise ValueError("a secret")
        if kind == "exit":
            raise SystemExit(3)
        return {
            "text": "héllo", "bytes": b"\\x00\\xff", "array": np.arange(3), "scalar": np.float32(0.5),
            "list": [1, None], "nothing": None, "nan": {"a": [1.0, float("nan")]}, "inf": np.array([np.inf]),
            "point": Point(3),
            "object": object(), "response": Response(201, {"X-Kind": "one"}, {"a": 1}), "empty": Response(204),
            "status": Response(99),
        }[kind]

    @route("GET", "/events")
    async def events(self, request):
        for at in range(int(request.query["n"])):
            yield {"at": at} if at % 2 else f"line {at}\\nand more"

    @route("GET", "/lines")
    def lines(self, request):
        for at in range(int(request.query["n"])):
            yield b"%d\\n" % at

    @route("GET", "/broken")
    async def broken(self, request):
        yield "first"
        raise RuntimeError("a secret")

    @route("GET", "/early")
    async def early(self, request):
        raise BadRequest("nothing to stream")
        yield

    @route("GET", "/large")
    async def large(self, request):
        yield b"x" * (5 << 19)

    @route("GET", "/endless")
    async def endless(self, request):
        try:
            while True:
                self.told.append(1)
                yield b"x"
        finally:
            print("generator closed after", len(self.told))

    @route("GET", "/wait")
    async def wait(self, request):
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            print("cancelled", request.id)
            raise
        return {}

    @route("GET", "/open")
    async def open(self, request):
        self.gate.set()
        return {}

    @route("GET", "/request")
    async def request(self, request):
        return {"client": request.client, "id": request.id, "query": request.query, "agent": request.headers["agent"],
                "assets": str(self.context.assets), "name": self.context.name, "max": self.context.contract.dims[0].max,
                "properties": self.context.properties}

    @route("POST", "/form")
    async def form(self, request):
        form = await request.form()
        return {name: [part.value.decode(), part.content_type, part.file_name] for name, part in form.items()}
"""


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    folder = tmp_path_factory.mktemp("good")
    (folder / "good.py").write_text(GOOD)
    with started(folder / "good.py", properties={"a": 1}) as front:
        assert front.ready["t"] == "ready", front.ready
        yield front


def test_ready_names_the_routes(good: Front) -> None:
    assert good.ready["stream"] is True
    assert good.ready["routes"][:2] == [["POST", "/double"], ["POST", "/plain"]]


PATHS = ["/predictions/m", "/predictions/m/1", "/v2/models/m/predict", "/v2/models/m/versions/1/predict"]


@pytest.mark.parametrize("path", [*PATHS, "/double", "/predictions/m/double", "/predictions/m/1/double", "/double/"])
def test_a_model_is_called(good: Front, path: str) -> None:
    assert good.ask_json({"x": [[1, 2.5]]}, path=path) == (200, {"y": [[2.0, 5.0]]})
    call = good.calls[-1]
    assert call["inputs"] == [{"name": "x", "dtype": "FP32", "shape": [1, 2]}] and call["model"] == ""


def test_a_plain_function_runs_in_a_thread(good: Front) -> None:
    assert good.ask_json({"x": [[1, 2]]}, path="/plain") == (200, [[2.0, 4.0]])
    assert "in handler_" in good.log


def test_other_models_by_name(good: Front) -> None:
    good.model = lambda call, inputs: {k: v + 1 for k, v in inputs.items()} if call["model"] else {"y": inputs["x"]}
    try:
        assert good.ask_json(path="/chain") == (200, {"ids": [[4, 5]], "x": [[2.0, 3.0]]})
    finally:
        good.model = _double
    call = good.calls[-1]
    assert (call["model"], call["version"], call["timeout_ms"]) == ("reranker", "2", 50)
    assert [tensor["dtype"] for tensor in call["inputs"]] == ["INT64", "FP32"]


def _double(call: dict[str, Any], inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {"y": inputs["x"] * 2}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"x": [[1, "a"]]}, "input 'x': is list, allowed an array or numbers in lists"),
        ({"x": [[1], [1, 2]]}, "input 'x': its lists have different lengths"),
        (b"{", "the body is no JSON: Input data was truncated"),
        (b"\xff", "the body is no JSON: JSON is malformed: invalid character (byte 0)"),
    ],
)
def test_what_cannot_be_sent_is_the_clients_error(good: Front, body: object, said: str) -> None:
    assert good.ask_json(body, path="/double") == (400, {"error": said})


def test_a_models_refusal_is_the_answer_if_nobody_catches_it(good: Front) -> None:
    good.model = lambda call, inputs: (503, "the queue is full")
    try:
        status, headers, body = good.ask({"x": [[1, 2]]}, path="/double")
        assert good.ask_json({"x": [[1, 2]]}, path="/plain") == (503, {"error": "the queue is full"})
    finally:
        good.model = _double
    assert (status, json.loads(body), headers["retry-after"]) == (503, {"error": "the queue is full"}, "1")


@pytest.mark.parametrize(
    ("kind", "status", "content_type", "body"),
    [
        ("text", 200, "text/plain; charset=utf-8", "héllo".encode()),
        ("bytes", 200, "application/octet-stream", b"\x00\xff"),
        ("array", 200, "application/json", b"[0,1,2]"),
        ("scalar", 200, "application/json", b"0.5"),
        ("list", 200, "application/json", b"[1,null]"),
        ("point", 200, "application/json", b'{"x":3}'),
        ("response", 201, "application/json", b'{"a":1}'),
        ("empty", 204, None, b""),
        ("nan", 422, "application/json", b'{"error":"the answer holds NaN or infinity, which JSON cannot say"}'),
        ("inf", 422, "application/json", b'{"error":"the answer holds NaN or infinity, which JSON cannot say"}'),
        ("refuse", 400, "application/json", b'{"error":"no such luck"}'),
        ("teapot", 418, "application/json", b'{"error":"a teapot"}'),
    ],
)
def test_what_a_handler_may_return(good: Front, kind: str, status: int, content_type: str | None, body: bytes) -> None:
    answer = good.ask(method="GET", path=f"/answers/{kind}")
    assert (answer[0], answer[1].get("content-type"), answer[2]) == (status, content_type, body)
    if kind == "response":
        assert answer[1]["x-kind"] == "one"


@pytest.mark.parametrize(
    ("kind", "logged"),
    [
        ("raise", "ValueError: a secret"),
        ("exit", "SystemExit: 3"),
        ("nothing", "the handler returned nothing"),
        ("object", "the handler returned a object, which JSON does not have"),
        ("status", "the status of a Response is 99"),
    ],
)
def test_a_handlers_fault_is_told_to_the_log_only(good: Front, kind: str, logged: str) -> None:
    said = good.ask_json(id=77, method="GET", path=f"/answers/{kind}")
    assert said == (500, {"error": "the handler failed on request r77: the log says why"})
    assert logged in good.log


@pytest.mark.parametrize(
    ("method", "path", "said"),
    [
        ("GET", "/nowhere", (404, {"error": "the handler has no `/nowhere`"})),
        ("GET", "/predictions/other", (404, {"error": "the handler has no `/predictions/other`"})),
        ("GET", "/double", (405, {"error": "`/double` takes POST, not GET"})),
    ],
)
def test_paths_that_are_none(good: Front, method: str, path: str, said: tuple[int, Any]) -> None:
    assert good.ask_json(method=method, path=path) == said


def test_errors_below_v1_are_openais(good: Front) -> None:
    status, said = good.ask_json(path="/v1/nothing")
    assert status == 404 and said["error"] == {
        "message": "the handler has no `/v1/nothing`", "type": "invalid_request_error", "param": None, "code": None
    }  # fmt: skip


def test_what_a_request_says(good: Front) -> None:
    status, said = good.ask_json(
        id=5, method="GET", path="/request", query="a=1&b=%C3%BC&a=2&c=", headers=[["agent", "x"]]
    )
    assert status == 200 and said.pop("assets").endswith("good0")
    assert said == {
        "client": "1.2.3.4", "id": "r5", "query": {"a": "2", "b": "ü", "c": ""}, "agent": "x", "name": "m", "max": 8,
        "properties": {"a": 1},
    }  # fmt: skip


def test_forms(good: Front) -> None:
    body = (
        b'--B\r\nContent-Disposition: form-data; name="a"\r\n\r\none\r\ntwo\r\n'
        b'--B\r\ncontent-disposition: form-data; name="f"; filename="c d.txt"\r\nContent-Type: text/x\r\n\r\n\r\n'
        b"--B--\r\n"
    )
    head = [["content-type", "multipart/form-data; boundary=B"]]
    said = good.ask_json(body, path="/form", headers=head)
    assert said == (200, {"a": ["one\r\ntwo", "", ""], "f": ["", "text/x", "c d.txt"]})
    cut = good.ask_json(body[:-9], path="/form", headers=head)
    assert cut == (400, {"error": "the form ends before its last boundary"})
    plain = good.ask_json(b"a=1", path="/form", headers=[["content-type", "text/plain"]])
    assert plain == (400, {"error": "the body is no form: its content type is `text/plain`"})


# --- streams -----------------------------------------------------------------------------------------------------


def test_a_stream_of_events_in_order(good: Front) -> None:
    good.request(9, method="GET", path="/events", query="n=40")
    frames = list(good.stream(9))
    assert frames[0][0]["t"] == "start" and ["content-type", "text/event-stream"] in frames[0][0]["headers"]
    parts = [body for header, body in frames if header["t"] == "part"]
    assert parts[:2] == [b"data: line 0\ndata: and more\n\n", b'data: {"at":1}\n\n'] and len(parts) == 40
    assert frames[-1][0] == {"t": "end", "id": 9}


def test_a_plain_generator_streams_too(good: Front) -> None:
    good.request(9, method="GET", path="/lines", query="n=3")
    assert b"".join(body for _, body in good.stream(9)) == b"0\n1\n2\n"


def test_large_items_are_split(good: Front) -> None:
    good.request(9, method="GET", path="/large")
    sizes = [len(body) for header, body in good.stream(9) if header["t"] == "part"]
    assert sizes == [1 << 20, 1 << 20, 1 << 19]


def test_an_empty_stream(good: Front) -> None:
    good.request(9, method="GET", path="/events", query="n=0")
    assert [header["t"] for header, _ in good.stream(9)] == ["start", "end"]


def test_a_stream_that_breaks_says_nothing_of_why(good: Front) -> None:
    good.request(9, method="GET", path="/broken")
    frames = list(good.stream(9))
    assert [header["t"] for header, _ in frames] == ["start", "part", "break"]
    assert "secret" not in frames[-1][0]["error"] and "RuntimeError: a secret" in good.log


def test_before_the_first_item_it_is_an_ordinary_refusal(good: Front) -> None:
    assert good.ask_json(method="GET", path="/early") == (400, {"error": "nothing to stream"})


def test_a_slow_reader_holds_the_generator(good: Front) -> None:
    good.request(9, method="GET", path="/endless")
    assert good.next(9)[0]["t"] == "start"
    for _ in range(16):
        assert good.next(9)[0]["t"] == "part"
    for _ in range(3):  # it would have gone on long before it answers
        assert good.alive()
    assert good._frames[9].empty()
    good.send({"t": "more", "id": 9})
    assert good.next(9)[0]["t"] == "part"
    good.send({"t": "cancel", "id": 9})
    assert good.next(9)[0]["t"] == "break"
    assert good.alive() and "generator closed after 18" in good.log


# --- cancelling, bounds, the end ---------------------------------------------------------------------------------


def test_a_client_that_goes_away_cancels_the_coroutine_and_its_calls(good: Front) -> None:
    waits = threading.Event()
    good.model = lambda call, inputs: (waits.wait(60) and {"y": inputs["x"]}) or {"y": inputs["x"]}
    before = len(good.calls)
    try:
        for path in ("/double", "/plain"):
            good.request(3, {"x": [[1, 2]]}, path=path)
            while len(good.calls) == before:
                assert good.alive()
            before += 1
            good.send({"t": "cancel", "id": 3})
            assert good.next("uncall")[0]["call"] == good.calls[-1]["call"]
            assert good.next(3)[0]["status"] == 499
    finally:
        waits.set()
        good.model = _double
    assert good.ask_json({"x": [[1, 2]]}, path="/double") == (200, {"y": [[2.0, 4.0]]})


def test_one_that_is_cancelled_before_it_begins(good: Front) -> None:
    text = json.dumps({"t": "request", "id": 3, "method": "GET", "path": "/wait"}).encode()
    cancel = json.dumps({"t": "cancel", "id": 3}).encode()
    frames = b"".join(len(each).to_bytes(4, "little") + bytes(8) + each for each in (text, cancel))
    good._socket.sendall(frames)
    assert good.next(3)[0]["status"] == 499


def test_the_deadline_of_a_request(good: Front) -> None:
    said = good.ask_json(method="GET", path="/wait", deadline_ms=20)
    assert said == (504, {"error": "the deadline of the request has passed"})


def test_no_more_requests_than_agreed(good: Front) -> None:
    for id in range(20, 28):
        good.request(id, method="GET", path="/wait")
    assert good.ask_json(id=28, method="GET", path="/wait") == (503, {"error": "the handler has no room"})
    for id in range(20, 28):
        good.send({"t": "cancel", "id": id})
    assert [good.next(id)[0]["status"] for id in range(20, 28)] == [499] * 8
    assert "cancelled r20" in good.log


def test_frames_that_mean_nothing_now_are_ignored(good: Front) -> None:
    good.send({"t": "cancel", "id": 999})
    good.send({"t": "more", "id": 999})
    good.send({"t": "result", "id": 999, "call": 999, "status": 200, "outputs": []})
    good.send({"t": "something new", "id": 1})
    assert good.alive()


def test_bodies_of_many_sizes(good: Front) -> None:
    """Around the size up to which frames are read at once, and far beyond."""
    for id, rows in enumerate([1, 10_000, 15_000, 20_000, 300_000], start=40):
        array = np.arange(rows * 2, dtype=np.float32).reshape(rows, 2)
        status, said = good.ask_json({"x": array.tolist()}, id=id, path="/double")
        assert status == 200 and np.array_equal(np.array(said["y"], np.float32), array * 2)


def test_drain_finishes_what_runs(tmp_path: Path) -> None:
    (tmp_path / "good.py").write_text(GOOD)
    with started(tmp_path / "good.py") as front:
        front.request(1, method="GET", path="/wait")
        front.send({"t": "drain"})
        assert front.alive() and front.process.poll() is None
        front.request(2, method="GET", path="/open")
        assert front.next(1)[0]["status"] == front.next(2)[0]["status"] == 200
        assert front.exit_code() == 0


def test_it_ends_with_the_server(tmp_path: Path) -> None:
    (tmp_path / "good.py").write_text(GOOD)
    with started(tmp_path / "good.py") as front:
        front.request(1, method="GET", path="/wait")
        assert front.alive()
        front._socket.shutdown(2)
        assert front.exit_code() == 0


def test_a_broken_peer_ends_it(tmp_path: Path) -> None:
    (tmp_path / "good.py").write_text(GOOD)
    with started(tmp_path / "good.py") as front:
        front._socket.sendall(b"\xff" * 12)
        assert front.exit_code() == 0
