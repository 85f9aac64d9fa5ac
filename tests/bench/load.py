"""Open-loop load with every answer checked: builds the generator in load/ when it is needed, and runs it.

    python tests/bench/load.py http://127.0.0.1:8000 --bundle mlp.pt2 --rate 2000:10,4000:10 --connections 256

sends the golden rows of the bundle to the model that the bundle names, and prints one JSON object.
"""

import argparse
import fcntl
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

HERE = Path(__file__).resolve().parent
BUILT = HERE.parents[1] / "build" / "bench" / "load"


@dataclass(frozen=True, slots=True)
class Case:
    """A whole HTTP/1.1 request, and the bytes of the outputs that answer it; without these, any 200 will do."""

    request: bytes
    expected: bytes = b""


class Distribution(msgspec.Struct, frozen=True):
    """Microseconds. None where nothing was counted."""

    count: int
    mean: float | None
    p50: int | None
    p90: int | None
    p99: int | None
    p999: int | None
    max: int | None


class Tally(msgspec.Struct, frozen=True):
    """How requests ended; each is counted once.

    refused: 503 or 429. expired: 504. failed: another status. lost: the connection ended, or the time was up, before
    the answer. abandoned: the patience was over. unreachable: no connection was made. unsent: none was free.
    """

    right: int
    wrong: int
    refused: int
    expired: int
    failed: int
    lost: int
    abandoned: int
    unreachable: int
    unsent: int
    statuses: dict[str, int]
    right_us: Distribution  # from the time at which the request was meant to leave
    refused_us: Distribution  # from the time at which it left
    delay_us: Distribution  # from the one to the other: large where connections are too few


class Phase(Tally, frozen=True, kw_only=True):
    """The requests that were meant to leave in one part of the run. Rate 0: their times were given."""

    rate: float
    seconds: float


class Report(Tally, frozen=True, kw_only=True):
    seed: int
    connections: int
    requests: int
    seconds: float  # until the last answer
    longest_gap_us: int  # between two right answers, or the start and the first
    phases: list[Phase]
    notes: list[str]  # the first faults in words


def http_request(path: str, body: bytes, headers: Mapping[str, str]) -> bytes:
    """A POST of `body` to this machine."""
    fields = {"host": "127.0.0.1", **headers, "content-length": str(len(body))}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + body


@contextmanager
def running(
    port: int,
    cases: Sequence[Case],
    *,
    rate: Sequence[tuple[float, float]] = (),
    arrivals: Sequence[float] = (),
    **options: float,
) -> Iterator[subprocess.Popen[str]]:
    """The generator at work against 127.0.0.1; `report` waits for its end. It is ended with the block.

    `rate`: phases of (requests a second, seconds) with Poisson arrivals; or `arrivals`: the seconds of each request.
    `options`: seed; connections (64); grace, the seconds that answers may take after the last request (5); patience,
    after so many seconds a connection with no answer is closed (0: never); rtol and atol, for outputs that are
    float32 (0: equal bytes).
    """
    with tempfile.TemporaryDirectory(prefix="load-") as name:
        folder = Path(name)
        for index, case in enumerate(cases):
            (folder / f"{index}.request").write_bytes(case.request)
            (folder / f"{index}.expected").write_bytes(case.expected)
        (folder / "arrivals").write_text("\n".join(map(repr, arrivals)))
        phases = ",".join(f"{per_second}:{seconds}" for per_second, seconds in rate)
        when = ["--rate", phases] if rate else ["--arrivals", str(folder / "arrivals")]
        words = [str(binary()), "--port", str(port), "--cases", name, *when]
        words += [word for option, value in options.items() for word in (f"--{option}", str(value))]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
            try:
                yield process
            finally:
                process.kill()


def report(process: subprocess.Popen[str]) -> Report:
    """What a run of the generator printed at its end."""
    printed, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(f"the load generator ended with {process.returncode}")
    return msgspec.json.decode(printed, type=Report)


def run(port: int, cases: Sequence[Case], **options: object) -> Report:
    """`running`, to its end."""
    with running(port, cases, **options) as process:  # type: ignore[arg-type]
        return report(process)


def binary() -> Path:
    """The generator, built when it is missing or older than its sources; by one process at a time."""
    sources = sorted((HERE / "load").iterdir())
    BUILT.parent.mkdir(parents=True, exist_ok=True)
    with (BUILT.parent / "load.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not BUILT.is_file() or BUILT.stat().st_mtime < max(path.stat().st_mtime for path in sources):
            compiler = os.environ.get("CXX", "c++")
            words = [compiler, "-std=c++20", "-O2", "-Wall", "-Wextra", "-Werror", "-o", str(BUILT)]
            subprocess.run([*words, str(HERE / "load" / "main.cc")], check=True)
    return BUILT


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="http://127.0.0.1:PORT of `mctl serve`")
    parser.add_argument("--bundle", type=Path, required=True, help="whose golden rows are sent")
    parser.add_argument("--rate", required=True, help="REQUESTS_A_SECOND:SECONDS,… one phase after another")
    parser.add_argument("--header", action="append", default=[], help="'name: value', for instance a deadline")
    for name, kind, help in [
        ("seed", int, "of the arrivals"),
        ("connections", int, "at most"),
        ("grace", float, "seconds for answers after the last request"),
        ("patience", float, "seconds after which a connection without an answer is closed"),
    ]:
        parser.add_argument(f"--{name}", type=kind, help=help)
    given = parser.parse_args()
    url = urlsplit(given.url)
    if url.hostname != "127.0.0.1" or url.port is None:
        parser.error("load is only made on this machine: http://127.0.0.1:PORT")
    from examples import Examples

    examples = Examples.of(given.bundle)
    headers = dict(map(str.strip, header.split(":", 1)) for header in given.header)
    names = ("seed", "connections", "grace", "patience")
    options = {name: getattr(given, name) for name in names if getattr(given, name) is not None}
    phases = [tuple(map(float, phase.split(":"))) for phase in given.rate.split(",")]
    done = run(url.port, examples.cases(headers), rate=phases, rtol=examples.rtol, atol=examples.atol, **options)
    sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(done), indent=1) + b"\n")


if __name__ == "__main__":
    main()
