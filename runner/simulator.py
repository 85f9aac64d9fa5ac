"""Runs the batching policy over a trace of arrivals, on instances whose batches cost what they are said to."""

from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from .pace import Formed, Pace, Size
from .policy import Batch, Reason, Request, Settings, chunks, decide
from .shares import Client, Shares

Status = Literal["ok", "rejected", "expired"]


@dataclass(frozen=True, slots=True)
class Cost:
    """How long a batch takes: fixed_us + per_row_us * padded rows; of those that start at `from_us` or later."""

    fixed_us: float
    per_row_us: float
    from_us: int = 0

    def of(self, padded: int) -> int:
        """In whole microseconds, as the clock of the simulation is."""
        return round(self.fixed_us + self.per_row_us * padded)


@dataclass(frozen=True, slots=True)
class Arrival:
    at_us: int
    rows: int = 1
    key: str = ""  # its kind, too
    timeout_us: int | None = None  # None: the default
    client: Client = 0


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
class Changed:
    """The limit from `at_us` on."""

    at_us: int
    limit: int


@dataclass(frozen=True, slots=True)
class Outcome:
    batches: tuple[Started, ...]
    completions: tuple[Completion, ...]  # in order of arrival
    limits: tuple[Changed, ...] = ()


def simulate(
    settings: Settings,
    costs: Cost | Sequence[Cost],
    arrivals: Sequence[Arrival],
    *,
    instances: int = 1,
    drain_at_us: int | None = None,
    seeds: Mapping[Size, int] | None = None,
    ahead: bool = False,
) -> Outcome:
    """What the policy makes of a trace (arrivals in order of time). `costs` in order of their `from_us`.

    `ahead`: an instance takes a full batch while it runs another, and begins it at once when that is done, as the
    workers of mctl-runner do.
    """
    costs = [costs] if isinstance(costs, Cost) else costs
    return _Simulation(settings, costs, arrivals, instances, drain_at_us, Pace(settings, seeds), ahead).run()


@dataclass(frozen=True, slots=True)
class _Waiting(Request):
    """`id` is the arrival's index."""

    client: Client
    turn: int


@dataclass(slots=True)
class _Instance:
    batch: Formed | None = None  # what it runs, or ran last
    began_us: int = 0
    took_us: int = 0
    waits_us: tuple[int, ...] = ()
    busy: bool = False
    before: tuple[Formed, int] | None = None
    next: tuple[Batch[_Waiting], Formed] | None = None


class _Simulation:
    def __init__(
        self,
        settings: Settings,
        costs: Sequence[Cost],
        arrivals: Sequence[Arrival],
        instances: int,
        drain_at_us: int | None,
        pace: Pace,
        ahead: bool,
    ) -> None:
        self.settings, self.costs, self.arrivals, self.drain_at_us = settings, costs, arrivals, drain_at_us
        self.pace, self.ahead = pace, ahead
        self.instances = [_Instance() for _ in range(instances)]
        self.arrived = 0
        self.queue: list[_Waiting] = []
        self.shares = Shares()
        self.batches: list[Started] = []
        self.limits = [Changed(0, pace.limit)] if pace.limit != settings.limit else []
        self.rejected: dict[int, int] = {}  # and when
        self.unserved: set[int] = set()  # a chunk expired in the queue
        self.done_us: dict[int, int] = {}  # when the last chunk that ran was done

    def run(self) -> Outcome:
        now: int | None = 0
        while now is not None:
            now = self.step(now)
        completions = tuple(self.completion(i) for i in range(len(self.arrivals)))
        return Outcome(tuple(self.batches), completions, tuple(self.limits))

    def step(self, now: int) -> int | None:
        """All that happens at one moment, and the next one at which something does."""
        self.drop(tuple(r for r in self.queue if r.deadline_us <= now))
        draining = self.drain_at_us is not None and self.drain_at_us <= now
        while self.arrived < len(self.arrivals) and self.arrivals[self.arrived].at_us <= now:
            self.arrive(self.arrived, draining, now)
            self.arrived += 1
        for instance in self.instances:
            if instance.busy and instance.began_us + instance.took_us <= now:
                self.finish(instance, now)
        while True:
            free = [instance for instance in self.instances if not instance.busy]
            room = sorted((i for i in self.instances if self.ahead and not i.next), key=lambda i: i.began_us)
            decision = decide(self.settings, self.pace.limit, self.queue, now, len(free), draining, bool(room))
            self.drop(decision.expired)
            if decision.batch is None:
                break
            self.take((free or room)[0], decision.batch, now)
        nexts = [instance.began_us + instance.took_us for instance in self.instances if instance.busy]
        nexts += [a.at_us for a in self.arrivals[self.arrived : self.arrived + 1]]
        if decision.wake_us is not None:
            nexts.append(decision.wake_us)
        if self.drain_at_us is not None and not draining:
            nexts.append(self.drain_at_us)
        return min(nexts, default=None)

    def drop(self, expired: tuple[_Waiting, ...]) -> None:
        self.unserved.update(r.id for r in expired)
        self.remove(expired)

    def remove(self, requests: Sequence[_Waiting]) -> None:
        """They wait no longer."""
        gone = set(map(id, requests))
        self.queue = [r for r in self.queue if id(r) not in gone]
        for request in requests:
            self.pace.left(request.key, request.rows)
            self.shares.leave(request.client, request.rows)

    def arrive(self, index: int, draining: bool, now: int) -> None:
        arrival = self.arrivals[index]
        if draining or not self.let_in(arrival, now):
            self.rejected[index] = now
            return
        self.make_room(arrival.rows, now)
        for rows in chunks(self.pace.limit, arrival.rows):
            turn = self.shares.join(arrival.client, rows)
            deadline = arrival.at_us + self.timeout_of(arrival)
            request = _Waiting(index, arrival.at_us, deadline, rows, arrival.key, arrival.client, turn)
            insort(self.queue, request, key=lambda waiting: waiting.turn)
            self.pace.joined(arrival.key, arrival.key, rows)

    def let_in(self, arrival: Arrival, now: int) -> bool:
        """Rules 4, 12, 17 and 18."""
        settings, client = self.settings, arrival.client
        if not settings.admits(self.pace.rows, arrival.rows) and not self.shares.entitled(
            client, arrival.rows, settings.max_queue_size
        ):
            return False
        stated, first = arrival.timeout_us is not None, not self.shares.waits(client)
        estimate = self.pace.estimate(arrival.key, arrival.key, arrival.rows, self.free_after(now), first=first)
        if not estimate.too_late(self.pace.time_us(self.timeout_of(arrival), stated)):
            return True
        self.pace.refused(arrival.key, stated)
        self.note_limit(now)
        return False

    def make_room(self, rows: int, now: int) -> None:
        """Rule 17."""
        while not self.settings.admits(self.pace.rows, rows):
            largest = self.shares.largest()
            last = next(request for request in reversed(self.queue) if request.client == largest)
            self.rejected[last.id] = now
            self.remove([request for request in self.queue if request.id == last.id])

    def timeout_of(self, arrival: Arrival) -> int:
        return self.settings.default_timeout_us if arrival.timeout_us is None else arrival.timeout_us

    def free_after(self, now: int) -> list[int]:
        """By the costs that are known, not by those that are true."""
        times = []
        for instance in self.instances:
            batch = instance.batch if instance.busy else None
            expected = self.pace.cost(batch.kind, batch.padded) if batch else 0
            left = max(0, instance.began_us + expected - now) if batch else 0
            if instance.next:
                left += self.pace.cost(instance.next[1].kind, instance.next[1].padded)
            times.append(left)
        return times

    def take(self, instance: _Instance, batch: Batch[_Waiting], now: int) -> None:
        self.remove(batch.requests)
        for request in batch.requests:
            self.shares.started(request.turn)
        formed = self.pace.formed(batch.requests[0].key, batch.rows, batch.reason == "full")
        if instance.busy:
            instance.next = batch, formed
        else:
            self.start(instance, batch, formed, now)

    def start(self, instance: _Instance, batch: Batch[_Waiting], formed: Formed, now: int) -> None:
        cost = next(c for c in reversed(self.costs) if c.from_us <= now)
        ids = tuple(r.id for r in batch.requests)
        self.batches.append(Started(now, ids, batch.rows, batch.padded, batch.reason))
        instance.before = (instance.batch, instance.took_us) if instance.batch else None
        instance.batch = formed
        instance.began_us, instance.took_us = now, cost.of(batch.padded)
        instance.waits_us = tuple(now - r.arrival_us for r in batch.requests)
        instance.busy = True
        self.done_us.update((i, max(now + instance.took_us, self.done_us.get(i, 0))) for i in ids)

    def finish(self, instance: _Instance, now: int) -> None:
        assert instance.batch
        instance.busy = False
        self.pace.finished(instance.batch, instance.took_us, instance.waits_us, instance.before)
        self.note_limit(now)
        if instance.next:
            batch, formed = instance.next
            instance.next = None
            self.start(instance, batch, formed, now)

    def note_limit(self, now: int) -> None:
        if self.pace.limit != (self.limits[-1].limit if self.limits else self.settings.limit):
            self.limits.append(Changed(now, self.pace.limit))

    def completion(self, index: int) -> Completion:
        arrival = self.arrivals[index]
        if index in self.rejected:
            return Completion(index, self.rejected[index], "rejected")
        deadline = arrival.at_us + self.timeout_of(arrival)
        if index in self.unserved or self.done_us[index] >= deadline:
            return Completion(index, deadline, "expired")
        return Completion(index, self.done_us[index], "ok")
