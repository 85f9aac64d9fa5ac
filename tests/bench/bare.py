"""What the compiled model reaches by itself: in this process, without a server. Prints one JSON object.

python tests/bench/bare.py minilm.pt2 --threads 2 --size seq=32 --seconds 5
"""

import argparse
import json
import time
from pathlib import Path

import torch

from mctl.bundle_format.contract import Input
from mctl.runner.session import Prepared, Session, load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--size", action="append", default=[], help="DIM=N, of dims besides the batch")
    parser.add_argument("--seconds", type=float, default=5, help="in all, shared by the batch sizes")
    given = parser.parse_args()
    sizes = {name: int(size) for name, size in (text.split("=") for text in given.size)}
    with load(given.bundle, threads=given.threads) as session:
        batch = session.contract.batch_dim
        buckets = session.manifest.buckets[batch]
        calls = {rows: _prepared(session, {**sizes, batch: rows}) for rows in buckets}
        rates = _rows_per_second(session, calls, given.seconds)
        print(json.dumps({"rows_per_second": rates, "batch_1_us": 1e6 / rates[buckets[0]] * buckets[0]}))


def _prepared(session: Session, sizes: dict[str, int]) -> Prepared:
    inputs = {declared.name: _input(declared, sizes) for declared in session.contract.inputs}
    return session.prepare(inputs)


def _input(declared: Input, sizes: dict[str, int]) -> torch.Tensor:
    shape = [sizes[axis] if isinstance(axis, str) else axis for axis in declared.shape]
    dtype = getattr(torch, declared.dtype)
    return torch.randn(shape).to(dtype) if dtype.is_floating_point else torch.ones(shape, dtype=dtype)


def _rows_per_second(session: Session, calls: dict[int, Prepared], seconds: float) -> dict[int, float]:
    """The sizes in turn, in many short slices, so that all see the same machine; their median counts."""
    slices: dict[int, list[float]] = {rows: [] for rows in calls}
    for _ in range(10):
        for rows, call in calls.items():
            slices[rows].append(rows / _seconds_a_call(session, call, seconds / 10 / len(calls)))
    return {rows: sorted(rates)[len(rates) // 2] for rows, rates in slices.items()}


def _seconds_a_call(session: Session, call: Prepared, seconds: float) -> float:
    start, count = time.perf_counter(), 0
    while (now := time.perf_counter()) < start + seconds or not count:
        session.run(call.tensors, call.dims)
        count += 1
    return (now - start) / count


if __name__ == "__main__":
    main()
