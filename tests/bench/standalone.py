"""Standalone beside libtorch: start, memory, size and speed of one bundle, both ways in one run.

    python tests/bench/standalone.py bundle.pt2

The bundle has to be standalone, or to import nothing that the shim lacks. Start and memory are medians of several
starts in turns; the speed of a bucket is the ratio of the fastest calls of many short turns, on one thread.
"""

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from mctl.bundle_format import archive as archives
from mctl.bundle_format import host
from mctl.export import golden
from mctl.parity import cases
from mctl.runner import native
from mctl.runner.stopwatch import Ask, runner_stopwatch

STARTS, TURNS, SECONDS = 7, 40, 0.02
WAYS = ("libtorch", "standalone")


def main(bundle: Path) -> None:
    with archives.open_bundle(bundle) as archive, tempfile.TemporaryDirectory() as work:
        manifest = archive.manifest
        contract = manifest.contract
        stored = golden.load_golden(archive)
        spans = cases.spans(contract, [case.inputs for case in stored])
        batch = contract.batch_dim or ""
        small = {dim.name: dim.min for dim in contract.dims}
        files = {}
        for size in manifest.buckets.get(batch, (1,)):
            dims = cases_dims(small, contract, batch, size)
            inputs = cases.tensors(contract, cases.Case(dims, "normal"), 0, spans)
            path = Path(work, str(size))
            path.write_bytes(b"".join(map(bytes, golden.dump_case(golden.Case("", dims, inputs, {})))))
            files[size] = (path, dims, inputs)
        marked = {way: Path(work, f"{way}.pt2") for way in WAYS}
        for way, path in marked.items():
            archives.rewrite(archive, path, msgspec.structs.replace(manifest, standalone=way == "standalone"), {})
        first = next(iter(files.values()))
        show(starts(marked, request_of(manifest, first[2])))
        print()
        speeds(marked, files)


def cases_dims(small: dict[str, int], contract, batch: str, size: int) -> dict[str, int]:  # type: ignore[no-untyped-def]
    typical = {dim.name: cases.default_size(dim) for dim in contract.dims}
    return {**small, **typical, **({batch: size} if batch else {})}


def library_of(way: str) -> Path | None:
    return native.find_libtorch() if way == "libtorch" else None


# --- start and memory ---------------------------------------------------------------------------------------------


def starts(bundles: dict[str, Path], request: tuple[str, bytes]) -> dict[str, dict[str, float]]:
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(STARTS):
        for way in WAYS:
            with served(bundles[way], way) as (process, url, begun):
                answer_after = first_answer(url, *request) - begun
                found[way].append({"exec to first answer over HTTP, ms": answer_after * 1e3, **memory(process.pid)})
    medians = {
        way: {name: statistics.median(run[name] for run in runs) for name in runs[0]} for way, runs in found.items()
    }
    for way in WAYS:
        medians[way]["deployed without the bundle, MB"] = deployed(way) / 1e6
    return medians


@contextmanager
def served(bundle: Path, way: str) -> Iterator[tuple[subprocess.Popen[str], str, float]]:
    library = library_of(way)
    words = [str(native.find_runner()), "serve", str(bundle), "--port=0", "--threads=1"]
    begun = time.perf_counter()
    process = subprocess.Popen(
        words + ([f"--libtorch={library}"] if library else []), stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    line = process.stderr.readline()
    found = re.search(r"http://\S+", line)
    assert found, line
    try:
        yield process, found[0], begun
    finally:
        process.terminate()
        process.wait()


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


def first_answer(url: str, path: str, body: bytes) -> float:
    """When the first answer was there: it is asked again until the model is ready."""
    while True:
        try:
            with urllib.request.urlopen(urllib.request.Request(url + path, body), timeout=10) as answer:
                answer.read()
            return time.perf_counter()
        except urllib.error.HTTPError as error:
            assert error.code == 503, error.read()
            time.sleep(0.0005)


def memory(front: int) -> dict[str, float]:
    children = Path(f"/proc/{front}/task/{front}/children").read_text().split()
    found = {}
    for key, label in (("Rss", "resident"), ("Pss", "resident, shared pages in parts")):
        each = [smaps(int(pid), key) for pid in (front, *children)]
        found[f"{label}: front + worker, MB"] = sum(each) / 1000
    return found


def smaps(pid: int, key: str) -> int:
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return int(re.search(rf"{key}:\s+(\d+)", text)[1])  # type: ignore[index]


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
    print(f"{'':48}{WAYS[0]:>12}{WAYS[1]:>12}")
    for name in medians["libtorch"]:
        print(f"{name:48}" + "".join(f"{medians[way][name]:12.1f}" for way in WAYS))


# --- speed --------------------------------------------------------------------------------------------------------


def speeds(bundles: dict[str, Path], files) -> None:  # type: ignore[no-untyped-def]
    runner = native.find_runner()
    os.environ["OMP_WAIT_POLICY"] = "passive"
    watches = {way: runner_stopwatch(runner, bundles[way], library_of(way), 1) for way in WAYS}
    try:
        print(f"{'us a call':>12}{WAYS[0]:>12}{WAYS[1]:>12}{'speed':>8}")
        for size, (path, dims, _) in files.items():
            fastest = dict.fromkeys(WAYS, float("inf"))
            for _ in range(TURNS):
                for way in WAYS:
                    taken = watches[way].time(Ask(str(path), dims, "", SECONDS))
                    fastest[way] = min(fastest[way], statistics.median(taken) / 1e3)
            ratio = fastest["libtorch"] / fastest["standalone"]
            print(f"{size:>12}" + "".join(f"{fastest[way]:12.2f}" for way in WAYS) + f"{ratio:8.3f}")
    finally:
        for watch in watches.values():
            watch.__exit__(None, None, None)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
