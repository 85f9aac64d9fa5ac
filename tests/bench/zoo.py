"""Real architectures, small and with random weights, from export to bench: what builds, what is refused and why.

python tests/bench/zoo.py [NAME …] [--speed] [--work DIR]

Each file of zoo/ is a model with its `mctl export` command; NAME chooses some. README.md says which packages they need.
"""

import argparse
import ast
import json
import os
import random
import runpy
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mctl.bundle_format.archive import open_bundle
from mctl.bundle_format.contract import Contract
from mctl.bundle_format.errors import MctlError
from mctl.export.golden import load_golden
from mctl.parity.cases import Case, spans, tensors
from mctl.runner import load

ZOO = Path(__file__).with_name("zoo")
PEERS = ("eager", "compile", "aoti", "onnxruntime", "openvino")
BATCHES = (1, 8, 32)


@dataclass(frozen=True, slots=True)
class Built:
    """What came of a model; `said` is the error where a step failed."""

    name: str
    step: str = "built"  # or the step that failed
    said: str = ""
    seconds: float = 0.0  # of the compile
    size: int = 0  # bytes of the bundle
    error: float = 0.0  # the largest beside eager, at sizes that parity does not try


def command_of(path: Path) -> list[str]:
    """The arguments after `mctl` of the command in the file's docstring."""
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    return shlex.split(docstring.replace("\\\n", " ").partition("mctl ")[2])


def mctl(*arguments: str | Path, timeout: float = 3600) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mctl.cli.main", *map(str, arguments)]
    return subprocess.run(command, cwd=ZOO, text=True, capture_output=True, timeout=timeout)


def build(path: Path, folder: Path) -> Built:
    """Exports, compiles with parity, and compares once more."""
    program, bundle = folder / f"{path.stem}.program.pt2", folder / f"{path.stem}.pt2"
    done = mctl(*command_of(path), "-o", program)
    if done.returncode:
        return Built(path.stem, "export", told(done))
    begun = time.monotonic()
    done = mctl("compile", program, "-o", bundle)
    if done.returncode:
        return Built(path.stem, "compile", told(done))
    seconds = time.monotonic() - begun
    try:
        return Built(path.stem, seconds=seconds, size=bundle.stat().st_size, error=largest_error(path, bundle))
    except (MctlError, RuntimeError) as error:
        return Built(path.stem, "call", str(error))


def told(done: subprocess.CompletedProcess[str]) -> str:
    """The error's sentence and its hint, or what stands at the end."""
    text = done.stderr[done.stderr.find("error: ") :] if "error: " in done.stderr else done.stderr[-400:]
    return " ".join(text.split())


def largest_error(path: Path, bundle: Path, count: int = 5) -> float:
    """Over random sizes, each error in terms of the largest number of its output."""
    torch.manual_seed(0)  # the default of `mctl export --seed`
    model = runpy.run_path(str(path))["model"]().eval()
    with open_bundle(bundle) as archive:
        contract = archive.manifest.contract
        span = spans(contract, [case.inputs for case in load_golden(archive)])
    session, worst = load(bundle), 0.0
    for case in some_sizes(contract, count):
        inputs = tensors(contract, case, 7, span)
        with torch.no_grad():
            wanted = named(model(**{name: tensor.clone() for name, tensor in inputs.items()}), contract)
        got = session.call(inputs)
        for name, value in wanted.items():
            if value.numel():
                scale = value.double().abs().max().clamp(min=1e-6)
                worst = max(worst, float((got[name].double() - value.double()).abs().max() / scale))
        if contract.state:
            break  # the next call would go on from here
    return worst


def some_sizes(contract: Contract, count: int) -> list[Case]:
    drawn = random.Random(5)
    return [
        Case({dim.name: drawn.randrange(dim.min, dim.max + 1, dim.multiple) for dim in contract.dims}, "normal")
        for _ in range(count if contract.dims else 1)
    ]


def named(result: Any, contract: Contract) -> dict[str, torch.Tensor]:
    if isinstance(result, dict):
        return result
    values = result if isinstance(result, tuple) else (result,)
    return {output.name: value for output, value in zip(contract.outputs, values, strict=True)}


def speeds(bundle: Path) -> dict[str, list[str]]:
    """For each peer its time over mctl's at batch 1, 8, 32, with one thread and with two."""
    with open_bundle(bundle) as archive:
        contract = archive.manifest.contract
    largest = next((dim.max for dim in contract.dims if dim.name == contract.batch_dim), 1)
    sizes = ",".join(str(size) for size in BATCHES if size <= largest)
    dim = ["--dim", f"{contract.batch_dim}={sizes}"] if contract.batch_dim else []
    done = mctl("bench", bundle, *dim, "--threads", "1,2", "--against", ",".join(PEERS), "--json")
    if done.returncode:
        return {"bench": [told(done)]}
    report = json.loads(done.stdout)
    found: dict[str, list[str]] = {}
    for measured in report["measured"]:
        if measured["ratio"]:
            found.setdefault(measured["name"], []).append(f"{measured['ratio']['middle']:.2f}")
    return found | {name: [f"left out: {why}"] for name, why in report["left_out"].items()}


def main() -> None:
    """Exit code 1 if a model that is not meant to be refused was."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="models [all]")
    parser.add_argument("--speed", action="store_true", help="measure beside other ways to run them")
    parser.add_argument("--work", type=Path, help="keep programs and bundles here")
    options = parser.parse_args()
    folder = (options.work or Path(tempfile.mkdtemp(prefix="zoo-"))).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    failed = 0
    for path in sorted(ZOO.glob("*.py")):
        if options.names and path.stem not in options.names:
            continue
        built = build(path, folder)
        if built.step != "built":
            failed += 1
            print(f"{built.name:20} {built.step} failed: {built.said}", flush=True)
            continue
        print(f"{built.name:20} {built.seconds:5.0f} s {built.size / 1e6:7.2f} MB  error {built.error:.1e}", flush=True)
        for peer, ratios in speeds(folder / f"{path.stem}.pt2").items() if options.speed else ():
            print(f"{'':20}   {peer:12} {'  '.join(ratios)}", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
