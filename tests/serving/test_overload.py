"""More load than the model can carry: what is accepted is answered, the rest is refused, and nothing is lost.

Who has many connections gets no more than who has one; clients are told apart by their addresses.
"""

import json
import runpy
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from .conftest import SAMPLES, Mlp
from .server import Raw, Server, infer_binary, outputs_of, post
from .test_batching import eventually, random, stopped

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
import load

BATCH, QUEUE = 4, 16  # rows
SIZE = 48  # height and width of the images: milliseconds each


@pytest.fixture(scope="module")
def slow(cnn_bundle: Path) -> Iterator[Server]:
    """A model that takes milliseconds for a row, and whose queue is short."""
    options = ["--threads", "1", "--max-batch-size", str(BATCH), "--max-queue-size", str(QUEUE)]
    with Server(cnn_bundle, *options) as server:
        yield server


@pytest.fixture(scope="module")
def cases() -> list[load.Case]:
    """Images with the logits of eager torch."""
    torch.manual_seed(0)  # the default of `mctl export --seed`
    model = runpy.run_path(str(SAMPLES / "cnn.py"))["model"]().eval().requires_grad_(False)
    made = []
    for seed in range(4):
        image = np.random.default_rng(seed).standard_normal((1, 3, SIZE, SIZE), np.float32)
        tensor = {"name": "image", "shape": image.shape, "datatype": "FP32"}
        tensor["parameters"] = {"binary_data_size": image.nbytes}
        wanted = [{"name": "logits", "parameters": {"binary_data": True}}]
        text = json.dumps({"inputs": [tensor], "outputs": wanted}).encode()
        headers = {"inference-header-content-length": str(len(text))}
        request = load.http_request("/v2/models/cnn/infer", text + image.tobytes(), headers)
        made.append(load.Case(request, model(torch.from_numpy(image))["logits"].numpy().tobytes()))
    return made


def run(server: Server, cases: list[load.Case], rate: float, seconds: float, connections: int) -> load.Report:
    options = {"connections": connections, "rtol": 1e-3, "atol": 1e-4}
    return load.run(server.port, cases, rate=[(rate, seconds)], **options)


def counted(server: Server) -> dict[str, int]:
    """The server's own count of its answers."""
    start = 'mctl_requests_total{code="'
    return {name[len(start) : -2]: int(value) for name, value in server.metrics().items() if name.startswith(start)}


def peak_memory(server: Server) -> int:
    """KiB of the front process."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0])


def test_far_beyond_the_capacity(slow: Server, cases: list[load.Case]) -> None:
    # As many clients as two batches have rows keep the model busy, and never fill the queue.
    alone = run(slow, cases, 20, 1, 1)
    full = [run(slow, cases, 2000, 0.5, 2 * BATCH) for _ in range(3)]
    assert alone.right == alone.requests and all(found.refused == found.wrong == 0 for found in full)
    capacity = max(found.right / found.seconds for found in full)
    memory, before, metrics = peak_memory(slow), counted(slow), slow.metrics()

    over = run(slow, cases, 4 * capacity, 3, 200)

    assert over.right + over.refused == over.requests, over
    after, now = counted(slow), slow.metrics()
    assert (after["ok"] - before["ok"], after["rejected"] - before["rejected"]) == (over.right, over.refused)
    rows, batches = (now[f"mctl_batch_rows_{name}"] - metrics[f"mctl_batch_rows_{name}"] for name in ("sum", "count"))
    assert rows > 0.75 * BATCH * batches  # how fast it goes, overload.py measures
    assert over.right > 0 and over.refused > 0
    assert peak_memory(slow) - memory < 12 << 10
    again = run(slow, cases, 20, 1, 1)
    assert again.right == again.requests


def test_a_burst_of_ready_sockets_does_not_hide_the_worker(mlp_bundle: Path, mlp: Mlp) -> None:
    """900 requests are there at once: batches have to end and start while they are read, or the queue overflows."""
    x = random(1)
    request = mlp_request(x)
    with Server(mlp_bundle, "--threads", "1") as server:
        clients = [server.connect() for _ in range(900)]
        assert {raw.send(b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n\r\n").read().status for raw in clients} == {200}
        right = []
        for _ in range(3):  # the scheduler may keep the worker from running once
            server.process.send_signal(signal.SIGSTOP)
            for raw in clients:
                raw.send(request)
            server.process.send_signal(signal.SIGCONT)
            answers = [raw.read() for raw in clients]
            assert {answer.status for answer in answers} <= {200, 503}
            accepted = [answer for answer in answers if answer.status == 200]
            np.testing.assert_allclose(outputs_of(accepted[-1])["output"], mlp(x), rtol=1e-4, atol=1e-6)
            right.append(len(accepted))
        for raw in clients:
            raw.socket.close()
    assert max(right) > 256 + 2 * 64, right  # more than the queue and both of the worker's slots hold


def mlp_request(x: np.ndarray, *fields: str) -> bytes:
    body, headers = infer_binary(x=x)
    return post("/v2/models/mlp/infer", body, *fields, *(f"{name}: {value}" for name, value in headers.items()))


def test_a_client_with_one_request_goes_before_one_with_many(mlp_bundle: Path) -> None:
    """The queue of eight rows is full of one client's requests when another one comes."""
    options = ["--max-batch-size", "4", "--max-queue-size", "8", "--log-requests"]
    with Server(mlp_bundle, *options) as server:

        def send(name: str, rows: int, source: str) -> Raw:
            return server.connect(source).send(mlp_request(random(rows), f"x-request-id: {name}"))

        with stopped(server):
            held = []
            for count in (1, 2):
                held.append(send(f"held{count}", 4, "127.0.0.1"))
                eventually(lambda count=count: server.metrics()["mctl_inflight_batches"] == count)
            many = []
            for count in range(1, 9):
                many.append(send(f"many{count}", 1, "127.0.0.1"))
                eventually(lambda count=count: server.metrics()["mctl_queue_rows"] == count)
            assert send("too much", 1, "127.0.0.1").read().status == 503
            one = send("one", 3, "127.0.0.2")
            gave_way = [raw.read() for raw in many[5:]]  # three rows: the latest
            assert [answer.status for answer in gave_way] == [503] * 3
            assert gave_way[0].headers["retry-after"] == "1" and "the queue is full" in gave_way[0].error
            assert send("over its share", 2, "127.0.0.2").read().status == 503
            assert server.metrics()["mctl_queue_rows"] == 8
        assert [raw.read().status for raw in (*held, one, *many[:5])] == [200] * 8
    lines = [json.loads(line) for line in server.lines if line.startswith("{")]
    answered = [line["id"] for line in lines if line["status"] == 200 and "id" in line]
    # Both clients have had nothing since the queue began: one request of each, then the rest.
    assert answered == ["held1", "held2", "many1", "one", "many2", "many3", "many4", "many5"]


def test_nobody_starves_beside_two_hundred_connections(slow: Server, cases: list[load.Case]) -> None:
    capacity = run(slow, cases, 2000, 1, 2 * BATCH)
    rate = 6 * capacity.right / capacity.seconds
    options = {"connections": 200, "rtol": 1e-3, "atol": 1e-4}
    with load.running(slow.port, cases, rate=[(rate, 3)], **options) as crowd, slow.connect("127.0.0.2") as raw:
        eventually(lambda: slow.metrics()["mctl_queue_rows"] > QUEUE - BATCH)
        while slow.metrics()["mctl_queue_rows"] > QUEUE - BATCH:
            alone = [raw.send(cases[0].request).read().status for _ in range(10)]
            assert alone == [200] * 10
        report = load.report(crowd)
    assert report.right + report.refused == report.requests
    assert report.refused > 0


def test_requests_sent_ahead_take_turns_with_other_connections(mlp_bundle: Path) -> None:
    """One connection has sent hundreds of requests when another one sends one."""
    with Server(mlp_bundle, "--null", "--log-requests", ready=False) as server, server.connect() as greedy:
        modest = server.connect()
        server.process.send_signal(signal.SIGSTOP)
        greedy.send(b"GET /greedy HTTP/1.1\r\nHost: localhost\r\n\r\n" * 300)
        modest.send(b"GET /modest HTTP/1.1\r\nHost: localhost\r\n\r\n")
        server.process.send_signal(signal.SIGCONT)
        assert modest.read().status == 404
        assert {greedy.read().status for _ in range(300)} == {404}
        modest.socket.close()
    paths = [json.loads(line)["path"] for line in server.lines if line.startswith("{")]
    assert paths.index("/modest") <= 2
