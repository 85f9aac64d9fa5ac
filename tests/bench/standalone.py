"""Standalone beside libtorch: start, memory, size and speed of one bundle, both ways in one run.

    python tests/bench/standalone.py bundle.pt2

The bundle has to be standalone, or to import nothing that the shim lacks. Start and memory are medians of several
starts in turns. The speed of a bucket is the ratio of the fastest of many short turns; beside it, the median of the
ratios of single turns.
"""

import argparse
import json
import re
import statistics
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from mctl.bundle_format import archive as archives
from mctl.bundle_format import host
from mctl.bundle_format.manifest import Manifest
from mctl.export import golden
from mctl.parity import cases
from mctl.runner import native
from mctl.runner.stopwatch import Ask, runner_stopwatch

STARTS, TURNS, SECONDS = 5, 40, 0.02
THREADS = (1, 2)
ALONE = "exec to first answer in the worker, fastest, ms"
WAYS = ("libtorch", "standalone")


class Inputs(NamedTuple):
    """Of one bucket."""

    file: Path  # as the runner reads them
    dims: dict[str, int]
    tensors: dict[str, torch.Tensor]


class Prepared(NamedTuple):
    manifest: Manifest
    bundles: dict[str, Path]  # by the way
    inputs: dict[int, Inputs]  # by the rows of a bucket


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--only", choices=["starts", "speeds"])
    given = parser.parse_args()
    with prepared(given.bundle) as ready:
        if given.only != "speeds":
            show(starts(ready))
        for threads in THREADS if given.only != "starts" else ():
            speeds(ready, threads)


@contextmanager
def prepared(bundle: Path) -> Iterator[Prepared]:
    with archives.open_bundle(bundle) as archive, tempfile.TemporaryDirectory() as work:
        manifest = archive.manifest
        contract = manifest.contract
        spans = cases.spans(contract, [case.inputs for case in golden.load_golden(archive)])
        batch = contract.batch_dim or ""
        small = {dim.name: dim.min for dim in contract.dims}
        inputs = {}
        for size in manifest.buckets.get(batch, (1,)):
            dims = cases_dims(small, contract, batch, size)
            tensors = cases.tensors(contract, cases.Case(dims, "normal"), 0, spans)
            file = Path(work, str(size))
            file.write_bytes(b"".join(map(bytes, golden.dump_case(golden.Case("", dims, tensors, {})))))
            inputs[size] = Inputs(file, dims, tensors)
        bundles = {way: Path(work, f"{way}.pt2") for way in WAYS}
        for way, path in bundles.items():
            archives.rewrite(archive, path, msgspec.structs.replace(manifest, standalone=way == "standalone"), {})
        yield Prepared(manifest, bundles, inputs)


def cases_dims(small: dict[str, int], contract, batch: str, size: int) -> dict[str, int]:  # type: ignore[no-untyped-def]
    typical = {dim.name: cases.default_size(dim) for dim in contract.dims}
    return {**small, **typical, **({batch: size} if batch else {})}


def library_of(way: str) -> Path | None:
    return native.find_libtorch() if way == "libtorch" else None


# --- start and memory ---------------------------------------------------------------------------------------------


def starts(ready: Prepared) -> dict[str, dict[str, float]]:
    first = next(iter(ready.inputs.values()))
    request = request_of(ready.manifest, first.tensors)
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(STARTS):
        for way in WAYS:
            alone = min(worker_alone(ready.bundles[way], way, first) for _ in range(STARTS))
            run = {ALONE: alone * 1e3}
            for start in ("full", "quick"):
                with served(ready.bundles[way], way, start) as server:
                    run[f"{start}: exec to ready, ms"] = server.ready_after() * 1e3
                    run[f"{start}: exec to first answer over HTTP, ms"] = server.answer_after(*request) * 1e3
                    run |= {f"{start}: {name}": size for name, size in memory(server.pid, ready.bundles[way]).items()}
            found[way].append(run)
    medians = {
        way: {name: statistics.median(run[name] for run in runs) for name in runs[0]} for way, runs in found.items()
    }
    for way in WAYS:
        medians[way][ALONE] = min(run[ALONE] for run in found[way])
        medians[way]["deployed without the bundle, MB"] = deployed(way) / 1e6
    return medians


def worker_alone(bundle: Path, way: str, inputs: Inputs) -> float:
    """Of the process that loads a bundle as a worker does, without a front; it leaves digests and warm-up out."""
    ask = msgspec.json.encode(Ask(str(inputs.file), inputs.dims, "", 0.0, calls=1)) + b"\n"
    words = [native.find_runner(), "measure", bundle, library_of(way) or "", "1"]
    begun = time.perf_counter()
    with subprocess.Popen([*map(str, words)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin and process.stdout
        process.stdin.write(ask)
        process.stdin.flush()
        said = process.stdout.readline() + process.stdout.readline()
        taken = time.perf_counter() - begun
    assert b'"ns"' in said, said
    return taken


class Started:
    """A server that has said where it listens."""

    def __init__(self, words: list[str]) -> None:
        self._begun = time.perf_counter()
        self._process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
        self.pid = self._process.pid
        self.url = self._line("listening on ").split()[-1]

    def _line(self, start: str) -> str:
        assert self._process.stderr is not None
        said = []
        for line in self._process.stderr:
            said.append(line)
            if line.startswith(start):
                return line.strip()
        raise AssertionError(said)

    def ready_after(self) -> float:
        self._line("ready: ")
        return time.perf_counter() - self._begun

    def answer_after(self, path: str, body: bytes) -> float:
        """Whoever asks when it is ready has the answer then."""
        with urllib.request.urlopen(urllib.request.Request(self.url + path, body), timeout=10) as answer:
            answer.read()
        return time.perf_counter() - self._begun

    def end(self) -> None:
        self._process.terminate()
        self._process.wait()


@contextmanager
def served(bundle: Path, way: str, start: str = "full") -> Iterator[Started]:
    library = library_of(way)
    options = ["--port=0", "--threads=1", f"--start={start}", "--debuggable"]  # its memory is looked at
    words = [str(native.find_runner()), "serve", str(bundle), *options]
    server = Started(words + ([f"--libtorch={library}"] if library else []))
    try:
        yield server
    finally:
        server.end()


def request_of(manifest, inputs) -> tuple[str, bytes]:  # type: ignore[no-untyped-def]
    kinds = {"float32": "FP32", "int64": "INT64", "int32": "INT32", "bool": "BOOL"}
    body = [
        {
            "name": each.name,
            "datatype": kinds[each.dtype],
            "shape": list(inputs[each.name].shape),
            "data": inputs[each.name].flatten().tolist(),
        }
        for each in manifest.contract.inputs
    ]
    return f"/v2/models/{manifest.name}/infer", json.dumps({"inputs": body}).encode()


def memory(front: int, bundle: Path) -> dict[str, float]:
    """Of front and worker, in MB. The bundle's own pages belong to the page cache, which all processes share."""
    children = Path(f"/proc/{front}/task/{front}/children").read_text().split()
    kept = [resident(int(pid), bundle) for pid in (front, *children)]
    return {
        "resident, front + worker, MB": sum(all_pages for all_pages, _ in kept) / 1e6,
        "the same without the bundle's pages, MB": sum(all_pages - shared for all_pages, shared in kept) / 1e6,
    }


def resident(pid: int, bundle: Path) -> tuple[int, int]:
    """Bytes, and those of them that are pages of the bundle."""
    total = shared = 0
    path = ""
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if fields := re.match(r"[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \S+\s*(.*)", line):
            path = fields[1]
        elif line.startswith("Rss:"):
            size = int(line.split()[1]) * 1024
            total += size
            shared += size if path == str(bundle) else 0
    return total, shared


def deployed(way: str) -> int:
    """Of the runner, stripped, and of what it loads beside the C library."""
    runner = native.find_runner()
    with tempfile.TemporaryDirectory() as work:
        sizes = []
        for path in (runner, *([host.find_shim()] if way == "standalone" else [])):
            stripped = Path(work, path.name)
            subprocess.run(["strip", "-o", stripped, path], check=True)
            sizes.append(stripped.stat().st_size)
    start = host.find_shim() if way == "standalone" else native.find_libtorch() / "libtorch_cpu.so"
    loaded = subprocess.run(["ldd", start], capture_output=True, text=True, check=True).stdout
    paths = [Path(found) for found in re.findall(r"=> (/\S+)", loaded)]
    c_library = ("libc.so", "libm.so", "libdl.so", "librt.so", "libpthread.so", "ld-linux")
    extra = [path for path in paths if not path.name.startswith(c_library)]
    return (
        sum(sizes)
        + sum(path.resolve().stat().st_size for path in extra)
        + (0 if way == "standalone" else start.stat().st_size)
    )


def show(medians: dict[str, dict[str, float]]) -> None:
    print(f"{'':58}{WAYS[0]:>12}{WAYS[1]:>12}")
    for name in medians["libtorch"]:
        print(f"{name:58}" + "".join(f"{medians[way][name]:12.1f}" for way in WAYS))


# --- speed --------------------------------------------------------------------------------------------------------


def speeds(ready: Prepared, threads: int) -> None:
    runner = native.find_runner()
    watches = {way: runner_stopwatch(runner, ready.bundles[way], library_of(way), threads) for way in WAYS}
    try:
        print(f"{'us a call':>12}{WAYS[0]:>12}{WAYS[1]:>12}{'speed':>8}{'of turns':>10}   threads: {threads}")
        for size, inputs in ready.inputs.items():
            turns = []
            for _ in range(TURNS):
                asked = {way: watches[way].time(Ask(str(inputs.file), inputs.dims, "", SECONDS)) for way in WAYS}
                turns.append([statistics.median(taken) / 1e3 for taken in asked.values()])
            fastest = [min(turn[at] for turn in turns) for at in range(len(WAYS))]
            paired = statistics.median(libtorch / standalone for libtorch, standalone in turns)
            figures = "".join(f"{each:12.2f}" for each in fastest)
            print(f"{size:>12}{figures}{fastest[0] / fastest[1]:8.3f}{paired:10.3f}", flush=True)
    finally:
        for watch in watches.values():
            watch.__exit__(None, None, None)


if __name__ == "__main__":
    main()
