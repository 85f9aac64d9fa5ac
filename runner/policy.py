"""The batching policy, a pure function of settings, limit, queue and clock.

The rules, which runner/cpp/engine/policy.cc follows too (tests/vectors/batching/*.json runs both). Times are integer
microseconds on one clock; everything counts rows.

1.  `limit`, the most rows of a batch, is max_batch_size, or the last of allowed_batch_sizes if that is smaller; with a
    latency target it is less for the time being (rules 9 to 15, in pace.py). A batch is padded up to the first allowed
    size that holds it, its bucket; without allowed sizes, or where the bucket is one of unpadded_sizes, it is not.
2.  An arrival of more rows than `limit` is split into chunks of `limit` rows and a rest, which queue as requests of
    their own with the arrival's key, time and deadline. It is answered when its last chunk is.
3.  A request has expired when `deadline <= now`. Expired ones leave the queue before anything else is looked at; they
    never reach the model. An answer that comes at or after the deadline counts as expired too.
4.  An arrival is refused at once if the rows that wait plus all its own are more than max_queue_size, if the queue
    drains, or if it would be answered too late (rule 12). Rows that run don't count. Of several clients, one that has
    less than its share of the queue is let in at the cost of the one that has most (rules 16 to 18, in shares.py).
5.  A key's candidate batch: its requests in the order of the queue, which is that of arrival where there is one client
    (rule 16), up to `limit` rows. It ends at the first that does not fit: later and smaller ones don't overtake. It is
    full if it has `limit` rows or such a one exists. The first always fits: it may have more rows than a limit that
    went down since it queued.
6.  While an instance is free, the first rule that holds starts a key's candidate, and names the reason:
    `full`; `drain` (the queue drains); `idle` (max_queue_delay is 0); `delay` (its oldest request arrived
    max_queue_delay ago, or longer). If several keys may start, the one that is first in the queue does. A later key's
    full batch does not wait for an earlier key's delay.
7.  Otherwise sleep until the next arrival or completion, the end of a key's delay (only if an instance is free), or the
    next deadline, whichever is first.
8.  At one moment: expired requests leave, then draining begins, then arrivals queue in order, then completions free
    their instances, then batches start.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from ..bundle_format.errors import UsageError
from ..bundle_format.lookup import padded

Reason = Literal["full", "drain", "idle", "delay"]


@dataclass(frozen=True, slots=True)
class Settings:
    """What the user may set; UsageError if it makes no sense."""

    max_batch_size: int  # rows
    max_queue_size: int  # rows
    max_queue_delay_us: int = 0
    allowed_batch_sizes: tuple[int, ...] = ()  # ascending; empty: a batch is not padded
    unpadded_sizes: tuple[int, ...] = ()  # of these: what they hold runs as it is
    default_timeout_us: int = 30_000_000
    latency_target_us: int | None = None  # of `percentile` percent of the requests
    percentile: int = 99

    def __post_init__(self) -> None:
        for name, least in (("max_batch_size", 1), ("max_queue_size", 1), ("max_queue_delay_us", 0)):
            if getattr(self, name) < least:
                raise UsageError(f"`{name}` is {getattr(self, name)}, allowed {least} or more")
        if self.default_timeout_us < 1:
            raise UsageError("the default timeout is not positive")
        if not 50 <= self.percentile <= 99:
            raise UsageError(f"`percentile` is {self.percentile}, allowed 50..99")
        if self.latency_target_us is not None and self.latency_target_us <= max(0, self.max_queue_delay_us):
            raise UsageError("the latency target is not longer than the queue delay: no request could keep it")
        sizes = self.allowed_batch_sizes
        if list(sizes) != sorted(set(sizes)) or any(s < 1 for s in sizes):
            raise UsageError(f"the allowed batch sizes are not ascending: {', '.join(map(str, sizes))}")

    @property
    def limit(self) -> int:
        """The most rows that a batch may ever have, before padding."""
        return min((self.max_batch_size, *self.allowed_batch_sizes[-1:]))

    def padded(self, rows: int) -> int:
        """Rows of a batch after padding."""
        return padded(rows, self.allowed_batch_sizes, self.unpadded_sizes)

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


def chunks(limit: int, rows: int) -> tuple[int, ...]:
    """The rows of the requests that an arrival becomes."""
    whole, rest = divmod(rows, limit)
    return (limit,) * whole + ((rest,) if rest else ())


def decide(
    settings: Settings,
    limit: int,
    queue: Sequence[R],
    now_us: int,
    free: int,
    draining: bool = False,
    room: bool = False,
) -> Decision[R]:
    """The next thing to do with `queue` and `free` instances that have nothing to do.

    `room`: if none is free, one can hold a batch until it is: only one that waiting cannot improve starts.
    """
    expired = tuple(r for r in queue if r.deadline_us <= now_us)
    alive = [r for r in queue if r.deadline_us > now_us] if expired else queue
    wakes = [min(r.deadline_us for r in alive)] if alive else []
    if free > 0 or room:
        for requests, full in _candidates(limit, alive):
            opens = min(r.arrival_us for r in requests) + settings.max_queue_delay_us
            if not free and not full:
                continue
            if full or draining or opens <= now_us:
                rows = sum(r.rows for r in requests)
                reason: Reason = "full" if full else "drain" if draining else "delay"
                if reason == "delay" and settings.max_queue_delay_us == 0:
                    reason = "idle"
                return Decision(expired, Batch(requests, rows, settings.padded(rows), reason), None)
            wakes.append(opens)
    return Decision(expired, None, min(wakes, default=None))


def _candidates(limit: int, queue: Iterable[R]) -> list[tuple[tuple[R, ...], bool]]:
    """Each key's next batch and whether it is full; the key that is first in the queue first."""
    taken: dict[str, list[R]] = {}
    rows: dict[str, int] = {}
    full: set[str] = set()
    for request in queue:
        key = request.key
        if key in full:
            continue
        total = rows.get(key, 0) + request.rows
        if total <= limit or key not in taken:
            taken.setdefault(key, []).append(request)
            rows[key] = total
        if total >= limit:
            full.add(key)
    return [(tuple(requests), key in full) for key, requests in taken.items()]
