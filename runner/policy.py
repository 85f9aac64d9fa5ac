"""The batching policy, a pure function of settings, queue and clock; and a simulator that runs it over a trace.

The rules, which runner/cpp/batcher.cc follows too (tests/vectors/batching/*.json runs both). Times are integer
microseconds on one clock; everything counts rows.

1.  `limit`, the most rows of a batch, is max_batch_size, or the last of allowed_batch_sizes if that is smaller. A batch
    is padded up to the first allowed size that holds it; without allowed sizes it is not padded.
2.  An arrival of more rows than `limit` is split into chunks of `limit` rows and a rest, which queue next to each other
    as requests of their own with the arrival's key, time and deadline. It is answered when its last chunk is.
3.  A request has expired when `deadline <= now`. Expired ones leave the queue before anything else is looked at; they
    never reach the model. An answer that comes at or after the deadline counts as expired too.
4.  An arrival is refused at once if the rows that wait plus all its own are more than max_queue_size, or if the queue
    drains. Rows that run don't count.
5.  A key's candidate batch: its requests in order of arrival, from the oldest, up to `limit` rows. It ends at the first
    that does not fit: later and smaller ones don't overtake. It is full if it has `limit` rows or such a one exists.
6.  While an instance is free, the first rule that holds starts a key's candidate, and names the reason:
    `full`; `drain` (the queue drains); `idle` (max_queue_delay is 0); `delay` (its oldest request arrived
    max_queue_delay ago, or longer). If several keys may start, the one with the oldest request does (the one that
    queued first, of equal arrivals). A younger key's full batch does not wait for an older key's delay.
7.  Otherwise sleep until the next arrival or completion, the end of a key's delay (only if an instance is free), or the
    next deadline, whichever is first.
8.  At one moment: expired requests leave, then draining begins, then arrivals queue in order, then completions free
    their instances, then batches start.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from ..bundle_format.errors import UsageError

Reason = Literal["full", "drain", "idle", "delay"]
Status = Literal["ok", "rejected", "expired"]


@dataclass(frozen=True, slots=True)
class Settings:
    """What the user may set; UsageError if it makes no sense."""

    max_batch_size: int  # rows
    max_queue_size: int  # rows
    max_queue_delay_us: int = 0
    allowed_batch_sizes: tuple[int, ...] = ()  # ascending; empty: a batch is not padded
    default_timeout_us: int = 30_000_000

    def __post_init__(self) -> None:
        for name, least in (("max_batch_size", 1), ("max_queue_size", 1), ("max_queue_delay_us", 0)):
            if getattr(self, name) < least:
                raise UsageError(f"`{name}` is {getattr(self, name)}, allowed {least} or more")
        if self.default_timeout_us < 1:
            raise UsageError("the default timeout is not positive")
        sizes = self.allowed_batch_sizes
        if list(sizes) != sorted(set(sizes)) or any(s < 1 for s in sizes):
            raise UsageError(f"the allowed batch sizes are not ascending: {', '.join(map(str, sizes))}")

    @property
    def limit(self) -> int:
        """The most rows of a batch, before padding."""
        return min((self.max_batch_size, *self.allowed_batch_sizes[-1:]))

    def padded(self, rows: int) -> int:
        """Rows of a batch after padding."""
        return next((size for size in self.allowed_batch_sizes if size >= rows), rows)

    def chunks(self, rows: int) -> tuple[int, ...]:
        """The rows of the requests that an arrival becomes."""
        whole, rest = divmod(rows, self.limit)
        return (self.limit,) * whole + ((rest,) if rest else ())

    def admits(self, waiting: int, rows: int) -> bool:
        """Whether an arrival may queue behind `waiting` rows."""
        return waiting + rows <= self.max_queue_size


@dataclass(frozen=True, slots=True)
class Request:
    """One entry of the queue: rows that stay together. `key` is the bucket of the dims that are not the batch's."""

    id: int
    arrival_us: int
    deadline_us: int
    rows: int
    key: str


R = TypeVar("R", bound=Request)


@dataclass(frozen=True, slots=True)
class Batch(Generic[R]):
    """What an instance runs next."""

    requests: tuple[R, ...]
    rows: int
    padded: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class Decision(Generic[R]):
    """Requests that leave the queue unserved; then a batch to start now, or when to look again (None: when told)."""

    expired: tuple[R, ...]
    batch: Batch[R] | None
    wake_us: int | None


def decide(settings: Settings, queue: Sequence[R], now_us: int, free: int, draining: bool = False) -> Decision[R]:
    """The next thing to do with `queue`, which is in order of arrival, and `free` instances that have nothing to do."""
    expired = tuple(r for r in queue if r.deadline_us <= now_us)
    alive = [r for r in queue if r.deadline_us > now_us] if expired else queue
    wakes = [min(r.deadline_us for r in alive)] if alive else []
    if free > 0:
        for requests, full in _candidates(settings.limit, alive):
            opens = requests[0].arrival_us + settings.max_queue_delay_us
            if full or draining or opens <= now_us:
                rows = sum(r.rows for r in requests)
                reason: Reason = "full" if full else "drain" if draining else "delay"
                if reason == "delay" and settings.max_queue_delay_us == 0:
                    reason = "idle"
                return Decision(expired, Batch(requests, rows, settings.padded(rows), reason), None)
            wakes.append(opens)
    return Decision(expired, None, min(wakes, default=None))


def _candidates(limit: int, queue: Iterable[R]) -> list[tuple[tuple[R, ...], bool]]:
    """Each key's next batch and whether it is full; the key with the oldest request first."""
    taken: dict[str, list[R]] = {}
    rows: dict[str, int] = {}
    full: set[str] = set()
    for request in queue:
        key = request.key
        if key in full:
            continue
        total = rows.get(key, 0) + request.rows
        if total <= limit:
            taken.setdefault(key, []).append(request)
            rows[key] = total
        if total >= limit:
            full.add(key)
    return [(tuple(requests), key in full) for key, requests in taken.items()]


# --- the simulator -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cost:
    """How long a batch takes: fixed_us + per_row_us * padded rows."""

    fixed_us: int
    per_row_us: int


@dataclass(frozen=True, slots=True)
class Arrival:
    at_us: int
    rows: int = 1
    key: str = ""
    timeout_us: int | None = None  # None: the default


@dataclass(frozen=True, slots=True)
class Started:
    """A batch of the simulation; `requests` are indices of arrivals."""

    start_us: int
    requests: tuple[int, ...]
    rows: int
    padded: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class Completion:
    request: int
    at_us: int
    status: Status


@dataclass(frozen=True, slots=True)
class Outcome:
    batches: tuple[Started, ...]
    completions: tuple[Completion, ...]  # in order of arrival


def simulate(
    settings: Settings,
    cost: Cost,
    arrivals: Sequence[Arrival],
    *,
    instances: int = 1,
    drain_at_us: int | None = None,
) -> Outcome:
    """What `decide` makes of a trace (arrivals in order of time) on instances that cost `cost`."""
    return _Simulation(settings, cost, arrivals, instances, drain_at_us).run()


class _Simulation:
    def __init__(
        self, settings: Settings, cost: Cost, arrivals: Sequence[Arrival], instances: int, drain_at_us: int | None
    ) -> None:
        self.settings, self.cost, self.arrivals, self.drain_at_us = settings, cost, arrivals, drain_at_us
        self.free = instances
        self.arrived = 0
        self.queue: list[Request] = []
        self.running: list[int] = []  # when each busy instance is done
        self.batches: list[Started] = []
        self.rejected: set[int] = set()
        self.unserved: set[int] = set()  # a chunk expired in the queue
        self.done_us: dict[int, int] = {}  # when the last chunk that ran was done

    def run(self) -> Outcome:
        now: int | None = 0
        while now is not None:
            now = self.step(now)
        return Outcome(tuple(self.batches), tuple(self.completion(i) for i in range(len(self.arrivals))))

    def step(self, now: int) -> int | None:
        """All that happens at one moment, and the next one at which something does."""
        self.drop(tuple(r for r in self.queue if r.deadline_us <= now))
        draining = self.drain_at_us is not None and self.drain_at_us <= now
        while self.arrived < len(self.arrivals) and self.arrivals[self.arrived].at_us <= now:
            self.arrive(self.arrived, draining)
            self.arrived += 1
        self.free += sum(end <= now for end in self.running)
        self.running = [end for end in self.running if end > now]
        while True:
            decision = decide(self.settings, self.queue, now, self.free, draining)
            self.drop(decision.expired)
            if decision.batch is None:
                break
            self.start(decision.batch, now)
        nexts = [*self.running, *(a.at_us for a in self.arrivals[self.arrived : self.arrived + 1])]
        if decision.wake_us is not None:
            nexts.append(decision.wake_us)
        if self.drain_at_us is not None and not draining:
            nexts.append(self.drain_at_us)
        return min(nexts, default=None)

    def drop(self, expired: tuple[Request, ...]) -> None:
        self.queue = [r for r in self.queue if r not in expired]
        self.unserved.update(r.id for r in expired)

    def arrive(self, index: int, draining: bool) -> None:
        arrival = self.arrivals[index]
        waiting = sum(r.rows for r in self.queue)
        if draining or not self.settings.admits(waiting, arrival.rows):
            self.rejected.add(index)
            return
        for rows in self.settings.chunks(arrival.rows):
            self.queue.append(Request(index, arrival.at_us, self.deadline(arrival), rows, arrival.key))

    def deadline(self, arrival: Arrival) -> int:
        timeout = self.settings.default_timeout_us if arrival.timeout_us is None else arrival.timeout_us
        return arrival.at_us + timeout

    def start(self, batch: Batch[Request], now: int) -> None:
        end = now + self.cost.fixed_us + self.cost.per_row_us * batch.padded
        ids = tuple(r.id for r in batch.requests)
        self.batches.append(Started(now, ids, batch.rows, batch.padded, batch.reason))
        self.queue = [r for r in self.queue if all(r is not taken for taken in batch.requests)]
        self.free -= 1
        self.running.append(end)
        self.done_us.update((i, max(end, self.done_us.get(i, 0))) for i in ids)

    def completion(self, index: int) -> Completion:
        arrival = self.arrivals[index]
        if index in self.rejected:
            return Completion(index, arrival.at_us, "rejected")
        deadline = self.deadline(arrival)
        if index in self.unserved or self.done_us[index] >= deadline:
            return Completion(index, deadline, "expired")
        return Completion(index, self.done_us[index], "ok")
