"""Measuring: who is compared is measured in turn, and a number counts once it stands still."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from pathlib import Path
from statistics import median
from typing import NamedTuple, Protocol

from .stopwatch import Ask, Failed

WINDOW = 0.1  # seconds, of one contestant's turn; longer where a few calls take longer
LEAST_CALLS = 3  # in a window
STILL = 3  # windows in a row whose medians have to lie within NOISE of each other
NOISE = 0.05
LEAST_ROUNDS, MOST_ROUNDS = 5, 15

Progress = Callable[[str], None]


class Contestant(Protocol):
    """A way to run the model. `time` gives ns for each call, or raises Failed."""

    @property
    def name(self) -> str: ...

    @property
    def threads(self) -> int: ...

    def time(self, ask: Ask) -> tuple[int, ...]: ...


class Point(NamedTuple):
    """Sizes to measure at, their rows, and the tensors for them."""

    dims: dict[str, int]
    rows: int
    tensors: Path
    variant: str  # that the runner takes at these sizes


class Ratio(NamedTuple):
    """Of two medians, over the last LEAST_ROUNDS rounds: the middle one, the smallest and the largest."""

    middle: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Measured:
    """One contestant at one point; microseconds."""

    name: str
    threads: int
    dims: dict[str, int]
    rows: int
    median_us: float
    p90_us: float
    p99_us: float
    calls: int
    spread: float  # of the windows that count: (largest - smallest) / smallest median
    ratio: Ratio | None  # its time over that of the first contestant with as many threads; None for that one
    variant: str = ""  # that ran, of a bundle

    @property
    def stable(self) -> bool:
        return self.spread <= NOISE

    @property
    def rows_per_second(self) -> float:
        return self.rows * 1e6 / self.median_us


@dataclass(slots=True)
class _Turns:
    """What one contestant did at one point, window by window."""

    contestant: Contestant
    windows: list[tuple[int, ...]]
    failed: str = ""

    @property
    def medians(self) -> list[float]:
        return [median(window) for window in self.windows]

    @property
    def spread(self) -> float:
        last = self.medians[-STILL:]
        return max(last) / min(last) - 1


def measure(
    contestants: Sequence[Contestant], point: Point, progress: Progress, window: float = WINDOW
) -> tuple[list[Measured], dict[str, str]]:
    """Every contestant at a point, and why those failed that did. The first of the same threads is what ratios are to.

    Rounds go on until the last windows of each stand still, or there were MOST_ROUNDS. `window`: seconds.
    """
    turns = [_Turns(contestant, []) for contestant in contestants]
    for round in range(-1, MOST_ROUNDS):  # the first one warms up
        alive = [turn for turn in turns if not turn.failed]
        for turn in alive[round % len(alive) :] + alive[: round % len(alive)] if alive else []:
            _take_turn(turn, point, window, warm_up=round < 0)
        if round + 1 >= LEAST_ROUNDS and all(turn.failed or turn.spread <= NOISE for turn in turns):
            break
        progress(f"{_sizes(point.dims)}, round {round + 2}")
    done = [turn for turn in turns if not turn.failed]
    return [_summary(turn, point, done) for turn in done], {t.contestant.name: t.failed for t in turns if t.failed}


def _take_turn(turn: _Turns, point: Point, window: float, *, warm_up: bool) -> None:
    slowest = median(turn.windows[-1]) * LEAST_CALLS / 1e9 if turn.windows else 0.0
    ask = Ask(str(point.tensors), point.dims, point.variant, max(window, slowest))
    try:
        taken = turn.contestant.time(ask)
    except Failed as failed:
        turn.failed = str(failed)
    else:
        turn.windows = turn.windows if warm_up else [*turn.windows, taken]


def _summary(turn: _Turns, point: Point, turns: Sequence[_Turns]) -> Measured:
    calls = sorted(ns for window in turn.windows[-STILL:] for ns in window)
    first = next(other for other in turns if other.contestant.threads == turn.contestant.threads)
    pairs = zip(turn.medians[-LEAST_ROUNDS:], first.medians[-LEAST_ROUNDS:], strict=True)
    ratios = sorted(mine / base for mine, base in pairs)
    return Measured(
        turn.contestant.name,
        turn.contestant.threads,
        point.dims,
        point.rows,
        median(calls) / 1e3,
        quantile(calls, 0.9) / 1e3,
        quantile(calls, 0.99) / 1e3,
        len(calls),
        turn.spread,
        None if turn is first else Ratio(median(ratios), ratios[0], ratios[-1]),
    )


def quantile(ascending: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed (nearest rank)."""
    return ascending[max(0, ceil(len(ascending) * share) - 1)]


def _sizes(dims: dict[str, int]) -> str:
    return ", ".join(f"{name} {size}" for name, size in dims.items()) or "the only size"


# --- the cost curve ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Curve:
    """latency(rows) = fixed_us + row_us * rows; `worst` is the largest share by which a measured point is off."""

    fixed_us: float
    row_us: float
    worst: float

    @property
    def rows_per_second(self) -> float:
        """What larger batches come near to: 1 / row_us."""
        return 1e6 / self.row_us if self.row_us > 0 else float("inf")

    def rows_for(self, share: float) -> float:
        """The batch that reaches this share of `rows_per_second`; at least 1."""
        return max(1.0, share / (1 - share) * self.fixed_us / self.row_us) if self.row_us > 0 else 1.0


def fit(points: Sequence[tuple[int, float]]) -> Curve | None:
    """Least squares of the relative error over (rows, us), both terms at least 0; None with fewer than two sizes."""
    if len({rows for rows, _ in points}) < 2:
        return None
    # minimise sum(((a + b n) / t - 1)^2): linear in a and b with weights 1 / t
    u, v = [1 / us for _, us in points], [rows / us for rows, us in points]
    uu, vv, uv = (sum(x * y for x, y in zip(p, q, strict=True)) for p, q in ((u, u), (v, v), (u, v)))
    su, sv = sum(u), sum(v)
    det = uu * vv - uv * uv
    fixed, row = (su * vv - sv * uv) / det, (sv * uu - su * uv) / det
    if fixed < 0:
        fixed, row = 0.0, sv / vv
    elif row < 0:
        fixed, row = su / uu, 0.0
    return Curve(fixed, row, max(abs((fixed + row * rows) / us - 1) for rows, us in points))


def largest_within(points: Sequence[tuple[int, float]], target_us: float) -> int | None:
    """The largest batch of which two in a row fit into the target: a request may find one running when it arrives."""
    return max((rows for rows, us in points if 2 * us <= target_us), default=None)


def better_from(mine: Sequence[tuple[int, float]], other: Sequence[tuple[int, float]]) -> int | None:
    """The batch from which on `other` gives more rows/s wherever both were measured; None: not at the largest."""
    known = dict(other)
    found = None
    for rows, us in sorted(mine, reverse=True):
        if rows in known:
            if known[rows] >= us:
                break
            found = rows
    return found


def padding_waste(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """(rows, share): what the smallest batch above each bucket costs, padded to the next, over its time unpadded.

    The time unpadded is taken from the line between the two buckets.
    """
    found = []
    for (low, before), (high, after) in pairwise(sorted(points)):
        if high > low + 1:
            unpadded = before + (after - before) / (high - low)
            found.append((low + 1, after / unpadded - 1))
    return found


# --- is the machine quiet? ---------------------------------------------------------------------------------------


class Machine:
    """What the machine did while we measured: `start` it before, `warnings` after."""

    def __init__(self) -> None:
        self.cores = len(os.sched_getaffinity(0))
        self._speed = _loop_ns()
        self._stolen, self._total = _stolen()

    def warnings(self) -> list[str]:
        """In words, what makes the numbers less worth."""
        found = []
        stolen, total = _stolen()
        if total > self._total and (share := (stolen - self._stolen) / (total - self._total)) > 0.01:
            found.append(f"the machine's host took {share:.0%} of the time for others")
        change = _loop_ns() / self._speed
        if not 1 / (1 + NOISE) <= change <= 1 + NOISE:
            found.append(f"the processor's speed changed during the run: a fixed loop takes {change:.2f} times as long")
        return found


def _loop_ns() -> int:
    """How long a fixed piece of work takes, at its best."""
    best = []
    for _ in range(7):
        begin = time.perf_counter_ns()
        sum(range(200_000))
        best.append(time.perf_counter_ns() - begin)
    return min(best)


def _stolen() -> tuple[int, int]:
    """Ticks that the hypervisor gave to others, and all ticks: https://docs.kernel.org/filesystems/proc.html#proc-stat."""
    fields = [int(number) for number in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    return fields[7] if len(fields) > 7 else 0, sum(fields[:8])
