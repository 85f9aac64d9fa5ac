"""Models that are in memory only while somebody asks for them."""

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as triton

from . import faulty
from .fleet import Shelf, eventually, factor_of, infer
from .server import infer_json, post
from .test_management import Managed

FACTORS = {"a": 3, "b": 5, "c": 7}
ON_DEMAND = {"load": "on_demand", "idle_unload_s": 300}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("on_demand")
    shelf = Shelf(folder)
    for name, factor in FACTORS.items():
        shelf.bundle(factor, folder / f"{name}.pt2")
    return folder


def models(**settings: object) -> dict[str, object]:
    return {
        name: {"settings": {**ON_DEMAND, **settings}, "versions": {"1": {"bundle": f"{name}.pt2"}}} for name in FACTORS
    }


def phase(server: Managed, name: str, version: str = "1") -> str:
    return str(server.manage("/admin/v1/models").json()["models"][name]["versions"][version]["phase"])


def test_the_first_request_loads_it(store: Path) -> None:
    with Managed("--model-store", str(store)) as server:
        assert server.patch({"models": models()}).status == 200
        eventually(lambda: server.request("/v2/health/ready").status == 200)
        assert not server.workers()
        assert [phase(server, name) for name in FACTORS] == ["on demand"] * 3
        # What it is can be asked without loading it.
        client = triton.InferenceServerClient(server.url.removeprefix("http://"))
        assert client.is_model_ready("a") and client.is_model_ready("a", "1")
        assert client.get_model_metadata("a")["versions"] == ["1"]
        index = client.get_model_repository_index()
        assert {row["name"]: row["state"] for row in index} == dict.fromkeys(FACTORS, "READY")
        client.close()
        assert "a (version 1)" in server.request("/").body.decode()
        assert not server.workers()
        answer = infer(server, "a")
        assert (factor_of(answer), answer.headers["x-mctl-version"]) == (3, "1")
        assert len(server.workers()) == 1
        assert [phase(server, name) for name in FACTORS] == ["ready", "on demand", "on demand"]
        assert factor_of(infer(server, "b/versions/1")) == 5
        assert infer(server, "b/versions/2").status == 404
        assert infer(server, "nobody").status == 404


def test_many_wait_for_one_load(store: Path) -> None:
    with Managed("--model-store", str(store)) as server, ThreadPoolExecutor(16) as pool:
        assert server.patch({"models": models()}).status == 200
        asked = [(name, value) for value in range(1, 21) for name in FACTORS]
        answers = list(pool.map(lambda ask: infer(server, *ask), asked))
        assert [factor_of(answer, ask[1]) for ask, answer in zip(asked, answers, strict=True)] == [
            FACTORS[name] for name, _ in asked
        ]
        loads = [event for event in server.manage("/admin/v1/events").json()["events"] if event["kind"] == "loading"]
        assert len(loads) == 3


def test_it_goes_when_nobody_asks(store: Path) -> None:
    with Managed("--model-store", str(store)) as server:
        assert server.patch({"models": models(idle_unload_s=1)}).status == 200
        for _ in range(2):
            assert factor_of(infer(server, "a")) == 3
            eventually(lambda: not server.workers())
            assert phase(server, "a") == "on demand"


def test_the_one_used_longest_ago_makes_room(store: Path) -> None:
    with Managed("--model-store", str(store), "--max-resident", "2") as server:
        assert server.patch({"models": models()}).status == 200
        for name in ("a", "b", "a", "c"):
            assert factor_of(infer(server, name)) == FACTORS[name]
        assert [phase(server, name) for name in FACTORS] == ["ready", "on demand", "ready"]


def test_none_fails_because_others_are_asked_for(store: Path) -> None:
    """Three models of which one fits, asked for at the same time: each answer is that of the model that was asked."""
    with Managed("--model-store", str(store), "--max-resident", "1") as server:
        assert server.patch({"models": models()}).status == 200
        eventually(lambda: server.request("/v2/health/ready").status == 200)

        def ask(name: str) -> None:
            random = np.random.default_rng(FACTORS[name])
            for _ in range(10):
                value = int(random.integers(1, 1000))
                assert factor_of(infer(server, name, value), value) == FACTORS[name]

        with ThreadPoolExecutor(6) as pool:
            list(pool.map(ask, [*FACTORS, *FACTORS]))
        assert len(server.workers()) <= 1


def test_what_does_not_fit_is_refused_with_both_numbers(store: Path) -> None:
    with Managed("--model-store", str(store), "--max-resident", "1") as server:
        stays = {"versions": {"1": {"bundle": "a.pt2"}}}
        assert server.patch({"models": {**models(), "a": stays}}).status == 200
        server.wait_for("a")
        refused = infer(server, "b")
        assert refused.status == 503
        assert "1 models are in memory, and `--max-resident` is 1" in refused.error
        assert factor_of(infer(server, "a")) == 3
        assert server.patch({"models": {"a": None}}).status == 200
        assert factor_of(infer(server, "b")) == 5


def test_one_that_cannot_be_loaded(store: Path, tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    shelf.bundle(3, store / "wrong.pt2", golden_factor=4)  # its golden case fails
    (store / "cut.pt2").write_bytes((store / "a.pt2").read_bytes()[:5000])
    with Managed("--model-store", str(store)) as server:
        wrong = {"settings": ON_DEMAND, "versions": {"1": {"bundle": "wrong.pt2"}}}
        assert server.patch({"models": {"wrong": wrong, **models()}}).status == 200
        for _ in range(2):
            refused = infer(server, "wrong")
            assert refused.status == 503
            assert "could not be loaded" in refused.error
        assert phase(server, "wrong") == "failed"
        assert factor_of(infer(server, "a")) == 3
        cut = server.patch({"models": {"cut": {"settings": ON_DEMAND, "versions": {"1": {"bundle": "cut.pt2"}}}}})
        assert cut.status in (200, 400)
        assert infer(server, "cut").status in (404, 503)


def test_who_waits_has_a_deadline_and_may_leave(store: Path) -> None:
    with Managed("--model-store", str(store), "--max-resident", "1") as server, ThreadPoolExecutor(4) as pool:
        assert server.patch({"models": models()}).status == 200
        assert factor_of(infer(server, "a")) == 3
        (worker,) = server.workers()
        os.kill(worker, signal.SIGSTOP)
        held = pool.submit(infer, server, "a")
        eventually(lambda: server.metrics()["mctl_inflight_batches"] == 1)
        late = infer(server, "b", x_mctl_timeout_ms="100")  # there is no room before the other is answered
        assert late.status == 504
        assert "was not in memory" in late.error
        leaves = server.connect().send(
            post("/v2/models/b/infer", json.dumps(infer_json(x=faulty.rows((1, 2)))).encode())
        )
        waits = pool.submit(infer, server, "c")
        leaves.socket.close()
        os.kill(worker, signal.SIGCONT)
        assert (factor_of(held.result()), factor_of(waits.result())) == (3, 7)
        assert factor_of(infer(server, "b")) == 5


def test_a_large_body_waits_too(store: Path) -> None:
    with Managed("--model-store", str(store)) as server:
        assert server.patch({"models": models()}).status == 200
        body = json.dumps(infer_json(x=faulty.rows((1, 7)))).encode() + b" " * (1 << 20)
        assert factor_of(server.request("/v2/models/a/infer", body)) == 3


def test_a_server_that_ends_answers_who_waits(store: Path) -> None:
    with Managed("--model-store", str(store), "--max-resident", "1") as server, ThreadPoolExecutor(4) as pool:
        assert server.patch({"models": models()}).status == 200
        assert factor_of(infer(server, "a")) == 3
        (worker,) = server.workers()
        os.kill(worker, signal.SIGSTOP)
        held = pool.submit(infer, server, "a")
        eventually(lambda: server.metrics()["mctl_inflight_batches"] == 1)
        body = json.dumps(infer_json(x=faulty.rows((1, 2)))).encode()
        waits = server.connect().send(post("/v2/models/b/infer", body))
        assert server.request("/v2/health/live").status == 200  # the other was read before
        server.process.send_signal(signal.SIGTERM)
        refused = waits.read()
        os.kill(worker, signal.SIGCONT)
        assert (refused.status, refused.error) == (503, "draining: the server is going away")
        assert factor_of(held.result()) == 3
        assert server.process.wait(40) == 0


def test_two_versions_share_exactly(store: Path) -> None:
    with Managed("--model-store", str(store)) as server:
        versions = {"1": {"bundle": "a.pt2"}, "2": {"bundle": "b.pt2"}}
        model = {"settings": ON_DEMAND, "versions": versions, "traffic": {"1": 30, "2": 70}}
        assert server.patch({"models": {"m": model}}).status == 200
        answers = [factor_of(infer(server, "m")) for _ in range(100)]
        assert (answers.count(3), answers.count(5)) == (30, 70)
