"""What it costs to be served without libtorch: the bundle is measured both ways, in turn, before it is checked.

Only a variant that calls operators is measured: all other code is the same both ways. It is the one that covers all;
those that tuning adds have to be faster than it, measured as the bundle is then served.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from ..aoti import plan
from ..aoti.compiler import CompileOptions, Staged
from ..bundle_format.errors import CompileError, HostError
from ..bundle_format.interface import operators, with_callers
from ..runner import native
from ..runner.bench import LEAST_ROUNDS, Point
from ..runner.stopwatch import Ask, Failed
from .selection import LEAST_NOISE, WINDOW, Duel, DuelError, Fixed, Progress, Watch, duel
from .tune import Bench

ALLOWED = 1.05  # times as long, where `--standalone=auto` is all that was said
SECONDS = 10.0
_SHOWN = 3

_MORE = "allow it with a larger `--standalone-slowdown`, or keep libtorch with `--standalone=auto`"


@dataclass(frozen=True, slots=True)
class Place:
    """How many times libtorch's time a call takes without it, at some sizes."""

    dims: dict[str, int]
    threads: int
    ratio: float
    slower: bool  # than allowed, by more than the noise

    def __str__(self) -> str:
        sizes = ", ".join(f"{name} {size}" for name, size in self.dims.items()) or "its only size"
        return f"{self.ratio:.3g} times as long at {sizes} ({self.threads} thread{'s' * (self.threads > 1)})"


def settle(staged: Staged, options: CompileOptions, threads: Sequence[int], progress: Progress) -> None:
    """Measures a standalone bundle, and notes what it costs. Where that is more than allowed, it is no longer
    standalone, with "auto"; CompileError, with "yes" and a limit.
    """
    called = operators(staged.stats.imports.torch)
    if not called:
        return
    limit, auto = options.standalone_slowdown, options.standalone == "auto"
    try:
        places, untried = _measured(staged, limit or ALLOWED, threads, progress)
    except (HostError, DuelError, Failed) as error:
        if limit is not None:
            raise CompileError(
                f"what it costs to do without libtorch cannot be measured: {error}", "leave `--standalone-slowdown` out"
            ) from error
        staged.note(f"standalone; its time beside that with libtorch was not measured: {error}")
        return
    names = ", ".join(with_callers(name, staged.stats.callers.get(name, ())) for name in called)
    standalone, text = decide(places, untried, limit, auto=auto, names=names)
    staged.manifest = msgspec.structs.replace(staged.manifest, standalone=standalone)
    progress(text)
    staged.note(text)


def decide(places: Sequence[Place], untried: int, limit: float | None, *, auto: bool, names: str) -> tuple[bool, str]:
    """Whether the bundle stays standalone, and what to say of it. `names`: the operators that it calls."""
    rest = f"; {untried} more were not measured within {SECONDS:g} s" if untried else ""
    slower = sorted((place for place in places if place.slower), key=lambda place: -place.ratio)
    if not slower:
        worst = max(places, key=lambda place: place.ratio)
        return True, f"standalone: without libtorch a call takes at most {worst}{rest}"
    shown = ", ".join(map(str, slower[:_SHOWN])) + (f" and at {len(slower) - _SHOWN} more" if slower[_SHOWN:] else "")
    text = f"without libtorch a call takes {shown}, allowed {limit or ALLOWED:g}; it calls {names}"
    if auto:
        return False, f"not standalone: {text}"
    if limit is not None:
        raise CompileError(text, _MORE)
    return True, f"standalone, but slower: {text}{rest}"


def _measured(staged: Staged, allowed: float, threads: Sequence[int], progress: Progress) -> tuple[list[Place], int]:
    runner, libtorch = native.find_runner(progress), native.find_libtorch()
    bench = Bench(staged.folder / "slowdown", runner, threads)
    bench.stage(staged, [staged.base])
    points = bench.points(plan.points(staged.manifest.contract, staged.manifest.buckets))
    with bench.watches(libtorch) as with_it, bench.watches() as without:
        return compare(
            points,
            staged.base.name,
            list(zip(with_it, without, strict=True)),
            allowed,
            lambda text: progress(f"with libtorch and without: {text}"),
        )


def compare(
    points: Sequence[Point],
    variant: str,
    ways: Sequence[tuple[Watch, Watch]],
    allowed: float,
    progress: Progress,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[list[Place], int]:
    """Every point, small ones first, and how many were left when the time was up; the first is always measured.

    `ways`: with libtorch and without, for each number of threads. Slower is what is so when it is measured again, too.
    """
    end = clock() + SECONDS
    noise = max(_apart(variant, points[0], watch, progress) for watch, _ in ways)
    todo = [(point, way) for point in points for way in ways]
    found: list[Place] = []
    for at, (point, (with_it, without)) in enumerate(todo):
        first, second = (_way(name, watch, variant, point) for name, watch in (("with", with_it), ("without", without)))
        if found and clock() + _least(first) > end:
            return found, len(todo) - at
        seen = _compared(first, second, progress)
        if slower := seen.lost(allowed, noise):
            seen = _compared(first, second, progress)
            slower = seen.lost(allowed, noise)
        found.append(Place(point.dims, with_it.threads, seen.slowdown, slower))
    return found, 0


def _way(name: str, watch: Watch, variant: str, point: Point) -> Fixed:
    """In turns that do not grow: of a slow model, one call each."""
    return Fixed(name, watch, variant, point, longest=WINDOW)


def _compared(first: Fixed, second: Fixed, progress: Progress) -> Duel:
    return duel(first, second, progress, attempts=1)


def _apart(variant: str, point: Point, watch: Watch, progress: Progress) -> float:
    """By how much equal things differ: the noise."""
    same = _compared(_way("one", watch, variant, point), _way("other", watch, variant, point), progress)
    return max(LEAST_NOISE, abs(same.ratio.middle - 1))


def _least(way: Fixed) -> float:
    """Seconds that comparing takes at least, by one call."""
    took = way.watch.time(Ask(str(way.point.tensors), way.point.dims, way.variant, 0.0, calls=1))
    return max(WINDOW, *(ns / 1e9 for ns in took)) * 2 * (LEAST_ROUNDS + 1)
