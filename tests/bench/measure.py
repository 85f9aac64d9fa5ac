"""Measurements of a running server: speed by wrk, memory by /proc, batches by its metrics."""

import json
import os
import re
import subprocess
import tempfile
import urllib.request
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import msgspec

# wrk calls `request` for each request in each thread; all requests are made before it starts.
_SCRIPT = """
local requests = {{}}
for i = 1, {count} do
  local file = io.open("{folder}/" .. i, "rb")
  requests[i] = file:read("*a")
  file:close()
end
local at = 0
function request()
  at = at % {count} + 1
  return requests[at]
end
function done(summary, latency)
  local errors = summary.errors
  local lost = errors.connect + errors.read + errors.write + errors.timeout
  local form = '{{"requests": %d, "microseconds": %d, "refused": %d, "lost": %d, "p50_us": %d, "p99_us": %d}}'
  io.write(string.format(form,
    summary.requests, summary.duration, errors.status, lost, latency:percentile(50), latency:percentile(99)))
end
"""


class Speed(msgspec.Struct, frozen=True):
    """One run of wrk. `refused`: answers that were not 2xx; `lost`: no answer."""

    rate: float  # requests a second
    p50_us: int
    p99_us: int
    refused: int
    lost: int


class Batches(msgspec.Struct, frozen=True):
    """What the server's batcher did meanwhile."""

    mean_rows: float
    pad_waste: float  # share of the rows that ran
    queue_us: float  # mean of a request


class Memory(msgspec.Struct, frozen=True):
    """MiB of a server's processes. Shared pages count in each process, or in equal parts."""

    processes: int
    resident: float
    proportional: float


def wrk(port: int, requests: Sequence[bytes], connections: int, seconds: float, cpus: set[int]) -> Speed:
    """Closed loop: each connection sends its next request when the answer to the last is there."""
    threads = min(2, len(cpus), connections)
    with tempfile.TemporaryDirectory(prefix="wrk-") as name:
        for index, request in enumerate(requests, 1):
            (Path(name) / str(index)).write_bytes(request)
        script = Path(name) / "requests.lua"
        script.write_text(_SCRIPT.format(count=len(requests), folder=name))
        # wrk takes whole seconds
        words = ["wrk", f"-t{threads}", f"-c{connections}", f"-d{max(1, round(seconds))}s", "--timeout=60s"]
        words += ["-s", str(script), f"http://127.0.0.1:{port}"]
        done = subprocess.run(words, capture_output=True, text=True, preexec_fn=pinned(cpus))
    if done.returncode:
        raise RuntimeError(f"wrk: {done.stderr or done.stdout}")
    counted = json.loads(done.stdout.splitlines()[-1])
    good = counted["requests"] - counted["refused"]
    latency = {name: counted[name] for name in ("p50_us", "p99_us", "refused", "lost")}
    return Speed(rate=good / counted["microseconds"] * 1e6, **latency)


def pinned(cpus: set[int]):
    """What a child does before it becomes another program."""
    return lambda: os.sched_setaffinity(0, cpus)


def scrape(port: int) -> dict[str, float]:
    """The samples of /metrics, summed over their labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    samples: dict[str, float] = defaultdict(float)
    for name, value in re.findall(r"^(\w+)(?:\{.*\})? (\S+)$", text, re.MULTILINE):
        samples[name] += float(value)
    return samples


def batches_between(before: dict[str, float], after: dict[str, float]) -> Batches | None:
    """None where no batch ran."""
    rows, batches, padded, waited, requests = (
        after[name] - before.get(name, 0)
        for name in (
            "mctl_batch_rows_sum",
            "mctl_batch_rows_count",
            "mctl_padded_rows_total",
            "mctl_queue_duration_seconds_sum",
            "mctl_queue_duration_seconds_count",
        )
    )
    if not batches:
        return None
    return Batches(rows / batches, padded / (rows + padded), waited / requests * 1e6)


def descendants(pid: int) -> list[int]:
    """A process and all that come from it, as far as their parents live."""
    children = defaultdict(list)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue
            children[int(stat.rpartition(")")[2].split()[1])].append(int(entry.name))
    found = [pid]
    for parent in found:
        found += children[parent]
    return found


def memory_of(pid: int) -> Memory:
    count, totals = 0, {"Rss": 0, "Pss": 0}
    for process in descendants(pid):
        try:
            lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        count += 1
        for line in lines:
            name, _, rest = line.partition(":")
            if name in totals:
                totals[name] += int(rest.split()[0])
    return Memory(count, totals["Rss"] / 1024, totals["Pss"] / 1024)
