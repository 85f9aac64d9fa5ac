"""Which variant runs where: they are measured in turn, in the runner's own call path, and the faster one is kept."""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf, prod
from typing import Protocol

from ..bundle_format.lookup import Lookup, covers
from ..bundle_format.manifest import Choice, Machine, Manifest, Measured, Timing, Tuning, Variant
from ..runner import bench as timing
from ..runner.bench import Point, Ratio
from ..runner.stopwatch import Ask

Progress = Callable[[str], None]
Place = tuple[int, int]  # the number of a point, and threads

LEAST_NOISE = 0.01
ATTEMPTS = 2  # at one duel, while the machine is disturbed
WINDOW = 0.03  # seconds of one turn: many short ones tell two apart sooner than few long ones


class Watch(Protocol):
    """Calls the variants of a bundle, as runner.stopwatch does."""

    @property
    def threads(self) -> int: ...

    def time(self, ask: Ask) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True)
class Fixed:
    """A variant at some sizes, as one of two that are compared."""

    name: str
    watch: Watch
    variant: str
    point: Point
    longest: float = inf  # seconds of a turn

    @property
    def threads(self) -> int:
        return self.watch.threads

    def time(self, ask: Ask) -> tuple[int, ...]:
        seconds = min(ask.seconds, self.longest)
        return self.watch.time(Ask(str(self.point.tensors), self.point.dims, self.variant, seconds))


@dataclass(frozen=True, slots=True)
class Duel:
    """Medians in ns of two that were measured in turn, and the ratio of the second to the first."""

    first_ns: float
    second_ns: float
    ratio: Ratio
    steady: bool

    def won(self, noise: float) -> bool:
        """Whether the second is faster by more than the noise; where the machine was disturbed, in every round."""
        return (self.ratio.middle if self.steady else self.ratio.high) < 1 - noise

    @property
    def slowdown(self) -> float:
        """How many times as long the second takes at least."""
        return self.ratio.middle if self.steady else self.ratio.low

    def lost(self, allowed: float, noise: float) -> bool:
        """Whether it takes more than `allowed` times as long, by more than the noise."""
        return self.slowdown > allowed * (1 + noise)


class DuelError(Exception):
    """One of the two cannot be measured; the message says why."""


def duel(
    first: Fixed,
    second: Fixed,
    progress: Progress,
    quiet: Callable[[], timing.Machine] = timing.Machine,
    *,
    attempts: int = ATTEMPTS,
) -> Duel:
    """Measures two in turn, again where something else disturbed them."""
    found = None
    for _ in range(attempts):
        machine = quiet()
        measured, failed = timing.measure([first, second], second.point, progress, WINDOW)
        if failed:
            raise DuelError("; ".join(failed.values()))
        one, two = measured
        assert two.ratio is not None
        steady = one.stable and two.stable and not machine.warnings()
        found = Duel(one.median_us * 1e3, two.median_us * 1e3, two.ratio, steady)
        if steady:
            break
    assert found is not None
    return found


@dataclass(slots=True)
class Selection:
    """What was measured so far. `base` covers all and is measured everywhere."""

    points: Sequence[Point]
    threads: Sequence[int]
    base: str
    noise: float = LEAST_NOISE
    timings: dict[Place, dict[str, float]] = field(default_factory=dict)  # ns by variant
    best: dict[Place, str] = field(default_factory=dict)
    unpadded: set[Place] = field(default_factory=set)

    def begin(self, watches: Iterable[Watch], progress: Progress) -> None:
        """The base against itself, everywhere: how long it takes, and by how much equal things differ."""
        apart = []
        for place, point, watch in self._places(watches):
            found = duel(Fixed("first", watch, self.base, point), Fixed("second", watch, self.base, point), progress)
            self.timings[place] = {self.base: min(found.first_ns, found.second_ns)}
            self.best[place] = self.base
            apart.append(abs(found.ratio.middle - 1))
        self.noise = max(LEAST_NOISE, timing.quantile(sorted(apart), 0.9))

    def consider(self, variant: Variant, watches: Iterable[Watch], progress: Progress) -> int:
        """Measures a variant against the best so far, where it covers and has the threads that it is compiled for.

        At how many places it is the best now.
        """
        won = 0
        for place, point, watch in self._places(watches):
            if not covers(variant, point.dims) or variant.threads > watch.threads:
                continue
            first = Fixed("first", watch, self.best[place], point)
            found = duel(first, Fixed("second", watch, variant.name, point), progress)
            known = self.timings[place]
            # on the scale of what was measured before: the machine's speed drifts
            known[variant.name] = known[self.best[place]] * found.ratio.middle
            if found.won(self.noise):
                self.best[place] = variant.name
                won += 1
        return won

    @property
    def begun(self) -> bool:
        """Whether the base was measured everywhere."""
        return len(self.best) == len(self.points) * len(self.threads)

    def restrict(self, names: Collection[str]) -> None:
        """Only these variants are left, the base among them; where the best one is not, the next is."""
        for place, known in self.timings.items():
            left = {name: ns for name, ns in known.items() if name in names}
            self.timings[place] = left
            if self.best[place] not in left:
                self.best[place] = min(left, key=lambda name: left[name])

    @property
    def kept(self) -> set[str]:
        """The variants that are the best somewhere, and the base."""
        return {self.base, *self.best.values()}

    def gain(self, variant: str) -> float:
        """By how much the places would be slower without it: the sum of their relative increases."""
        total = 0.0
        for place, best in self.best.items():
            if best == variant:
                known = self.timings[place]
                total += min(ns for name, ns in known.items() if name != variant) / known[variant] - 1
        return total

    def tuning(self, machine: Machine) -> Tuning:
        """As the manifest holds it."""
        order = sorted(self.best, key=lambda place: (place[1], prod(self.points[place[0]].dims.values())))
        return Tuning(
            machine=machine,
            noise=round(self.noise, 4),
            choices=tuple(
                Choice(
                    dims=self.points[at].dims,
                    threads=threads,
                    variant=self.best[at, threads],
                    pad=(at, threads) not in self.unpadded,
                )
                for at, threads in order
            ),
            timings=tuple(
                Timing(dims=self.points[at].dims, threads=threads, variant=name, median_ns=round(ns))
                for at, threads in order
                for name, ns in sorted(self.timings[at, threads].items())
                if name in self.kept
            ),
            threads=self._best_threads(),
        )

    def curve(self) -> tuple[Measured, ...]:
        """What the chosen variants take."""
        return tuple(
            Measured(dims=self.points[at].dims, threads=threads, median_us=round(self.timings[at, threads][best] / 1e3))
            for (at, threads), best in sorted(self.best.items())
        )

    def compare_padding(
        self,
        manifest: Manifest,
        between: Mapping[int, Point],
        watches: Sequence[Watch],
        progress: Progress,
    ) -> None:
        """`between`: for the number of a point, sizes halfway between the bucket before it and it. Are these faster as
        they are, on the variant that would run them, than padded to the point?
        """
        for place, point, watch in self._places(watches):
            if place[0] not in between:
                continue
            loose = between[place[0]]
            variant = Lookup(manifest, watch.threads).variant(loose.dims)
            assert variant is not None
            padded = Fixed("first", watch, self.best[place], point)
            if duel(padded, Fixed("second", watch, variant.name, loose), progress).won(self.noise):
                self.unpadded.add(place)

    def _best_threads(self) -> int:
        """The number that is fastest at the largest sizes; the smaller one of equals."""
        last = len(self.points) - 1
        best = self.threads[0]
        for threads in sorted(self.threads):
            taken, least = (self.timings[last, n][self.best[last, n]] for n in (threads, best))
            if taken < least * (1 - self.noise):
                best = threads
        return best

    def _places(self, watches: Iterable[Watch]) -> list[tuple[Place, Point, Watch]]:
        return [((at, watch.threads), point, watch) for watch in watches for at, point in enumerate(self.points)]


class Budget:
    """Seconds that tuning may take, and those that it took so far."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begin = clock()
        self._seconds = seconds
        self._longest = 0.0

    @property
    def spent(self) -> float:
        return self._clock() - self._begin

    def allows(self) -> bool:
        """Whether there is time for one more: as long as the longest so far."""
        return self.spent + self._longest < self._seconds

    @contextmanager
    def timed(self) -> Iterator[None]:
        """One of those, unless it fails."""
        begin = self.spent
        yield
        self._longest = max(self._longest, self.spent - begin)
