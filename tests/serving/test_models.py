"""One server, several models: each by its name and version, with workers and numbers of its own."""

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as triton
from prometheus_client.parser import text_string_to_metric_families

from .conftest import Mlp
from .server import Server, infer_json, outputs_of


@pytest.fixture(scope="module")
def two(mlp_bundle: Path, cnn_bundle: Path) -> Iterator[Server]:
    with Server(mlp_bundle, str(cnn_bundle)) as running:
        while not running.request("/v2/health/ready").json()["ready"]:
            time.sleep(0.05)
        yield running


def test_each_answers_under_its_name(two: Server, mlp: Mlp, cnn_bundle: Path) -> None:
    x = np.random.default_rng(1).normal(size=(3, 128)).astype(np.float32)
    answer = two.request("/v2/models/mlp/infer", json.dumps(infer_json(x=x)).encode())
    assert answer.status == 200 and answer.json()["model_name"] == "mlp"
    np.testing.assert_allclose(next(iter(outputs_of(answer).values())), mlp(x), rtol=1e-4, atol=1e-5)
    metadata = two.request("/v2/models/cnn").json()
    assert metadata["name"] == "cnn" and metadata["versions"] == ["1"]
    image = np.zeros((1, 3, 16, 24), np.float32)
    assert two.request("/v2/models/cnn/infer", json.dumps(infer_json(image=image)).encode()).status == 200
    wrong = two.request("/v2/models/cnn/infer", json.dumps(infer_json(x=x)).encode())
    assert wrong.status == 400  # the MLP's tensors are not the CNN's


def test_predictions_take_tensors_as_json_where_there_is_no_handler(two: Server, mlp: Mlp) -> None:
    x = np.random.default_rng(2).normal(size=(3, 128)).astype(np.float32)
    expected = mlp(x)
    for path in ("/predictions/mlp", "/predictions/mlp/1"):
        answer = two.request(path, json.dumps({"x": x.tolist()}).encode())
        assert answer.status == 200, answer.body
        (y,) = answer.json().values()
        np.testing.assert_allclose(np.array(y, np.float32), expected, rtol=1e-4, atol=1e-5)
    assert two.request("/predictions/mlp", json.dumps(infer_json(x=x)).encode()).status == 200
    assert "unknown input 'z'" in two.request("/predictions/mlp", b'{"z": [[1]]}').error
    assert "ragged" in two.request("/predictions/mlp", b'{"x": [[1, 2], [3]]}').error
    assert "tensors by name" in two.request("/predictions/mlp", b"[1]").error
    assert two.request("/predictions/mlp").status == 405
    assert two.request("/predictions/mlp/7", b"{}").status == 404
    assert "has no handler" in two.request("/v2/models/mlp/predict", b"{}").error


def test_what_is_not_there_is_told(two: Server) -> None:
    assert two.request("/v2/models/bert").error == "model 'bert' is not here: this server has 'cnn', 'mlp'"
    answer = two.request("/v2/models/mlp/versions/7")
    assert answer.status == 404 and answer.error == "model 'mlp' has no version '7': it has '1'"


def test_metrics_have_each_family_once_with_both_models(two: Server) -> None:
    families = list(text_string_to_metric_families(two.request("/metrics").body.decode()))
    names = [family.name for family in families]
    assert len(names) == len(set(names))
    requests = next(family for family in families if family.name == "mctl_requests")
    assert {sample.labels["model"] for sample in requests.samples} == {"mlp", "cnn"}


def test_tritons_client_sees_both(two: Server) -> None:
    with triton.InferenceServerClient(two.url.removeprefix("http://")) as client:
        assert client.is_model_ready("mlp") and client.is_model_ready("cnn")
        stats = client.get_inference_statistics()["model_stats"]
        assert {model["name"] for model in stats} == {"mlp", "cnn"}
        assert [model["name"] for model in client.get_inference_statistics("cnn")["model_stats"]] == ["cnn"]


def test_the_front_page_has_an_example_for_each(two: Server) -> None:
    page = two.request("/").body.decode()
    assert "/v2/models/mlp/infer" in page and "/v2/models/cnn/infer" in page


def samples_of(server: Server, name: str, **labels: str) -> dict[str, float]:
    """The samples with this name and these labels, by their model."""
    families = text_string_to_metric_families(server.request("/metrics").body.decode())
    found = (sample for family in families for sample in family.samples if sample.name == name)
    return {s.labels["model"]: s.value for s in found if labels.items() <= s.labels.items()}


def test_a_dead_worker_of_one_is_not_the_others(two: Server) -> None:
    x = np.zeros((1, 128), np.float32)
    assert samples_of(two, "mctl_workers", state="live") == {"mlp": 1.0, "cnn": 1.0}
    os.kill(two.workers()[0], signal.SIGKILL)
    for _ in range(600):
        restarts = samples_of(two, "mctl_worker_restarts_total", reason="crash")
        if sum(restarts.values()) == 1 and all(samples_of(two, "mctl_model_ready").values()):
            break
        time.sleep(0.1)
    assert sorted(restarts.values()) == [0.0, 1.0]
    assert two.request("/v2/models/mlp/infer", json.dumps(infer_json(x=x)).encode()).status == 200


def test_the_same_bundle_twice_is_refused(refusal, mlp_bundle: Path, tmp_path: Path) -> None:
    copy = shutil.copy(mlp_bundle, tmp_path / "again.pt2")
    code, said = refusal(mlp_bundle, str(copy))
    assert code == 2 and "model 'mlp', version '1' is given twice" in said
