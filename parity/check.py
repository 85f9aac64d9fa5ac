"""Is the compiled model the eager model, over the whole contract? The checks of one bundle, one after another."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from ..bundle_format.archive import Archive, open_bundle
from ..bundle_format.errors import ParityError, UsageError
from ..bundle_format.manifest import Manifest, Tolerance
from ..export.golden import load_golden
from . import against as beside
from . import apart, batching, continuing
from .onnx import Runs, twin_notes
from .report import SCHEMA, Report, Result, Verdict, fair_tolerances, overall
from .runs import Compiled, CrashError, Raised, RaisedError, attempt
from .subject import Subject
from .truth import Truth, live

Progress = Callable[[str], None]


def check_bundle(
    path: Path,
    *,
    against: str | None = None,
    weights: Path | None = None,
    tolerance: Mapping[str, Tolerance] | None = None,
    seed: int = 0,
    runs: Runs = "compiled",
    onnx: Path | None = None,
    progress: Progress = lambda text: None,
) -> Report:
    """Parity of a bundle with its golden cases, or with the live eager model of `against` (MODEL.py[:NAME]).

    `runs` says what is judged: the compiled model, or its ONNX twin (the file `onnx`, or the one in or beside the
    bundle). MctlError where the bundle cannot be read or run here, or the model file cannot be loaded.
    """
    with open_bundle(path) as archive:
        _refuse_unknown(archive.manifest, tolerance or {})
        if archive.manifest.generation is not None:
            return _check_continuing(archive, against, weights, tolerance or {}, seed, runs, progress)
        notes = twin_notes(path, runs, onnx)
        with Compiled(path, runs, onnx) as compiled:  # it loads while this process does
            progress("loading the model")
            truth = live(against, weights, archive.manifest) if against else None
            if truth:
                _refuse_other(truth, archive)
            report = examine(archive, compiled, truth, tolerance=tolerance, seed=seed, progress=progress)
    return msgspec.structs.replace(report, runs=runs, notes=(*report.notes, *notes))


def _check_continuing(
    archive: Archive,
    against: str | None,
    weights: Path | None,
    tolerance: Mapping[str, Tolerance],
    seed: int,
    runs: Runs,
    progress: Progress,
) -> Report:
    """The same of a bundle that continues text."""
    if runs != "compiled":
        raise UsageError("a bundle that continues text has no ONNX twin", "leave `--runs` out")
    with Compiled(archive.path) as compiled:
        progress("loading the model")
        truth = continuing.live(against, weights, archive.manifest) if against else None
        return continuing.examine(archive, compiled, truth, tolerance=tolerance, seed=seed, progress=progress)


def _refuse_other(truth: Truth, archive: Archive) -> None:
    """ParityError where the live model does not take what the exported one was called with."""
    contract = archive.manifest.contract
    for case in load_golden(archive)[:1]:
        outcome = attempt(truth.reference, case.inputs)
        truth.reference.reset()
        if isinstance(outcome, Raised):
            names = ", ".join(f"`{declared.name}`" for declared in contract.inputs)
            raise ParityError(
                f"this model takes other inputs than the bundle ({names}): at {case.name}, {outcome.message}",
                "give the model that was exported: `--against MODEL.py[:NAME]`",
            )


def examine(
    archive: Archive,
    compiled: Compiled,
    truth: Truth | None,
    *,
    tolerance: Mapping[str, Tolerance] | None = None,
    seed: int = 0,
    progress: Progress = lambda text: None,
    find_batching: bool = False,
    dims: dict[str, int] | None = None,
) -> Report:
    """All checks; with `dims`, only those of these sizes.

    With `find_batching`, rows that depend on each other are a finding (`batchable`) and no failure.
    """
    start = time.monotonic()
    manifest = archive.manifest
    subject = Subject(manifest, compiled, truth, load_golden(archive), tolerance or {}, seed)
    unloaded = _load(compiled)
    if unloaded:
        results = [unloaded]
    else:
        results = run_checks(subject, progress) if dims is None else beside.at_sizes(subject, dims, progress)
    batchable = all(result.verdict == "pass" for result in results if result.check == "rows")
    if find_batching:
        results = [_found(result) if result.check == "rows" else result for result in results]
    verdict = overall(results)
    return Report(
        schema=SCHEMA,
        ok=verdict == "pass",
        verdict="random" if verdict == "pass" and subject.random else verdict,
        model=f"{manifest.name} {manifest.version}",
        file=archive.path.name,
        digest=archive.digest,
        reference=truth.label if truth else "eager's stored cases",
        fp64=subject.fp64 or "not used: no model at hand that could run in fp64",
        seed=seed,
        seconds=time.monotonic() - start,
        results=tuple(results),
        left_out=tuple(subject.left_out),
        notes=truth.notes if truth else (),
        batchable=batchable if manifest.contract.batch_dim else None,
    )


def _load(compiled: Compiled) -> Result | None:
    """Waits for the child; what became of it, if the bundle kills or fails it."""
    try:
        compiled.wait()
    except (CrashError, RaisedError) as error:
        verdict: Verdict = "crash" if isinstance(error, CrashError) else "compiled-raises"
        return Result(check="load", case="load", verdict=verdict, detail=str(error))
    return None


def _found(result: Result) -> Result:
    return msgspec.structs.replace(result, counts=result.verdict != "differs")


def run_checks(subject: Subject, progress: Progress) -> list[Result]:
    """Every check that says something of this contract, in the order of what they tell."""
    contract = subject.manifest.contract
    results = []
    if not contract.state:
        results.append(repeated := apart.repeat(subject, progress))
        if repeated.verdict == "random":
            subject.random = True
            results[-1] = msgspec.structs.replace(repeated, counts=not contract.random)
    results += beside.stored_cases(subject, progress)
    results += beside.sweep(subject, progress)
    subject.wider = fair_tolerances(results)
    if contract.state or subject.random:  # neither of them gives the same answer twice
        return results
    if contract.batch_dim:
        results += apart.rows(subject, contract.batch_dim, progress)
    for dim in subject.manifest.buckets:
        if batching.paddable(contract, dim):
            results += apart.padding(subject, dim, progress)
    return results


def _refuse_unknown(manifest: Manifest, tolerance: Mapping[str, Tolerance]) -> None:
    names = [output.name for output in manifest.contract.outputs]
    for name in tolerance:
        if name not in names:
            raise UsageError(f"there is no output `{name}`", f"the model gives {', '.join(f'`{n}`' for n in names)}")
