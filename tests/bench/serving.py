"""The serving benchmark: `mctl serve` beside its limit and other servers, in one run on one machine.

    python tests/bench/serving.py --mlp mlp.pt2 --minilm minilm.pt2 --peers peers/bin/python

Needs `wrk`. Each round starts each server in turn, in another order, checks that its answers are right, and measures it
at 1, 8, 64 (and, for the MLP, 512) connections. README.md beside this file says what is compared.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import bodies
import measure
import msgspec
import servers
from examples import Examples, Row
from results import Bare, Point, Results, tables
from servers import Server, Setup

from mctl.runner.session import load

HERE = Path(__file__).resolve().parent
SAMPLES = HERE.parents[1] / "samples"
WARM_SECONDS = 1  # before each measurement, at its number of connections


@dataclass(frozen=True, slots=True)
class Model:
    """One of the two models that are served."""

    name: str  # of the sample
    binary: bodies.Writer
    sizes: dict[str, int]  # of dims besides the batch
    connections: tuple[int, ...]
    threads: int | None  # of the model; None: one for each of the server's CPUs


MODELS = (
    Model("mlp", bodies.write_oip_raw, {}, (1, 8, 64, 512), 1),
    Model("minilm", bodies.write_oip_binary, {"seq": 32}, (1, 8, 64), None),
)


def main() -> None:
    given = _arguments()
    found = {}
    for model in MODELS:
        bundle = getattr(given, model.name)
        if bundle:
            found[model.name] = _measure(model, bundle.resolve(), given)
            print(tables(found[model.name]), end="\n\n", flush=True)
    if given.json:
        given.json.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mlp", type=Path, help="bundle of samples/mlp.py")
    parser.add_argument("--minilm", type=Path, help="bundle of samples/minilm.py")
    parser.add_argument("--peers", help="Python of an environment with other servers; README.md says how to make one")
    parser.add_argument("--servers", type=_names, help="only these, by the start of their names: 'mctl,Lit'")
    parser.add_argument("--connections", type=_numbers, help="only these: '1,64'")
    parser.add_argument("--seconds", type=int, default=5, help="of each measurement [5]")
    parser.add_argument("--rounds", type=int, default=3, help="[3]")
    parser.add_argument("--workers", type=int, help="of each peer [one for each of the server's CPUs]")
    parser.add_argument("--server-cpus", type=_cpus, help="'0-3,8' [half of them; with less than four all]")
    parser.add_argument("--client-cpus", type=_cpus, help="[the others; with less than four all]")
    parser.add_argument(
        "--soak", type=int, default=0, metavar="REQUESTS", help="then measure the growth of memory over so many"
    )
    parser.add_argument("--json", type=Path, help="write every number to this file")
    given = parser.parse_args()
    if not given.mlp and not given.minilm:
        parser.error("give --mlp or --minilm")
    every = sorted(os.sched_getaffinity(0))
    half = len(every) // 2 if len(every) >= 4 else 0
    given.server_cpus = given.server_cpus or set(every[: half or None])
    given.client_cpus = given.client_cpus or set(every[half:])
    return given


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def _cpus(text: str) -> set[int]:
    ranges = [part.partition("-") for part in text.split(",")]
    return {cpu for first, _, last in ranges for cpu in range(int(first), int(last or first) + 1)}


def _measure(model: Model, bundle: Path, given: argparse.Namespace) -> Results:
    examples = Examples.of(bundle)
    threads = model.threads or len(given.server_cpus)
    connections = given.connections or model.connections
    with load(bundle, threads=threads) as session:
        rows = examples.sized(model.sizes, session)
    batch = examples.manifest.contract.dim(examples.manifest.contract.batch_dim).max
    results = Results(model.name)
    with tempfile.TemporaryDirectory(prefix="serving-") as work_dir:
        chosen = _choose(
            servers.servers_for(model.binary, given.workers or len(given.server_cpus), batch), given, results
        )
        onnx = None
        if any(server.needs for server in chosen):
            onnx = _onnx(SAMPLES / f"{model.name}.py", examples, given.peers, Path(work_dir))
        setup = Setup(bundle, onnx, given.peers, threads, max(connections), given.server_cpus, Path(work_dir))
        for number in range(given.rounds):
            results.bare.append(_bare(model, setup, given.seconds))
            turn = number % len(chosen)
            for server in [*chosen[turn:], *chosen[:turn]]:
                _say(f"{model.name}, round {number + 1} of {given.rounds}: {server.name}")
                try:
                    with servers.started(server, setup, examples, rows) as (pid, port):
                        requests = server.requests(examples, rows)
                        for count in connections:
                            results.points.append(_point(server, port, requests, count, number, given))
                        results.memory.setdefault(server.name, []).append(measure.memory_of(pid))
                except RuntimeError as error:
                    if not server.needs:  # ours
                        raise
                    results.left_out[server.name] = f"round {number + 1}: {error}"
                    _say(results.left_out[server.name])
        results.points.sort(key=lambda point: [server.name for server in chosen].index(point.server))
        if given.soak:
            _soak(chosen[0], setup, examples, rows, given)
    return results


def _choose(every: Sequence[Server], given: argparse.Namespace, results: Results) -> list[Server]:
    """The servers that were asked for and can be had."""
    chosen = []
    for server in every:
        if given.servers and not server.name.startswith(given.servers):
            continue
        if not server.needs:
            chosen.append(server)
        elif not given.peers:
            results.left_out[server.name] = "no --peers"
        elif absent := servers.missing(server, given.peers):
            results.left_out[server.name] = f"not installed: {', '.join(absent)}"
        else:
            chosen.append(server)
    return chosen


def _onnx(source: Path, examples: Examples, python: str, folder: Path) -> Path:
    """The sample as the peers run it, made by their Python with the weights that the bundle has."""
    contract = examples.manifest.contract
    axes = {
        declared.name: {
            axis: [dim, contract.dim(dim).min, contract.dim(dim).max]
            for axis, dim in enumerate(declared.shape)
            if isinstance(dim, str)
        }
        for declared in contract.inputs
    }
    target = folder / f"{source.stem}.onnx"
    words = [python, str(HERE / "peers" / "onnx_model.py"), str(source), str(target)]
    words += [str(examples.manifest.source.seed), json.dumps(axes)]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"no ONNX file of {source}:\n{done.stderr[-2000:]}")
    return target


def _bare(model: Model, setup: Setup, seconds: float) -> Bare:
    words = [sys.executable, str(HERE / "bare.py"), str(setup.bundle), f"--threads={setup.threads}"]
    words += [f"--seconds={2 * seconds}", *(f"--size={name}={size}" for name, size in model.sizes.items())]
    preexec = measure.pinned(setup.cpus)
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True, preexec_fn=preexec)
    return msgspec.json.decode(done.stdout, type=Bare, strict=False)


def _point(
    server: Server, port: int, requests: Sequence[bytes], connections: int, number: int, given: argparse.Namespace
) -> Point:
    measure.wrk(port, requests, connections, WARM_SECONDS, given.client_cpus)
    before = measure.scrape(port) if server.has_metrics else {}
    speed = measure.wrk(port, requests, connections, given.seconds, given.client_cpus)
    batches = measure.batches_between(before, measure.scrape(port)) if server.has_metrics else None
    return Point(server.name, connections, number, speed, batches)


def _soak(server: Server, setup: Setup, examples: Examples, rows: tuple[Row, ...], given: argparse.Namespace) -> None:
    """How much a server grows over many requests, after it is warm."""
    with servers.started(server, setup, examples, rows) as (pid, port):
        requests = server.requests(examples, rows)
        measure.wrk(port, requests, 64, 5, given.client_cpus)
        before, done = measure.memory_of(pid), 0.0
        while done < given.soak:
            done += 10 * measure.wrk(port, requests, 64, 10, given.client_cpus).rate
        after = measure.memory_of(pid)
        print(f"{server.name}: {after.resident - before.resident:+.2f} MiB over {done:,.0f} requests")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
