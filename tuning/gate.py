"""What stands between a program and its bundle: it is compiled, checked, and only then written."""

import secrets
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from ..aoti.compiler import Built, CompileOptions, Staged, Standalone, Stats, compile_program
from ..aoti.target import require_runs_here
from ..aoti.workspace import require_space
from ..bundle_format import archive as archives
from ..bundle_format import host, interface
from ..bundle_format.archive import Archive
from ..bundle_format.errors import CompileError, HostError, ParityError
from ..bundle_format.files import require_place
from ..bundle_format.layout import REPORT
from ..bundle_format.manifest import Manifest, Tolerance
from ..export.program import NOT_APART, ExportReport, ExportRequest, export_model, load_program
from ..generation.export import GenerationRequest, export_generation
from ..parity import continuing
from ..parity.check import Progress, examine
from ..parity.report import Report, fair_tolerances, to_json, without_times
from ..parity.runs import Compiled
from ..parity.truth import Truth, exported, live
from ..runner import native
from . import slowdown
from .tune import TuneOptions, tune

_HELP = "write that part of the model with other operators"


class FailedError(ParityError):
    """The bundle was not written; `report` says why."""

    def __init__(self, report: Report, hint: str | None = None) -> None:
        first = report.failures[0]
        text = f"the bundle was not written: {first.verdict} in `{first.case}`"
        super().__init__(text, hint or first.advice)
        self.report = report


@dataclass(frozen=True, slots=True)
class Made:
    """A bundle that was written. `report` is None where parity was skipped, `export` where a program was given."""

    path: Path
    manifest: Manifest
    size: int  # bytes
    stats: Stats
    report: Report | None
    export: ExportReport | None = None


def compile_checked(
    program_path: Path,
    output: Path,
    options: CompileOptions,
    *,
    tuning: TuneOptions = TuneOptions(),  # noqa: B008
    parity: bool = True,
    tolerance: Mapping[str, Tolerance] | None = None,
    seed: int = 0,
    progress: Progress,
    truth: Callable[[Manifest], Truth | continuing.Truth] | None = None,
) -> Made:
    """Compiles a program, checks the bundle, and writes it whole or not at all.

    It is compared with the exported program run by torch, or with `truth`. A model whose rows depend on each other
    loses its batch dim, and says so. FailedError (with the report) where the compiled model is another; CompileError.
    """
    require_place(output)
    if parity:
        require_runs_here(options.target)
    if program_path.is_file():  # with parity, there is a second bundle for a while
        size = program_path.stat().st_size * (2 if parity else 1)
        require_space(output.resolve().parent, size, "free some space, or choose another place with `-o`")
    with compile_program(program_path, options, progress) as staged:
        if options.standalone:
            _without_libtorch(staged, options.standalone, progress)
        if staged.manifest.standalone:
            slowdown.settle(staged, options, tuning.measured_threads, progress)
        gate = None
        if parity:
            found = (truth or _from(program_path))(staged.manifest)
            gate = _Gate(staged, output, found, tolerance or {}, seed, options.standalone, progress)
        if tuning.level != "none":
            require_runs_here(options.target)
            tune(staged, tuning, gate.fault_of if gate else lambda _: "", progress)
        report = gate.checked() if gate else None
        manifest = _write(staged, output, report, tolerance or {})
        return Made(output, manifest, output.stat().st_size, staged.stats, report)


def build(
    request: ExportRequest | GenerationRequest,
    output: Path,
    options: CompileOptions,
    *,
    tuning: TuneOptions = TuneOptions(),  # noqa: B008
    tolerance: Mapping[str, Tolerance] | None = None,
    progress: Progress,
) -> Made:
    """Export, compile, and parity against the live eager model; `request.output` is not used."""
    require_place(output)
    with tempfile.TemporaryDirectory(dir=options.work_dir, prefix="mctl-build-") as folder:
        program = Path(folder) / "program.pt2"
        if isinstance(request, ExportRequest):
            report = export_model(replace(request, output=program), progress)
        else:
            report = export_generation(replace(request, output=program), progress)

        def eager(manifest: Manifest) -> Truth | continuing.Truth:
            of = live if manifest.generation is None else continuing.live
            return of(request.spec, request.weights, manifest)

        made = compile_checked(
            program,
            output,
            options,
            tuning=tuning,
            tolerance=tolerance,
            seed=request.seed,
            progress=progress,
            truth=eager,
        )
        return replace(made, export=report)


def _without_libtorch(staged: Staged, wanted: Standalone, progress: Progress) -> None:
    """Marks a bundle that mctl's shim has everything for. CompileError, or with "auto" a note, where it has not."""
    native.find_runner(progress)  # a checkout builds the shim with it
    shim = host.find_shim()
    if shim is None:
        raise HostError("this installation of mctl has no shim to check the bundle with", "install a wheel of mctl")
    missing = host.shim_lacks(shim, staged.stats.imports.torch)
    if not missing:
        staged.manifest = msgspec.structs.replace(staged.manifest, standalone=True)
        torch = staged.manifest.producer.torch
        if not torch.startswith(tuple(f"{version}." for version in host.TORCH_TESTED)):
            staged.note(f"compiled by torch {torch}; mctl's shim was tested with {' and '.join(host.TORCH_TESTED)}")
        return
    # what only operators need (lists of their arguments, say) is no reason of its own
    reasons = interface.operators(missing) or missing
    called = (interface.with_callers(name, staged.stats.callers.get(name, ())) for name in reasons)
    text = f"the compiled model needs libtorch for {', '.join(called)}"
    if wanted == "yes":
        raise CompileError(text, f"{_HELP}, or keep libtorch with `--standalone=auto`")
    progress(f"not standalone: {text}")
    staged.note(f"not standalone: {text}")


def _from(program_path: Path) -> Callable[[Manifest], Truth | continuing.Truth]:
    def program(manifest: Manifest) -> Truth | continuing.Truth:
        loaded = load_program(program_path)
        return exported(loaded) if manifest.generation is None else continuing.Exported(loaded)

    return program


@dataclass(slots=True)
class _Gate:
    """Holds the parts of a bundle against the truth, at a temporary path beside `output`."""

    staged: Staged
    output: Path
    truth: Truth | continuing.Truth
    tolerance: Mapping[str, Tolerance]
    seed: int
    standalone: Standalone
    progress: Progress

    def checked(self) -> Report:
        """The report of a bundle that passes. Where only its other variants do not, they go, and a note says so; where
        it does not without libtorch, it keeps that, if "auto" was asked for.
        """
        report = self._examine()
        if not report.ok and len(self.staged.manifest.variants) > 1:
            fault = _fault(report)
            self.staged.choose([self.staged.base])
            notes = (*self.staged.manifest.notes, f"all variants but one were dropped: together, {fault}")
            self.staged.manifest = msgspec.structs.replace(self.staged.manifest, curve=(), notes=notes)
            report = self._examine()
        if not report.ok and self.staged.manifest.standalone:
            report = self._with_libtorch(report)
        if not report.ok:
            raise FailedError(report)
        return report

    def _with_libtorch(self, report: Report) -> Report:
        """What the report is where the same code is called with libtorch; `report` again where that is no better."""
        before = self.staged.manifest
        notes = (note for note in before.notes if not note.startswith("standalone"))
        self.staged.manifest = msgspec.structs.replace(before, standalone=False, notes=tuple(notes))
        self.progress(f"without libtorch {_fault(report)}")
        other = self._examine()
        if not other.ok:
            self.staged.manifest = before
            return report
        if self.standalone == "yes":
            raise FailedError(report, "with libtorch the bundle passes: keep it with `--standalone=auto`")
        detail = report.failures[0].detail
        self.staged.note(f"not standalone: without libtorch {_fault(report)}{f': {detail}' if detail else ''}")
        return other

    def fault_of(self, variants: Sequence[Built]) -> str:
        """Why the first of these is not the eager model where it covers; or ""."""
        before = self.staged.manifest, self.staged.members
        self.staged.choose(variants)
        try:
            report = self._examine(variants[0].recipe.dims or None)
        finally:
            self.staged.manifest, self.staged.members = before
        return "" if report.ok else _fault(report)

    def _examine(self, dims: dict[str, int] | None = None) -> Report:
        with _beside(self.output) as path:
            self.staged.write(path)
            with archives.open_bundle(path) as archive, Compiled(path) as compiled:
                self.progress("parity: loading the model")
                report = self._examine_as(archive, compiled, dims)
        return msgspec.structs.replace(report, file=self.output.name, digest="")  # of a file that is gone

    def _examine_as(self, archive: Archive, compiled: Compiled, dims: dict[str, int] | None) -> Report:
        """By the checks for what the bundle does."""

        def progress(text: str) -> None:
            self.progress(f"parity: {text}")

        given, seed = self.tolerance, self.seed
        if not isinstance(self.truth, Truth):
            return continuing.examine(
                archive, compiled, self.truth, tolerance=given, seed=seed, progress=progress, find_invariance=True
            )
        return examine(
            archive,
            compiled,
            self.truth,
            tolerance=given,
            seed=seed,
            progress=progress,
            find_batching=True,
            dims=dims,
        )


def _fault(report: Report) -> str:
    first = report.failures[0]
    return f"parity found {first.verdict} in `{first.case}`"


@contextmanager
def _beside(output: Path) -> Iterator[Path]:
    path = output.resolve().parent / f".{output.name[:200]}.{secrets.token_hex(6)}.checking"
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def _write(staged: Staged, output: Path, report: Report | None, given: Mapping[str, Tolerance]) -> Manifest:
    if report is None:
        manifest = msgspec.structs.replace(staged.manifest, parity="skipped")
        return archives.write(output, staged.top, staged.members, manifest)
    manifest = _settled(staged.manifest, report, given)
    return archives.write(output, staged.top, [*staged.members, (REPORT, to_json(without_times(report)))], manifest)


def _settled(manifest: Manifest, report: Report, given: Mapping[str, Tolerance]) -> Manifest:
    """The manifest with what parity found: its verdict, batching, and tolerances that eager's own error asks for."""
    contract, buckets, notes = manifest.contract, dict(manifest.buckets), list(manifest.notes)
    if report.batchable is False and contract.batch_dim is not None:
        buckets.pop(contract.batch_dim, None)
        contract = msgspec.structs.replace(contract, batch_dim=None, batch_note=NOT_APART)
        notes.append(f"not batchable: {NOT_APART}")
    tolerances = {**manifest.tolerances, **given}
    for name, wider in fair_tolerances(report.results).items():
        tolerances[name] = wider
        notes.append(f"tolerance of `{name}` is {wider.rtol:.1e},{wider.atol:.1e}: eager itself is that far from fp64")
    generation = manifest.generation
    if generation is not None:
        generation = msgspec.structs.replace(generation, invariant=continuing.is_invariant(report))
        if not generation.invariant:
            notes.append("not invariant: bits of a token depend on what is computed beside it")
    return msgspec.structs.replace(
        manifest,
        contract=contract,
        generation=generation,
        buckets=buckets,
        tolerances=tolerances,
        notes=tuple(notes),
        parity="skipped" if report.verdict == "random" else "pass",
    )
