"""The curves of `mctl bench` as a picture."""

import importlib.util
from itertools import cycle
from pathlib import Path

from ..bundle_format.errors import UsageError
from ..bundle_format.files import atomic
from ..runner.bench import Measured
from .bench import BenchReport

_FORMS = (".png", ".svg", ".pdf")
_WIDTH = 50  # columns of the longest bar


def require(path: Path) -> None:
    """UsageError for a file that cannot be drawn; `-` is the terminal."""
    if path == Path("-"):
        return
    if path.suffix not in _FORMS:
        raise UsageError(f"`--plot {path}` is no picture", f"end it in {', '.join(_FORMS)}, or write `--plot -`")
    if importlib.util.find_spec("matplotlib") is None:
        hint = "`pip install matplotlib`, or draw in the terminal with `--plot -`"
        raise UsageError("the package `matplotlib` is not installed", hint)


def series(report: BenchReport) -> dict[str, list[Measured]]:
    """By who ran it, with how many threads, at which sizes of other dims; in order of rows."""
    found: dict[str, list[Measured]] = {}
    for each in report.measured:
        others = {name: size for name, size in each.dims.items() if name != report.batch_dim}
        sizes = "".join(f", {name} {size}" for name, size in others.items())
        threads = f", {each.threads} thread{'s' if each.threads > 1 else ''}"
        found.setdefault(f"{each.name}{threads}{sizes}", []).append(each)
    return {name: sorted(points, key=lambda point: point.rows) for name, points in found.items()}


def to_file(report: BenchReport, path: Path) -> None:
    """Latency and rows/s over the batch size, a line each; told apart by marks and dashes too, for print."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    styles = cycle([(mark, dash) for dash in ("-", "--", ":") for mark in "os^Dv"])
    for (name, points), (mark, dash) in zip(series(report).items(), styles, strict=False):
        rows = [point.rows for point in points]
        how = {"marker": mark, "linestyle": dash, "markersize": 5, "linewidth": 1.2}
        left.plot(rows, [point.median_us / 1000 for point in points], label=name, **how)
        right.plot(rows, [point.rows_per_second for point in points], label=name, **how)
    for axes, title, unit in ((left, "latency, median", "ms"), (right, "throughput", "rows/s")):
        axes.set(title=title, xlabel="rows in a batch", ylabel=unit, xscale="log", yscale="log")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.grid(True, which="major", linewidth=0.3)
    left.legend(fontsize=8)
    figure.suptitle(report.model)
    with atomic(path) as file:
        figure.savefig(file, format=path.suffix[1:], dpi=150)


def in_terminal(report: BenchReport) -> list[str]:
    """Bars of rows/s, on one scale."""
    most = max(point.rows_per_second for point in report.measured)
    lines = []
    for name, points in series(report).items():
        lines += [name, *(_bar(point, most) for point in points), ""]
    return lines


def _bar(point: Measured, most: float) -> str:
    eighths = round(point.rows_per_second / most * _WIDTH * 8)
    bar = "█" * (eighths // 8) + ("", *"▏▎▍▌▋▊▉")[eighths % 8]
    return f"{point.rows:>6}  {bar or '▏'} {point.rows_per_second:,.0f} rows/s"
