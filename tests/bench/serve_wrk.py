"""Requests a second and latency of `mctl serve` beside its null mode, by wrk; prints ratios with their spread.

python tests/bench/serve_wrk.py mlp.pt2 [--seconds 3] [--repeats 3] [--connections 1,64] [--option=--threads=1 …]

The null mode has the same sockets, parsing and contract, and answers zeros without a model: it is the limit. The two
servers are measured in turn, so that what else the machine does falls on both.
"""

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mctl.runner import native

UNITS = {"us": 1.0, "ms": 1e3, "s": 1e6}


class Sample(NamedTuple):
    rate: float  # requests a second
    p50: float  # us
    p99: float  # us


class Server:
    """`mctl-runner serve`, ready; stopped by `stop`."""

    def __init__(self, bundle: Path, options: list[str]) -> None:
        words = [native.find_runner(), "serve", bundle, "--libtorch", native.find_libtorch(), "--port", "0", *options]
        self.process = subprocess.Popen([*map(str, words)], stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        self.url = self.process.stderr.readline().split()[-1]
        while not self.ready():
            time.sleep(0.05)

    def ready(self) -> bool:
        try:
            return urllib.request.urlopen(f"{self.url}/v2/health/ready").status == 200
        except OSError:
            return False

    def get(self, path: str) -> str:
        return urllib.request.urlopen(self.url + path).read().decode()

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()


def body_of(model: dict, binary: bool) -> tuple[bytes, dict[str, str]]:
    """A request of one row of ones; dynamic axes other than the first are 32."""
    tensors, raw = [], b""
    dtypes = {"FP32": np.float32, "INT64": np.int64, "INT32": np.int32}
    for tensor in model["inputs"]:
        shape = [1 if axis == 0 else 32 if size < 0 else size for axis, size in enumerate(tensor["shape"])]
        value = np.ones(shape, dtypes[tensor["datatype"]])
        entry = {"name": tensor["name"], "shape": shape, "datatype": tensor["datatype"]}
        if binary:
            raw += value.tobytes()
            entry["parameters"] = {"binary_data_size": value.nbytes}
        else:
            numbers = np.sin(np.arange(value.size)) if value.dtype == np.float32 else value
            entry["data"] = [float(f"{number:.8g}") for number in numbers.reshape(-1)]
        tensors.append(entry)
    text = json.dumps({"inputs": tensors, "parameters": {"binary_data_output": binary}}).encode()
    headers = {"Inference-Header-Content-Length": str(len(text))} if binary else {"Content-Type": "application/json"}
    return text + raw, headers


def script_of(body: bytes, headers: dict[str, str], folder: Path, name: str) -> Path:
    data, script = folder / f"{name}.body", folder / f"{name}.lua"
    data.write_bytes(body)
    lines = ['wrk.method = "POST"', f'wrk.body = io.open("{data}", "rb"):read("*a")']
    lines += [f'wrk.headers["{key}"] = "{value}"' for key, value in headers.items()]
    script.write_text("\n".join(lines))
    return script


def wrk(url: str, script: Path, connections: int, seconds: int) -> Sample:
    words = ["wrk", "-t1", f"-c{connections}", f"-d{seconds}s", "--latency", "-s", script, url]
    text = subprocess.run([*map(str, words)], capture_output=True, text=True, check=True).stdout
    if "Non-2xx" in text or "Socket errors" in text:
        sys.exit(f"wrong answers:\n{text}")

    def latency(percentile: str) -> float:
        value, unit = re.search(rf"{percentile}%\s+([\d.]+)(us|ms|s)", text).groups()  # type: ignore[union-attr]
        return float(value) * UNITS[unit]

    return Sample(float(re.search(r"Requests/sec:\s+([\d.]+)", text)[1]), latency("50"), latency("99"))  # type: ignore[index]


def spread(values: list[float], digits: int = 0) -> str:
    return f"{statistics.median(values):,.{digits}f} ({min(values):,.{digits}f}..{max(values):,.{digits}f})"


def batches(server: Server) -> str:
    """Mean rows of a batch and the share of padding, since the server's start."""
    text = server.get("/metrics")

    def total(name: str) -> float:
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name + "{"))

    rows, padded = total("mctl_batch_rows_sum"), total("mctl_padded_rows_total")
    memory = float(re.search(r"^process_resident_memory_bytes (\S+)", text, re.M)[1])  # type: ignore[index]
    return (
        f"{rows / total('mctl_batch_rows_count'):.1f} rows a batch, {padded / (rows + padded):.1%} padding, "
        f"{memory / 2**20:.0f} MiB resident"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--seconds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--connections", default="1,64")
    parser.add_argument("--option", action="append", default=[], help="an option of `mctl serve`, as `--threads=1`")
    options = parser.parse_args()
    if shutil.which("wrk") is None:
        sys.exit("there is no `wrk`")
    servers = {"served": Server(options.bundle, options.option), "null": Server(options.bundle, ["--null"])}
    name = json.loads(
        urllib.request.urlopen(
            urllib.request.Request(servers["null"].url, headers={"Accept": "application/json"})
        ).read()
    )["models"][0]
    path = f"/v2/models/{name}"
    model = json.loads(servers["null"].get(path))
    print(f"{name}: {os.cpu_count()} cores, {options.repeats} x {options.seconds} s, median (least..most)")
    with tempfile.TemporaryDirectory() as folder:
        scripts = {
            kind: script_of(*body_of(model, kind == "binary"), Path(folder), kind) for kind in ("binary", "json")
        }
        for connections in map(int, options.connections.split(",")):
            samples: dict[tuple[str, str], list[Sample]] = {}
            for _ in range(options.repeats):
                for kind, script in scripts.items():
                    for role, server in servers.items():
                        sample = wrk(f"{server.url}{path}/infer", script, connections, options.seconds)
                        samples.setdefault((role, kind), []).append(sample)
            report(connections, samples)
    print(f"served: {batches(servers['served'])}")
    for server in servers.values():
        server.stop()


def report(connections: int, samples: dict[tuple[str, str], list[Sample]]) -> None:
    for (role, kind), runs in samples.items():
        rate, p50, p99 = (list(values) for values in zip(*runs, strict=True))
        line = f"{spread(rate)}/s, p50 {spread(p50)} us, p99 {statistics.median(p99):,.0f} us"
        print(f"  {connections} connections, {role}, {kind}: {line}")

    def ratio(over: tuple[str, str], under: tuple[str, str]) -> str:
        return spread([a.rate / b.rate for a, b in zip(samples[over], samples[under], strict=True)], 2)

    print(f"  {connections} connections: served/null {ratio(('served', 'binary'), ('null', 'binary'))}, "
          f"binary/json {ratio(('served', 'binary'), ('served', 'json'))}")  # fmt: skip


if __name__ == "__main__":
    main()
