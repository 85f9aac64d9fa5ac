"""The dynamic batcher for a Python program: requests from threads and coroutines, run together by one thread."""

import asyncio
import hashlib
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Self, overload

import torch
from torch import Tensor

from ..bundle_format.errors import ClosedError, DeadlineError, QueueFullError, UsageError
from ..export.raw import bytes_of
from . import rows
from .pace import Formed, Pace
from .policy import Batch, Request, Settings, chunks, decide
from .session import Prepared, Session
from .values import Array, Value

_ROOM_SECONDS = 0.001  # after which a coroutine looks again whether the queue has room


@dataclass(slots=True)
class BatchStats:
    """What a batcher has run so far."""

    batches: int = 0
    rows: int = 0  # of requests
    padded_rows: int = 0  # that were added to fill batches up


class DynamicBatcher:
    """Joins requests along the contract's batch dim. A context manager, also with `async with`, that drains at its end.

        with DynamicBatcher(session, max_queue_delay_us=2000) as batcher:
            future = batcher.submit(input_ids=ids, attention_mask=mask)  # from any thread
            outputs = future.result()
            outputs = await batcher(input_ids=ids, attention_mask=mask)  # in a coroutine

    Everything counts rows. `max_batch_size` is the most rows of a batch (default: the contract's maximum),
    `max_queue_delay_us` how long the oldest request may wait for company (0: batches form from what queued while the
    model ran), `allowed_batch_sizes` what a batch is padded to (the bundle's buckets), `max_queue_size` how many rows
    may wait (4 x max_batch_size), `default_timeout` a request's deadline in seconds, `max_request_rows` how many rows
    one request may have (max_queue_size); it is split into batches and joined.

    `latency_target` in seconds makes the batcher hold batches as small, and refuse as much, as it takes for
    `percentile` percent of the requests to be answered within it; `limit` is the most rows of a batch at present.

    A full queue raises QueueFullError; with `wait_when_full` a coroutine waits for room instead.

    A model without a batch dim, or with state, runs its requests one by one. UsageError for settings that make no
    sense.
    """

    def __init__(
        self,
        session: Session,
        *,
        max_batch_size: int | None = None,
        max_queue_delay_us: int = 0,
        allowed_batch_sizes: Sequence[int] | None = None,
        max_queue_size: int | None = None,
        default_timeout: float = 30.0,
        max_request_rows: int | None = None,
        latency_target: float | None = None,
        percentile: int = 99,
        wait_when_full: bool = False,
    ) -> None:
        contract = session.contract
        self.stats = BatchStats()
        self._session = session
        self._batch = None if contract.state else contract.batch_dim
        self._settings = self._checked_settings(
            max_batch_size, max_queue_delay_us, allowed_batch_sizes, max_queue_size, default_timeout
        )
        if latency_target is not None:
            target_us = _microseconds(latency_target)
            self._settings = replace(self._settings, latency_target_us=target_us, percentile=percentile)
        self._wait_when_full = wait_when_full
        self._pace = Pace(self._settings, self._curve())
        self._running: tuple[Formed, int] | None = None  # and since when
        self._last: tuple[Formed, int] | None = None  # and what it took
        self._max_rows = self._checked_rows(max_request_rows)
        shapes = [declared.shape for declared in contract.inputs]
        self._shared = [i for i, shape in enumerate(shapes) if self._batch is not None and self._batch not in shape]
        self._queue: list[_Chunk] = []
        self._expired: list[_Chunk] = []  # left the queue; the thread tells them, it alone touches futures
        self._dropped: list[_Chunk] = []
        self._draining = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="mctl-batcher", daemon=True)
        self._thread.start()

    @overload
    def submit(self, /, *, _timeout: float | None = None, **inputs: Array) -> "Future[dict[str, Array]]": ...
    @overload
    def submit(self, /, *, _timeout: float | None = None, **inputs: Tensor) -> "Future[dict[str, Tensor]]": ...
    @overload
    def submit(self, /, *, _timeout: float | None = None, **inputs: object) -> "Future[dict[str, Value]]": ...  # type: ignore[overload-cannot-match]
    def submit(self, /, *, _timeout: float | None = None, **inputs: object) -> Any:
        """Queues one request; the future holds what the session would return. `_timeout` in seconds.

        Inputs are read when the batch runs: leave them as they are until the future is done. Cancelling the future
        takes the request out of the queue, not out of a running batch.

        Raises at once ContractError, QueueFullError and ClosedError; the future raises DeadlineError and ModelError.
        """
        prepared = self._session.prepare(inputs, self._max_rows)
        now = _now()
        timeout = self._settings.default_timeout_us if _timeout is None else _microseconds(_timeout)
        answer = _Answer(self._session, prepared, now + timeout)
        self._enqueue(list(self._chunks(answer, prepared, now)), now, timeout, stated=_timeout is not None)
        answer.future.add_done_callback(self._forget)
        return answer.future

    @overload
    async def __call__(self, /, *, _timeout: float | None = None, **inputs: Array) -> dict[str, Array]: ...
    @overload
    async def __call__(self, /, *, _timeout: float | None = None, **inputs: Tensor) -> dict[str, Tensor]: ...
    @overload
    async def __call__(self, /, *, _timeout: float | None = None, **inputs: object) -> dict[str, Value]: ...  # type: ignore[overload-cannot-match]
    async def __call__(self, /, *, _timeout: float | None = None, **inputs: object) -> Any:
        """`submit` for a coroutine; cancelling the task cancels the request.

        With `wait_when_full` it waits for room in the queue, until the request's deadline, and raises QueueFullError
        only then.
        """
        seconds = self._settings.default_timeout_us / 1e6 if _timeout is None else _timeout
        deadline = time.monotonic() + seconds
        while True:
            try:
                waiting = self.submit(_timeout=_timeout, **inputs)
            except QueueFullError:
                if not self._wait_when_full or time.monotonic() >= deadline:
                    raise
                await asyncio.sleep(_ROOM_SECONDS)
            else:
                return await asyncio.wrap_future(waiting)
            _timeout = max(0.0, deadline - time.monotonic())

    @property
    def limit(self) -> int:
        """The most rows of a batch at present."""
        return self._pace.limit

    def close(self, *, drain: bool = True) -> None:
        """Refuses new requests, and answers those that wait, or, without `drain`, fails them with ClosedError.

        Returns when the last batch is done. The session stays open.
        """
        with self._changed:
            self._draining = True
            if not drain:
                self._dropped += self._take(self._queue)
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)

    # --- settings ------------------------------------------------------------------------------------------------

    def _checked_settings(
        self, size: int | None, delay_us: int, allowed: Sequence[int] | None, queue: int | None, timeout: float
    ) -> Settings:
        buckets = self._session.manifest.buckets.get(self._batch or "", ())
        sizes = buckets if allowed is None else tuple(allowed)
        if self._batch is None:
            largest, sizes = 1, ()
        else:
            dim = self._session.contract.dim(self._batch)
            largest = dim.max
            if outside := [size for size in sizes if not dim.allows(size)]:
                raise UsageError(f"`allowed_batch_sizes` has {outside[0]}, allowed {dim.allowed} ({dim.name})")
        size = largest if size is None else size
        if size > largest:
            reason = "the model cannot be batched" if self._batch is None else f"the contract's maximum is {largest}"
            raise UsageError(f"`max_batch_size` is {size}: {reason}")
        return Settings(
            max_batch_size=size,
            max_queue_size=4 * max(size, 1) if queue is None else queue,
            max_queue_delay_us=delay_us,
            allowed_batch_sizes=sizes,
            unpadded_sizes=self._session.unpadded if allowed is None and self._batch is not None else (),
            default_timeout_us=_microseconds(timeout),
        )

    def _checked_rows(self, rows: int | None) -> int | None:
        """The most rows of one request; None where rows mean nothing."""
        largest = self._settings.max_queue_size
        if rows is not None and not 1 <= rows <= largest:
            raise UsageError(f"`max_request_rows` is {rows}, allowed 1..{largest} (max_queue_size)")
        return None if self._batch is None else rows or largest

    def _curve(self) -> dict[tuple[str, int], int]:
        """The bundle's measured costs, with as many threads as torch has here."""
        threads = torch.get_num_threads()
        points = [point for point in self._session.manifest.curve if point.threads == threads]
        rows = [point.dims.get(self._batch or "", 1) for point in points]
        return {(self._kind(p.dims), self._settings.padded(n)): p.median_us for p, n in zip(points, rows, strict=True)}

    # --- the queue -----------------------------------------------------------------------------------------------

    def _chunks(self, answer: "_Answer", prepared: Prepared, now: int) -> Iterable["_Chunk"]:
        """What a request becomes: one entry of the queue, or several if it is larger than a batch."""
        kind = self._kind(prepared.dims)
        key = self._key(kind, prepared)
        total = 1 if self._batch is None else prepared.dims[self._batch]
        sizes = chunks(self._pace.limit, total)
        answer.expect(len(sizes))
        at = 0
        for index, count in enumerate(sizes):
            part = prepared.tensors if len(sizes) == 1 else self._rows_of(prepared.tensors, at, count)
            dims = prepared.dims if self._batch is None else {**prepared.dims, self._batch: count}
            yield _Chunk(index, now, answer.deadline_us, count, key, kind, answer, part, dims)
            at += count

    def _rows_of(self, tensors: list[Tensor], at: int, count: int) -> list[Tensor]:
        return [t if index in self._shared else t[at : at + count] for index, t in enumerate(tensors)]

    def _kind(self, dims: dict[str, int]) -> str:
        """What the cost of a batch depends on beside its rows: the sizes of the other dims."""
        if self._batch is not None:
            dims = self._session.bucket(dims) if len(dims) > 1 else {}
        return ",".join(f"{name}={size}" for name, size in dims.items() if name != self._batch)

    def _key(self, kind: str, prepared: Prepared) -> str:
        """Requests with the same key may run together: of a kind, and with equal inputs where rows share them."""
        if self._batch is None:
            return ""
        shared = [hashlib.sha256(bytes_of(prepared.tensors[i])).hexdigest() for i in self._shared]
        return ",".join([kind, *shared])

    def _enqueue(self, chunks: list["_Chunk"], now: int, timeout: int, stated: bool) -> None:
        """Puts one request into the queue. QueueFullError, ClosedError."""
        total = sum(chunk.rows for chunk in chunks)
        key, kind = chunks[0].key, chunks[0].kind
        with self._changed:
            if self._draining:
                raise ClosedError("the batcher is closed")
            if not self._thread.is_alive():
                raise ClosedError("the batcher has no thread", "after a fork, make it in the process that uses it")
            if self._fault(key, kind, total, timeout, stated):
                self._expired += self._take([chunk for chunk in self._queue if chunk.deadline_us <= now])
            if fault := self._fault(key, kind, total, timeout, stated):
                self._pace.refused(kind, stated)
                raise fault
            self._queue += chunks
            self._pace.joined(key, kind, total)
            self._changed.notify()

    def _fault(self, key: str, kind: str, total: int, timeout: int, stated: bool) -> QueueFullError | None:
        """Why a request of `total` rows is not let in, if it is not; the lock is held."""
        waiting, most = self._pace.rows, self._settings.max_queue_size
        if not self._settings.admits(waiting, total):
            return QueueFullError(f"the queue is full: {waiting} rows wait, {total} more would pass {most}")
        estimate = self._pace.estimate(key, kind, total, [self._left_us()])
        time_us = self._pace.time_us(timeout, stated)
        if not estimate.too_late(time_us):
            return None
        allowed = "the latency target" if time_us < timeout else "its timeout"
        answered = f"the answer would take about {estimate.done_us / 1000:.1f} ms"
        text = f"too much waits: {answered}, more than the {time_us / 1000:.1f} ms that {allowed} leaves"
        return QueueFullError(text, "try again later, or give the request a longer `_timeout`")

    def _left_us(self) -> int:
        """How long the running batch will still take."""
        if self._running is None:
            return 0
        batch, began = self._running
        return max(0, began + self._pace.cost(batch.kind, batch.padded) - _now())

    def _take(self, chunks: Iterable["_Chunk"]) -> list["_Chunk"]:
        """Takes `chunks` out of the queue; the lock is held."""
        taken = list(chunks)
        if taken:
            gone = set(map(id, taken))
            self._queue = [chunk for chunk in self._queue if id(chunk) not in gone]
            for chunk in taken:
                self._pace.left(chunk.key, chunk.rows)
        return taken

    def _forget(self, future: "Future[dict[str, Value]]") -> None:
        """Where the future was cancelled, its place in the queue is free."""
        if future.cancelled():
            with self._changed:
                self._take([chunk for chunk in self._queue if chunk.answer.future is future])
                self._changed.notify()

    # --- the thread ----------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while (batch := self._next()) is not None:
            self._run_timed(batch)
            del batch  # its tensors are not needed while this sleeps

    def _next(self) -> "Batch[_Chunk] | None":
        """Sleeps until a batch may start; None when the queue has drained."""
        while True:
            with self._changed:
                decision = decide(self._settings, self._pace.limit, self._queue, _now(), 1, self._draining)
                expired = self._expired + self._take(decision.expired)
                if batch := decision.batch:
                    self._take(batch.requests)
                    formed = self._pace.formed(batch.requests[0].kind, batch.rows, batch.reason == "full")
                    self._running = (formed, _now())
                dropped, self._dropped, self._expired = self._dropped, [], []
                if not (expired or dropped or batch):
                    if self._draining and not self._queue:
                        return None
                    self._changed.wait(None if decision.wake_us is None else max(0, decision.wake_us - _now()) / 1e6)
            for chunk in expired:
                chunk.answer.fail(DeadlineError("the request's deadline passed in the queue"))
            for chunk in dropped:
                chunk.answer.fail(ClosedError("the batcher was closed before the request ran"))
            if batch:
                return batch

    def _run_timed(self, batch: "Batch[_Chunk]") -> None:
        """Runs a batch; what it took is learnt."""
        assert self._running
        formed, began = self._running
        took = self._run(list(batch.requests))
        with self._changed:
            self._running = None
            if took is not None:
                waits = [began - chunk.arrival_us for chunk in batch.requests]
                self._pace.finished(formed, took, waits, self._last)
                self._last = (formed, took)

    def _run(self, batch: "list[_Chunk]") -> int | None:
        """Runs a batch and answers it. If the model fails on several, each is run alone: one must not fail others.

        Returns how many microseconds the model took, if it did what it should.
        """
        chunks = [chunk for chunk in batch if chunk.answer.begin()]
        if not chunks:
            return None
        try:
            began = _now()
            outputs = self._outputs(chunks)
            took = _now() - began
            for chunk, own in zip(chunks, outputs, strict=True):
                chunk.answer.deliver(chunk.id, own)
            return took
        except Exception as error:  # the thread outlives whatever a model does
            if len(chunks) == 1:
                chunks[0].answer.fail(error)
                return None
            for chunk in chunks:
                self._run([chunk])
            return None

    def _outputs(self, chunks: list["_Chunk"]) -> list[list[Tensor]]:
        """The outputs of each chunk, from one call of the model."""
        contract = self._session.contract
        count = sum(chunk.rows for chunk in chunks)
        sizes = dict(chunks[0].dims)
        if self._batch is not None:
            sizes = self._session.bucket(sizes)
            # without allowed sizes nothing else keeps the rest of a split request above the smallest batch
            sizes[self._batch] = max(self._settings.padded(count), contract.dim(self._batch).min)
        parts = zip(*[chunk.tensors for chunk in chunks], strict=True)
        pairs = zip(contract.inputs, parts, strict=True)
        whole = self._session.run([rows.join(declared, part, self._batch, sizes) for declared, part in pairs], sizes)
        self.stats.batches += 1
        self.stats.rows += count
        self.stats.padded_rows += sizes[self._batch] - count if self._batch is not None else 0
        answers, row = [], 0
        for chunk in chunks:
            cuts = zip(contract.outputs, whole, strict=True)
            answers.append([_own(rows.cut(o, tensor, self._batch, chunk.dims, row), tensor) for o, tensor in cuts])
            row += chunk.rows
        return answers


@dataclass(eq=False, slots=True)
class _Answer:
    """What one call of `submit` waits for: all its chunks, or the first error."""

    session: Session
    prepared: Prepared
    deadline_us: int
    future: "Future[dict[str, Value]]" = field(default_factory=Future)
    parts: list[list[Tensor] | None] = field(default_factory=list)

    def expect(self, chunks: int) -> None:
        self.parts = [None] * chunks

    def begin(self) -> bool:
        """False if nobody waits any more."""
        if self.future.running():
            return True
        return not self.future.done() and self.future.set_running_or_notify_cancel()

    def fail(self, error: Exception) -> None:
        if self.begin():
            self.future.set_exception(error)

    def deliver(self, index: int, outputs: list[Tensor]) -> None:
        self.parts[index] = outputs
        parts = [part for part in self.parts if part is not None]
        if len(parts) < len(self.parts) or not self.begin():
            return
        if _now() >= self.deadline_us:
            self.fail(DeadlineError("the request's deadline passed in the model"))
            return
        joined = parts[0] if len(parts) == 1 else [torch.cat(pieces) for pieces in zip(*parts, strict=True)]
        self.future.set_result(self.session.named(joined, self.prepared.as_numpy))


@dataclass(frozen=True, slots=True, eq=False)
class _Chunk(Request):
    """An entry of the queue; `id` is its place in the answer."""

    kind: str
    answer: _Answer
    tensors: list[Tensor]
    dims: dict[str, int]


def _own(part: Tensor, whole: Tensor) -> Tensor:
    """A part that does not keep the whole batch in memory."""
    return part if part.shape == whole.shape else part.clone()


def _microseconds(seconds: float) -> int:
    if not seconds >= 0:
        raise UsageError(f"a timeout is {seconds} s, allowed 0 or more")
    return int(min(seconds, 1e9) * 1e6)


def _now() -> int:
    return time.monotonic_ns() // 1000
