"""Every path and status of SERVING's tables, by clients that know nothing of mctl."""

import gzip
import json
import shutil
import subprocess
import zlib
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as triton

from .conftest import Mlp
from .server import Server, infer_binary, infer_json, outputs_of

INFER = "/v2/models/mlp/infer"


def random(rows: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, 128), np.float32)


def test_what_can_be_read(server: Server) -> None:
    assert server.request("/v2").json()["extensions"] == ["binary_tensor_data", "statistics"]
    assert server.request("/v2/health/live").json() == {"live": True}
    assert server.request("/v2/health/ready").json() == {"ready": True}
    model = server.request("/v2/models/mlp").json()
    assert (model["name"], model["versions"], model["platform"]) == ("mlp", ["1"], "torch_aoti")
    assert model["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 128]}]
    assert model["outputs"] == [{"name": "output", "datatype": "FP32", "shape": [-1, 10]}]
    assert model["properties"]["batch_dim"] == "batch"
    assert model["properties"]["dims"] == {"batch": {"min": 1, "max": 64, "multiple": 1}}
    assert model["properties"]["max_request_rows"] == 256
    assert model["properties"]["buckets"] == {"batch": [1, 2, 4, 8, 16, 32, 64]}
    assert len(model["properties"]["digest"]) == 64
    assert server.request("/v2/models/mlp/ready").json() == {"name": "mlp", "ready": True}
    assert b"curl http" in server.request("/").body
    page = server.request("/", headers={"Accept": "application/json"}).json()
    assert page["models"] == ["mlp"] and f"POST {INFER}" in page["paths"]


@pytest.mark.parametrize("path", ["", "/ready", "/stats"])
def test_versions_and_slashes_are_the_same_path(server: Server, path: str) -> None:
    for same in (f"/v2/models/mlp/versions/1{path}", f"/v2/models/mlp{path}/", f"/v2/models/%6Dlp{path}?a=b"):
        assert server.request(same).json().keys() == server.request(f"/v2/models/mlp{path}").json().keys()


def test_the_front_page_has_a_command_that_works(server: Server, cnn_bundle: Path) -> None:
    with Server(cnn_bundle, "--null", ready=False) as images:  # whose inputs are too long to be spelled out
        for one in (server, images):
            command = one.request("/").body.decode().splitlines()[-1]
            done = subprocess.run(["bash", "-c", command + " -sf"], capture_output=True, check=True)
            assert json.loads(done.stdout)["outputs"][0]["shape"] == [1, 10]


def test_tritonclient(server: Server, mlp: Mlp) -> None:
    with triton.InferenceServerClient(server.url.removeprefix("http://")) as client:
        assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("mlp")
        assert client.get_server_metadata()["name"] == "mctl"
        assert client.get_model_metadata("mlp")["inputs"][0]["shape"] == [-1, 128]
        x = random(3)
        for binary_in in (True, False):
            for binary_out in (True, False):
                tensor = triton.InferInput("x", x.shape, "FP32")
                tensor.set_data_from_numpy(x, binary_data=binary_in)
                wanted = triton.InferRequestedOutput("output", binary_data=binary_out)
                result = client.infer("mlp", [tensor], outputs=[wanted], request_id="r1", model_version="1")
                np.testing.assert_allclose(result.as_numpy("output"), mlp(x), rtol=1e-4, atol=1e-6)
                assert result.get_response()["id"] == "r1"
        for algorithm in ("gzip", "deflate"):
            result = client.infer("mlp", [tensor], request_compression_algorithm=algorithm)
            np.testing.assert_allclose(result.as_numpy("output"), mlp(x), rtol=1e-4, atol=1e-6)
        statistics = client.get_inference_statistics("mlp")["model_stats"][0]
        assert statistics["inference_stats"]["success"]["count"] >= 6
        assert {"batch_size", "compute_input", "compute_infer", "compute_output"} == set(statistics["batch_stats"][0])
        tensor = triton.InferInput("x", [1, 64], "FP32")
        tensor.set_data_from_numpy(random(1)[:, :64])
        with pytest.raises(triton.InferenceServerException, match="axis 1 is 64, allowed 128"):
            client.infer("mlp", [tensor])


def test_curl(server: Server, mlp: Mlp, tmp_path) -> None:  # type: ignore[no-untyped-def]
    assert shutil.which("curl")
    x = random(2000 // 40)
    body, headers = infer_binary(x=x)
    (tmp_path / "body").write_bytes(body)
    words = ["curl", "-s", "-D", tmp_path / "head", server.url + INFER, "--data-binary", f"@{tmp_path / 'body'}"]
    for name, value in {**headers, "Expect": "100-continue", "Transfer-Encoding": "chunked"}.items():
        words += ["-H", f"{name}: {value}"]
    answer = subprocess.run(words, capture_output=True, check=True).stdout
    head = (tmp_path / "head").read_text()
    assert head.startswith("HTTP/1.1 100 Continue") and "HTTP/1.1 200 OK" in head
    np.testing.assert_allclose(np.frombuffer(answer[-50 * 40 :], np.float32).reshape(50, 10), mlp(x), rtol=1e-4)


def test_raw_request(server: Server, mlp: Mlp) -> None:
    x = random(2)
    answer = server.request(INFER, x.tobytes(), {"Inference-Header-Content-Length": "0"})
    np.testing.assert_allclose(outputs_of(answer)["output"], mlp(x), rtol=1e-4, atol=1e-6)
    answer = server.request(INFER, x.tobytes()[:-1], {"Inference-Header-Content-Length": "0"})
    assert (answer.status, answer.error) == (400, "input 'x': the body has 1023 bytes, no float32[batch,128]")


def test_json_and_binary_agree_bit_by_bit(server: Server) -> None:
    x = random(3)
    text = outputs_of(server.request(INFER, json.dumps(infer_json(x=x)).encode()))["output"]
    raw = outputs_of(server.request(INFER, *infer_binary(x=x)))["output"]
    assert text.tobytes() == raw.tobytes()


def test_aliases_and_chosen_outputs(server: Server) -> None:
    request = infer_json(x=random(1)) | {"id": "7", "outputs": [{"name": "OUTPUT__0"}]}
    request["inputs"][0]["name"] = "INPUT__0"
    answer = server.request(INFER, json.dumps(request).encode()).json()
    assert answer["id"] == "7" and answer["model_name"] == "mlp" and answer["model_version"] == "1"
    assert [output["name"] for output in answer["outputs"]] == ["OUTPUT__0"]


def test_answer_headers(server: Server) -> None:
    answer = server.request(INFER, json.dumps(infer_json(x=random(3))).encode(), {"x-request-id": "mine"})
    assert answer.headers["x-request-id"] == "mine"
    assert answer.headers["x-mctl-batch-size"] == "3"
    assert answer.headers["x-mctl-bucket"] == "batch=4"
    assert answer.headers["x-mctl-variant"]
    queue, model, total = (float(answer.headers[f"x-{part}-time"]) for part in ("queue", "inference", "total"))
    assert 0 < model < total and queue + model <= total + 0.002
    made = {server.request(INFER, b"{").headers["x-request-id"] for _ in range(3)}
    assert len(made) == 3


def tensor(**changes: object) -> dict:
    whole = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2], **changes}
    return {"inputs": [{key: value for key, value in whole.items() if value is not None}]}


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"inputs": []}, "missing input 'x'"),
        (tensor(name="y"), "unknown input 'y'"),
        (tensor(datatype="FP64"), "input 'x': dtype is float64, allowed float32"),
        (tensor(), "input 'x': axis 1 is 2, allowed 128"),
        (tensor(shape=[2]), "input 'x': "),
        (tensor(shape=[0, 128], data=[]), "input 'x': axis 0 is 0, allowed 1..256 (batch)"),
        (tensor(shape=[257, 128], data=[0] * 257 * 128), "input 'x': axis 0 is 257, allowed 1..256 (batch)"),
        (tensor(data=None), "input 'x' has no data"),
    ],
)
def test_what_breaks_the_contract_is_400(server: Server, request_: dict, message: str) -> None:
    answer = server.request(INFER, json.dumps(request_).encode())
    assert answer.status == 400
    assert answer.json().keys() == {"error"} and message in answer.error


def test_paths_that_are_not_there(server: Server) -> None:
    for path in (
        "/nope",
        "/v2/nope",
        "/v2/models/other",
        "/v2/models/mlp/nope",
        "/v2/models/mlp/versions/9",
        "/v2/models",
    ):
        assert server.request(path).status == 404, path
    assert server.request("/v2/models/other/infer", b"{}").status == 404
    assert "'mlp'" in server.request("/v2/models/other/infer", b"{}").error


@pytest.mark.parametrize(
    ("verb", "path", "allowed"),
    [
        ("GET", INFER, "POST"),
        ("HEAD", INFER, "POST"),
        ("POST", "/v2/models/mlp", "GET, HEAD"),
        ("DELETE", "/v2/health/live", "GET, HEAD"),
        ("PUT", "/metrics", "GET, HEAD"),
        ("BREW", "/", "GET, HEAD"),
    ],
)
def test_wrong_verbs_are_405_with_allow(server: Server, verb: str, path: str, allowed: str) -> None:
    answer = server.request(path, verb=verb)
    assert (answer.status, answer.headers["allow"]) == (405, allowed)


def test_types_and_encodings_that_are_not_understood_are_415(server: Server) -> None:
    body = json.dumps(infer_json(x=random(1))).encode()
    assert server.request(INFER, body, {"Content-Type": "text/xml"}).status == 415
    assert server.request(INFER, body, {"Content-Type": "application/x-www-form-urlencoded"}).status == 200  # curl -d
    assert server.request(INFER, body, {"Content-Encoding": "br"}).status == 415
    assert server.request(INFER, body, {"Content-Type": "application/json; charset=utf-8"}).status == 200


def test_compressed_bodies(server: Server) -> None:
    body = json.dumps(infer_json(x=random(1))).encode()
    assert server.request(INFER, gzip.compress(body), {"Content-Encoding": "gzip"}).status == 200
    assert server.request(INFER, zlib.compress(body), {"Content-Encoding": "deflate"}).status == 200
    assert server.request(INFER, gzip.compress(body)[:-9], {"Content-Encoding": "gzip"}).status == 400
    assert server.request(INFER, body, {"Content-Encoding": "gzip"}).status == 400
    bomb = gzip.compress(b" " * (65 << 20))
    assert len(bomb) < 100_000
    assert server.request(INFER, bomb, {"Content-Encoding": "gzip"}).status == 413


def test_extensions_that_are_not_implemented_are_501(server: Server) -> None:
    request = infer_json(x=random(1))
    request["inputs"][0]["parameters"] = {"shared_memory_region": "r"}
    assert server.request(INFER, json.dumps(request).encode()).status == 501
    for path in ("/v2/models/mlp/config", "/v2/systemsharedmemory/status"):
        assert server.request(path).status == 501


def test_head_has_no_body(server: Server) -> None:
    with server.connect() as raw:
        for path in ("/v2/health/live", "/metrics"):
            answer = raw.send(f"HEAD {path} HTTP/1.1\r\nHost: localhost\r\n\r\n").read(head=True)
            assert answer.status == 200 and int(answer.headers["content-length"]) > 10
        assert raw.send("GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n").read().json() == {"live": True}


def test_bad_timeouts(server: Server) -> None:
    body = json.dumps(infer_json(x=random(1))).encode()
    for value in ("0", "-1", "soon", "99999999999999999999"):
        assert server.request(INFER, body, {"x-mctl-timeout-ms": value}).status == 400
    assert server.request(INFER, body, {"x-mctl-timeout-ms": "5000"}).status == 200


def test_null_mode_answers_zeros_by_the_same_rules(mlp_bundle) -> None:  # type: ignore[no-untyped-def]
    with Server(mlp_bundle, "--null", ready=False) as server:
        assert server.request("/v2/health/ready").status == 200
        answer = outputs_of(server.request(INFER, *infer_binary(x=random(3))))["output"]
        assert answer.shape == (3, 10) and not answer.any()
        assert server.request(INFER, json.dumps(tensor()).encode()).status == 400
        assert server.workers() == []
