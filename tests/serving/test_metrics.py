"""/metrics and the statistics, read by other programs' parsers, and held against what the clients counted."""

import math
import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from .server import Answer, Server, infer_binary, post
from .test_batching import INFER, eventually, random, stopped

OUTCOMES = {200: "ok", 400: "invalid", 413: "invalid", 415: "invalid", 500: "error", 503: "rejected", 504: "expired"}

DOCUMENT = Path(__file__).parents[2] / "runner" / "METRICS.md"


def families(server: Server) -> dict[str, Metric]:
    found = list(text_string_to_metric_families(server.request("/metrics").body.decode()))
    assert len({family.name for family in found}) == len(found)  # each in one piece
    return {family.name: family for family in found}


def total(family: Metric, suffix: str = "_total", **labels: str) -> float:
    wanted = labels.items()
    return sum(s.value for s in family.samples if s.name == family.name + suffix and wanted <= s.labels.items())


def documented(*, handler: bool = False) -> dict[str, tuple[str, set[str]]]:
    """Type and labels of every family in METRICS.md, by the name that the parser gives it."""
    rows = re.findall(r"^\| (`[^|]+`) \| (\w+) \|([^|]*)\|", DOCUMENT.read_text(), re.MULTILINE)
    rows = [row for row in rows if handler or "mctl_handler_" not in row[0]]
    return {
        name.removesuffix("_total"): (kind, set(re.findall(r"`(\w+)`", labels)))
        for names, kind, labels in rows
        for name in re.findall(r"`((?:mctl|process)_\w+)`", names)
    }


def test_every_family_is_as_documented(server: Server) -> None:
    for rows in (1, 3, 64):
        assert server.request(INFER, *infer_binary(x=random(rows))).status == 200
    answer = server.request("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0, text/plain"})
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    found, expected = families(server), documented()
    assert {name: family.type for name, family in found.items()} == {name: kind for name, (kind, _) in expected.items()}
    assert len(found) > 20
    for name, family in found.items():
        assert family.documentation.endswith(".") and family.samples, name
        model = {} if name.startswith("process_") else {"model": "mlp", "version": "1"}
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == model.keys() | expected[name][1], sample
            assert model.items() <= sample.labels.items()
        series = [(sample.name, tuple(sorted(sample.labels.items()))) for sample in family.samples]
        assert len(set(series)) == len(series), name


def test_histograms_are_cumulative(server: Server) -> None:
    server.request(INFER, *infer_binary(x=random(5)))
    histograms = [family for family in families(server).values() if family.type == "histogram"]
    assert len(histograms) == 4
    for family in histograms:
        series: dict[tuple, dict[str, list]] = {}
        for sample in family.samples:
            key = tuple(sorted(item for item in sample.labels.items() if item[0] != "le"))
            value = (float(sample.labels["le"]), sample.value) if "le" in sample.labels else sample.value
            series.setdefault(key, {}).setdefault(sample.name.removeprefix(family.name), []).append(value)
        for parts in series.values():
            bounds, counts = zip(*parts["_bucket"], strict=True)
            assert list(bounds) == sorted(set(bounds)) and bounds[-1] == math.inf
            assert list(counts) == sorted(counts)
            assert parts["_count"] == [counts[-1]] and len(parts["_sum"]) == 1
            assert counts[-1] > 0 and parts["_sum"][0] > 0


def test_processes_are_those_of_the_front_and_the_workers(mlp_bundle: Path) -> None:
    def rss(pid: int) -> int:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    began = time.time()
    with Server(mlp_bundle, "--instances", "2", "--debuggable") as server:
        started = time.time()
        metrics = server.metrics()
        workers = server.workers()
        assert metrics['mctl_workers{state="live"}'] == len(workers) == 2
        everybody = [server.process.pid, *workers]
        assert metrics["process_resident_memory_bytes"] == pytest.approx(sum(map(rss, everybody)), rel=0.05)
        ticks = os.sysconf("SC_CLK_TCK")
        spent = 0
        for pid in everybody:
            spent += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))
        assert metrics["process_cpu_seconds_total"] == pytest.approx(spent / ticks, abs=0.2)
        fds = len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))
        assert abs(metrics["process_open_fds"] - fds) <= 2 < metrics["process_max_fds"]
        assert began - 1 <= metrics["process_start_time_seconds"] <= started + 1
        os.kill(workers[0], signal.SIGKILL)
        eventually(lambda: server.metrics()['mctl_worker_restarts_total{reason="crash"}'] == 1)
        eventually(lambda: server.metrics()['mctl_workers{state="live"}'] == 2)
        # what the dead one had used is not forgotten
        assert server.metrics()["process_cpu_seconds_total"] >= metrics["process_cpu_seconds_total"]


class Clients:
    """Requests to the model that divides; `seen` is their own count of how each ended."""

    PATH = "/v2/models/divide/infer"

    def __init__(self, server: Server) -> None:
        self.server = server
        self.seen: Counter[str] = Counter()
        self.rows = 0  # of good answers
        self.lock = threading.Lock()

    @staticmethod
    def request(rows: int, trunc: int = 1) -> tuple[bytes, dict[str, str]]:
        value = np.full((rows, 2), 7, np.int64)
        return infer_binary(x=value, floor=np.full_like(value, 2), trunc=np.full_like(value, trunc))

    def count(self, outcome: str, rows: int = 0) -> None:
        with self.lock:
            self.seen[outcome] += 1
            self.rows += rows

    def ask(self, rows: int, body: bytes, headers: dict[str, str]) -> Answer:
        answer = self.server.request(self.PATH, body, headers)
        self.count(OUTCOMES[answer.status], rows if answer.status == 200 else 0)
        return answer

    def mixed(self, seed: int) -> None:
        """Good ones of one to four rows, and a wrong one now and then; one of them ends the worker."""
        for step in range(12):
            rows = 1 + (seed + step) % 4
            body, headers = self.request(rows, trunc=0 if seed == 0 and step == 6 else 1)
            kind = (seed + step) % 6
            if kind == 3:
                body = body[:-1]
            elif kind == 4:
                headers = headers | {"Content-Type": "image/png"}
            elif kind == 5:
                headers = headers | {"Content-Encoding": "gzip"}
            self.ask(rows, body, headers)

    def leave(self, until: Callable[[], bool]) -> None:
        """Goes away without an answer, when `until` holds."""
        body, headers = self.request(1)
        with self.server.connect() as raw:
            raw.send(post(self.PATH, body, *(f"{name}: {value}" for name, value in headers.items())))
            eventually(until)
        self.count("cancelled")


def test_counters_add_up_after_a_mixed_run(fragile_bundle: Path) -> None:
    """Good, invalid, refused, expired and cancelled requests, and one that ends the worker twice."""
    sizes = ["--allowed-batch-sizes", "1,2,3,4,5,6,7,8"]  # no rows of zeros are added, by which it would divide
    options = ["--max-queue-size", "8", "--max-body-mb", "1", *sizes]
    with Server(fragile_bundle, *options) as server, ThreadPoolExecutor(8) as pool:
        clients = Clients(server)

        def metric(name: str) -> float:
            return server.metrics()[name]

        for done in [pool.submit(clients.mixed, seed) for seed in range(8)]:
            done.result()
        while clients.seen["error"] == 0:  # the killer may have met a queue that was full, or no worker
            clients.ask(1, *clients.request(1, trunc=0))
        eventually(lambda: clients.ask(1, *clients.request(1)).status == 200)
        clients.ask(1, b"x" * (2 << 20), {})
        clients.ask(1, b"{", {})
        with stopped(server):
            clients.leave(lambda: metric("mctl_inflight_batches") == 1)  # it is in the model: nobody takes its answer
            running = pool.submit(clients.ask, 2, *clients.request(2))
            eventually(lambda: metric("mctl_inflight_batches") + metric("mctl_queue_rows") >= 2)
            for _ in range(2):
                clients.leave(lambda: metric("mctl_queue_rows") >= 1)
                eventually(lambda: metric("mctl_queue_rows") <= 2)
            body, headers = clients.request(1)
            assert clients.ask(1, body, headers | {"x-mctl-timeout-ms": "50"}).status == 504
            waiting = pool.submit(clients.ask, 4, *clients.request(4))
            eventually(lambda: metric("mctl_queue_rows") >= 4)
            assert clients.ask(8, *clients.request(8)).status == 503
        assert {running.result().status, waiting.result().status} == {200}

        found, seen = families(server), clients.seen
        assert all(seen[outcome] > 0 for outcome in ("ok", "invalid", "rejected", "expired", "cancelled", "error"))
        counted = {s.labels["code"]: int(s.value) for s in found["mctl_requests"].samples}
        assert counted == dict(seen)
        assert total(found["mctl_request_duration_seconds"], "_count") == sum(seen.values())
        assert total(found["mctl_worker_restarts"], reason="crash") == 2 * seen["error"]
        started = total(found["mctl_batches"])
        assert started == total(found["mctl_batch_rows"], "_count")
        finished = total(found["mctl_compute_duration_seconds"], "_count")
        assert finished <= started - 2 * seen["error"]
        assert total(found["mctl_queue_rows"], "") == total(found["mctl_inflight_batches"], "") == 0

        statistics = server.request("/v2/models/divide/stats").json()["model_stats"][0]
        # the one that went away while it was in the model was run all the same
        executed = statistics["inference_stats"]["compute_infer"]["count"]
        assert statistics["inference_stats"]["success"]["count"] == seen["ok"] == executed - 1
        assert statistics["inference_stats"]["fail"]["count"] == sum(seen.values()) - seen["ok"]
        assert statistics["inference_count"] == clients.rows + 1
        assert statistics["execution_count"] == finished


def test_statistics_are_tritons(mlp_bundle: Path) -> None:
    """One after the other, so that each request is a batch: the requests' sums are the batches' sums."""
    rows = [1, 1, 3, 64, 3, 1]
    with Server(mlp_bundle, "--max-request-rows", "200", "--max-queue-size", "200") as server:
        before = time.time()
        times = [server.request(INFER, *infer_binary(x=random(count))).headers for count in rows]
        after = time.time()
        [statistics] = server.request("/v2/models/stats").json()["model_stats"]
        assert statistics == server.request("/v2/models/mlp/versions/1/stats").json()["model_stats"][0]
        assert statistics["name"] == "mlp" and statistics["version"] == "1"
        assert statistics["inference_count"] == sum(rows) and statistics["execution_count"] == len(rows)
        assert before - 0.01 <= statistics["last_inference"] / 1000 <= after + 0.01
        told = statistics["inference_stats"]
        assert set(told) == {"success", "fail", "queue", "compute_input", "compute_infer", "compute_output",
                             "cache_hit", "cache_miss"}  # fmt: skip
        for name, header in (
            ("success", "x-total-time"),
            ("queue", "x-queue-time"),
            ("compute_infer", "x-inference-time"),
        ):
            assert told[name]["count"] == len(rows)
            measured = sum(float(headers[header]) for headers in times)  # ms, three decimals each
            assert told[name]["ns"] / 1e6 == pytest.approx(measured, abs=0.0006 * len(rows))
        assert told["fail"] == told["cache_hit"] == told["cache_miss"] == {"count": 0, "ns": 0}
        batches = {batch["batch_size"]: batch for batch in statistics["batch_stats"]}
        assert {size: batch["compute_infer"]["count"] for size, batch in batches.items()} == Counter(rows)
        for stage in ("compute_input", "compute_infer", "compute_output"):
            assert sum(batch[stage]["ns"] for batch in batches.values()) == told[stage]["ns"] > 0
            assert sum(batch[stage]["count"] for batch in batches.values()) == told[stage]["count"]
        # one request in three batches is one inference of many rows
        assert server.request(INFER, *infer_binary(x=random(150))).status == 200
        [statistics] = server.request("/v2/models/stats").json()["model_stats"]
        assert statistics["inference_count"] == sum(rows) + 150 and statistics["execution_count"] == len(rows) + 3
        assert statistics["inference_stats"]["success"]["count"] == len(rows) + 1


def test_statistics_of_requests_that_share_a_batch(mlp_bundle: Path) -> None:
    with Server(mlp_bundle) as server, ThreadPoolExecutor(4) as pool:
        with stopped(server):
            first = pool.submit(server.request, INFER, *infer_binary(x=random(1)))
            eventually(lambda: server.metrics()["mctl_inflight_batches"] == 1)
            others = [pool.submit(server.request, INFER, *infer_binary(x=random(2))) for _ in range(3)]
            eventually(lambda: server.metrics()["mctl_queue_rows"] == 6)
        assert {done.result().status for done in [first, *others]} == {200}
        [statistics] = server.request("/v2/models/stats").json()["model_stats"]
        told, batches = statistics["inference_stats"], {b["batch_size"]: b for b in statistics["batch_stats"]}
        assert statistics["execution_count"] == 2 and set(batches) == {1, 6}
        # each of the three took the whole time of their batch
        one, six = (batches[size]["compute_infer"]["ns"] for size in (1, 6))
        assert told["compute_infer"] == {"count": 4, "ns": one + 3 * six}
