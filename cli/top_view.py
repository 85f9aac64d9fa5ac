"""How `mctl top` looks: a snapshot as a picture for a terminal of any width."""

from collections.abc import Iterable

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..bundle_format.errors import ServeError
from ..runner.telemetry import Overview, Snapshot, Times

BAR = 16  # characters
LAST_BOUND = 10.0  # seconds: longer times are known as longer only
TROUBLE = ("rejected", "expired", "error")


def view(found: Snapshot | Overview, url: str) -> RenderableType:
    """The whole picture."""
    if isinstance(found, Overview):
        return _overview(found, url)
    below = [table for table in (_batch_sizes(found), _compute(found)) if table.row_count]
    return Group(_title(found, url), "", _figures(found), *([""] if below else []), Columns(below, padding=(0, 4)))


def away(error: ServeError, last: Snapshot | Overview, url: str) -> RenderableType:
    """No reading: why, and what was seen last."""
    why = Text(f"away: {error.message}; trying again. The last reading was:", style="bold red")
    return Group(why, "", view(last, url))


def _overview(found: Overview, url: str) -> RenderableType:
    title = Text.assemble(f"{len(found.models)} versions at {url}  ", _state(found))
    title.append(f"\nup {duration(found.uptime)}, {_processes(found)}", style="dim")
    table = Table(box=None, padding=(0, 1), header_style="bold", pad_edge=False)
    for name in ("model", "version", "", "ok/s", "failed/s", "p50", "p99", "queue", "batches/s", "rows", "workers"):
        table.add_column(name, justify="left" if name in ("model", "version", "") else "right")
    for one in sorted(found.models, key=lambda one: one.model):
        table.add_row(*_row(one))
    return Group(title, "", table)


def _row(one: Snapshot) -> tuple[RenderableType, ...]:
    failed = sum(one.requests.get(code, 0.0) for code in TROUBLE)
    return (
        one.model,
        one.version,
        Text("ready", style="green") if one.ready else Text("not ready", style="bold red"),
        rate(one.requests.get("ok", 0.0)),
        Text(rate(failed), style="bold red" if failed else "dim"),
        seconds(one.latency.p50),
        seconds(one.latency.p99),
        f"{one.queue_rows:,}",
        rate(one.batches),
        "-" if one.mean_rows is None else f"{one.mean_rows:.3g}",
        str(one.workers.get("live", 0)),
    )


def _state(found: Snapshot | Overview) -> tuple[str, str]:
    why = f": {found.why_not}" if found.why_not else ""
    return ("ready", "bold green") if found.ready else (f"not ready{why}", "bold red")


def _processes(found: Snapshot | Overview) -> str:
    return f"{found.memory / 2**20:,.0f} MiB, {found.cpu:.2f} cores"


def _title(found: Snapshot, url: str) -> Text:
    period = f"since its start, {duration(found.uptime)}" if found.since_start else f"the last {found.seconds:.1f} s"
    title = Text.assemble((found.model, "bold"), f" version {found.version} at {url}  ", _state(found))
    title.append(f"\n{found.digest[:12]}, torch {found.torch}, {found.target}, up {duration(found.uptime)}")
    title.append(f"\n{period}:", style="dim")
    return title


def _figures(found: Snapshot) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, text in _lines(found):
        table.add_row(name, text)
    return table


def _lines(found: Snapshot) -> Iterable[tuple[str, Text]]:
    yield "requests/s", _requests(found)
    yield "latency", _percentiles(found.latency)
    yield "queue time", _percentiles(found.queue)
    waiting = f"queue rows {found.queue_rows} of {found.queue_capacity}   inflight batches {found.inflight_batches}"
    yield "now", Text(waiting)
    if found.mean_rows is not None and found.pad_waste is not None:
        reasons = ", ".join(f"{reason} {share:.0%}" for reason, share in found.batch_reasons.items())
        text = f"{rate(found.batches)}/s, {found.mean_rows:.3g} rows a batch, {found.pad_waste:.1%} padding; {reasons}"
        yield "batches", Text(text)
    if found.stages:
        parts = {name: getattr(found.stages, name) for name in found.stages.__struct_fields__}
        yield "stages", Text("   ".join(f"{name} {seconds(value)}" for name, value in parts.items()))
    restarts = {reason: count for reason, count in found.restarts.items() if count}
    text = ", ".join(f"{count} {state}" for state, count in found.workers.items())
    told = " and ".join(f"{count} after {reason}" for reason, count in restarts.items())
    yield "workers", Text.assemble(text, f"; restarts: {told or 'none'}")
    yield "processes", Text(_processes(found))


def _requests(found: Snapshot) -> Text:
    text = Text()
    for code, value in found.requests.items():
        style = "bold red" if value and code in TROUBLE else "" if value else "dim"
        text.append(f"{code} {rate(value)}", style=style).append("  ")
    text.rstrip()
    return text


def _percentiles(times: Times) -> Text:
    if not times.count:
        return Text("no requests", style="dim")
    parts = {"p50": times.p50, "p90": times.p90, "p99": times.p99, "mean": times.mean}
    return Text("   ".join(f"{name} {seconds(value)}" for name, value in parts.items()))


def _batch_sizes(found: Snapshot) -> Table:
    table = Table("rows", "batches", "share", "", box=None, padding=(0, 1), header_style="bold", pad_edge=False)
    for column in table.columns[:3]:
        column.justify = "right"
    below = 0
    for size in found.batch_sizes:
        most = f">{below}" if size.at_most is None else str(size.at_most)
        table.add_row(most, f"{size.batches:,}", f"{size.share:.1%}", "█" * round(BAR * size.share) or "▏")
        below = size.at_most or below
    return table


def _compute(found: Snapshot) -> Table:
    table = Table(
        "bucket", "batches", "mean", "p50", "p99", box=None, padding=(0, 1), header_style="bold", pad_edge=False
    )
    for column in table.columns[1:]:
        column.justify = "right"
    for bucket, times in found.compute.items():
        table.add_row(bucket, f"{times.count:,}", seconds(times.mean), seconds(times.p50), seconds(times.p99))
    return table


def rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 99.5 else f"{value:.3g}"


def seconds(value: float | None) -> str:
    if value is None:
        return "-"
    if value >= LAST_BOUND:
        return f">{LAST_BOUND:.0f} s"
    unit, name = next(((u, n) for u, n in ((1e-6, "us"), (1e-3, "ms")) if value < 1000 * u), (1.0, "s"))
    return f"{value / unit:.3g} {name}"


def duration(value: float) -> str:
    minutes, rest = divmod(int(value), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [(days, "d"), (hours, "h"), (minutes, "min"), (rest, "s")]
    told = [f"{count} {unit}" for count, unit in parts if count] or ["0 s"]
    return " ".join(told[:2])
