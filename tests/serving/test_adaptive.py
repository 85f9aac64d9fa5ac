"""A latency target, refusal on arrival, and what counts as waiting: the model takes as long as it is told."""

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from mctl.bundle_format.archive import open_bundle, rewrite
from mctl.bundle_format.manifest import Measured

from . import faulty
from .server import Answer, Server, infer_binary

MOST = faulty.MOST_ROWS
NAP = 5  # ms a row
TARGET = 120  # ms: two batches of 16 rows take longer, two of 4 do not
CLIENTS = 40


@pytest.fixture
def plain(faulty_bundle: Path) -> Iterator[Server]:
    with Server(faulty_bundle) as server:
        yield server


def send(server: Server, rows: int = 1, nap: int = NAP, **headers: str) -> Answer:
    body, own = infer_binary(x=faulty.rows(*[(faulty.Action.NAP, nap)] * rows))
    return server.request(faulty.INFER, body, own | {name.replace("_", "-"): text for name, text in headers.items()})


def ms(answer: Answer, name: str) -> float:
    return float(answer.headers[f"x-{name}-time"])


def overload(server: Server, seconds: float, watch: Callable[[], object] = lambda: None) -> list[tuple[float, Answer]]:
    """Each client sends its next row when it has the answer to the last, or a little after it was refused."""
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
        time.sleep(0.05)
    return answers


def test_without_a_target_all_wait(plain: Server) -> None:
    waited = [ms(answer, "total") for left, answer in overload(plain, 2) if left < 1]
    assert statistics.median(waited) > TARGET


def test_a_latency_target_under_overload(faulty_bundle: Path) -> None:
    with Server(faulty_bundle, "--latency-target-ms", str(TARGET), "--percentile", "90") as server:
        seen: list[dict[str, float]] = []
        answers = overload(server, 5, lambda: seen.append(server.metrics()))
        assert min(metrics["mctl_batch_limit_rows"] for metrics in seen) <= 4
        assert max(metrics["mctl_expected_wait_seconds"] for metrics in seen) > 0
        refused = [answer for _, answer in answers if answer.status == 503]
        assert refused and all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
        assert refused[0].error.startswith("too much waits: the answer would take about ")
        assert refused[0].error.endswith(
            "that the latency target leaves; try again later, or allow more with x-mctl-timeout-ms"
        )
        metrics = server.metrics()
        assert metrics['mctl_requests_total{code="rejected"}'] == len(refused)
        assert metrics['mctl_requests_total{code="ok"}'] == len(answers) - len(refused), "who is let in is served"
        assert [send(server).status for _ in range(5)] == [200] * 5, "nothing waits: all are let in"
        assert server.metrics()["mctl_expected_wait_seconds"] == 0


def test_a_deadline_that_cannot_be_met_is_refused_on_arrival(plain: Server) -> None:
    for _ in range(8):
        send(plain, MOST)  # what warmed the model took no time: it learns that 16 rows take about 80 ms
    threads = [threading.Thread(target=send, args=(plain, MOST)) for _ in range(4)]
    for thread in threads:
        thread.start()
    while plain.metrics()["mctl_queue_rows"] < MOST:
        time.sleep(0.001)
    late = send(plain, x_mctl_timeout_ms="30")
    assert late.status == 503 and "more than the " in late.error and "that its timeout leaves" in late.error
    assert send(plain, x_mctl_timeout_ms="60000").status == 200
    for thread in threads:
        thread.join()
    assert plain.metrics()['mctl_requests_total{code="rejected"}'] == 1


def test_queue_time_lasts_until_the_worker_begins(plain: Server) -> None:
    """Two full batches: the second is assembled in the other slot while the first runs, and waits there for 480 ms."""
    answers: list[Answer] = []
    threads = [threading.Thread(target=lambda: answers.append(send(plain, MOST, nap=30))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first, second = sorted(answers, key=lambda answer: ms(answer, "queue"))
    assert ms(second, "queue") > 0.7 * ms(first, "inference")
    for answer in answers:
        assert ms(answer, "queue") + ms(answer, "inference") > 0.8 * ms(answer, "total")
    waited = 1000 * plain.metrics()["mctl_queue_duration_seconds_sum"]
    assert waited == pytest.approx(ms(first, "queue") + ms(second, "queue"), abs=0.1)


@pytest.mark.parametrize(("options", "message"), [
    (["--percentile", "95"], "`--percentile` is that of `--latency-target-ms`"),
    (["--latency-target-ms", "5", "--percentile", "100"], "`--percentile` is `100`, allowed 50..99"),
    (["--latency-target-ms", "5", "--max-queue-delay-us", "5000"], "`--latency-target-ms` is not longer than"),
])  # fmt: skip
def test_senseless_targets(faulty_bundle: Path, refusal, options: list[str], message: str) -> None:  # type: ignore[no-untyped-def]
    code, text = refusal(faulty_bundle, *options)
    assert code == 2 and message in text


def test_the_limit_begins_by_the_curve_of_the_bundle(faulty_bundle: Path, tmp_path: Path) -> None:
    """Two batches have to fit into the target: of 4 rows, which take 10 ms each, they do; of 16 rows not."""
    curve = tuple(
        Measured(dims={"batch": rows}, threads=threads, median_us=us)
        for threads, rows, us in ((1, 1, 5_000), (1, 4, 10_000), (1, 16, 40_000), (2, 16, 1_000))
    )
    with open_bundle(faulty_bundle) as archive:
        rewrite(archive, tmp_path / "b.pt2", msgspec.structs.replace(archive.manifest, curve=curve), {})

    def limit(bundle: Path, threads: int) -> float:
        with Server(bundle, "--latency-target-ms=30", f"--threads={threads}") as server:
            return server.metrics()["mctl_batch_limit_rows"]

    assert limit(tmp_path / "b.pt2", 1) == 4
    assert limit(tmp_path / "b.pt2", 2) == MOST  # the curve for two threads says so
    assert limit(faulty_bundle, 1) == MOST  # without a curve warm-up does, where nothing takes long
