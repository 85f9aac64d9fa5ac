"""A bundle over files: more rows than the model takes at once are streamed through it, batch by batch."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from torch import Tensor

from ..bundle_format import contract as contracts
from ..bundle_format import tensors as safetensors
from ..bundle_format.contract import TensorInfo, shape_of, signature
from ..bundle_format.errors import ModelError
from ..bundle_format.files import atomic
from ..export.raw import bytes_of
from . import rows
from .session import Session
from .sources import FileSource, MadeSource, Spec, open_sources
from .values import DTYPE_NAMES

Sources = Mapping[str, FileSource | MadeSource]
Progress = Callable[[int, int], object]  # rows done, rows in all


@dataclass(frozen=True, slots=True)
class OutputSummary:
    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RunReport:
    """What was run: rows of the batch dim (1 where there is none), calls, seconds from the first row to the last."""

    rows: int
    calls: int
    seconds: float
    rows_per_second: float
    outputs: tuple[OutputSummary, ...]


def run_files(
    session: Session,
    specs: Sequence[Spec],
    *,
    dims: Mapping[str, int] | None = None,
    seed: int = 0,
    output: Path | None = None,
    progress: Progress = lambda done, rows: None,
) -> RunReport:
    """Runs the model over all rows of its inputs; `output` is a safetensors file, written whole or not at all.

    `dims` gives sizes that no file has. UsageError, ContractError before anything runs; ModelError.
    """
    contract = session.contract
    sources = open_sources(contract, list(specs), dims or {}, seed)
    infos = {name: TensorInfo(source.dtype, source.shape) for name, source in sources.items()}
    batch = contract.batch_dim
    count = next(
        (infos[i.name].shape[0] for i in contract.inputs if i.shape[:1] == (batch,) and infos[i.name].shape), 1
    )
    most = contract.dim(batch).max if batch else 1
    sizes = contracts.check(contract, infos, max_rows=max(count, most))
    with ExitStack() as stack:
        writer = _Writer(session, sizes, stack.enter_context(atomic(output)) if output else None)
        start = time.perf_counter()
        calls = 0
        for begin in range(0, count, most):
            end = min(begin + most, count)
            writer.write(begin, end, _run(session, sources, sizes, begin, end))
            calls += 1
            progress(end, count)
        seconds = time.perf_counter() - start
    return RunReport(count, calls, seconds, count / seconds, writer.summaries)


def _run(session: Session, sources: Sources, sizes: Mapping[str, int], begin: int, end: int) -> list[Tensor]:
    """The outputs for these rows of inputs that have `sizes`. A rest that is smaller than the smallest batch is padded,
    and cut back.
    """
    contract = session.contract
    batch = contract.batch_dim
    inputs: dict[str, Tensor] = {}
    for declared in contract.inputs:
        source = sources[declared.name]
        batched = batch is not None and batch in declared.shape
        inputs[declared.name] = source.rows(begin, end) if batched else source.whole()
    if batch is None or end - begin >= contract.dim(batch).min:
        prepared = session.prepare(inputs)
        return session.run(prepared.tensors, prepared.dims)
    for declared in contract.inputs:
        tensor = inputs[declared.name]
        if batch in declared.shape:
            shape = (contract.dim(batch).min, *tensor.shape[1:])
            inputs[declared.name] = rows.fill(declared, [tensor], shape, sizes)
    prepared = session.prepare(inputs)
    outputs = session.run(prepared.tensors, prepared.dims)
    own = {**prepared.dims, batch: end - begin}
    return [rows.cut(output, out, batch, own) for output, out in zip(contract.outputs, outputs, strict=True)]


class _Writer:
    """Puts the outputs of each batch into their places of a safetensors file; only checks them where there is none."""

    def __init__(self, session: Session, sizes: Mapping[str, int], file: BinaryIO | None) -> None:
        self._contract = session.contract
        self._sizes = sizes
        self._file = file
        described = {o.name: (o.dtype, shape_of(o, sizes)) for o in self._contract.outputs}
        start, self._places = safetensors.plan(described)
        self.summaries = tuple(OutputSummary(name, *what) for name, what in described.items())
        if file is not None:
            file.write(start)
            file.truncate(max([len(start), *(place.end for place in self._places.values())]))

    def write(self, begin: int, end: int, outputs: list[Tensor]) -> None:
        batch = self._contract.batch_dim
        sizes = {**self._sizes, batch: end - begin} if batch else self._sizes
        for output, tensor in zip(self._contract.outputs, outputs, strict=True):
            dtype, shape = DTYPE_NAMES.get(tensor.dtype), tuple(tensor.shape)
            if dtype != output.dtype or shape != shape_of(output, sizes):
                raise ModelError(f"output '{output.name}' is {dtype}{list(shape)}, declared {signature(output)}")
            if self._file is not None:
                data = bytes_of(tensor)
                per_row = len(data) // (end - begin) if batch else 0
                self._file.seek(self._places[output.name].begin + begin * per_row)
                self._file.write(data)
