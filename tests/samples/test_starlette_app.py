"""The Starlette sample answers as eager does, batches concurrent requests and tells errors by their status."""

import runpy
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from starlette.testclient import TestClient

SAMPLES = Path(__file__).parents[2] / "samples"


@pytest.fixture(scope="module")
def client(mlp_bundle: Path) -> Iterator[TestClient]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MCTL_BUNDLE", str(mlp_bundle))
        app = runpy.run_path(str(SAMPLES / "starlette_app.py"))["app"]
        with TestClient(app) as client:
            yield client


def test_concurrent_requests_get_their_own_answers(client: TestClient) -> None:
    torch.manual_seed(0)
    model = runpy.run_path(str(SAMPLES / "mlp.py"))["model"]().eval()
    inputs = [torch.randn(1 + i % 3, 128) for i in range(30)]
    with ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(lambda x: client.post("/predict", json={"x": x.tolist()}), inputs))
    for x, answer in zip(inputs, answers, strict=True):
        assert answer.status_code == 200
        with torch.no_grad():
            torch.testing.assert_close(torch.tensor(answer.json()["output"]), model(x))
    stats = client.app.state.batcher.stats
    assert stats.rows == sum(len(x) for x in inputs)
    assert stats.batches < len(inputs)


@pytest.mark.parametrize(
    ("body", "status", "wanted"),
    [
        ({"x": [[0.0] * 64]}, 400, "input 'x': axis 1 is 64, allowed 128"),
        ({}, 400, "missing input 'x': float32[batch,128]"),
        ({"y": [1]}, 400, "unknown input 'y': the model takes x"),
        ({"x": "text"}, 400, "an input is no array of numbers"),
        ({"x": [[0.0], [0.0, 1.0]]}, 400, "an input is no array of numbers"),
        ([1, 2], 400, "the body is no JSON object of inputs by name"),
        ({"x": [[0.0] * 128] * 300}, 400, "input 'x': axis 0 is 300, allowed 1..256 (batch)"),
    ],
)
def test_errors(client: TestClient, body: object, status: int, wanted: str) -> None:
    answer = client.post("/predict", json=body)
    assert (answer.status_code, list(answer.json())) == (status, ["error"])
    assert answer.json()["error"].startswith(wanted)


def test_no_json(client: TestClient) -> None:
    assert client.post("/predict", content="{").status_code == 400
