"""Faults under load: every client checks its own numbers, and every request is accounted for."""

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from mctl.runner import native

from . import faulty
from .faulty import INFER, Action, case, load, right, rows
from .server import Answer, Server, at_rest, infer_binary, outputs_of
from .test_batching import eventually
from .test_environment import MIB, answers, limited, resource, told

# Longer runs, or the same one again: MCTL_FAULT_SECONDS=600 MCTL_FAULT_SEED=7 pytest -s tests/serving/test_faults.py
SECONDS = float(os.environ.get("MCTL_FAULT_SECONDS", "10"))
SEED = int(os.environ.get("MCTL_FAULT_SEED", time.time_ns() % 1_000_000))

TIME = {"x_mctl_timeout_ms": "600000"}  # of a request that any machine answers in time
INNOCENT = [
    case(rows(*((Action.ANSWER, 100 * size + row) for row in range(size))), **TIME)
    for size in (1, 1, 1, 2, 3, 5, 8, 16, 21)
]
SLOW = [case(rows((Action.NAP, 3)), **TIME), case(rows((Action.ANSWER, 1), (Action.NAP, 9)), **TIME)]
PARTED = "note: the model's processes end while they run requests: each runs alone until none ended for 30 s"
PATIENT = ("--max-queue-size=8000",)  # what comes while a worker starts again can wait


@contextmanager
def loaded(server: Server, cases: list[load.Case], rate: float, seconds: float, seed: int = 1) -> Iterator[list]:
    """Load on the server while the body runs; afterwards its report is in the list."""
    reports: list[load.Report] = []
    options = {"seed": seed, "connections": 48, "grace": 60}
    with load.running(server.port, cases, rate=[(rate, seconds)], **options) as process:
        time.sleep(0.3)
        yield reports
        reports.append(load.report(process))


def complete(report: load.Report) -> None:
    """Every request was answered, none of them wrong."""
    assert report.right + report.refused + report.expired == report.requests, report
    assert (report.wrong, report.failed, report.lost, report.unreachable, report.unsent) == (0, 0, 0, 0, 0), report


def ask(server: Server, *pairs: tuple[int, int]) -> Answer:
    return server.request(INFER, *infer_binary(x=rows(*pairs)))


def end_worker(server: Server) -> None:
    """The only one ends, and the server knows."""
    victim = server.workers()[0]
    os.kill(victim, signal.SIGKILL)
    eventually(lambda: victim not in server.workers())


def ready(server: Server) -> bool:
    return server.request("/v2/health/ready").status == 200


def restarts(server: Server) -> dict[str, int]:
    start = 'mctl_worker_restarts_total{reason="'
    found = {name.removeprefix(start)[:-2]: int(count) for name, count in server.metrics().items() if start in name}
    return {reason: count for reason, count in found.items() if count}


def replaced(server: Server, times: int = 1) -> None:
    """So many workers have been ready again."""
    eventually(lambda: server.lines.count("note: a worker is ready again") == times)
    assert ready(server)


# --- signals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("instances", [1, 2])
def test_workers_that_signals_end(faulty_bundle: Path, instances: int) -> None:
    signals = [signal.SIGABRT, signal.SIGBUS, signal.SIGKILL]
    with Server(faulty_bundle, f"--instances={instances}", *PATIENT) as server:
        with loaded(server, INNOCENT + SLOW, 400, 4) as reports:
            for times, number in enumerate(signals, 1):
                victim = server.workers()[0]
                os.kill(victim, number)
                while victim in server.workers():
                    assert instances == 1 or ready(server)  # of two, one lives
                replaced(server, times)
                assert ask(server, (Action.ANSWER, 1)).status == 200  # so that restarts do not back off
        complete(reports[0])
        assert reports[0].right == reports[0].requests and restarts(server) == {"crash": len(signals)}
        metrics = server.metrics()
        assert metrics['mctl_requests_total{code="ok"}'] == reports[0].right + len(signals)
        assert metrics['mctl_requests_total{code="error"}'] == 0


@pytest.mark.parametrize("instances", [1, 2])
def test_workers_that_are_stuck(faulty_bundle: Path, instances: int) -> None:
    cases = [case(rows((Action.ANSWER, row)), x_mctl_timeout_ms="700") for row in range(20)]
    with Server(faulty_bundle, f"--instances={instances}") as server:
        with loaded(server, cases, 300, 4) as reports:
            victim = server.workers()[0]
            os.kill(victim, signal.SIGSTOP)
            replaced(server)
            assert restarts(server) == {"stuck": 1} and victim not in server.workers()
            assert told(server, "warning") == ["warning: a worker was stuck, another one starts in 100 ms"]
        complete(reports[0])
        assert reports[0].expired > 0 and reports[0].right > 0
        if instances == 2:  # no more than the two batches that the stuck one held
            assert reports[0].expired <= 2 * faulty.MOST_ROWS


def test_a_replacement_does_not_warm_up_for_long(faulty_library: Path, tmp_path: Path) -> None:
    """Every row naps for 6 ms: all buckets take more than 4 s, and those that a replacement has time for about 1 s."""
    naps = (Action.NAP, Action.NAP)
    path = faulty.bundle(faulty_library, tmp_path / "b.pt2", (), most=512, buckets=(1, 64, 128), values=naps)
    with Server(path) as server:
        first = warmup_seconds(server)
        os.kill(server.workers()[0], signal.SIGKILL)
        replaced(server)
        assert first > 4 and warmup_seconds(server) < first
        assert (outputs_of(ask(server, naps))["y"] == 3 * Action.NAP + 1).all()


def warmup_seconds(server: Server) -> float:
    return server.metrics()['mctl_load_seconds{phase="warmup"}']


# --- what a request does to its worker -------------------------------------------------------------------------------


@pytest.mark.parametrize("instances", [1, 2])
def test_killers_among_innocents(faulty_bundle: Path, instances: int) -> None:
    limit = limited(resource.RLIMIT_AS, 700 * MIB)
    killers = [(Action.CRASH, 0), (Action.EXHAUST, 4096), (Action.ABORT, 0), (Action.LEAVE, 0)]
    sent = 0
    with Server(faulty_bundle, f"--instances={instances}", *PATIENT, prepare=limit) as server:
        with loaded(server, INNOCENT + SLOW, 400, 3) as reports:
            for killer in killers:
                answer = ask(server, (Action.ANSWER, 1), killer)
                assert (answer.status, "ended while it ran this request" in answer.error) == (500, True)
                sent += 1
            assert ask(server, (Action.FAIL, 0)).error == "the row asked for it"
            eventually(lambda: answers(server))
        complete(reports[0])
        assert reports[0].right == reports[0].requests  # each waits until there is a worker again
        assert restarts(server) == {"crash": 2 * sent}  # once with others, once more
        eventually(lambda: PARTED in server.lines)
        assert server.metrics()['mctl_requests_total{code="error"}'] == sent + 1


def test_a_model_that_hangs_is_ended_and_tried_once_more(faulty_bundle: Path) -> None:
    with Server(faulty_bundle, "--worker-timeout", "1") as server:
        answer = ask(server, (Action.HANG, 0))
        assert answer.status == 500 and "twice" in answer.error
        assert restarts(server) == {"stuck": 2}
        eventually(lambda: answers(server))


# --- workers that do not come back -----------------------------------------------------------------------------------


def test_a_worker_that_cannot_start_again_is_tried_less_and_less(faulty_bundle: Path, tmp_path: Path) -> None:
    libtorch = tmp_path / "lib"
    libtorch.symlink_to(native.find_libtorch())
    with Server(faulty_bundle, libtorch=libtorch) as server:
        libtorch.unlink()
        end_worker(server)
        refused = ask(server, (Action.ANSWER, 1))  # it waits for three starts
        assert (refused.status, "cannot load libtorch" in refused.error) == (503, True)
        assert restarts(server)["load"] >= 3
        assert ask(server, (Action.ANSWER, 1)).error == refused.error
        eventually(lambda: len(told(server, "warning")) >= 4)
        pauses = [line.rpartition(" starts in ")[2] for line in told(server, "warning")]
        assert pauses[:4] == ["100 ms", "200 ms", "400 ms", "800 ms"]
        libtorch.symlink_to(native.find_libtorch())
        eventually(lambda: answers(server))
        end_worker(server)
        assert answers(server)  # requests wait again


def test_a_bundle_that_changes_while_no_worker_lives_refuses_what_waits(faulty_library: Path, tmp_path: Path) -> None:
    path = faulty.bundle(faulty_library, tmp_path / "b.pt2")
    whole = path.read_bytes()
    with Server(path) as server:
        end_worker(server)
        path.write_bytes(whole[: len(whole) // 2])
        refused = ask(server, (Action.ANSWER, 1))
        assert (refused.status, "changed while it was served" in refused.error) == (503, True)
        assert ask(server, (Action.ANSWER, 1)).error == refused.error


def test_draining_waits_for_a_worker_that_starts_again(faulty_bundle: Path) -> None:
    with Server(faulty_bundle) as server, ThreadPoolExecutor(1) as pool:
        end_worker(server)
        waits = pool.submit(ask, server, (Action.NAP, 100))
        eventually(lambda: server.metrics()["mctl_queue_rows"] > 0 or waits.done())
        server.process.send_signal(signal.SIGTERM)
        assert (outputs_of(waits.result())["y"] == 301).all()
        assert server.process.wait(40) == 0


def test_a_replacement_replays_the_smallest_golden_case(faulty_library: Path, tmp_path: Path) -> None:
    golden = [rows((Action.NAP, 700), (Action.NAP, 1)), rows((Action.ANSWER, 5))]
    bundle = faulty.bundle(faulty_library, tmp_path / "slow.pt2", golden)
    with Server(bundle) as server:
        assert server.metrics()['mctl_load_seconds{phase="golden"}'] > 0.7
        os.kill(server.workers()[0], signal.SIGKILL)
        eventually(lambda: answers(server))
        assert server.metrics()['mctl_load_seconds{phase="golden"}'] < 0.7


# --- everything at once ----------------------------------------------------------------------------------------------


class Chaos:
    """Faults drawn from a seed, one after another, and what came of the requests that it sent itself."""

    def __init__(self, server: Server, seed: int) -> None:
        self.server, self.random = server, random.Random(seed)
        self.statuses: Counter[int] = Counter()
        self.done: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._asking: list[threading.Thread] = []
        self._failures: list[BaseException] = []

    def step(self) -> None:
        fault = self.random.choice([self.end, self.end, self.stop, self.kill, self.hurry, self.leave, self.wait])
        self.done[fault.__name__] += 1
        fault()

    def settle(self) -> None:
        for thread in self._asking:
            thread.join()
        assert not self._failures, self._failures[0]

    def end(self) -> None:
        """A signal ends a worker."""
        self._signal(self.random.choice([signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGTERM]))

    def stop(self) -> None:
        """A worker stops, for a while or for good."""
        victim = self._signal(signal.SIGSTOP)
        time.sleep(self.random.choice([0.05, 0.3, 1.5]))
        if victim in self.server.workers():
            os.kill(victim, signal.SIGCONT)

    def kill(self) -> None:
        """A request ends its worker."""
        action = self.random.choice([Action.CRASH, Action.ABORT, Action.LEAVE, Action.FAIL])
        self._ask({500, 503}, (Action.ANSWER, 4), (action, 3))

    def hurry(self) -> None:
        """A request has no time, or too little."""
        limit = str(self.random.choice([1, 5, 20]))
        self._ask({200, 503, 504}, (Action.NAP, 10), x_mctl_timeout_ms=limit)

    def leave(self) -> None:
        """Connections come and go with half a request."""
        for _ in range(10):
            with self.server.connect() as raw:
                raw.send(case(rows((Action.ANSWER, 1))).request[: self.random.choice([0, 30, 150])])

    def wait(self) -> None:
        time.sleep(self.random.random())

    def _signal(self, number: int) -> int | None:
        workers = self.server.workers()
        victim = self.random.choice(workers) if workers else None
        if victim is not None:
            os.kill(victim, number)
        return victim

    def _ask(self, allowed: set[int], *pairs: tuple[int, int], **headers: str) -> None:
        def run() -> None:
            try:
                x = rows(*pairs)
                body, fields = infer_binary(x=x)
                named = {name.replace("_", "-"): value for name, value in headers.items()}
                answer = self.server.request(INFER, body, fields | named)
                assert answer.status in allowed, answer
                if answer.status == 200:
                    assert (outputs_of(answer)["y"] == right(x)).all()
                with self._lock:
                    self.statuses[answer.status] += 1
            except BaseException as error:
                self._failures.append(error)

        self._asking.append(threading.Thread(target=run))
        self._asking[-1].start()


def held(pid: int) -> tuple[int, int]:
    """Descriptors and threads of a process."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir())), len(list(Path(f"/proc/{pid}/task").iterdir()))


def test_faults_at_random_lose_nothing(faulty_bundle: Path) -> None:
    print(f"MCTL_FAULT_SEED={SEED} MCTL_FAULT_SECONDS={SECONDS}")
    cases = [*INNOCENT, *SLOW, case(rows((Action.NAP, 4)), x_mctl_timeout_ms="60")]
    options = ("--instances=2", "--worker-timeout=2", "--max-queue-size=200", "--threads=1", "--debuggable")
    with Server(faulty_bundle, *options) as server:
        front = server.process.pid
        before, workers = at_rest(lambda: held(front)), sorted(map(held, server.workers()))
        chaos = Chaos(server, SEED)
        end = time.monotonic() + SECONDS
        with loaded(server, cases, 300, SECONDS + 0.5, SEED) as reports:
            while time.monotonic() < end:
                chaos.step()
                time.sleep(chaos.random.random() / 3)
        chaos.settle()
        report = reports[0]
        print(dict(chaos.done), dict(chaos.statuses), restarts(server), report)
        complete(report)
        eventually(lambda: len(server.workers()) == 2 and answers(server))
        metrics = server.metrics()

        def counted(code: str) -> float:
            return metrics[f'mctl_requests_total{{code="{code}"}}']

        refused_later = counted("rejected") - report.refused - chaos.statuses[503]
        assert counted("ok") == report.right + chaos.statuses[200] + 1
        assert counted("expired") == report.expired + chaos.statuses[504]
        assert counted("error") == chaos.statuses[500]
        assert 0 <= refused_later < 1000  # those of `eventually`
        assert metrics["mctl_queue_rows"] == metrics["mctl_inflight_batches"] == 0
        eventually(lambda: held(front) == before)
        eventually(lambda: sorted(map(held, server.workers())) == workers)
