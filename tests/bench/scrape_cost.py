"""What scraping /metrics costs a busy server: its requests/s with and without a scraper, in one run, by wrk.

python tests/bench/scrape_cost.py mlp.pt2 [--rate 1,100] [--seconds 5] [--repeats 5] [--connections 64]

One scrape a second costs less than the noise of most machines, so a faster scraper is measured as well, and the cost of
one scrape is told from that. The front is one thread, so that its CPU time for a scrape, measured without load, is a
bound that no noise reaches: what it spends on scrapes it cannot spend on requests.
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from serve_wrk import Server, body_of, script_of, spread, wrk


@contextmanager
def scraped(url: str, rate: float) -> Iterator[list[int]]:
    """A scraper at work, which keeps its times as Prometheus does; the sizes of what it got."""
    sizes: list[int] = []
    over = threading.Event()

    def scrape() -> None:
        due = time.monotonic()
        while not over.wait(max(0.0, due - time.monotonic())):
            with urllib.request.urlopen(f"{url}/metrics") as answer:
                sizes.append(len(answer.read()))
            due += 1 / rate

    thread = threading.Thread(target=scrape)
    if rate:
        thread.start()
    try:
        yield sizes
    finally:
        over.set()
        if rate:
            thread.join()


def cpu_seconds(pid: int) -> float:
    """User and system time of the front process, to the nanosecond."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) * 1e-9


def cpu_of_a_scrape(server: Server, scrapes: int = 500) -> float:
    before = cpu_seconds(server.process.pid)
    for _ in range(scrapes):
        server.get("/metrics")
    return (cpu_seconds(server.process.pid) - before) / scrapes


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--rate", default="1,100", help="scrapes a second")
    parser.add_argument("--seconds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--option", action="append", default=[], help="an option of `mctl serve`, as `--threads=1`")
    options = parser.parse_args()
    if shutil.which("wrk") is None:
        sys.exit("there is no `wrk`")
    rates = [0.0, *map(float, options.rate.split(","))]
    server = Server(options.bundle, options.option)
    try:
        measure(server, rates, options)
    finally:
        server.stop()


def measure(server: Server, rates: list[float], options: argparse.Namespace) -> None:
    ask = urllib.request.Request(server.url, headers={"Accept": "application/json"})
    path = f"/v2/models/{json.loads(urllib.request.urlopen(ask).read())['models'][0]}"
    body, headers = body_of(json.loads(server.get(path)), binary=True)
    runs: dict[float, list[float]] = {rate: [] for rate in rates}
    with tempfile.TemporaryDirectory() as folder:
        script = script_of(body, headers, Path(folder), "binary")
        wrk(f"{server.url}{path}/infer", script, options.connections, 1)
        for repeat in range(options.repeats):
            for rate in rates if repeat % 2 else reversed(rates):  # what else the machine does falls on all
                with scraped(server.url, rate) as sizes:
                    found = wrk(f"{server.url}{path}/infer", script, options.connections, options.seconds)
                runs[rate].append(found.rate)
                if rate and len(sizes) < 0.8 * rate * options.seconds:
                    sys.exit(f"only {len(sizes)} scrapes in {options.seconds} s: {rate:g} a second are too many here")
    print(f"{options.connections} connections, {options.repeats} x {options.seconds} s, median (least..most)")
    for rate, measured in runs.items():
        ratios = [with_scrapes / without for with_scrapes, without in zip(measured, runs[0.0], strict=True)]
        line = f"{spread(measured)} requests/s"
        if rate:
            lost = (1 - statistics.median(ratios)) / rate
            line += f", {spread(ratios, 3)} of the rate without; by that one a second costs {lost:.3%}"
        print(f"  {rate:g} scrapes/s: {line}")
    used, size = cpu_of_a_scrape(server), len(server.get("/metrics"))
    print(
        f"  the front's CPU time for a scrape of {size:,} bytes: {used * 1e6:.0f} us, at one a second {used:.3%} of it"
    )


if __name__ == "__main__":
    main()
