"""model.py to program.pt2, and program.pt2 read again."""

import copy
import platform
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.export import ExportedProgram

from .. import __version__
from ..bundle_format import archive as archives
from ..bundle_format import contract as contracts
from ..bundle_format.archive import Archive
from ..bundle_format.contract import Contract, Input
from ..bundle_format.errors import BundleError
from ..bundle_format.manifest import Golden, Manifest, Producer, Tolerance, name_from
from .capture import capture
from .dims import DimSpec, InputSpec, bind
from .example import make_inputs, tracing_sizes
from .golden import Case, case_name, case_sizes, dump_case, member_of
from .naming import Tensors, dtype_name
from .outputs import describe_output
from .source import Source, eager, load_source

Run = Callable[[Mapping[str, torch.Tensor]], Tensors]
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """What `mctl export` was asked for."""

    spec: str  # MODEL.py[:NAME]
    output: Path
    dims: tuple[DimSpec, ...] = ()
    inputs: tuple[InputSpec, ...] = ()
    weights: Path | None = None
    seed: int = 0
    ranges: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    pads: Mapping[str, int | float] = field(default_factory=dict)
    batch_dim: str | None = None  # None: found; "none": there is none
    output_names: tuple[str, ...] = ()
    allow_random: bool = False


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What was made, and what it took."""

    path: Path
    manifest: Manifest
    size: int  # bytes
    seconds: dict[str, float]
    notes: tuple[str, ...]


def export_model(request: ExportRequest, progress: Progress) -> ExportReport:
    """Writes program.pt2 (atomically) and says what it holds."""
    progress("importing the model")
    start = time.monotonic()
    source = load_source(request.spec, weights=request.weights, seed=request.seed)
    named = source.named
    examples = named.tensors
    dims = [spec.dim for spec in request.dims]
    shapes = bind(request.dims, {name: tuple(value.shape) for name, value in examples.items()}, request.inputs)
    given = {
        axis: examples[name].shape[at]
        for name, shape in shapes.items()
        for at, axis in enumerate(shape)
        if isinstance(axis, str)
    }
    sizes = tracing_sizes(dims, given)
    progress("exporting")
    inputs = make_inputs(examples, shapes, sizes, request.ranges, request.seed)
    exported = capture(source.model, named, inputs, shapes, dims)
    symbols = {}
    placeholders = [n for n in exported.graph.nodes if n.op == "placeholder"][-len(inputs) :]
    for node, name in zip(placeholders, inputs, strict=True):
        for at, axis in enumerate(shapes[name]):
            if isinstance(axis, str):
                expr = node.meta["val"].shape[at].node.expr
                symbols[next(iter(expr.free_symbols))] = next(d for d in dims if d.name == axis)
    results = next(n for n in exported.graph.nodes if n.op == "output").args[0]
    run = eager(source)
    names = list(run(inputs))
    outputs = tuple(
        describe_output(name, node.meta["val"], symbols)
        for name, node in zip(names, results[-len(names) :], strict=True)
    )
    contract = Contract(
        dims=tuple(dims),
        inputs=tuple(
            Input(
                name=name,
                dtype=dtype_name(value.dtype),
                shape=shapes[name],
                range=request.ranges.get(name),
                pad=request.pads.get(name),
            )
            for name, value in examples.items()
        ),
        outputs=outputs,
        state=tuple(
            contracts.State(name=name, dtype=dtype_name(value.dtype), shape=tuple(value.shape))
            for name, value in exported.state_dict.items()
            if name in exported.run_decompositions({}).graph_signature.buffers_to_mutate.values()
        ),
        constants=tuple(contracts.Constant(name=name, value=value) for name, value in named.constants.items()),
    )
    buffers = {s.name: source.model.get_buffer(s.name).clone() for s in contract.state}
    batch = "batch" if not contract.state and any(dim.name == "batch" for dim in dims) else None
    if batch and not contracts.batch_fault(contract, batch):
        contract = msgspec.structs.replace(contract, batch_dim=batch)
    progress("running golden cases")
    cases = []
    for point in case_sizes(dims):
        inputs = make_inputs(examples, shapes, point, request.ranges, request.seed)
        for name, value in buffers.items():
            source.model.get_buffer(name).copy_(value)
        cases.append(Case(case_name(point), point, inputs, run(inputs)))
    progress("writing")
    manifest = _manifest(source, contract, cases)
    manifest = _write(request.output, exported, manifest, cases)
    seconds = {"total": time.monotonic() - start}
    return ExportReport(request.output, manifest, request.output.stat().st_size, seconds, ())


def _manifest(source: Source, contract: Contract, cases: list[Case]) -> Manifest:
    return Manifest(
        schema="mctl.program/1",
        name=name_from(Path(source.record.file).stem),
        version="1",
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        producer=producer(),
        source=source.record,
        contract=contract,
        golden=tuple(Golden(name=case.name, member=member_of(case), dims=case.dims) for case in cases),
        tolerances={output.name: tolerance_of(output.dtype) for output in contract.outputs},
        members={},
        preprocessing=source.preprocessing,
    )


def producer() -> Producer:
    """This mctl, torch and Python."""
    return Producer(
        mctl=__version__,
        torch=str(torch.__version__),
        torch_git=torch.version.git_version,
        python=platform.python_version(),
    )


_TOLERANCES = {
    "float64": Tolerance(rtol=1e-7, atol=1e-9),
    "float32": Tolerance(rtol=1e-4, atol=1e-5),
    "float16": Tolerance(rtol=1e-3, atol=1e-3),
    "bfloat16": Tolerance(rtol=1e-2, atol=1e-2),
}


def tolerance_of(dtype: str) -> Tolerance:
    """What may lie between compiled and eager; nothing for integers and booleans."""
    return _TOLERANCES.get(dtype, Tolerance(rtol=0, atol=0))


def _write(path: Path, exported: ExportedProgram, manifest: Manifest, cases: list[Case]) -> Manifest:
    with tempfile.TemporaryDirectory(dir=path.resolve().parent, prefix=f".{path.name}.") as folder:
        stock = Path(folder) / "stock.pt2"
        torch.export.save(exported, stock)
        with Archive.open(stock) as saved:
            members: list[tuple[str, archives.Data]] = [(name, saved.view(name)) for name in saved.members]
            members += [(member_of(case), dump_case(case)) for case in cases]
            return archives.write(path, saved.top, members, manifest)


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
        try:
            return torch.export.load(self.archive.path)
        except Exception as error:
            raise BundleError(f"torch cannot read `{self.archive.path}`: {error}", "export it again") from error


def load_program(path: Path) -> Program:
    """Opens a program that `export_model` wrote; WrongKindError for another kind of file."""
    return Program(archives.open_program(path))


def run_exported(program: Program, *, double: bool = False) -> Run:
    """The exported program as a function from named inputs to named outputs, in the state that it was exported in.

    `double`: with its parameters and buffers in float64, for inputs in float64.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's, about its own tree specs
        module = copy.deepcopy(program.exported.module())  # a model with state writes to its buffers
    if double:
        module = module.double()
    order = [declared.name for declared in program.manifest.contract.inputs]

    def run(inputs: Mapping[str, torch.Tensor]) -> Tensors:
        with torch.no_grad():
            result: Any = module(*(inputs[name] for name in order))
        return dict(result)

    return run
