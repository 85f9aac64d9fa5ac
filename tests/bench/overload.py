"""More load than a server can carry: what is answered, what is refused, how fast, and what stays of it.

    python tests/bench/overload.py minilm.pt2 --option=--threads=1

measures the peak with as many clients as two batches have rows, each of which waits for its answer; offers twice that
for a minute; and looks at the latency of one patient client before and after. Prints a JSON object of what was
measured, and whether each goal was met; ends with 1 if one was not.
"""

import argparse
import json
import re
import sys
from pathlib import Path

import load
from examples import Examples
from serve_wrk import Server


def kib(server: Server) -> int:
    """What the front process has in memory."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0])


def sample(server: Server, name: str) -> float:
    """One sample of /metrics, by the start of its line."""
    found = re.search(rf"^{re.escape(name)}.* (\S+)$", server.get("/metrics"), re.MULTILINE)
    assert found, name
    return float(found[1])


def counts(server: Server, examples: Examples) -> list[int]:
    """How many requests the server says it answered, refused and let expire."""
    name, version = examples.manifest.name, examples.manifest.version
    start = f'mctl_requests_total{{model="{name}",version="{version}",code='
    return [int(sample(server, f'{start}"{code}"')) for code in ("ok", "rejected", "expired")]


def summary(report: load.Report) -> dict[str, object]:
    names = ("requests", "seconds", "right", "wrong", "refused", "expired", "failed", "lost", "unreachable", "unsent")
    counts = {name: getattr(report, name) for name in names}
    times = {
        f"{name}_us": {key: getattr(getattr(report, f"{name}_us"), key) for key in ("p50", "p90", "p99", "p999", "max")}
        for name in ("right", "refused", "delay")
    }
    return counts | times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--seconds", type=float, default=60, help="of overload")
    parser.add_argument("--times", type=float, default=2, help="the peak that is offered")
    parser.add_argument("--connections", type=int, default=900, help="of the overload")
    parser.add_argument("--option", action="append", default=[], help="an option of `mctl serve`, as `--threads=1`")
    given = parser.parse_args()
    examples = Examples.of(given.bundle)
    cases = examples.cases({})
    exact = {"rtol": examples.rtol, "atol": examples.atol}
    server = Server(given.bundle, given.option)
    try:
        port = int(server.url.rpartition(":")[2])
        capacity = sample(server, "mctl_queue_capacity_rows")  # four batches, unless options say other
        rows = round(capacity / 2)  # of the batches that one worker holds

        alone = load.run(port, cases, rate=[(20, 5)], connections=1, **exact)
        full = load.run(port, cases, rate=[(200_000, 8)], connections=min(rows, 64), grace=0.2, **exact)
        peak = full.right / full.seconds
        offer = given.times * peak
        load.run(port, cases, rate=[(offer, 3)], connections=given.connections, **exact)  # each gets its buffers
        held, before = kib(server), counts(server, examples)
        over = load.run(port, cases, rate=[(offer, given.seconds)], connections=given.connections, **exact)
        grown = kib(server) - held
        counted = [now - then for now, then in zip(counts(server, examples), before, strict=True)]
        again = load.run(port, cases, rate=[(20, 5)], connections=1, **exact)
    finally:
        server.stop()

    bound = 1e6 * (capacity + rows + 1) / peak
    goals = {
        "nothing wrong, failed or lost": not any((over.wrong, over.failed, over.lost, over.unreachable, over.unsent)),
        "the server counts what the clients do": counted == [over.right, over.refused, over.expired],
        "goodput at least 0.9 of the peak": over.right / over.seconds >= 0.9 * peak,
        "refused within 2 ms (p99)": over.refused_us.p99 is not None and over.refused_us.p99 <= 2000,
        "answered within queue bound / throughput (p99)": over.right_us.p99 is not None and over.right_us.p99 <= bound,
        "memory of the front grows by less than 4 MiB": grown < 4096,
        "latency afterwards as before (p50 within a fifth)": again.right_us.p50 <= 1.2 * alone.right_us.p50,
    }
    measured = {
        "peak": round(peak, 1),
        "offered": round(offer, 1),
        "goodput": round(over.right / over.seconds, 1),
        "bound_us": round(bound),
        "grown_kib": grown,
        "alone_before_us": alone.right_us.p50,
        "alone_after_us": again.right_us.p50,
        "overload": summary(over),
        "goals": goals,
    }
    print(json.dumps(measured, indent=1))
    sys.exit(0 if all(goals.values()) else 1)


if __name__ == "__main__":
    main()
