"""More load than the model can carry: what is accepted is answered in time, the rest at once, and nothing is lost."""

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
from .server import Server, infer_binary, outputs_of, post

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


def test_twice_the_capacity(slow: Server, cases: list[load.Case]) -> None:
    # As many clients as two batches have rows keep the model busy, and never fill the queue.
    alone = run(slow, cases, 20, 1, 1)
    full = run(slow, cases, 2000, 1.5, 2 * BATCH)
    assert alone.right == alone.requests and full.refused == full.wrong == 0
    capacity = full.right / full.seconds
    memory, before = peak_memory(slow), counted(slow)

    over = run(slow, cases, 2 * capacity, 4, 200)

    assert over.right + over.refused == over.requests, over
    after = counted(slow)
    assert (after["ok"] - before["ok"], after["rejected"] - before["rejected"]) == (over.right, over.refused)
    assert over.right > 0.7 * capacity * 4, (capacity, over)
    assert over.refused > 0.25 * over.requests
    assert over.refused_us.p50 is not None and over.refused_us.p50 < 5_000
    assert over.right_us.p50 is not None and over.right_us.p50 < 2e6 * (QUEUE + 2 * BATCH) / capacity
    assert peak_memory(slow) - memory < 12 << 10
    again = run(slow, cases, 20, 1, 1)
    assert again.right == again.requests and again.right_us.p50 < 3 * alone.right_us.p50  # type: ignore[operator]


def test_a_burst_of_ready_sockets_does_not_hide_the_worker(mlp_bundle: Path, mlp: Mlp) -> None:
    """900 requests are there at once: batches have to end and start while they are read, or the queue overflows."""
    x = np.random.default_rng(0).standard_normal((1, 128), np.float32)
    body, headers = infer_binary(x=x)
    request = post("/v2/models/mlp/infer", body, *(f"{name}: {value}" for name, value in headers.items()))
    with Server(mlp_bundle, "--threads", "1") as server:
        clients = [server.connect() for _ in range(900)]
        assert {raw.send(b"GET /v2 HTTP/1.1\r\n\r\n").read().status for raw in clients} == {200}
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
    assert max(right) > 700, right
