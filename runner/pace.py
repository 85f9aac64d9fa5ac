"""What a batcher learns as it runs: what batches cost, how large they may be, and when an arrival would be answered.

The rules go on from those of policy.py; runner/cpp/engine/pace.cc follows them too, by the same vectors. Everything is
an integer, microseconds or rows, and divisions round down.

9.  Cost: what a batch takes, by its kind (the sizes of the dims that are not the batch's) and its padded rows. The
    first measurement m sets eight times the cost to 8 * m, every other one adds m - cost to it. A seed counts as the
    first. A size that has none costs what the largest smaller one does that has, or nothing.
10. Work: what waits of a key costs as many batches of `limit` rows as it fills and one of the rest. It is reckoned when
    rows of the key come or go, and for all keys when the limit changes.
11. Estimate: an arrival's last batch begins when instances that are free after f1 <= f2 <= … have done the work ahead
    of it, that of other keys and of its own key's full batches before it: after the least of
    (work + f1 + … + fk) // k. It costs what its rows do with those of its key that share it or, since others may join,
    what the kind's last batch would at the present limit, if that is more. How long something waits for company is
    left out.
12. Admission: an arrival that would be answered when its time is over, or later, is refused, unless its first batch
    may begin at once. Its time is over at its deadline or, with a latency target and no timeout of its own, after 7/8
    of the target, if that is earlier: an eighth is left for what the estimate can't know. It keeps its deadline.
13. A request is late by the limit's fault if its own batch and its wait, of which no more counts than the batch ahead
    of it took, exceed the target, and would not have if both batches had cost what the smallest size does. To wait
    behind more than one batch is the load's fault, and smaller batches would make it worse; what no limit would have
    mended is not the limit's. An arrival refused by the target is late by the limit's fault if two batches at the limit
    take longer than 7/8 of the target, and two of the smallest size don't.
14. Limit: the largest allowed size up to an adaptive value, never below the smallest size; without a latency target it
    is that of rule 1. Requests count for it whose own batch and the one ahead were formed since it last changed. The
    eleventh late one of a window, 1000 // (100 - percentile) requests long, ends it and lowers the value to 9/10 of the
    limit. A window that ends well raises the value by 1/16 of max_batch_size (at least 1 row) if at least half of its
    requests ran in full batches and nothing is owed: each late request that was answered, counted for a window or not,
    owes `percentile` and each other one pays 100 - percentile back, so that trying larger limits keeps within the
    percentile. No more is owed than for one of the largest batches.
15. The value begins as the largest allowed size of which two batches take no longer than 7/8 of the target, by the
    seeds of the kind that costs least; without seeds at its maximum.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .policy import Settings

LATE_OF_A_WINDOW = 10
Size = tuple[str, int]  # kind and padded rows


@dataclass(frozen=True, slots=True)
class Estimate:
    """Of an arrival, from now on: when its first batch would begin, and when its last one would be done."""

    wait_us: int
    done_us: int

    def too_late(self, time_us: int) -> bool:
        """Whether an arrival that has this time is refused (rule 12)."""
        return self.wait_us > 0 and self.done_us >= time_us


@dataclass(frozen=True, slots=True)
class Formed:
    """A batch as far as the pace counts it: `era` tells between which changes of the limit it was formed."""

    kind: str
    padded: int
    full: bool
    era: int


@dataclass(slots=True)
class _Waiting:
    kind: str
    rows: int = 0
    work_us: int = 0


class Pace:
    """The limit in effect and what it follows from. Whoever batches tells it what comes, goes and ran."""

    def __init__(self, settings: Settings, seeds: Mapping[Size, int] | None = None) -> None:
        self.era = 0
        self.rows = 0  # that wait
        self.work_us = 0  # that waits
        self._settings = settings
        self._smallest = min((*settings.allowed_batch_sizes[:1], settings.limit)) if settings.allowed_batch_sizes else 1
        self._cost8: dict[str, dict[int, int]] = {}
        self._last: dict[str, int] = {}  # padded rows of the kind's last batch
        self._waiting: dict[str, _Waiting] = {}
        self._value = settings.limit
        self._seen = self._late = self._full = self._owed = 0
        self.limit = settings.limit
        self.seed(seeds or {})

    @property
    def bound_us(self) -> int | None:
        """How long an arrival without a timeout of its own may take by the estimate (rule 12)."""
        target = self._settings.latency_target_us
        return None if target is None else target * 7 // 8

    # --- costs ---------------------------------------------------------------------------------------------------

    def seed(self, costs: Mapping[Size, int]) -> None:
        """Costs from elsewhere, for sizes that have none yet; what the limit begins with follows from them."""
        for (kind, padded), cost_us in costs.items():
            self._cost8.setdefault(kind, {}).setdefault(padded, 8 * cost_us)
        bound, allowed = self.bound_us, self._settings.allowed_batch_sizes
        if bound is None or not costs or self.era or self._seen:
            return
        sizes = {
            self._effective(size) for size in (*(allowed or [padded for _, padded in costs]), self._settings.limit)
        }
        kept = [size for size in sizes if any(2 * self.cost(kind, size) <= bound for kind in self._cost8)]
        self._change(max(kept, default=self._smallest))

    def cost(self, kind: str, rows: int) -> int:
        """Of a batch of `rows`, after padding (rule 9)."""
        known = self._cost8.get(kind, {})
        padded = self._settings.padded(rows)
        nearest = padded if padded in known else max((size for size in known if size < padded), default=None)
        return 0 if nearest is None else known[nearest] // 8

    def _learn(self, batch: Formed, took_us: int) -> None:
        known = self._cost8.setdefault(batch.kind, {})
        if batch.padded in known:
            known[batch.padded] += took_us - known[batch.padded] // 8
        else:
            known[batch.padded] = 8 * took_us
        self._last[batch.kind] = batch.padded

    # --- what waits ----------------------------------------------------------------------------------------------

    def joined(self, key: str, kind: str, rows: int) -> None:
        """Rows of a key queue."""
        self._count(self._waiting.setdefault(key, _Waiting(kind)), rows)

    def left(self, key: str, rows: int) -> None:
        """They are taken out of the queue, to run or not."""
        waiting = self._waiting[key]
        self._count(waiting, -rows)
        if waiting.rows == 0:
            del self._waiting[key]

    def _count(self, waiting: _Waiting, rows: int) -> None:
        self.rows += rows
        waiting.rows += rows
        self._reckon(waiting)

    def _reckon(self, waiting: _Waiting) -> None:
        whole, rest = divmod(waiting.rows, self.limit)
        work = whole * self.cost(waiting.kind, self.limit) if whole else 0
        work += self.cost(waiting.kind, rest) if rest else 0
        self.work_us += work - waiting.work_us
        waiting.work_us = work

    # --- arrivals ------------------------------------------------------------------------------------------------

    def estimate(
        self, key: str, kind: str, rows: int, free_after_us: Sequence[int], *, first: bool = False
    ) -> Estimate:
        """`free_after_us`: how long each live instance still has to run (rule 11); `first`: it is before all that waits
        (rule 18)."""
        waiting = _Waiting(kind) if first else self._waiting.get(key, _Waiting(kind))
        others, full = 0 if first else self.work_us - waiting.work_us, self.cost(kind, self.limit)
        ahead, before_last = waiting.rows // self.limit, (waiting.rows + rows - 1) // self.limit
        own = waiting.rows + rows - before_last * self.limit
        cost = max(self.cost(kind, own), self.cost(kind, min(self._last.get(kind, 0), self.limit)))
        wait_us = begin(free_after_us, others + ahead * full)
        return Estimate(wait_us, begin(free_after_us, others + before_last * full) + cost)

    def wait_us(self, free_after_us: Sequence[int]) -> int:
        """How long a batch would wait that is formed after all that waits."""
        return begin(free_after_us, self.work_us)

    def time_us(self, timeout_us: int, stated: bool) -> int:
        """An arrival's time (rule 12). `stated`: the timeout is its own, not the default."""
        bound = self.bound_us
        return timeout_us if stated or bound is None else min(timeout_us, bound)

    def refused(self, kind: str, stated: bool) -> None:
        """An arrival was refused by the estimate."""
        bound = self.bound_us
        if bound is None or stated:
            return
        if 2 * self.cost(kind, self.limit) > bound >= 2 * self.cost(kind, self._smallest):
            self._record(1, 1, False)

    # --- batches -------------------------------------------------------------------------------------------------

    def formed(self, kind: str, rows: int, full: bool) -> Formed:
        """What to keep of a batch that starts, until it is done."""
        return Formed(kind, self._settings.padded(rows), full, self.era)

    def finished(
        self, batch: Formed, took_us: int, waits_us: Sequence[int], ahead: tuple[Formed, int] | None = None
    ) -> None:
        """`waits_us`: of its requests; `ahead`: the batch that the same instance ran before, and what that took."""
        late = self._late_of(batch, took_us, waits_us, ahead)
        self._learn(batch, took_us)
        if self._settings.latency_target_us is None:
            return
        self._owe(len(waits_us), late)
        if batch.era == self.era and (ahead is None or ahead[0].era == self.era):
            self._record(len(waits_us), late, batch.full)

    def _late_of(self, batch: Formed, took_us: int, waits_us: Sequence[int], ahead: tuple[Formed, int] | None) -> int:
        target = self._settings.latency_target_us
        if target is None:
            return 0
        before, before_us = ahead or (batch, 0)
        spare, spare_before = self._spare(batch), self._spare(before)
        late = 0
        for wait in waits_us:
            waited = min(wait, before_us)
            late += waited + took_us > target >= max(0, waited - spare_before) + took_us - spare
        return late

    def _spare(self, batch: Formed) -> int:
        """How much less a batch would have cost at the smallest size."""
        return max(0, self.cost(batch.kind, batch.padded) - self.cost(batch.kind, self._smallest))

    # --- the limit -----------------------------------------------------------------------------------------------

    def _record(self, requests: int, late: int, full: bool) -> None:
        """Requests count for the window."""
        self._seen += requests
        self._late += late
        self._full += requests if full else 0
        if self._late > LATE_OF_A_WINDOW:
            self._change(max(self._smallest, self.limit * 9 // 10))
        elif self._seen >= 1000 // (100 - self._settings.percentile):
            grows = 2 * self._full >= self._seen and self._owed == 0
            self._change(self._value + max(1, self._settings.limit // 16) if grows else self._value)

    def _owe(self, requests: int, late: int) -> None:
        percentile = self._settings.percentile
        owed = self._owed + late * percentile - (requests - late) * (100 - percentile)
        self._owed = max(0, min(owed, self._settings.limit * percentile))

    def _change(self, value: int) -> None:
        """A window ends."""
        self._seen = self._late = self._full = 0
        self._value = value
        limit = self._effective(value)
        if limit == self.limit:
            return
        self.limit = limit
        self.era += 1
        for waiting in self._waiting.values():
            self._reckon(waiting)

    def _effective(self, value: int) -> int:
        if value >= self._settings.limit or not self._settings.allowed_batch_sizes:
            return min(value, self._settings.limit)
        return max((size for size in self._settings.allowed_batch_sizes if size <= value), default=self._smallest)


def begin(free_after_us: Sequence[int], work_us: int) -> int:
    """When instances that are free after these times have done `work_us` and one of them takes the next batch."""
    total, least = work_us, None
    for count, free in enumerate(sorted(free_after_us), 1):
        total += free
        least = total // count if least is None else min(least, total // count)
    return least or 0
