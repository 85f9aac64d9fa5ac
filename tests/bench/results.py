"""What a benchmark run found, and its tables."""

from collections.abc import Callable, Iterable, Sequence
from statistics import median

import msgspec
from measure import Batches, Memory, Speed


class Point(msgspec.Struct, frozen=True):
    """One server at one number of connections in one round."""

    server: str
    connections: int
    round: int
    speed: Speed
    batches: Batches | None


class Bare(msgspec.Struct, frozen=True):
    """The compiled model by itself in one round."""

    rows_per_second: dict[int, float]  # by batch size
    batch_1_us: float

    @property
    def best(self) -> float:
        return max(self.rows_per_second.values())


class Results(msgspec.Struct):
    """Of one model."""

    model: str
    points: list[Point] = []
    bare: list[Bare] = []  # by round
    memory: dict[str, list[Memory]] = {}
    left_out: dict[str, str] = {}  # server -> why

    def of(self, server: str, connections: int) -> list[Point]:
        """By round."""
        found = [p for p in self.points if p.server == server and p.connections == connections]
        return sorted(found, key=lambda point: point.round)

    @property
    def servers(self) -> list[str]:
        return list(dict.fromkeys(point.server for point in self.points))

    @property
    def connections(self) -> list[int]:
        return sorted({point.connections for point in self.points})


def spread(values: Iterable[float], form: str = "{:,.0f}") -> str:
    """`median (smallest to largest)`."""
    numbers = list(values)
    if not numbers:
        return "-"
    middle = form.format(median(numbers))
    return middle if len(numbers) == 1 else f"{middle} ({form.format(min(numbers))} to {form.format(max(numbers))})"


def tables(results: Results) -> str:
    """All tables of a model as Markdown."""
    parts = [f"## {results.model}"]
    for connections in results.connections:
        rows = [_speed_row(results, server, connections) for server in results.servers]
        heads = ["server", "requests/s", "mctl / it", "p50 us", "p99 us", "refused", "lost"]
        parts += [f"### {connections} connection{'s' if connections > 1 else ''}", _table(heads, rows)]
    parts += [
        "### What the batcher did",
        _table(["server", "connections", "mean rows", "padded", "queue us"], _batch_rows(results)),
    ]
    parts += ["### Memory, MiB", _table(["server", "processes", "resident", "proportional"], _memory_rows(results))]
    if results.bare:
        sizes = results.bare[0].rows_per_second
        rows = [[str(size), spread(bare.rows_per_second[size] for bare in results.bare)] for size in sizes]
        parts += ["### The compiled model in a process of its own", _table(["batch", "rows/s"], rows)]
    if results.left_out:
        parts.append("Left out: " + "; ".join(f"{server} ({why})" for server, why in results.left_out.items()))
    parts += ["### Goals", _table(["goal", "measured", "allowed", ""], _goals(results))]
    return "\n\n".join(parts)


def _speed_row(results: Results, server: str, connections: int) -> list[str]:
    points, own = results.of(server, connections), results.of("mctl", connections)
    speeds = [point.speed for point in points]
    return [
        server,
        spread(speed.rate for speed in speeds),
        spread(_ratios(own, points, lambda speed: speed.rate), "{:.2f}"),
        spread(speed.p50_us for speed in speeds),
        spread(speed.p99_us for speed in speeds),
        str(sum(speed.refused for speed in speeds)),
        str(sum(speed.lost for speed in speeds)),
    ]


def _ratios(above: Sequence[Point], below: Sequence[Point], value: Callable[[Speed], float]) -> list[float]:
    """Round by round, so that what slows the whole machine does not count."""
    by_round = {point.round: value(point.speed) for point in below}
    return [value(p.speed) / by_round[p.round] for p in above if by_round.get(p.round)]


def _batch_rows(results: Results) -> list[list[str]]:
    rows = []
    for server in results.servers:
        for connections in results.connections:
            found = [point.batches for point in results.of(server, connections) if point.batches]
            if found:
                means = [spread((b.mean_rows for b in found), "{:.1f}"), spread((b.pad_waste for b in found), "{:.0%}")]
                rows.append([server, str(connections), *means, spread(b.queue_us for b in found)])
    return rows


def _memory_rows(results: Results) -> list[list[str]]:
    return [
        [server, str(many[0].processes), spread(m.resident for m in many), spread(m.proportional for m in many)]
        for server, many in results.memory.items()
    ]


def _goals(results: Results) -> list[list[str]]:
    """Those for which everything was measured."""
    rows = []
    own, null, one = results.of("mctl", 1), results.of("mctl null", 1), [bare.batch_1_us for bare in results.bare]
    if own and null and one:
        allowed = 2 * median(p.speed.p50_us for p in null) + median(one)
        rows.append(_goal("p50 at 1 connection, us", median(p.speed.p50_us for p in own), allowed, "at most"))
    at_64 = results.of("mctl", 64)
    if not at_64:
        return rows
    if results.model == "minilm":
        share = median(p.speed.rate / results.bare[p.round].best for p in at_64)
        return [*rows, _goal("64 connections: share of the bare model's rows/s", share, 0.95, "at least")]
    rows += _ratio_goal("64 connections: share of the null mode", at_64, results.of("mctl null", 64), 0.5)
    peers = [s for s in results.servers if not s.startswith("mctl") and results.of(s, 64)]
    if peers:
        best = max(peers, key=lambda server: median(p.speed.rate for p in results.of(server, 64)))
        rows += _ratio_goal(f"64 connections: times the best peer, {best}", at_64, results.of(best, 64), 8)
    if text := _ratios(at_64, results.of("mctl JSON", 64), _rate):
        rows.append(_goal("64 connections: time of JSON / binary", median(text), 3, "at most"))
    return rows


def _rate(speed: Speed) -> float:
    return speed.rate


def _ratio_goal(name: str, above: Sequence[Point], below: Sequence[Point], least: float) -> list[list[str]]:
    ratios = _ratios(above, below, _rate)
    return [_goal(name, median(ratios), least, "at least")] if ratios else []


def _goal(name: str, measured: float, limit: float, kind: str) -> list[str]:
    met = measured <= limit if kind == "at most" else measured >= limit
    return [name, f"{measured:.2f}", f"{kind} {limit:.2f}", "met" if met else "MISSED"]


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown that is also aligned."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    lines = [heads, ["-" * width for width in widths], *rows]
    return "\n".join("| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in lines)
