"""Arrivals for the simulator: from a file, or drawn from a seed; and what a simulation comes to."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from ipaddress import ip_network
from pathlib import Path

import msgspec

from ..bundle_format.errors import UsageError
from .bench import quantile
from .simulator import Arrival, Cost, Outcome

MOST = 200_000  # arrivals


class _Logged(msgspec.Struct):
    """A line of `mctl serve --log-requests`, as far as it tells when a request came."""

    time: datetime  # when it was answered
    total_us: int
    rows: int = 0  # 0: it was no inference
    client: str = ""  # address and port


def read_arrivals(path: Path) -> list[Arrival]:
    """A trace in order of time, from 0 on: a server's access log, or lines of `MILLISECONDS [ROWS [TIMEOUT_MS]]`.

    Empty lines and those that begin with `#` are left out. UsageError for anything else.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read `{path}`: {getattr(error, 'strerror', None) or error}") from None
    found = []
    clients: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        try:
            found += [arrival] if (arrival := _arrival(line.strip(), clients)) else []
        except (ValueError, OverflowError, msgspec.MsgspecError):
            hint = "a line is `MILLISECONDS [ROWS [TIMEOUT_MS]]`, or one of `mctl serve --log-requests`"
            raise UsageError(f"line {number} of `{path}` is not understood: {line[:100]}", hint) from None
    if not 0 < len(found) <= MOST:
        raise UsageError(f"`{path}` has {len(found)} arrivals, allowed 1..{MOST}")
    found.sort(key=lambda arrival: arrival.at_us)
    start = found[0].at_us
    return [replace(arrival, at_us=arrival.at_us - start) for arrival in found]


def _arrival(line: str, clients: dict[str, int]) -> Arrival | None:
    """`clients`: the numbers of those that a log named so far."""
    if not line or line.startswith("#"):
        return None
    if line.startswith("{"):
        logged = msgspec.json.decode(line, type=_Logged)
        at = round(logged.time.timestamp() * 1e6) - logged.total_us
        client = clients.setdefault(_client_of(logged.client), len(clients))
        return Arrival(at, logged.rows, client=client) if logged.rows else None
    at_ms, *rest = line.replace(",", " ").split()
    rows, timeout = (int(rest[0]) if rest else 1), (round(float(rest[1]) * 1000) if len(rest) > 1 else None)
    if len(rest) > 2 or rows < 1 or (timeout is not None and timeout < 1):
        raise ValueError
    return Arrival(round(float(at_ms) * 1000), rows, timeout_us=timeout)


def _client_of(peer: str) -> str:
    """As the server tells clients apart: by an address of IPv4, or a network of IPv6, without the port."""
    host = peer.rpartition(":")[0].strip("[]")
    return str(ip_network(f"{host}/64", strict=False)) if ":" in host else host


def poisson(rate: float, seconds: float, burst: int, seed: int) -> list[Arrival]:
    """Single rows at `rate` a second on average; `burst` of them arrive together, and bursts are a Poisson process."""
    if rate * seconds > MOST:
        raise UsageError(f"these are {rate * seconds:,.0f} arrivals, allowed {MOST:,}", "give fewer `--seconds`")
    draw, at, found = random.Random(seed), 0.0, list[Arrival]()
    while (at := at + draw.expovariate(rate / burst)) < seconds:
        found += [Arrival(round(at * 1e6))] * burst
    return found


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a trace under one setting; times in ms, from arrival to answer, of those that were served."""

    served: int
    rejected: int
    expired: int
    mean_ms: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    last_ms: float  # when the last answer came
    rows_per_batch: float
    padding: float  # share of pad rows among all rows that ran
    utilisation: float  # share of the time that instances ran something, until the last batch ended


def result_of(outcome: Outcome, arrivals: Sequence[Arrival], cost: Cost, instances: int) -> Result:
    """The numbers of one simulation."""
    took = sorted(_took(outcome, arrivals))
    ran = sum(batch.padded for batch in outcome.batches)
    busy = sum(cost.of(batch.padded) for batch in outcome.batches)
    end = max((batch.start_us + cost.of(batch.padded) for batch in outcome.batches), default=0)
    statuses = [completion.status for completion in outcome.completions]

    def ms(share: float) -> float:
        return quantile(took, share) / 1000 if took else 0.0

    return Result(
        served=statuses.count("ok"),
        rejected=statuses.count("rejected"),
        expired=statuses.count("expired"),
        mean_ms=sum(took) / len(took) / 1000 if took else 0.0,
        p50_ms=ms(0.5),
        p90_ms=ms(0.9),
        p99_ms=ms(0.99),
        last_ms=max((c.at_us for c in outcome.completions if c.status == "ok"), default=0) / 1000,
        rows_per_batch=sum(batch.rows for batch in outcome.batches) / len(outcome.batches) if outcome.batches else 0.0,
        padding=1 - sum(batch.rows for batch in outcome.batches) / ran if ran else 0.0,
        utilisation=busy / (instances * end) if end else 0.0,
    )


def _took(outcome: Outcome, arrivals: Sequence[Arrival]) -> Iterator[int]:
    for completion in outcome.completions:
        if completion.status == "ok":
            yield completion.at_us - arrivals[completion.request].at_us
