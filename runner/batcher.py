"""The dynamic batcher for a Python program: requests from threads and coroutines, run together by one thread."""

import asyncio
import hashlib
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from ..bundle_format.errors import ClosedError, DeadlineError, QueueFullError, UsageError
from ..export.raw import bytes_of
from . import rows
from .policy import Request, Settings, decide
from .session import Prepared, Session
from .values import Value


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
    ) -> None:
        contract = session.contract
        self.stats = BatchStats()
        self._session = session
        self._batch = None if contract.state else contract.batch_dim
        self._settings = self._checked_settings(
            max_batch_size, max_queue_delay_us, allowed_batch_sizes, max_queue_size, default_timeout
        )
        self._max_rows = self._checked_rows(max_request_rows)
        shapes = [declared.shape for declared in contract.inputs]
        self._shared = [i for i, shape in enumerate(shapes) if self._batch is not None and self._batch not in shape]
        self._queue: list[_Chunk] = []
        self._expired: list[_Chunk] = []  # left the queue; the thread tells them, it alone touches futures
        self._dropped: list[_Chunk] = []
        self._waiting = 0  # rows in the queue
        self._draining = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="mctl-batcher", daemon=True)
        self._thread.start()

    def submit(self, /, *, _timeout: float | None = None, **inputs: object) -> "Future[dict[str, Value]]":
        """Queues one request; the future holds what the session would return. `_timeout` in seconds.

        Inputs are read when the batch runs: leave them as they are until the future is done. Cancelling the future
        takes the request out of the queue, not out of a running batch.

        Raises at once ContractError, QueueFullError and ClosedError; the future raises DeadlineError and ModelError.
        """
        prepared = self._session.prepare(inputs, self._max_rows)
        now = _now()
        timeout = self._settings.default_timeout_us if _timeout is None else _microseconds(_timeout)
        answer = _Answer(self._session, prepared, now + timeout)
        self._enqueue(list(self._chunks(answer, prepared, now)), now)
        answer.future.add_done_callback(self._forget)
        return answer.future

    async def __call__(self, /, *, _timeout: float | None = None, **inputs: object) -> dict[str, Value]:
        """`submit` for a coroutine; cancelling the task cancels the request."""
        return await asyncio.wrap_future(self.submit(_timeout=_timeout, **inputs))

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
            default_timeout_us=_microseconds(timeout),
        )

    def _checked_rows(self, rows: int | None) -> int | None:
        """The most rows of one request; None where rows mean nothing."""
        largest = self._settings.max_queue_size
        if rows is not None and not 1 <= rows <= largest:
            raise UsageError(f"`max_request_rows` is {rows}, allowed 1..{largest} (max_queue_size)")
        return None if self._batch is None else rows or largest

    # --- the queue -----------------------------------------------------------------------------------------------

    def _chunks(self, answer: "_Answer", prepared: Prepared, now: int) -> Iterable["_Chunk"]:
        """What a request becomes: one entry of the queue, or several if it is larger than a batch."""
        key = self._key(prepared)
        total = 1 if self._batch is None else prepared.dims[self._batch]
        sizes = self._settings.chunks(total)
        answer.expect(len(sizes))
        at = 0
        for index, count in enumerate(sizes):
            part = prepared.tensors if len(sizes) == 1 else self._rows_of(prepared.tensors, at, count)
            dims = prepared.dims if self._batch is None else {**prepared.dims, self._batch: count}
            yield _Chunk(index, now, answer.deadline_us, count, key, answer, part, dims)
            at += count

    def _rows_of(self, tensors: list[Tensor], at: int, count: int) -> list[Tensor]:
        return [t if index in self._shared else t[at : at + count] for index, t in enumerate(tensors)]

    def _key(self, prepared: Prepared) -> str:
        """Requests with the same key may run together: the sizes of other dims, and the inputs that rows share."""
        if self._batch is None or (len(prepared.dims) == 1 and not self._shared):
            return ""
        sizes = [f"{n}={size}" for n, size in self._session.bucket(prepared.dims).items() if n != self._batch]
        shared = [hashlib.sha256(bytes_of(prepared.tensors[i])).hexdigest() for i in self._shared]
        return ",".join(sizes + shared)

    def _enqueue(self, chunks: list["_Chunk"], now: int) -> None:
        """Puts one request into the queue. QueueFullError, ClosedError."""
        total = sum(chunk.rows for chunk in chunks)
        with self._changed:
            if self._draining:
                raise ClosedError("the batcher is closed")
            if not self._thread.is_alive():
                raise ClosedError("the batcher has no thread", "after a fork, make it in the process that uses it")
            if not self._settings.admits(self._waiting, total):
                self._expired += self._take([chunk for chunk in self._queue if chunk.deadline_us <= now])
            if not self._settings.admits(self._waiting, total):
                most = self._settings.max_queue_size
                raise QueueFullError(f"the queue is full: {self._waiting} rows wait, {total} more would pass {most}")
            self._queue += chunks
            self._waiting += total
            self._changed.notify()

    def _take(self, chunks: Iterable["_Chunk"]) -> list["_Chunk"]:
        """Takes `chunks` out of the queue; the lock is held."""
        taken = list(chunks)
        if taken:
            gone = set(map(id, taken))
            self._queue = [chunk for chunk in self._queue if id(chunk) not in gone]
            self._waiting = sum(chunk.rows for chunk in self._queue)
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
            self._run(batch)
            del batch  # its tensors are not needed while this sleeps

    def _next(self) -> "list[_Chunk] | None":
        """Sleeps until a batch may start; None when the queue has drained."""
        while True:
            with self._changed:
                decision = decide(self._settings, self._queue, _now(), 1, self._draining)
                expired = self._expired + self._take(decision.expired)
                batch = self._take(decision.batch.requests) if decision.batch else []
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

    def _run(self, batch: "list[_Chunk]") -> None:
        """Runs a batch and answers it. If the model fails on several, each is run alone: one must not fail others."""
        chunks = [chunk for chunk in batch if chunk.answer.begin()]
        if not chunks:
            return
        try:
            for chunk, own in zip(chunks, self._outputs(chunks), strict=True):
                chunk.answer.deliver(chunk.id, own)
        except Exception as error:  # the thread outlives whatever a model does
            if len(chunks) == 1:
                chunks[0].answer.fail(error)
                return
            for chunk in chunks:
                self._run([chunk])

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
