"""Memory over a million calls and a million requests, standalone and with libtorch.

    python tests/bench/standalone_memory.py mlp.pt2 [--count 1000000]

First the process that loads a bundle as a worker does: it calls the model at all buckets in turns. Then a server, whose
64 clients (`wrk`) send requests of one to eight rows, so that batches have all sizes. Printed is what is resident
without the pages of the bundle, which belong to the page cache.
"""

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

import bodies
import measure
from load import http_request
from standalone import WAYS, Prepared, library_of, prepared, resident, served

from mctl.runner import native
from mctl.runner.stopwatch import Ask, runner_stopwatch

CALLS = 2_000  # of one ask
POINTS = (0.02, 0.1, 0.25, 0.5, 0.75, 1.0)  # of the count, when memory is looked at


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--count", type=int, default=1_000_000)
    given = parser.parse_args()
    with prepared(given.bundle) as ready:
        for way in WAYS:
            print(f"{way}: calls, worker kB")
            for done, sizes in calls(ready, way, given.count):
                print(f"{done:12,}" + "".join(f"{size / 1024:12,.0f}" for size in sizes), flush=True)
        for way in WAYS:
            print(f"{way}: requests, front kB, worker kB")
            for done, sizes in requests(ready, way, given.count):
                print(f"{done:12,}" + "".join(f"{size / 1024:12,.0f}" for size in sizes), flush=True)


def calls(ready: Prepared, way: str, count: int) -> Iterator[tuple[int, list[int]]]:
    with runner_stopwatch(native.find_runner(), ready.bundles[way], library_of(way), 1) as watch:
        done = 0
        for point in POINTS:
            while done < point * count:
                for inputs in ready.inputs.values():
                    done += len(watch.time(Ask(str(inputs.file), inputs.dims, "", 60.0, calls=CALLS)))
            yield done, [own_pages(watch.pid, ready.bundles[way])]


def requests(ready: Prepared, way: str, count: int) -> Iterator[tuple[int, list[int]]]:
    with served(ready.bundles[way], way) as server:
        server.ready_after()
        port = int(server.url.rpartition(":")[2])
        [worker] = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
        sent = list(requests_of(ready))
        for point in POINTS:
            while answered(port) < point * count:
                measure.wrk(port, sent, 64, 1 if point < POINTS[1] else 4, os.sched_getaffinity(0))
            yield answered(port), [own_pages(pid, ready.bundles[way]) for pid in (server.pid, int(worker))]


def requests_of(ready: Prepared) -> Iterator[bytes]:
    for size, inputs in ready.inputs.items():
        if size <= 8:
            body, headers = bodies.write_oip_binary({name: each.numpy() for name, each in inputs.tensors.items()})
            yield http_request(f"/v2/models/{ready.manifest.name}/infer", body, headers)


def answered(port: int) -> int:
    return int(measure.scrape(port)["mctl_requests_total"])


def own_pages(pid: int, bundle: Path) -> int:
    every, shared = resident(pid, bundle)
    return every - shared


if __name__ == "__main__":
    main()
