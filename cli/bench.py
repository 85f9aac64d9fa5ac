"""`mctl bench`: how fast is a bundle, at which size, beside what?"""

import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from ..bundle_format.archive import open_bundle
from ..bundle_format.errors import UsageError
from ..bundle_format.files import require_place
from . import console, progress

if TYPE_CHECKING:
    from ..runner.bench import Curve, Measured
    from ..tuning.bench import BenchReport

_BUNDLE = Path("bundle.pt2")
_PEERS = ("eager", "compile", "aoti", "onnxruntime", "openvino", "eager-cuda", "compile-cuda")


def bench(
    bundle: Annotated[Path, typer.Argument(help="What `mctl compile` wrote.")] = _BUNDLE,
    dim: Annotated[
        list[str], typer.Option(metavar="NAME=MIN:MAX|SIZE,…", help="Sizes to measure [the batch's buckets].")
    ] = [],  # noqa: B006
    threads: Annotated[str, typer.Option(metavar="N,N,…", help="OpenMP threads [1].")] = "",
    against: Annotated[str, typer.Option(metavar="PEER,…", help=f"Measured beside it: {', '.join(_PEERS)}.")] = "",
    model: Annotated[
        str | None, typer.Option(metavar="MODEL.py[:NAME]", help="What eager and compile run [the recorded file].")
    ] = None,
    weights: Annotated[Path | None, typer.Option(metavar="FILE", help="Its weights, if they moved.")] = None,
    onnx: Annotated[Path | None, typer.Option(metavar="FILE", help="The ONNX twin, if it is elsewhere.")] = None,
    latency_target_ms: Annotated[
        float | None, typer.Option(min=0, help="Say which `--max-batch-size` meets it.")
    ] = None,
    libtorch: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Where libtorch_cpu.so is.")] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Of the inputs.")] = 0,
    save: Annotated[
        bool, typer.Option("--save", help="Keep the curve in the bundle: a server begins with it.")
    ] = False,
    reselect: Annotated[
        bool,
        typer.Option("--reselect", help="Measure the bundle's variants anew on this machine and choose among them."),
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="End with 1 if a point is slower than the bundle's curve says.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw latency and rows/s as PNG or SVG; `-`: in the terminal.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Measure a bundle at its buckets, in the server's own call path, in turn with other ways to run the model."""
    numbers, peers = parse_threads(threads or "1"), [name for name in against.split(",") if name]
    for name in peers:
        if name not in _PEERS:
            raise UsageError(f"`--against {name}` is not known", f"known are {', '.join(_PEERS)}")
    if plot not in (None, Path("-")):
        require_place(plot, "--plot")
    with open_bundle(bundle):  # what is no bundle is said before torch is imported
        pass
    if reselect:
        return _reselect(bundle, parse_threads(threads) if threads else (), json=json)
    from ..tuning import bench as benches
    from ..tuning import plot as plots

    if plot is not None:
        plots.require(plot)

    request = benches.BenchRequest(
        bundle=bundle,
        dims=dict(map(benches.parse_dim, dim)),
        threads=numbers,
        against=tuple(peers),  # type: ignore[arg-type]
        model=model,
        weights=weights,
        onnx=onnx,
        libtorch=libtorch,
        seed=seed,
    )
    with progress.shown() as say:
        report = benches.bench(request, say)
    slower = benches.slower_than_curve(bundle, report) if check else []
    if json:
        console.emit_json("mctl.bench/1", not slower, **asdict(report), slower=[asdict(each) for each in slower])
    else:
        _show(report, numbers, latency_target_ms)
    if plot == Path("-"):
        console.write(plots.in_terminal(report))
    elif plot is not None:
        plots.to_file(report, plot)
    for each in slower:
        console.say(
            f"slower: {each.dims} with {each.threads} threads takes {_us(each.is_us)}, it was {_us(each.was_us)}"
        )
    if save:
        console.say(f"the curve in `{bundle}` has {benches.save_curve(bundle, report)} points now")
    raise typer.Exit(1 if slower else 0)


def _reselect(bundle: Path, threads: tuple[int, ...], *, json: bool) -> None:
    from ..bundle_format.summary import tuning_lines
    from ..tuning.tune import reselect

    with progress.shown() as say:
        tuning = reselect(bundle, threads, say)
    if json:
        console.emit_json("mctl.reselect/1", True, **msgspec.to_builtins(tuning))
    else:
        console.write(tuning_lines(tuning))


def _show(report: "BenchReport", numbers: tuple[int, ...], latency_target_ms: float | None) -> None:
    for number in numbers:
        console.write(_table(report, number, console.width(sys.stdout)))
        console.write(_advice(report, number, latency_target_ms))
    console.write([f"left out: {name}: {why}" for name, why in report.left_out.items()])
    console.write([f"warning: {text}" for text in report.warnings])


def parse_threads(text: str) -> tuple[int, ...]:
    """`1,2`. UsageError for what is no list of numbers from 1 to 1024."""
    try:
        numbers = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        numbers = ()
    if not numbers or not all(1 <= number <= 1024 for number in numbers):
        raise UsageError(f"`--threads {text}` is not understood", "write `--threads 1` or `--threads 1,2`")
    return numbers


def _table(report: "BenchReport", threads: int, width: int | None = None) -> list[str]:
    """The numbers with these threads. What is wider than `width` goes on below, with the sizes in front again."""
    mine = report.of_mctl(threads)
    others = list(dict.fromkeys(m.name for m in report.measured if m.threads == threads and m.name != "mctl"))
    header = [*mine[0].dims, *(["variant"] if report.several else []), "median", "p90", "p99"]
    header.append("rows/s" if report.batch_dim else "calls/s")
    for name in others:
        header += [name, f"{name}/mctl"]
    rows = [header]
    for found in mine:
        row = [*map(str, found.dims.values()), *([found.variant] if report.several else [])]
        row += [_time(found), _us(found.p90_us), _us(found.p99_us)]
        row.append(f"{found.rows_per_second:,.0f}")
        for name in others:
            peer = next(
                (m for m in report.measured if (m.name, m.threads, m.dims) == (name, threads, found.dims)), None
            )
            row += [_time(peer), _ratio(peer)] if peer else ["", ""]
        rows.append(row)
    title = f"{report.model}, {threads} thread{'s' if threads > 1 else ''}"
    sizes = len(mine[0].dims) + report.several
    return [title, "", *(line for part in _parts(rows, sizes, width) for line in [*part, ""])]


def _parts(rows: list[list[str]], first: int, width: int | None) -> Iterator[list[str]]:
    """The table in parts no wider than `width`, if a column fits at all; the `first` columns stand in each."""
    columns = [[cell.rjust(max(map(len, column))) for cell in column] for column in zip(*rows, strict=True)]
    repeated, taken = columns[:first], list[list[str]]()

    def lines() -> list[str]:
        return ["  ".join(row).rstrip() for row in zip(*repeated, *taken, strict=True)]

    for column in columns[first:]:
        widths = [len(each[0]) + 2 for each in (*repeated, *taken, column)]
        if taken and width is not None and sum(widths) - 2 > width:
            yield lines()
            taken.clear()
        taken.append(column)
    yield lines()


def _time(found: "Measured") -> str:
    return ("" if found.stable else "~") + _us(found.median_us)


def _us(us: float) -> str:
    return f"{us:.3g} us" if us < 1000 else f"{us / 1000:.3g} ms"


def _ratio(found: "Measured") -> str:
    if found.ratio is None:
        return ""
    return f"{found.ratio.middle:.2f} ({found.ratio.low:.2f}..{found.ratio.high:.2f})"


def _advice(report: "BenchReport", threads: int, target_ms: float | None) -> list[str]:
    from ..runner.bench import largest_within
    from ..tuning.bench import CUDA

    lines = []
    if curve := report.curves.get(threads):
        lines.append(_curve_line(curve))
    most = largest_within(report.over_rows(threads), target_ms * 1000) if target_ms is not None else None
    if target_ms is not None and report.batch_dim is None:
        lines.append(f"{target_ms:g} ms are {'' if most else 'not '}enough for two calls in a row")
    elif target_ms is not None:
        lines.append(
            f"`--max-batch-size {most}` meets {target_ms:g} ms: two batches in a row fit into it"
            if most
            else f"no batch meets {target_ms:g} ms: a request may have to wait for one before its own"
        )
    for name in dict.fromkeys(m.name for m in report.measured if m.threads == threads and m.name.endswith(CUDA)):
        lines += _of_gpu(report, name, threads, target_ms)
    return [*lines, ""] if lines else []


def _curve_line(curve: "Curve") -> str:
    return (
        f"latency = {_us(curve.fixed_us)} + {_us(curve.row_us)} x rows, off by at most {curve.worst:.0%};"
        f" no more than {curve.rows_per_second:,.0f} rows/s, 90 % of it from batch {curve.rows_for(0.9):.0f} on"
    )


def _of_gpu(report: "BenchReport", name: str, threads: int, target_ms: float | None) -> list[str]:
    """Where the GPU is the better place, and which batch meets the target there; nothing where other dims vary too."""
    from ..runner.bench import better_from, fit, largest_within

    mine, other = report.over_rows(threads), report.over_rows(threads, name)
    if len(dict(mine)) != len(mine):
        return []
    lines = [f"{name}: {_curve_line(curve)}"] if (curve := fit(other)) else []
    first = better_from(mine, other)
    where = "at no batch" if first is None else "at every batch" if first == min(mine)[0] else f"from batch {first} on"
    text = f"{name} gives more rows/s than mctl on the CPU {where}"
    if target_ms is not None:
        most = largest_within(other, target_ms * 1000)
        text += f", and meets {target_ms:g} ms " + (f"up to batch {most}" if most else "at no batch")
    return [*lines, text]
