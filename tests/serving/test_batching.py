"""Requests that share batches: everybody gets their own numbers, and the counters say what happened."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from .conftest import Mlp
from .server import Answer, Server, infer_binary, infer_json, outputs_of, post

INFER = "/v2/models/mlp/infer"


def random(rows: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, 128), np.float32)


@contextmanager
def stopped(server: Server) -> Iterator[None]:
    """Workers that don't get on: what comes meanwhile has to queue."""
    workers = server.workers()
    for worker in workers:
        os.kill(worker, signal.SIGSTOP)
    try:
        yield
    finally:
        for worker in workers:
            os.kill(worker, signal.SIGCONT)


def eventually(check: Callable[[], bool]) -> None:
    for _ in range(1000):
        if check():
            return
        time.sleep(0.01)
    raise AssertionError("it did not come true within 10 s")


def start(pool: ThreadPoolExecutor, server: Server, x: np.ndarray, **headers: str):  # type: ignore[no-untyped-def]
    body, own = infer_binary(x=x)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return pool.submit(server.request, INFER, body, own | named)


def test_every_client_gets_its_own_numbers(server: Server, mlp: Mlp) -> None:
    def client(seed: int) -> None:
        for step in range(20):
            x = random(1 + (seed + step) % 7, seed * 1000 + step)
            answer = server.request(INFER, *infer_binary(x=x))
            np.testing.assert_allclose(outputs_of(answer)["output"], mlp(x), rtol=1e-4, atol=1e-6)

    with ThreadPoolExecutor(16) as pool:
        for done in [pool.submit(client, seed) for seed in range(16)]:
            done.result()


def test_requests_that_queue_share_a_padded_batch(mlp_bundle: Path, mlp: Mlp) -> None:
    with Server(mlp_bundle, "--max-batch-size", "8") as server, ThreadPoolExecutor(8) as pool:
        with stopped(server):
            inputs = [random(rows, rows) for rows in (1, 2, 3, 2)]
            blocker = start(pool, server, random(1))
            eventually(lambda: server.metrics()["mctl_inflight_batches"] == 1)
            waiting = []
            for count, x in enumerate(inputs):
                before = sum(len(x) for x in inputs[:count])
                eventually(lambda before=before: server.metrics()["mctl_queue_rows"] == before)
                waiting.append(start(pool, server, x))
            eventually(lambda: server.metrics()["mctl_inflight_batches"] == 2)
        assert blocker.result().headers["x-mctl-batch-size"] == "1"
        # 1 + 2 + 3 + 2 fill the batch of 8, which starts before the first one is done.
        assert [done.result().headers["x-mctl-batch-size"] for done in waiting] == ["8"] * 4
        for x, done in zip(inputs, waiting, strict=True):
            np.testing.assert_allclose(outputs_of(done.result())["output"], mlp(x), rtol=1e-4, atol=1e-6)
        metrics = server.metrics()
        assert metrics['mctl_batches_total{bucket="batch=8",reason="full"}'] == 1
        assert metrics['mctl_batches_total{bucket="batch=1",reason="idle"}'] == 1
        assert metrics["mctl_batch_rows_sum"] == 9 and metrics["mctl_padded_rows_total"] == 0


def test_a_delay_waits_for_company(mlp_bundle: Path) -> None:
    with Server(mlp_bundle, "--max-queue-delay-us", "1000000") as server, ThreadPoolExecutor(8) as pool:
        began = time.monotonic()
        first = start(pool, server, random(1))
        time.sleep(0.05)
        second = start(pool, server, random(2))
        assert {done.result().headers["x-mctl-batch-size"] for done in (first, second)} == {"3"}
        assert time.monotonic() - began > 0.99
        assert first.result().headers["x-mctl-bucket"] == "batch=4"
        assert server.metrics()['mctl_batches_total{bucket="batch=4",reason="delay"}'] == 1
        assert server.metrics()["mctl_padded_rows_total"] == 1


def test_large_requests_are_split_run_and_joined(mlp_bundle: Path, mlp: Mlp) -> None:
    with Server(mlp_bundle, "--max-batch-size", "16", "--max-queue-size", "200", "--max-request-rows", "150") as server:
        x = random(150)
        for answer in (
            server.request(INFER, *infer_binary(x=x)),
            server.request(INFER, json.dumps(infer_json(x=x)).encode()),
        ):
            np.testing.assert_allclose(outputs_of(answer)["output"], mlp(x), rtol=1e-4, atol=1e-6)
        answer = server.request(INFER, *infer_binary(x=random(151)))
        assert (answer.status, answer.error) == (400, "input 'x': axis 0 is 151, allowed 1..150 (batch)")


def test_a_full_queue_refuses_at_once(mlp_bundle: Path) -> None:
    with Server(mlp_bundle, "--max-queue-size", "4", "--max-batch-size", "4") as server, ThreadPoolExecutor(8) as pool:
        with stopped(server):
            held = [start(pool, server, random(4))]
            eventually(lambda: server.metrics()["mctl_inflight_batches"] == 1)
            held.append(start(pool, server, random(4)))
            eventually(lambda: server.metrics()["mctl_inflight_batches"] == 2)
            held.append(start(pool, server, random(3)))
            eventually(lambda: server.metrics()["mctl_queue_rows"] == 3)
            began = time.monotonic()
            refused = server.request(INFER, *infer_binary(x=random(2)))
            assert time.monotonic() - began < 0.5
            assert (refused.status, refused.headers["retry-after"]) == (503, "1")
            assert refused.error == "the queue is full: 3 of 4 rows wait"
        assert [done.result().status for done in held] == [200] * 3
        metrics = server.metrics()
        assert metrics['mctl_requests_total{code="rejected"}'] == 1 and metrics["mctl_queue_capacity_rows"] == 4


def test_deadlines_in_the_queue_and_in_the_model(mlp_bundle: Path) -> None:
    with Server(mlp_bundle) as server, ThreadPoolExecutor(8) as pool:
        with stopped(server):
            began = time.monotonic()
            running = start(pool, server, random(1), x_mctl_timeout_ms="300")
            eventually(lambda: server.metrics()["mctl_inflight_batches"] == 1)
            request = infer_json(x=random(1)) | {"parameters": {"timeout": 200_000}}
            queued = pool.submit(server.request, INFER, json.dumps(request).encode())
            patient = start(pool, server, random(1))
            assert queued.result().status == 504 and "in the queue" in queued.result().error
            assert time.monotonic() - began > 0.19
            assert running.result().status == 504 and "in the model" in running.result().error
        assert patient.result().status == 200
        assert server.metrics()['mctl_requests_total{code="expired"}'] == 2
        assert server.metrics()["mctl_batch_rows_sum"] == 2  # the expired one never reached the model


def test_a_client_that_goes_away_leaves_the_queue(mlp_bundle: Path) -> None:
    with Server(mlp_bundle) as server, ThreadPoolExecutor(8) as pool:
        with stopped(server):
            running = start(pool, server, random(1))
            eventually(lambda: server.metrics()["mctl_inflight_batches"] == 1)
            body, headers = infer_binary(x=random(5))
            raw = server.connect().send(post(INFER, body, *(f"{name}: {value}" for name, value in headers.items())))
            eventually(lambda: server.metrics()["mctl_queue_rows"] == 5)
            raw.socket.close()
            eventually(lambda: server.metrics()["mctl_queue_rows"] == 0)
        assert running.result().status == 200
        assert server.metrics()['mctl_requests_total{code="cancelled"}'] == 1
        assert server.metrics()["mctl_batch_rows_sum"] == 1


def test_counters_add_up_with_the_clients_own(mlp_bundle: Path) -> None:
    with Server(mlp_bundle, "--instances", "2", "--max-queue-size", "40") as server:
        seen: dict[int, int] = {}
        lock = threading.Lock()

        def count(answer: Answer) -> None:
            with lock:
                seen[answer.status] = seen.get(answer.status, 0) + 1

        def client(seed: int) -> None:
            for step in range(25):
                kind = (seed + step) % 5
                body, headers = infer_binary(x=random(1 + 39 * (kind == 4), seed))
                count(server.request(INFER, body[: -(kind == 3)] if kind == 3 else body, headers))

        with ThreadPoolExecutor(12) as pool:
            for done in [pool.submit(client, seed) for seed in range(12)]:
                done.result()
        metrics = server.metrics()
        codes = {200: "ok", 400: "invalid", 503: "rejected"}
        assert sum(seen.values()) == 300 and set(seen) <= set(codes)
        for status, code in codes.items():
            assert metrics[f'mctl_requests_total{{code="{code}"}}'] == seen.get(status, 0)
        assert metrics["mctl_request_duration_seconds_count"] == 300
        assert metrics['mctl_request_duration_seconds_bucket{le="+Inf"}'] == 300
        assert metrics["mctl_queue_duration_seconds_count"] == seen[200]
        batches = [value for name, value in metrics.items() if name.startswith("mctl_batches_total")]
        computed = [value for name, value in metrics.items() if name.startswith("mctl_compute_duration_seconds_count")]
        assert sum(batches) == sum(computed) == metrics["mctl_batch_rows_count"]
        assert metrics["mctl_queue_rows"] == metrics["mctl_inflight_batches"] == 0
        assert metrics["mctl_model_ready"] == 1 and metrics['mctl_load_seconds{phase="warmup"}'] > 0
        assert metrics["process_resident_memory_bytes"] > 50e6  # the workers' libtorch is counted


@pytest.mark.parametrize(("options", "message"), [
    (["--max-batch-size", "65"], "`--max-batch-size` is 65, the contract allows batch 1..64 in steps of 1"),
    (["--allowed-batch-sizes", "1,100"], "`--allowed-batch-sizes` has 100, the contract allows batch 1..64"),
])  # fmt: skip
def test_settings_that_the_contract_does_not_allow(mlp_bundle: Path, refusal, options: list[str], message: str) -> None:  # type: ignore[no-untyped-def]
    code, text = refusal(mlp_bundle, *options)
    assert code == 2 and message in text
