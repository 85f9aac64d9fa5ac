"""What a call through Session costs beyond the compiled model's own call, measured in turns.

python tests/bench/session_overhead.py BUNDLE [rounds]
"""

import statistics
import sys
import time
from collections.abc import Callable

import torch

from mctl.bundle_format.contract import shape_of
from mctl.runner.session import Session, load

CALLS = 300  # a turn


def smallest_inputs(session: Session) -> dict[str, torch.Tensor]:
    dims = {dim.name: dim.min for dim in session.contract.dims}
    return {
        i.name: torch.full(shape_of(i, dims), i.range[0] if i.range else 0, dtype=getattr(torch, i.dtype))
        for i in session.contract.inputs
    }


def microseconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - start) / CALLS * 1e6


def main(bundle: str, rounds: int) -> None:
    session = load(bundle, threads=1)
    tensors = smallest_inputs(session)
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    prepared = session.prepare(tensors)
    raw = session._library(prepared.dims).run
    ways: dict[str, Callable[[], object]] = {
        "compiled call": lambda: raw(prepared.tensors),
        "session, torch": lambda: session.call(tensors),
        "session, numpy": lambda: session.call(arrays),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, call in ways.items():
            times[name].append(microseconds(call))
    base = times["compiled call"]
    print(f"{'us a call':16}     best   median  overhead (best, median)  ratio")
    for name, own in times.items():
        best, median = min(own), statistics.median(own)
        more = statistics.median(mine - raw for mine, raw in zip(own, base, strict=True))
        print(f"{name:16} {best:8.2f} {median:8.2f} {best - min(base):9.2f} {more:8.2f} {best / min(base):12.2f}")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(f"usage: {sys.argv[0]} BUNDLE [rounds]")
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) == 3 else 40)
