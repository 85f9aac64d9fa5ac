"""What many models cost, and what changes under load cost: replacing a version, rolling back, kill -9.

    python -m tests.bench.fleet [--rounds 15] [--replace 200] [--rollback 50] [--kill 200] [--models 100] [--seconds 2]

Its models are tests/serving/faulty.py's: they need no compiler of torch, and their numbers tell which version answered.
A number of 0 leaves a part out. `wrk` is needed for the first part.
"""

import argparse
import contextlib
import random
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from ..serving import faulty
from ..serving.fleet import Shelf, eventually, infer
from ..serving.server import Server, infer_binary
from ..serving.test_management import Managed
from . import load
from .serve_wrk import script_of, spread, wrk

BAD, GOOD = 5, 3


def case(model: str, factor: int) -> load.Case:
    x = faulty.rows((1, 7))
    body, headers = infer_binary(x=x)
    return load.Case(load.http_request(f"/v2/models/{model}/infer", body, headers), faulty.right(x, factor).tobytes())


def measure_many(shelf: Shelf, folder: Path, models: int, rounds: int, seconds: int) -> None:
    """One model's throughput in a server of many, beside a server of one; round by round, in changing order."""
    one, many = folder / "one", folder / "many"
    bundle = shelf.bundle(GOOD)
    for place in [one / "m", *[many / name for name in ("m", *(f"n{number}" for number in range(models - 1)))]]:
        (place / "1").mkdir(parents=True)
        (place / "1" / "bundle.pt2").hardlink_to(bundle)
    body, headers = infer_binary(x=faulty.rows((1, 7)))
    script = script_of(body, headers, folder, "one")
    options = ("--threads", "1")
    with Server(one, *options, standalone=True) as single, Server(many, *options, standalone=True) as crowd:
        eventually(lambda: crowd.request("/v2/health/ready").status == 200, 300)
        ratios = []
        for number in range(rounds):
            rates = {}
            for server in (single, crowd) if number % 2 else (crowd, single):
                rates[server] = wrk(f"{server.url}/v2/models/m/infer", script, 8, seconds).rate
            ratios.append(rates[crowd] / rates[single])
        print(f"throughput of one in a server of {models}, beside a server of one: {spread(ratios, 3)}")


@contextlib.contextmanager
def managed(shelf: Shelf, folder: Path) -> Iterator[Managed]:
    store = folder / f"store{random.random()}"
    for factor in (GOOD, BAD):
        shelf.bundle(factor, store / f"{factor}.pt2")
    with Managed("--model-store", str(store), "--state", str(store / "state.json"), "--threads", "1") as server:
        server.patch({"models": {"m": {"versions": {"1": {"bundle": f"{GOOD}.pt2"}}}}})
        server.wait_for("m")
        yield server


def measure_replacing(shelf: Shelf, folder: Path, times: int) -> None:
    """A version is replaced again and again at 1,000 requests a second; every answer is checked by its bytes."""
    with managed(shelf, folder) as server:
        quiet = load.run(server.port, [case("m", GOOD)], rate=[(1000, 10)])
        begin = time.monotonic()
        replace(server, 10)
        seconds = (time.monotonic() - begin) / 10 * times * 1.5
        took: list[float] = []
        thread = threading.Thread(target=lambda: took.append(replace(server, times)))
        thread.start()
        busy = load.run(server.port, [case("m", GOOD)], rate=[(1000, seconds)])
        thread.join()
    print(
        f"{times} replacements in {took[0]:.1f} of {seconds:.1f} s: {busy.right} of {busy.requests} right; "
        f"p99 {busy.right_us.p99} us during, {quiet.right_us.p99} us without"
    )


def replace(server: Managed, times: int) -> float:
    """Other settings are a new load beside the old one. The seconds that it took."""
    begin = time.monotonic()
    for number in range(times):
        before = gone(server)
        settings = {"max_queue_delay_us": number % 2 + 1}
        told = server.patch({"models": {"m": {"versions": {"1": {"settings": settings}}}}})
        assert told.status == 200, told.body
        eventually(lambda before=before: gone(server) > before)  # type: ignore[misc]
    return time.monotonic() - begin


def gone(server: Managed) -> int:
    """The last event of a version that has drained and gone."""
    events = server.manage("/admin/v1/events").json()["events"]
    return max((event["id"] for event in events if event["kind"] == "unloaded"), default=0)


def measure_rollback(shelf: Shelf, folder: Path, times: int) -> None:
    """From the request for a rollback to the last answer of the bad version that was asked for after it."""
    took = []
    with managed(shelf, folder) as server:
        server.patch({"models": {"m": {"versions": {"2": {"bundle": f"{BAD}.pt2"}}, "labels": {"stable": "1"}}}})
        server.wait_for("m/versions/2")
        for _ in range(times):
            server.patch({"models": {"m": {"labels": {"stable": "2"}, "traffic": {"stable": 100}}}})
            assert infer(server, "m").headers["x-mctl-version"] == "2"
            begin = time.monotonic()
            assert server.manage("/admin/v1/models/m/rollback", {}).status == 200
            while infer(server, "m").headers["x-mctl-version"] == "2":
                continue
            took.append(1000 * (time.monotonic() - begin))
            server.patch({"models": {"m": {"labels": {"stable": "1"}}}})
    print(f"rollback, until the next request is the good version's: {spread(took, 1)} ms")


def measure_killing(shelf: Shelf, folder: Path, times: int) -> None:
    """kill -9 at a random moment of changes: the state is the last one that was acknowledged, or the one in flight."""
    store = folder / "killed"
    shelf.bundle(GOOD, store / "m.pt2")
    words = ("--model-store", str(store), "--state", str(store / "state.json"))
    acknowledged = flying = None
    neither = 0
    for _ in range(times):
        with Managed(*words) as server:
            state = server.state()["models"]
            neither += acknowledged is not None and state not in (acknowledged, flying)
            acknowledged = state
            killer = threading.Timer(random.uniform(0, 0.05), server.process.kill)
            killer.start()
            with contextlib.suppress(OSError):
                while True:
                    version = str(random.randrange(1, 5))
                    keep = random.randrange(100)
                    flying = changed(acknowledged, version, keep, store)
                    told = server.patch({"models": {"m": {"versions": {version: {"bundle": "m.pt2"}}, "keep": keep}}})
                    acknowledged = told.json()["models"]
            killer.join()
            server.kill()
    print(f"kill -9 of the front {times} times: {neither} states that were neither the last nor the next")


def changed(models: dict, version: str, keep: int, store: Path) -> dict:  # type: ignore[type-arg]
    """The models after the change, as the server would print them."""
    versions = dict(models.get("m", {}).get("versions", {}))
    digest = next((its["digest"] for its in versions.values()), None)
    its = {"bundle": str(store / "m.pt2"), **({"digest": digest} if digest else {})}
    return {"m": {"versions": {**versions, version: its}, "keep": keep}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in [("rounds", 15), ("replace", 200), ("rollback", 50), ("kill", 200), ("models", 100)]:
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--seconds", type=int, default=2)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fleet-") as name:
        folder = Path(name)
        shelf = Shelf(folder)
        if given.rollback:
            measure_rollback(shelf, folder, given.rollback)
        if given.kill:
            measure_killing(shelf, folder, given.kill)
        if given.replace:
            measure_replacing(shelf, folder, given.replace)
        if given.rounds:
            measure_many(shelf, folder, given.models, given.rounds, given.seconds)


if __name__ == "__main__":
    main()
