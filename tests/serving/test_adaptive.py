"""A latency target, refusal on arrival, and what counts as waiting: on a server whose model takes a while."""

import os
import signal
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from .server import Answer, Server, infer_binary

INFER = "/v2/models/cnn/infer"
IMAGE = infer_binary(image=np.ones((1, 3, 96, 96), np.float32))
CLIENTS = 24


@pytest.fixture
def plain(cnn_bundle: Path):  # type: ignore[no-untyped-def]
    with Server(cnn_bundle, "--threads", "1") as server:
        yield server


def send(server: Server, rows: int = 1, **headers: str) -> Answer:
    body, own = infer_binary(image=np.ones((rows, 3, 96, 96), np.float32)) if rows > 1 else IMAGE
    return server.request(INFER, body, own | {name.replace("_", "-"): value for name, value in headers.items()})


def ms(answer: Answer, name: str) -> float:
    return float(answer.headers[f"x-{name}-time"])


def overload(server: Server, seconds: float, watch: Callable[[], object] = lambda: None) -> list[tuple[float, Answer]]:
    """Each client sends its next image when it has the answer to the last, or a little after it was refused."""
    answers: list[tuple[float, Answer]] = []
    until = time.monotonic() + seconds

    def client() -> None:
        while (began := time.monotonic()) < until:
            answer = send(server)
            answers.append((until - began, answer))
            if answer.status == 503:
                time.sleep(0.05)

    threads = [threading.Thread(target=client) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        watch()
        time.sleep(0.1)
    return answers


def test_a_latency_target_under_overload(cnn_bundle: Path, plain: Server) -> None:
    """Three times as many clients as fit into the largest batch. The target is one and a half such batches."""
    full = statistics.median(ms(send(plain, 8), "inference") for _ in range(5))
    target = round(1.5 * full)
    waited = [ms(answer, "total") for left, answer in overload(plain, 1.5) if left < 1]
    assert statistics.median(waited) > target, "without a target three batches' worth of clients wait for each other"

    options = ["--threads", "1", "--latency-target-ms", str(target), "--percentile", "90"]
    with Server(cnn_bundle, *options) as server:
        seen: list[dict[str, float]] = []
        answers = overload(server, 5, lambda: seen.append(server.metrics()))
        settled = [ms(answer, "total") for left, answer in answers if left < 3.5 and answer.status == 200]
        assert statistics.median(settled) < target
        assert min(metrics["mctl_batch_limit_rows"] for metrics in seen) <= 4, "two batches of 8 take too long"
        assert max(metrics["mctl_expected_wait_seconds"] for metrics in seen) > 0
        refused = [answer for _, answer in answers if answer.status == 503]
        assert refused and all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
        assert refused[0].error.startswith("too much waits: the answer would take about ")
        assert refused[0].error.endswith(
            "that the latency target leaves; try again later, or allow more with x-mctl-timeout-ms"
        )
        metrics = server.metrics()
        assert metrics['mctl_requests_total{code="rejected"}'] == len(refused)
        assert metrics['mctl_requests_total{code="ok"}'] == len(answers) - len(refused), "no one is dropped"
        assert [send(server).status for _ in range(5)] == [200] * 5, "nothing waits: all are let in"
        assert metrics["mctl_queue_rows"] == server.metrics()["mctl_expected_wait_seconds"] == 0


def test_a_deadline_that_cannot_be_met_is_refused_on_arrival(plain: Server) -> None:
    full = statistics.median(ms(send(plain, 8), "inference") for _ in range(3))
    threads = [threading.Thread(target=send, args=(plain, 8)) for _ in range(4)]
    for thread in threads:
        thread.start()
    while plain.metrics()["mctl_queue_rows"] < 8:
        time.sleep(0.001)
    began = time.monotonic()
    late = send(plain, x_mctl_timeout_ms=str(max(1, round(full / 2))))
    assert late.status == 503 and time.monotonic() - began < 2 * full / 1000
    assert "that its timeout leaves" in late.error
    assert send(plain, x_mctl_timeout_ms="60000").status == 200
    for thread in threads:
        thread.join()


def test_queue_time_lasts_until_the_worker_begins(cnn_bundle: Path) -> None:
    """Two batches of 8: the second is assembled in the other slot while the first runs, and waits there."""
    with Server(cnn_bundle, "--threads", "1") as server:
        answers: list[Answer] = []
        threads = [threading.Thread(target=lambda: answers.append(send(server, 8))) for _ in range(2)]
        [worker] = server.workers()
        os.kill(worker, signal.SIGSTOP)
        for thread in threads:
            thread.start()
        while server.metrics()["mctl_inflight_batches"] < 2:
            time.sleep(0.01)
        time.sleep(0.3)
        os.kill(worker, signal.SIGCONT)
        for thread in threads:
            thread.join()
        waits = sorted(ms(answer, "queue") for answer in answers)
        assert waits[0] > 300
        assert waits[1] - waits[0] > 0.8 * min(ms(answer, "inference") for answer in answers)
        for answer in answers:
            assert ms(answer, "queue") + ms(answer, "inference") > 0.8 * ms(answer, "total")
        assert abs(1000 * server.metrics()["mctl_queue_duration_seconds_sum"] - sum(waits)) < 1


@pytest.mark.parametrize(("options", "message"), [
    (["--percentile", "95"], "`--percentile` is that of `--latency-target-ms`"),
    (["--latency-target-ms", "5", "--percentile", "100"], "`--percentile` is `100`, allowed 50..99"),
    (["--latency-target-ms", "5", "--max-queue-delay-us", "5000"], "`--latency-target-ms` is not longer than"),
])  # fmt: skip
def test_senseless_targets(cnn_bundle: Path, refusal, options: list[str], message: str) -> None:  # type: ignore[no-untyped-def]
    code, text = refusal(cnn_bundle, *options)
    assert code == 2 and message in text
