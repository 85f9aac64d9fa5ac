"""`--log-requests`: what a line holds, what clients cannot do to it, and what happens when nobody reads it."""

import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

from .server import Server, infer_binary, infer_json, post
from .test_batching import eventually, random, start, stopped

INFER = "/v2/models/mlp/infer"


def logged(server: Server) -> list[dict]:
    return [json.loads(line) for line in server.lines if line.startswith("{")]


def test_a_line_for_each_request(mlp_bundle: Path) -> None:
    with Server(mlp_bundle, "--log-requests") as server:
        answer = server.request(INFER, json.dumps(infer_json(x=random(3))).encode(), {"x-request-id": 'a"b'})
        refused = server.request(INFER, b"{")
        with server.connect() as raw:
            client = f"127.0.0.1:{raw.socket.getsockname()[1]}"
            assert raw.send(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n").read().status == 200
            assert raw.send(b"BREW /pot?a=\x1b HTTP/1.1\r\nHost: localhost\r\n\r\n").read().status == 400
        eventually(lambda: len(logged(server)) == 4)
    good, bad, live, broken = logged(server)
    written = datetime.fromisoformat(good.pop("time"))
    assert timedelta(0) <= datetime.now(UTC) - written < timedelta(minutes=1)
    assert {name: good[name] for name in ("verb", "path", "id", "status", "rows", "batch", "bucket")} == {
        "verb": "POST", "path": INFER, "id": 'a"b', "status": 200, "rows": 3, "batch": 3, "bucket": "batch=4",
    }  # fmt: skip
    for field, header in (
        ("queue_us", "x-queue-time"),
        ("compute_us", "x-inference-time"),
        ("total_us", "x-total-time"),
    ):
        assert abs(good[field] - 1000 * float(answer.headers[header])) <= 1
    assert (bad["id"], bad["status"]) == (refused.headers["x-request-id"], 400) and "rows" not in bad
    assert (live["client"], live["verb"], live["path"], live["status"]) == (client, "GET", "/v2/health/live", 200)
    assert (broken["client"], broken["status"]) == (client, 400)


def test_refused_expired_and_abandoned_requests_are_logged(mlp_bundle: Path) -> None:
    options = ["--log-requests", "--max-batch-size", "4", "--max-queue-size", "4"]
    with Server(mlp_bundle, *options) as server, ThreadPoolExecutor(8) as pool:
        with stopped(server):
            held = [start(pool, server, random(4)) for _ in range(2)]
            eventually(lambda: server.metrics()["mctl_inflight_batches"] == 2)
            late = start(pool, server, random(2), x_mctl_timeout_ms="200", x_request_id="late")
            body, headers = infer_binary(x=random(2))
            fields = [f"{name}: {value}" for name, value in headers.items()]
            raw = server.connect().send(post(INFER, body, "x-request-id: gone", *fields))
            eventually(lambda: server.metrics()["mctl_queue_rows"] == 4)
            assert start(pool, server, random(1), x_request_id="full").result().status == 503
            raw.socket.close()
            assert late.result().status == 504
            eventually(lambda: server.metrics()["mctl_queue_rows"] == 0)
        assert [done.result().status for done in held] == [200, 200]
    statuses = {line["id"]: line["status"] for line in logged(server) if line["path"] == INFER}
    assert {name: statuses[name] for name in ("late", "gone", "full")} == {"late": 504, "gone": 499, "full": 503}
    assert sorted(statuses.values()) == [200, 200, 499, 503, 504]


def test_clients_cannot_write_what_they_like(mlp_bundle: Path) -> None:
    # Quotes and escapes, control characters of ASCII and of Latin-1 (a terminal's CSI), broken UTF-8, and great length.
    targets = ['/\\"status":1', "/\x7f", "/\x1b[2J", "/\xc2\x9b2J", "/\xff\xfe", "/" + "x" * 50_000]
    with Server(mlp_bundle, "--null", "--log-requests", ready=False) as server:
        for target in targets:
            with server.connect() as raw:
                raw.send(f"GET {target} HTTP/1.1\r\nx-request-id: \xc2\x9b2J\r\n\r\n".encode("latin-1"))
                assert raw.read().status in (400, 404)
    lines = [line for line in server.lines if line.startswith("{")]
    assert len(lines) == len(targets) and json.loads(lines[0])["path"] == targets[0]
    for line in lines:
        assert len(line) < 1000 and json.loads(line)["status"] in (400, 404)
        assert not any(ord(char) < 32 or 127 <= ord(char) < 160 for char in line)


def test_a_reader_that_stands_still_stops_nobody(mlp_bundle: Path) -> None:
    request = b"GET /v2/health/live?" + b"x" * 300 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n"
    rounds, each = 100, 100
    with Server(mlp_bundle, "--null", "--log-requests", ready=False) as server:
        server.reading.clear()
        with server.connect() as raw:
            for _ in range(rounds):  # 4 MB of lines
                raw.send(request * each)
                assert {raw.read().status for _ in range(each)} == {200}
        status = Path(f"/proc/{server.process.pid}/status").read_text()
        assert int(status.split("VmRSS:")[1].split()[0]) < 40 << 10
        server.reading.set()
        lines = eventually_all(server, rounds * each)
        assert server.request("/v2/health/live").status == 200
    assert 1000 < lines < rounds * each


def eventually_all(server: Server, requests: int) -> int:
    """The lines about requests, when those and the dropped ones add up."""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        seen = logged(server)
        dropped = sum(line.get("dropped", 0) for line in seen)
        lines = sum("status" in line for line in seen)
        if lines + dropped == requests:
            return lines
        time.sleep(0.05)
    raise AssertionError((lines, dropped, requests))


def test_it_ends_though_nobody_reads(mlp_bundle: Path) -> None:
    server = Server(mlp_bundle, "--null", "--log-requests", ready=False)
    server.reading.clear()
    with server.connect() as raw:
        for _ in range(20):
            raw.send(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n" * 100)
            assert {raw.read().status for _ in range(100)} == {200}
    os.kill(server.process.pid, signal.SIGTERM)
    assert server.process.wait(5) == 0
    server.reading.set()
