"""What `mctl simulate` says of a trace, and what a server does with it."""

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from mctl.runner.trace import poisson

from . import faulty
from .server import Server, infer_binary, post
from .test_access_log import logged
from .test_batching import eventually

FIXED_MS = 20  # of a batch; a row adds a fifth of that
BODY, FIELDS = infer_binary(x=faulty.rows((faulty.Action.COST, FIXED_MS)))
REQUEST = post(faulty.INFER, BODY, *(f"{name}: {value}" for name, value in FIELDS.items()))

Run = Callable[..., CompletedProcess[str]]


def replay(server: Server, at_us: list[int]) -> list[int]:
    """Sends a request at each of these times, whatever became of those before; the statuses."""
    statuses = [0] * len(at_us)

    def send(index: int) -> None:
        with server.connect() as raw:
            statuses[index] = raw.send(REQUEST).read().status

    threads = [threading.Thread(target=send, args=[index]) for index in range(len(at_us))]
    begun = time.monotonic()
    for us, thread in zip(at_us, threads, strict=True):
        time.sleep(max(0.0, begun + us / 1e6 - time.monotonic()))
        thread.start()
    for thread in threads:
        thread.join()
    return statuses


def cost_us(line: dict) -> float:
    """What the batch of this request was told to take."""
    return FIXED_MS * (1000 + 200 * int(line["bucket"].removeprefix("batch=")))


SIXTEEN = [round(22_000 * FIXED_MS / 5 * n / 15) for n in range(16)]  # in 22 ms, were a batch's fixed cost 5 ms
STREAM = [arrival.at_us for arrival in poisson(110, 2.5, burst=1, seed=3)]


@pytest.mark.parametrize(
    ("at_us", "options"),
    [
        (SIXTEEN, ["--max-batch-size", "1", "--max-queue-size", "16"]),
        (SIXTEEN, ["--max-batch-size", "16"]),
        (STREAM, ["--max-batch-size", "16"]),
        (STREAM, ["--max-batch-size", "2", "--max-queue-size", "12"]),  # more than it can do
        (STREAM, ["--max-batch-size", "16", "--max-queue-delay-us", "60000"]),
    ],
)
def test_a_server_does_what_was_simulated(
    faulty_bundle: Path, tmp_path: Path, run_mctl: Run, at_us: list[int], options: list[str]
) -> None:
    """The arrivals are those that the server saw, a batch costs what it took there: the machine has other work, too."""
    with Server(faulty_bundle, "--log-requests", *options) as server:
        statuses = replay(server, at_us)
        eventually(lambda: len(logged(server)) == len(at_us))
        lines = logged(server)
    (tmp_path / "log").write_text("\n".join(map(json.dumps, lines)))
    served = [line for line in lines if line["status"] == 200]
    slower = sum(line["compute_us"] / cost_us(line) for line in served) / len(served)
    costs = ["--c-fixed-ms", f"{slower * FIXED_MS}", "--c-item-ms", f"{slower * FIXED_MS / 5}"]
    told = run_mctl("simulate", faulty_bundle, *costs, "--arrivals", tmp_path / "log", *options, "--json")
    assert told.returncode == 0, told.stderr
    said = json.loads(told.stdout)["runs"][0]["result"]

    assert 1 <= slower < 2
    assert {*statuses} <= {200, 503}
    assert len(served) == pytest.approx(said["served"], rel=0.05, abs=2)
    took = sorted(line["total_us"] / 1000 for line in served)
    for share, name in ((0.5, "p50_ms"), (0.9, "p90_ms")):
        assert took[round(share * (len(took) - 1))] == pytest.approx(said[name], rel=0.2, abs=10), name
    batches = sum(1 / line["batch"] for line in served)
    assert len(served) / batches == pytest.approx(said["rows_per_batch"], rel=0.15)
