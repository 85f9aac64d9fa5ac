"""`mctl bench`: how fast a bundle is at its buckets, and beside what else could run the same model."""

import importlib.util
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import product
from math import isqrt
from pathlib import Path

import msgspec
import torch

from ..bundle_format import archive as archives
from ..bundle_format import manifest as manifests
from ..bundle_format.contract import Dim
from ..bundle_format.errors import MctlError, UsageError
from ..bundle_format.lookup import Lookup
from ..bundle_format.manifest import Manifest
from ..export import golden
from ..parity import cases
from ..parity.onnx import PACKAGES
from ..runner import bench as timing
from ..runner import native
from ..runner.bench import Curve, Machine, Measured, Point
from ..runner.stopwatch import Failed, Stopwatch, runner_stopwatch
from .peers import Name, Peer, in_words

Progress = Callable[[str], None]
Sizes = Mapping[str, "Wanted"]

_MOST_POINTS = 256
CUDA = "-cuda"  # the end of the names of peers on a GPU


class Wanted(msgspec.Struct, frozen=True):
    """Sizes of one dim that a user asked for: these, or the served ones between two ends."""

    sizes: tuple[int, ...] = ()
    ends: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """What `mctl bench` was asked for. `model`, `weights` and `onnx`: what peers run, where it is not recorded."""

    bundle: Path
    dims: Sizes
    threads: tuple[int, ...]
    against: tuple[Name, ...] = ()
    model: str | None = None
    weights: Path | None = None
    onnx: Path | None = None
    libtorch: Path | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class BenchReport:
    """What was measured. `curves` are by threads, over the batch dim, where only that one varies."""

    model: str
    digest: str
    batch_dim: str | None
    measured: tuple[Measured, ...]
    curves: dict[int, Curve]
    left_out: dict[str, str]  # peer -> why
    warnings: tuple[str, ...]
    several: bool = False  # whether the bundle has more than one variant

    def of(self, name: str, threads: int) -> list[Measured]:
        return [found for found in self.measured if found.name == name and found.threads == threads]

    def of_mctl(self, threads: int) -> list[Measured]:
        return self.of("mctl", threads)

    def over_rows(self, threads: int, name: str = "mctl") -> list[tuple[int, float]]:
        """(rows, median us), of mctl or of a peer."""
        return [(found.rows, found.median_us) for found in self.of(name, threads)]


def parse_dim(text: str) -> tuple[str, Wanted]:
    """`batch=1:64`, `batch=8` or `batch=1,8,32`. UsageError for anything else."""
    name, _, rest = text.partition("=")
    try:
        low, colon, high = rest.partition(":")
        wanted = Wanted(ends=(int(low), int(high))) if colon else Wanted(tuple(map(int, rest.split(","))))
    except ValueError:
        wanted = Wanted()
    if not name or wanted == Wanted():
        raise UsageError(f"`--dim {text}` is not understood", "write `--dim batch=1:64` or `--dim batch=1,8,32`")
    return name, wanted


def bench(request: BenchRequest, progress: Progress) -> BenchReport:
    """Measures the bundle in the runner's own call path, and the peers, at every point in turn.

    Peers that cannot be had are left out by name. MctlError where the bundle cannot be read or run here.
    """
    runner = native.find_runner(progress)
    with archives.open_bundle(request.bundle) as archive, tempfile.TemporaryDirectory(prefix="mctl-bench-") as work:
        manifest = archive.manifest
        folder = native.libtorch_for(manifest, request.libtorch)
        points = _points(manifest, request, golden.load_golden(archive), Path(work))
        machine = Machine()
        measured: list[Measured] = []
        lookups = {threads: Lookup(manifest, threads) for threads in request.threads}
        with ExitStack() as stack:
            progress("loading")
            watches = [
                stack.enter_context(runner_stopwatch(runner, request.bundle, folder, threads))
                for threads in request.threads
            ]
            peers, left_out = _peers(request, manifest, stack)
            watches = [*watches, *peers]
            for point in points:
                watches = [watch for watch in watches if watch.name not in left_out]
                found, failed = timing.measure(watches, point, progress)
                if "mctl" in failed:
                    raise MctlError(f"the bundle cannot be measured: {failed['mctl']}")
                measured += [_named(each, lookups) for each in found]
                left_out |= failed
        digest = archive.digest
    report = BenchReport(
        f"{manifest.name} {manifest.version}",
        digest,
        manifest.contract.batch_dim,
        tuple(measured),
        {},
        left_out,
        (),
        len(manifest.variants) > 1,
    )
    curves = {threads: curve for threads in request.threads if (curve := timing.fit(_one_line(report, threads)))}
    batch = manifest.contract.batch_dim
    unpadded = {n: lookup.unpadded(batch) if batch else () for n, lookup in lookups.items()}
    warnings = (*machine.warnings(), *_warnings(report, manifest.buckets.get(batch or "", ()), unpadded, machine.cores))
    return replace(report, curves=curves, warnings=warnings)


def _named(found: Measured, lookups: Mapping[int, Lookup]) -> Measured:
    variant = lookups[found.threads].variant(found.dims) if found.name == "mctl" else None
    return replace(found, variant=variant.name if variant else "")


def _one_line(report: BenchReport, threads: int) -> list[tuple[int, float]]:
    """(rows, us), or nothing where other dims vary too."""
    points = report.over_rows(threads)
    return points if len({rows for rows, _ in points}) == len(points) else []


# --- where to measure --------------------------------------------------------------------------------------------


def _points(manifest: Manifest, request: BenchRequest, stored: Sequence[golden.Case], work: Path) -> list[Point]:
    contract = manifest.contract
    names = [dim.name for dim in contract.dims]
    for name in request.dims:
        if name not in names:
            raise UsageError(f"there is no dim `{name}`", f"the contract has {', '.join(f'`{n}`' for n in names)}")
    sizes = [_sizes(dim, request.dims.get(dim.name), manifest) for dim in contract.dims]
    grid = [dict(zip(names, combination, strict=True)) for combination in product(*sizes)]
    if len(grid) > _MOST_POINTS:
        raise UsageError(f"these are {len(grid)} combinations of sizes", "name fewer with `--dim NAME=SIZE,SIZE`")
    spans = cases.spans(contract, [case.inputs for case in stored])
    return [point_at(manifest, dims, work / f"{at}.safetensors", request.seed, spans) for at, dims in enumerate(grid)]


def point_at(manifest: Manifest, dims: dict[str, int], path: Path, seed: int, spans: cases.Spans) -> Point:
    """A point to measure at, its tensors written to `path`. The runner takes the variant for its threads."""
    contract = manifest.contract
    inputs = cases.tensors(contract, cases.Case(dims, "normal"), seed, spans)
    with path.open("wb") as file:
        for piece in golden.dump_case(golden.Case("", dims, inputs, {})):
            file.write(piece)
    rows = dims[contract.batch_dim] if contract.batch_dim else 1
    return Point(dims, rows, path, "")


def _sizes(dim: Dim, wanted: Wanted | None, manifest: Manifest) -> list[int]:
    served = manifest.buckets.get(dim.name, ())
    if wanted is None:
        return list(served) if dim.name == manifest.contract.batch_dim and served else [_typical(dim, served)]
    low, high = wanted.ends or (min(wanted.sizes), max(wanted.sizes))
    for size in (low, high, *wanted.sizes):
        if not dim.allows(size):
            steps = f" in steps of {dim.multiple}" if dim.multiple > 1 else ""
            raise UsageError(f"`{dim.name}` cannot be {size}, allowed {dim.min}..{dim.max}{steps}")
    if low > high:
        raise UsageError(f"`{dim.name}={low}:{high}` is no range")
    if wanted.sizes:
        return sorted(set(wanted.sizes))
    between = [size for size in served or _doubling(dim) if low <= size <= high]
    return sorted({low, *between, high})


def _typical(dim: Dim, served: Sequence[int]) -> int:
    """The served size next above the geometric middle of the range."""
    middle = isqrt(dim.min * dim.max)
    return next((size for size in sorted(served or _doubling(dim)) if size >= middle), dim.max)


def _doubling(dim: Dim) -> list[int]:
    sizes, size = [], dim.multiple
    while size <= dim.max:
        sizes += [size] if dim.allows(size) else []
        size *= 2
    return sizes or [dim.min]


# --- whom to compare with ----------------------------------------------------------------------------------------


def _peers(request: BenchRequest, manifest: Manifest, stack: ExitStack) -> tuple[list[Stopwatch], dict[str, str]]:
    """The processes, started, and why others are not."""
    found: list[Stopwatch] = []
    left_out: dict[str, str] = {}
    for name in request.against:
        try:
            peer = _peer(name, request, manifest)
        except MctlError as error:
            left_out[name] = in_words(error)
            continue
        for threads in request.threads:
            told = msgspec.json.encode(msgspec.structs.replace(peer, threads=threads)).decode()
            command = (sys.executable, "-P", "-m", "mctl.tuning.peers", told)
            watch = stack.enter_context(Stopwatch(name, command, threads))
            try:
                watch.wait()
                found.append(watch)
            except Failed as failed:
                left_out[name] = str(failed)
    return found, left_out


def _peer(name: Name, request: BenchRequest, manifest: Manifest) -> Peer:
    peer = Peer(name, str(request.bundle), 0, weights=str(request.weights or ""), onnx=str(request.onnx or ""))
    if name.endswith(CUDA):
        if not torch.cuda.is_available():
            raise UsageError(f"torch {torch.__version__} sees no CUDA device")
        peer = msgspec.structs.replace(peer, device="cuda")
    if name.removesuffix(CUDA) in ("eager", "compile", "aoti"):
        model = request.model or manifest.source.file
        if not Path(model if model.endswith(".py") else model.rpartition(":")[0]).is_file():
            raise UsageError(f"there is no `{model}` here", "say where the model is with `--model MODEL.py`")
        return msgspec.structs.replace(peer, model=model)
    package = "openvino" if name == "openvino" else PACKAGES["onnxruntime"]
    if importlib.util.find_spec(package) is None:
        raise UsageError(f"the package `{package}` is not installed", f"`pip install {package}`")
    return peer


# --- what to think of it -----------------------------------------------------------------------------------------


def _warnings(
    report: BenchReport, buckets: Sequence[int], threads: Mapping[int, Sequence[int]], cores: int
) -> Iterator[str]:
    """`buckets`: of the batch. `threads`: each number that was measured, and the batches that smaller ones are not
    padded to.
    """
    for number, unpadded in threads.items():
        if number > cores:
            yield f"threads oversubscribed: {number} threads on {cores} cores"
        line = _one_line(report, number)
        for rows, waste in timing.padding_waste(line):
            after = min(size for size, _ in line if size >= rows)
            padded = after not in unpadded and after == min((size for size in buckets if size >= rows), default=0)
            if waste > 0.25 and padded:
                yield f"padding costs {waste:.0%} at batch {rows} with {_threads(number)}"
    shaky = [found for found in report.measured if not found.stable]
    if shaky:
        yield f"{len(shaky)} of {len(report.measured)} numbers are unstable (marked ~): is the machine busy?"
    base = {(str(found.dims)): found.median_us for found in report.of_mctl(1)}
    for number in threads:
        more = [found for found in report.of_mctl(number) if str(found.dims) in base]
        if number > 1 and more and all(found.median_us > 0.95 * base[str(found.dims)] for found in more):
            yield f"the model is too small to fill {_threads(number)}"


def _threads(number: int) -> str:
    return f"{number} thread{'s' if number != 1 else ''}"


# --- the curve in the bundle -------------------------------------------------------------------------------------


def save_curve(path: Path, report: BenchReport) -> int:
    """Puts what stood still of mctl's own numbers into the bundle, atomically; how many points its curve has then.

    UsageError where the file is not the one that was measured.
    """
    with archives.open_bundle(path) as archive:
        if archive.digest != report.digest:
            raise UsageError(f"`{path}` is another file by now", "measure it again")
        known = {_key(point): point for point in archive.manifest.curve}
        for found in report.measured:
            if found.name == "mctl" and found.stable:
                point = manifests.Measured(dims=found.dims, threads=found.threads, median_us=round(found.median_us))
                known[_key(point)] = point
        curve = tuple(known[key] for key in sorted(known))
        archives.rewrite(archive, path, msgspec.structs.replace(archive.manifest, curve=curve), {})
        return len(curve)


@dataclass(frozen=True, slots=True)
class Slower:
    """A point that takes longer than the bundle's curve says, by more than both may vary; microseconds."""

    dims: dict[str, int]
    threads: int
    was_us: int
    is_us: float


def slower_than_curve(path: Path, report: BenchReport) -> list[Slower]:
    """Points that got slower. UsageError where the curve has none of those that were measured."""
    with archives.open_bundle(path) as archive:
        known = {_key(point): point.median_us for point in archive.manifest.curve}
    pairs = [(found, known.get(_key(found))) for found in report.measured if found.name == "mctl"]
    if all(was is None for _, was in pairs):
        raise UsageError(f"the curve of `{path}` has none of these points", "`mctl bench --save` measures it")
    return [
        Slower(found.dims, found.threads, was, found.median_us)
        for found, was in pairs
        # half a microsecond: the curve is in whole ones
        if was is not None
        and found.median_us > (was + 0.5) * (1 + timing.NOISE) * (1 + max(timing.NOISE, found.spread))
    ]


def _key(point: Measured | manifests.Measured) -> tuple[int, tuple[tuple[str, int], ...]]:
    return point.threads, tuple(sorted(point.dims.items()))
