"""The load generator: its arrivals, what it makes of every kind of answer, and that it ends."""

import math
import socketserver
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import mean, stdev

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import load

RIGHT = struct.pack("<3f", 0.25, -1.0, 3.0)


def answer(status: int, body: bytes, *fields: str) -> bytes:
    head = [f"HTTP/1.1 {status} x", f"Content-Length: {len(body)}", *fields, "", ""]
    return "\r\n".join(head).encode() + body


# What a request with this body gets; None: the connection is closed.
ANSWERS: dict[bytes, bytes | None] = {
    b"right": answer(200, RIGHT),
    b"near": answer(200, struct.pack("<3f", 0.2501, -1.0, 3.0)),
    b"json": answer(200, b'{"outputs":[]}' + RIGHT, "inference-header-content-length: 14"),
    b"wrong": answer(200, struct.pack("<3f", 0.25, -1.0, 4.0)),
    b"nan": answer(200, struct.pack("<3f", 0.25, math.nan, 3.0)),
    b"short": answer(200, RIGHT[:8]),
    b"full": answer(503, b"{}", "Retry-After: 1"),
    b"late": answer(504, b"{}"),
    b"broken": answer(500, b'{"error":"the model failed"}'),
    b"last": answer(200, RIGHT, "Connection: close"),
    b"two": answer(200, RIGHT) + answer(200, RIGHT),
    b"cut": answer(200, RIGHT)[:-1],
    b"gone": None,
}


@contextmanager
def served(reply: Callable[[bytes], bytes | None], *, hold: float = 0) -> Iterator[tuple[int, list[bytes]]]:
    """A server on a free port that answers a body with `reply(body)`; and the bodies that it has seen."""
    seen: list[bytes] = []

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while line := self.rfile.readline():
                size = 0
                while line.strip():
                    name, _, value = line.partition(b":")
                    size = int(value) if name.lower() == b"content-length" else size
                    line = self.rfile.readline()
                body = self.rfile.read(size)
                seen.append(body)
                time.sleep(hold)
                answered = reply(body)
                if answered is None:
                    return
                self.wfile.write(answered)
                if b"close" in answered or body == b"cut":
                    return

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads, request_queue_size = True, 128

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server.server_address[1], seen
        finally:
            server.shutdown()
            thread.join()


def case(body: bytes, expected: bytes = RIGHT) -> load.Case:
    return load.Case(load.http_request("/infer", body, {}), expected)


def arrivals(*options: str) -> list[float]:
    words = [str(load.binary()), "--only-arrivals", *options]
    return [float(line) for line in subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()]


def refusal(*options: str) -> str:
    done = subprocess.run([str(load.binary()), *options], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    return done.stderr


def test_arrivals_are_poisson() -> None:
    """Gaps are exponential and independent, and counts in equal spans vary as much as their mean."""
    times = arrivals("--rate", "1000:40", "--seed", "7")
    gaps = [b - a for a, b in pairwise(times)]
    assert len(times) == pytest.approx(40_000, abs=5 * math.sqrt(40_000))
    assert mean(gaps) == pytest.approx(1e-3, rel=0.03)
    assert stdev(gaps) == pytest.approx(1e-3, rel=0.05)
    for share in (0.1, 1, 3):  # P(gap > t) = exp(-rate t)
        assert mean(gap > share * 1e-3 for gap in gaps) == pytest.approx(math.exp(-share), abs=0.012)
    middle = mean(gaps)
    centred = [gap - middle for gap in gaps]
    correlation = sum(a * b for a, b in pairwise(centred)) / sum(a * a for a in centred)
    assert abs(correlation) < 0.025
    counts = [0] * 400
    for at in times:
        counts[int(at * 10)] += 1
    assert stdev(counts) ** 2 / mean(counts) == pytest.approx(1, abs=0.35)


def test_phases_follow_one_another_and_a_seed_repeats() -> None:
    options = ("--rate", "500:10,1000:10,500:10", "--seed", "3")
    times = arrivals(*options)
    assert times == sorted(times) == arrivals(*options)
    assert times != arrivals(*options[:2], "--seed", "4")
    counts = [sum(start <= at < start + 10 for at in times) for start in (0, 10, 20)]
    assert counts == [pytest.approx(n, abs=5 * math.sqrt(n)) for n in (5000, 10_000, 5000)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rate", "1000000:60"], "more than 10000000 requests"),
        (["--rate", "1:3601"], "longer than an hour"),
        (["--rate", "1:1800,1:1801"], "longer than an hour"),
        (["--rate", "inf:1"], "not a number: inf"),
        (["--rate", "-1:1"], "not a number: -1"),
        (["--rate", "10"], "--rate wants RATE:SECONDS"),
        (["--rate", "0:1"], "no request in that time"),
        (["--connections", "1000000", "--rate", "1:1"], "--connections is out of range"),
        ([], "give either --rate or --arrivals"),
    ],
)
def test_what_is_not_bounded_is_refused(options: list[str], message: str) -> None:
    assert message in refusal("--only-arrivals", *options)


@pytest.mark.parametrize(
    ("body", "outcome"),
    [
        (b"right", "right"),
        (b"near", "right"),  # within the tolerance
        (b"json", "right"),
        (b"last", "right"),
        (b"wrong", "wrong"),
        (b"nan", "wrong"),
        (b"short", "wrong"),
        (b"full", "refused"),
        (b"late", "expired"),
        (b"broken", "failed"),
        (b"two", "lost"),
        (b"cut", "lost"),
        (b"gone", "lost"),
    ],
)
def test_every_answer_is_counted_once(body: bytes, outcome: str) -> None:
    with served(ANSWERS.__getitem__) as (port, seen):
        report = load.run(port, [case(body)], arrivals=[0.0, 0.01, 0.02], rtol=1e-3, atol=1e-4)
    assert seen == [body] * 3
    names = ("right", "wrong", "refused", "expired", "failed", "lost", "abandoned", "unreachable", "unsent")
    assert {name: getattr(report, name) for name in names} == {name: 3 * (name == outcome) for name in names}
    assert report.requests == report.delay_us.count == 3
    assert report.right_us.count == report.right and report.refused_us.count == report.refused
    assert bool(report.notes) == (outcome not in ("right", "refused", "expired"))
    wanted = ANSWERS[body]
    status = {} if outcome == "lost" or wanted is None else {wanted[9:12].decode(): 3}
    assert report.statuses == status


def test_equal_bytes_are_wanted_without_a_tolerance() -> None:
    with served(ANSWERS.__getitem__) as (port, _):
        assert load.run(port, [case(b"near")], arrivals=[0.0]).wrong == 1
        assert load.run(port, [case(b"right")], arrivals=[0.0]).right == 1
        assert load.run(port, [case(b"wrong", b"")], arrivals=[0.0]).right == 1


def test_cases_are_mixed_and_phases_counted_apart() -> None:
    with served(ANSWERS.__getitem__) as (port, seen):
        cases = [case(b"right"), case(b"json"), case(b"full")]
        report = load.run(port, cases, rate=[(300, 0.5), (600, 0.5)], seed=1, connections=8)
    assert len(seen) == report.requests == report.right + report.refused
    for body in (b"right", b"json", b"full"):
        assert seen.count(body) == pytest.approx(report.requests / 3, abs=5 * math.sqrt(report.requests / 3))
    assert [phase.rate for phase in report.phases] == [300, 600]
    assert sum(phase.right for phase in report.phases) == report.right
    sent = [phase.right + phase.refused for phase in report.phases]
    assert sent == [pytest.approx(n, abs=5 * math.sqrt(n)) for n in (150, 300)]


def test_latency_counts_from_the_intended_time() -> None:
    """One connection, a server that takes a tenth of a second, all due at once: each waits for those before it."""
    with served(ANSWERS.__getitem__, hold=0.1) as (port, _):
        report = load.run(port, [case(b"right")], arrivals=[0.0] * 4, connections=1)
    assert report.right == 4
    assert report.right_us.max is not None and report.right_us.max >= 400_000
    assert report.right_us.p50 is not None and 200_000 <= report.right_us.p50 < report.right_us.max
    assert report.delay_us.max is not None and report.delay_us.max >= 300_000
    assert report.longest_gap_us >= 100_000


def test_refusals_count_from_the_time_at_which_they_left() -> None:
    with served(ANSWERS.__getitem__, hold=0.1) as (port, _):
        report = load.run(port, [case(b"full")], arrivals=[0.0] * 4, connections=1)
    assert report.refused == report.refused_us.count == 4
    assert report.refused_us.p50 is not None and report.delay_us.max is not None
    assert 100_000 <= report.refused_us.p50 < report.delay_us.max


def test_it_ends_when_nobody_answers() -> None:
    release = threading.Event()
    with served(lambda body: release.wait(30) and None) as (port, seen):
        report = load.run(port, [case(b"right")], rate=[(50, 0.5)], connections=2, grace=0.5)
        release.set()
    assert (report.lost, report.right, len(seen)) == (2, 0, 2)
    assert report.unsent == report.requests - 2
    assert 0.5 <= report.seconds < 20


def test_patience_closes_the_connection() -> None:
    with served(ANSWERS.__getitem__, hold=0.5) as (port, seen):
        report = load.run(port, [case(b"right")], arrivals=[0.0, 0.0, 0.0], patience=0.1)
        assert report.abandoned == 3 and report.seconds < 0.5
    assert seen == [b"right"] * 3


def test_nobody_there() -> None:
    with served(ANSWERS.__getitem__) as (port, _):
        pass
    report = load.run(port, [case(b"right")], arrivals=[0.0, 0.01])
    assert (report.unreachable, report.requests) == (2, 2)
    assert "refused" in report.notes[0]
