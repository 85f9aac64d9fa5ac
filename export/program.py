"""model.py to program.pt2, and program.pt2 read again."""

import io
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch._export.serde.serialize import SerializeError
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram

from .. import __version__
from ..bundle_format import archive as archives
from ..bundle_format.archive import Archive
from ..bundle_format.contract import Contract
from ..bundle_format.errors import BundleError, ExportError, ModelError, UsageError
from ..bundle_format.files import atomic, require_place
from ..bundle_format.layout import ONNX
from ..bundle_format.manifest import Golden, Manifest, Producer, checked_name, name_from
from . import graph
from .capture import Captured, capture
from .cases import Cases, try_example
from .declare import Declared, declare, describe_change
from .describe import Wishes, check_names, describe
from .dims import DimSpec, InputSpec, ValueRange
from .example import tracing_sizes
from .failures import FixedDimError
from .folder import split_folder
from .golden import Case, dump_case, member_of
from .held import has_tensors
from .onnx import refuse_state, require_onnx, to_onnx
from .operators import LibraryFile, check_operators, load_files, load_members
from .proof import prove_case, prove_repeated, prove_steady, rows_apart, tolerance_of
from .running import Run, call_model, run_program
from .source import Source, load_source
from .usercode import quiet

Progress = Callable[[str], None]

NOT_APART = "rows of a batch depend on each other: found by comparing a row alone with the same row in a batch"
_LARGER = 11  # times a dim's multiple: sizes to trace with where small ones do not serve


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """What `mctl export` was asked for."""

    spec: str  # MODEL.py[:NAME]
    output: Path
    dims: tuple[DimSpec, ...] = ()
    inputs: tuple[InputSpec, ...] = ()
    weights: Path | None = None
    libraries: tuple[Path, ...] = ()  # of C++ operators that the model calls
    seed: int = 0
    ranges: Mapping[str, ValueRange] = field(default_factory=dict)  # input -> smallest and largest value
    pads: Mapping[str, int | float] = field(default_factory=dict)  # input -> the value that fills it up to a bucket
    output_names: tuple[str, ...] = ()
    name: str | None = None  # of the model; None: made of the file's name
    batch_dim: str | None = None  # None: found by mctl; "none": there is none
    allow_random: bool = False
    onnx: Path | None = None  # where the ONNX twin is written
    embed_onnx: bool = False  # it is in the program as well

    @property
    def wishes(self) -> Wishes:
        return Wishes(self.ranges, self.pads, self.output_names, self.batch_dim)


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What was made, what was proven, and what it took."""

    path: Path
    size: int  # bytes
    manifest: Manifest
    proven: dict[str, float]  # case -> largest absolute error of the program against eager
    seconds: dict[str, float]  # by phase
    notes: tuple[str, ...]


def export_model(request: ExportRequest, progress: Progress) -> ExportReport:
    """Writes program.pt2 (atomically) and says what it holds. UsageError and ExportError say what is in the way."""
    require_place(request.output)
    name = checked_name(request.name) if request.name else name_of(request.spec)
    if request.onnx or request.embed_onnx:
        require_onnx()
    if request.onnx:
        require_place(request.onnx)
        if request.onnx == request.output:
            raise UsageError(
                f"`{request.output}` is where the ONNX model goes", "write the program elsewhere with `-o`"
            )
    clock = Clock(progress)
    with clock.phase("import", f"importing {request.spec}"):
        libraries = load_files(request.libraries)
        source = load_source(request.spec, weights=request.weights, seed=request.seed)
        request = _with_defaults(request, source)
        declared = declare(source, request.dims, request.inputs, request.ranges)
        check_names(request.wishes, declared.named, declared.dims)
    notes: list[str] = []
    with clock.phase("trace", "tracing the model with torch.export"):
        traced = _trace(request, source, declared, notes)
        check_operators(traced.captured.exported, libraries)
        if request.onnx or request.embed_onnx:
            refuse_state(traced.contract)
    with clock.phase("prove", "comparing the program with the model"):
        cases = _cases(request, source, traced, notes)
        proven = _prove(traced, cases, progress)
        kept = cases.kept(proven.cases)
        contract = _batched_if_apart(traced.contract, cases, proven.cases[0], notes)
    manifest = _manifest(name, source, contract, kept, notes, libraries)
    members: list[tuple[str, archives.Data]] = [(member_of(case), dump_case(case)) for case in kept]
    members += [(library.record.member, library.path) for library in libraries]
    members += source.handler.members if source.handler else ()
    if request.onnx or request.embed_onnx:
        with clock.phase("onnx", "writing the program as ONNX"):
            twin = to_onnx(traced.captured.exported, traced.contract, source.record)
        if request.onnx:
            with atomic(request.onnx) as file:
                file.write(twin)
        members += [(ONNX, twin)] if request.embed_onnx else []
    with clock.phase("write", f"writing {request.output}"):
        manifest = write_program(request.output, traced.captured.exported, manifest, members)
    size = request.output.stat().st_size
    return ExportReport(request.output, size, manifest, proven.errors, clock.seconds, tuple(notes))


def name_of(spec: str) -> str:
    """The model's name, by its file or folder."""
    folder = split_folder(spec)
    return name_from(folder[0].resolve().name if folder else Path(spec.rpartition(".py")[0]).name)


def _with_defaults(request: ExportRequest, source: Source) -> ExportRequest:
    """With the dims and pads that the source knows of, where nobody declared others."""
    given = {spec.name for spec in request.dims}
    dims = (*request.dims, *(spec for spec in source.dims if spec.name not in given))
    places = {spec.name: spec.bindings for spec in source.dims}
    bound = tuple(spec if spec.bindings else spec._replace(bindings=places.get(spec.name, ())) for spec in dims)
    return replace(request, dims=bound, pads={**source.pads, **request.pads})


@dataclass(slots=True)
class Clock:
    """Tells what begins, and keeps what each phase took."""

    progress: Progress
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str, text: str) -> Iterator[None]:
        self.progress(text)
        start = time.monotonic()
        yield
        self.seconds[name] = round(time.monotonic() - start, 3)


@dataclass(frozen=True, slots=True)
class _Traced:
    declared: Declared  # with the sizes that were traced
    captured: Captured
    contract: Contract

    def run(self) -> Run:
        return run_program(self.captured.exported, self.contract)


def _trace(request: ExportRequest, source: Source, declared: Declared, notes: list[str]) -> _Traced:
    """The exported program and its contract."""
    outputs = try_example(declared, source.fresh, request.seed, notes)
    captured, declared = _capture(source, declared, request.seed)
    if note := describe_change(declared):
        notes.append(note)
    graph.refuse_training(captured.exported)
    graph.refuse_layouts(captured.exported)
    line = graph.random_line(captured.exported)
    if line and not request.allow_random:
        hint = "take them out, or write `--allow-random`: then values cannot be compared"
        raise ExportError(f"the model draws random numbers: {line}", hint)
    register = False
    try:
        state, changed = graph.changed_names(captured.exported)
    except ExportError:  # of a tensor that is no buffer
        if not has_tensors(source.model):
            raise
        register = True
        captured, declared = _capture(source, declared, request.seed, register=register)
        state, changed = graph.changed_names(captured.exported)
    if changed:
        names = dict(zip(graph.input_values(captured.exported), declared.named.tensors, strict=True))
        copied = frozenset(names[name] for name in changed)
        captured, declared = _capture(source, declared, request.seed, copied, register=register)
        notes.append(f"the model changes its input {', '.join(sorted(copied))} in place; the program works on a copy")
    contract = describe(captured.exported, declared, outputs, state, request.wishes)
    return _Traced(declared, captured, contract)


def _capture(
    source: Source, declared: Declared, seed: int, copied: frozenset[str] = frozenset(), *, register: bool = False
) -> tuple[Captured, Declared]:
    """The exported program, and the sizes that it was traced with: a small one may make another size 1 in the model."""
    try:
        return _capture_at(source, declared, seed, copied, register), declared
    except FixedDimError:
        larger = replace(declared, sizes=tracing_sizes(declared.dims, {}, _LARGER))
        if larger.sizes == declared.sizes:
            raise
        with suppress(ExportError, ModelError):
            call_model(source.fresh(), larger.named, larger.inputs(larger.sizes, seed))
            return _capture_at(source, larger, seed, copied, register), larger
        raise


def _capture_at(source: Source, declared: Declared, seed: int, copied: frozenset[str], register: bool) -> Captured:
    inputs = declared.inputs(declared.sizes, seed)
    return capture(source.fresh(), declared.named, inputs, declared.shapes, declared.dims, copied, register=register)


def _cases(request: ExportRequest, source: Source, traced: _Traced, notes: list[str]) -> Cases:
    return Cases(
        models=source.fresh,
        program=traced.run,
        declared=traced.declared,
        contract=traced.contract,
        doubtful=traced.captured.doubtful,
        seed=request.seed,
        notes=notes,
    )


@dataclass(frozen=True, slots=True)
class _Proven:
    cases: list[Case]
    errors: dict[str, float]  # case -> largest absolute error


def _prove(traced: _Traced, cases: Cases, progress: Progress) -> _Proven:
    """Compares program and eager at every case, and over several calls in a row."""
    proven = _Proven([], {})
    run = traced.run()
    if not traced.contract.random:
        with quiet():
            prove_steady(cases.models, cases.bind, cases.inputs(cases.declared.sizes))
    for case in cases.all():
        progress(f"comparing the program with the model at {case.name}")
        with quiet():
            run = traced.run() if traced.contract.state else run  # each case from the first state
            proven.errors[case.name] = prove_case(case, run, traced.contract)
        proven.cases.append(case)
    if not traced.contract.random:
        with quiet():
            prove_repeated(cases.models, cases.bind, traced.run(), proven.cases[0].inputs)
    return proven


def _batched_if_apart(contract: Contract, cases: Cases, traced: Case, notes: list[str]) -> Contract:
    """The contract without its batch dim where a row of a batch is not what it is alone."""
    if contract.batch_dim is None:
        return contract
    try:
        with quiet():
            if rows_apart(cases.bind(cases.models()), contract, traced):
                return contract
    except ModelError:  # it does not run with one row; parity finds out about the others
        return contract
    notes.append(f"not batchable: {NOT_APART}")
    return msgspec.structs.replace(contract, batch_dim=None, batch_note=NOT_APART)


def _manifest(
    name: str,
    source: Source,
    contract: Contract,
    cases: list[Case],
    notes: list[str],
    libraries: Sequence[LibraryFile],
) -> Manifest:
    return Manifest(
        schema="mctl.program/1",
        name=name,
        version="1",
        created=now().isoformat(timespec="seconds"),
        producer=producer(),
        source=source.record,
        contract=contract,
        golden=tuple(Golden(name=case.name, member=member_of(case), dims=case.dims) for case in cases),
        tolerances={output.name: tolerance_of(output.dtype) for output in contract.outputs},
        members={},
        libraries=tuple(library.record for library in libraries),
        preprocessing=source.preprocessing,
        handler=source.handler.record if source.handler else None,
        notes=tuple(notes),
    )


def now() -> datetime:
    """The time, or what SOURCE_DATE_EPOCH says it is: https://reproducible-builds.org/specs/source-date-epoch/."""
    fixed = os.environ.get("SOURCE_DATE_EPOCH", "")
    return datetime.fromtimestamp(int(fixed), UTC) if fixed.isdecimal() else datetime.now(UTC)


def producer() -> Producer:
    """This mctl, torch and Python."""
    return Producer(
        mctl=__version__,
        torch=str(torch.__version__),
        torch_git=torch.version.git_version,
        python=platform.python_version(),
    )


def write_program(
    path: Path, exported: ExportedProgram, manifest: Manifest, more: list[tuple[str, archives.Data]]
) -> Manifest:
    """What `torch.export.save` writes, in one archive with the manifest and `more` members."""
    with tempfile.TemporaryDirectory(dir=path.resolve().parent, prefix=f".{path.name}.") as folder:
        stock = Path(folder) / "stock.pt2"
        _save_stock(exported, stock, path)
        with Archive.open(stock) as saved:
            members: list[tuple[str, archives.Data]] = [(name, saved.view(name)) for name in saved.members]
            members += more
            written = archives.write(path, saved.top, members, manifest)
            members.clear()  # views of the mapping that is closed here
        return written


def _save_stock(exported: ExportedProgram, stock: Path, path: Path) -> None:
    try:
        with stock.open("wb", buffering=0) as file, quiet():
            spool = _Spool(file)
            torch.export.save(exported, spool)
            if spool.failure is not None:
                raise spool.failure
    except SerializeError as error:
        last = str(error).strip().splitlines()[-1].strip()
        hint = "write that part of the model with other operators"
        raise ExportError(f"torch cannot write the program down: {last}", hint) from error
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        hint = "free some space, or choose another place with `-o`"
        raise BundleError(f"cannot write `{path}`: {reason}", hint) from error


class _Spool(io.RawIOBase):
    """A file for torch's writer, which ends the process where a write raises: the first failure is kept instead."""

    def __init__(self, file: io.FileIO) -> None:
        self.file = file
        self.failure: OSError | None = None

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        return 0  # torch rewinds at the end

    def write(self, data: Any) -> int:
        rest = memoryview(data).cast("B")
        try:
            while self.failure is None and rest:
                rest = rest[self.file.write(rest) :]
        except OSError as error:
            self.failure = error
        return memoryview(data).nbytes


class Program:
    """A program.pt2 that is open: its manifest, and the exported program once it is asked for."""

    def __init__(self, archive: Archive) -> None:
        self.archive = archive

    @property
    def manifest(self) -> Manifest:
        return self.archive.manifest

    @cached_property
    def exported(self) -> ExportedProgram:
        """Read with pickle: as trusted as the model's source. BundleError where torch cannot read it."""
        self.archive.verify()
        load_members(self.archive)
        try:
            with quiet():
                return _with_sizes(torch.export.load(self.archive.path))
        except Exception as error:
            reason = " ".join(str(error).split())[:400]
            raise BundleError(f"torch cannot read `{self.archive.path}`: {reason}", "export it again") from error


def _with_sizes(exported: ExportedProgram) -> ExportedProgram:
    """Where a dim has a multiple, `torch.export.load` knows the example's size of `2*s0` and not that of `s0`, without
    which torch's compiler cannot guess at other sizes.
    """
    values = (node.meta.get("val") for node in exported.graph.nodes if node.op == "placeholder")
    env = next((value.fake_mode.shape_env for value in values if isinstance(value, FakeTensor)), None)
    if env is None:
        return exported
    for size, example in list(env.backed_var_to_val.items()):
        factor, symbol = size.as_coeff_Mul()
        if symbol.is_Symbol and symbol not in env.backed_var_to_val:
            env.add_backed_var_to_val(symbol, int(example // factor))
    return exported


def load_program(path: Path) -> Program:
    """Opens a program that `export_model` wrote; WrongKindError for another kind of file."""
    return Program(archives.open_program(path))


def run_exported(program: Program, *, double: bool = False) -> Run:
    """The exported program, in a fresh state, as a function from named inputs to named outputs.

    `double`: with parameters and buffers in float64; the caller widens the inputs and what the graph asks narrower.
    """
    return run_program(program.exported, program.manifest.contract, double=double)
