"""In-process: a bundle loaded into this process and called with named tensors, each call checked by the contract."""

import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self, overload

import torch
from torch import Tensor

from ..bundle_format import contract as contracts
from ..bundle_format.archive import Archive, open_bundle
from ..bundle_format.contract import TensorInfo
from ..bundle_format.errors import BundleError, ClosedError, ContractError, HostError, ModelError, UsageError
from ..bundle_format.host import host_verdict
from ..bundle_format.layout import WEIGHTS
from ..bundle_format.lookup import Lookup, padded
from ..bundle_format.manifest import code_of
from . import rows, values
from .library import LIBTORCH, Constants, Library, load_libraries, span
from .policy import chunks
from .values import Array, Value

_REMEMBERED = 4096  # kinds of calls whose check is not made again


def load(path: str | Path, threads: int | None = None, *, verify: bool = True) -> "Session":
    """Loads a bundle for calls in this process; takes tens of milliseconds, runs no compiler and writes no file.

    Before any code is mapped, this machine is compared with what the bundle was compiled for (HostError), and the
    digests of the code and, with `verify`, of the weights are checked (BundleError).

    `threads` is the number of OpenMP threads of the model's operators. torch has one number for the whole process:
    it is set here (`torch.set_num_threads`), for everything else in the process too; None leaves it alone.
    """
    if threads is not None and threads < 1:
        raise UsageError(f"`threads` is {threads}, allowed 1 or more")
    archive = open_bundle(path)
    try:
        verdict = host_verdict(archive.manifest, LIBTORCH)
        if not verdict.ok:
            raise HostError(f"this machine cannot run `{path}`: {verdict.reason}", verdict.hint)
        archive.verify(*code_of(archive.manifest), *([WEIGHTS] if verify else []))
        constants = Constants(archive)
        libraries = load_libraries(archive, constants)
    except RuntimeError as error:  # dlopen, in torch's words
        archive.close()
        raise BundleError(f"`{path}` cannot be loaded: {_first_line(error)}") from error
    except BaseException:
        archive.close()
        raise
    if threads is not None:
        torch.set_num_threads(threads)
    return Session(archive, constants, libraries, threads or torch.get_num_threads())


@dataclass(slots=True)
class Stats:
    """What a session has done so far."""

    calls: int = 0
    made_contiguous: int = 0  # inputs that had to be copied because of their strides or byte order


class Prepared(NamedTuple):
    """Inputs that passed the check: tensors in call order, the sizes of the dims, whether to answer in numpy."""

    tensors: list[Tensor]
    dims: dict[str, int]
    as_numpy: bool


class Session:
    """A loaded bundle. Made by `load`; a context manager that closes it.

        with load("bundle.pt2") as session:
            outputs = session(input_ids=ids, attention_mask=mask)

    Calls may come from any thread and run one after another: torch holds the GIL while a model runs. Several sessions,
    also of one bundle, are independent of each other. A session cannot cross a fork, because OpenMP cannot: load in
    each process.
    """

    def __init__(self, archive: Archive, constants: Constants, libraries: list[Library], threads: int) -> None:
        self.manifest = archive.manifest
        self.contract = self.manifest.contract
        self.stats = Stats()
        self._archive = archive
        self._constants = constants
        self._libraries = {library.variant.name: library for library in libraries}
        self._lookup = Lookup(self.manifest, threads)
        self._chosen: dict[tuple[tuple[str, int], ...], Library] = {}
        batch = self.contract.batch_dim
        # up to these of its buckets a batch is faster as it is
        self.unpadded = self._lookup.unpadded(batch) if batch else ()
        self._spans = constants.spans()
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._ranged = [(index, i) for index, i in enumerate(self.contract.inputs) if i.range is not None]
        self._checked: dict[tuple[object, ...], dict[str, int]] = {}

    @overload
    def __call__(self, /, *, _pad: bool = False, **inputs: Array) -> dict[str, Array]: ...
    @overload
    def __call__(self, /, *, _pad: bool = False, **inputs: Tensor) -> dict[str, Tensor]: ...
    @overload
    def __call__(self, /, *, _pad: bool = False, **inputs: object) -> dict[str, Value]: ...  # type: ignore[overload-cannot-match]
    def __call__(self, /, *, _pad: bool = False, **inputs: object) -> Any:
        """`call` with the inputs as keywords."""
        return self.call(inputs, pad=_pad)

    @overload
    def call(self, inputs: Mapping[str, Array], *, pad: bool = False) -> dict[str, Array]: ...
    @overload
    def call(self, inputs: Mapping[str, Tensor], *, pad: bool = False) -> dict[str, Tensor]: ...
    @overload
    def call(self, inputs: Mapping[str, object], *, pad: bool = False) -> dict[str, Value]: ...
    def call(self, inputs: Mapping[str, object], *, pad: bool = False) -> Any:
        """Outputs by name, in the contract's order, for inputs by name.

        Inputs are torch tensors or numpy arrays with the contract's dtypes and shapes, in any strides; arguments that
        the model takes besides tensors may be left out, or have the value that was compiled in. Outputs are numpy
        arrays if all inputs are, else torch tensors; they belong to the caller.

        `pad` fills up to the next bucket (the batch, and other dims that have buckets), runs that, and cuts back. More
        rows than the largest batch run as several, and come back as one.

        ContractError says what the contract does not allow; ModelError, that the model itself failed.
        """
        prepared = self.prepare(inputs, self._rows_to_split(inputs))
        parts = [self._run_rows(tensors, dims, pad) for tensors, dims in self._batches(prepared)]
        outputs = parts[0] if len(parts) == 1 else [torch.cat(pieces) for pieces in zip(*parts, strict=True)]
        return self.named(outputs, prepared.as_numpy)

    def reset_state(self) -> None:
        """Gives the buffers that the model changes the values that they had at export."""
        with self._lock, torch.inference_mode(False):
            self._check_usable()
            self._constants.reset()

    def close(self) -> None:
        """Lets go of the weights and the file; later calls raise ClosedError. The code stays mapped."""
        with self._lock:
            self._libraries = {}
            self._chosen = {}
            self._constants = None  # type: ignore[assignment]
            self._archive.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # --- the steps of a call, for callers that put something in between ------------------------------------------

    def prepare(self, inputs: Mapping[str, object], max_rows: int | None = None) -> Prepared:
        """Checks and converts inputs; `max_rows` replaces the batch dim's maximum. ContractError."""
        tensors, as_numpy, copied = [], True, 0
        for declared in self.contract.inputs:
            if declared.name not in inputs:
                self._check(inputs, max_rows)
            value = inputs[declared.name]
            tensor, was_copied = values.tensor_from(declared, value)
            tensors.append(tensor)
            copied += was_copied
            as_numpy = as_numpy and not isinstance(value, Tensor)
        kind = (max_rows, *[(tensor.dtype, tensor.shape) for tensor in tensors])
        dims = self._checked.get(kind)
        if dims is None or len(inputs) != len(tensors) or not self._in_range(tensors, dims):
            dims = self._check(inputs, max_rows)
            if len(self._checked) >= _REMEMBERED:
                self._checked.clear()
            self._checked[kind] = dims
        if as_numpy:
            self._check_numpy()
        if copied:
            with self._lock:
                self.stats.made_contiguous += copied
        return Prepared(tensors, dims, as_numpy)

    def bucket(self, dims: Mapping[str, int]) -> dict[str, int]:
        """The sizes that inputs of these sizes are padded to."""
        batch = self.contract.batch_dim
        if batch is None or self.contract.state:
            return dict(dims)
        buckets = self.manifest.buckets
        stays = {batch: self.unpadded}
        return {name: padded(size, buckets.get(name, ()), stays.get(name, ())) for name, size in dims.items()}

    def run(self, tensors: list[Tensor], dims: Mapping[str, int]) -> list[Tensor]:
        """Runs the variant for `dims` on tensors that were checked. ModelError, ClosedError."""
        with self._lock:
            self._check_usable()
            try:
                outputs = self._library(dims).run(tensors)
            except RuntimeError as error:
                raise ModelError(f"the model failed: {_first_line(error)}") from error
            self.stats.calls += 1
            return self._callers_own(outputs, tensors)

    def named(self, outputs: list[Tensor], as_numpy: bool) -> dict[str, Value]:
        """Outputs by name, as torch tensors or numpy arrays."""
        made = [output.numpy() for output in outputs] if as_numpy else outputs
        return dict(zip([output.name for output in self.contract.outputs], made, strict=True))

    # -------------------------------------------------------------------------------------------------------------

    def _rows_to_split(self, inputs: Mapping[str, object]) -> int | None:
        """How many rows there are if these are more than the largest batch, and batches do not depend on each other."""
        batch = self.contract.batch_dim
        if batch is None or self.contract.state:
            return None
        first = next(declared.name for declared in self.contract.inputs if batch in declared.shape)
        shape = getattr(inputs.get(first), "shape", None) or (0,)
        return shape[0] if shape[0] > self.contract.dim(batch).max else None

    def _batches(self, prepared: Prepared) -> Iterator[tuple[list[Tensor], dict[str, int]]]:
        """The rows of one call as batches of the contract, with their sizes."""
        batch = self.contract.batch_dim
        if batch is None or prepared.dims[batch] <= self.contract.dim(batch).max:
            yield prepared.tensors, prepared.dims
            return
        at = 0
        for count in chunks(self.contract.dim(batch).max, prepared.dims[batch]):
            pairs = zip(self.contract.inputs, prepared.tensors, strict=True)
            yield [t[at : at + count] if batch in i.shape else t for i, t in pairs], {**prepared.dims, batch: count}
            at += count

    def _run_rows(self, tensors: list[Tensor], dims: dict[str, int], pad: bool) -> list[Tensor]:
        """One batch, filled up to its bucket if `pad`, and at least to the smallest one, and cut back."""
        batch = self.contract.batch_dim
        sizes = self.bucket(dims) if pad else dict(dims)
        if batch is not None:  # the rest of a call that was split may have too few rows
            sizes[batch] = max(sizes[batch], self.contract.dim(batch).min)
        if sizes == dims:
            return self.run(tensors, sizes)
        pairs = zip(self.contract.inputs, tensors, strict=True)
        outputs = self.run([rows.join(declared, [tensor], batch, sizes) for declared, tensor in pairs], sizes)
        ends = zip(self.contract.outputs, outputs, strict=True)
        return [rows.cut(declared, out, batch, dims) for declared, out in ends]

    def _library(self, dims: Mapping[str, int]) -> Library:
        """The variant that the bundle's measurements chose for these sizes."""
        sizes = tuple(dims.items())
        if sizes not in self._chosen:
            variant = self._lookup.variant(dims)
            if variant is None:
                raise BundleError(f"no variant covers {', '.join(f'{name}={size}' for name, size in dims.items())}")
            if len(self._chosen) >= _REMEMBERED:
                self._chosen.clear()
            self._chosen[sizes] = self._libraries[variant.name]
        return self._chosen[sizes]

    def _callers_own(self, outputs: list[Tensor], inputs: list[Tensor]) -> list[Tensor]:
        """Each output in memory of its own: copies of those that are an input or a constant, which a later call could
        change, or that share memory with an output before them.
        """
        spans = self._spans + [span(tensor) for tensor in inputs]
        storages: set[int] = set()
        for index, output in enumerate(outputs):
            address, storage = output.data_ptr(), output.untyped_storage().data_ptr()
            if storage in storages or any(start <= address < end for start, end in spans):
                outputs[index] = output.clone()
            elif storage:
                storages.add(storage)
        return outputs

    def _in_range(self, tensors: list[Tensor], dims: Mapping[str, int]) -> bool:
        for index, declared in self._ranged:
            limits = contracts.limits_of(declared, dims)
            if limits is not None and tensors[index].numel():
                smallest, largest = values.extremes(tensors[index])
                if smallest < limits[0] or largest > limits[1]:
                    return False
        return True

    def _check(self, inputs: Mapping[str, object], max_rows: int | None) -> dict[str, int]:
        """The whole check, in the order and the words that both runners have."""
        declared = {i.name: i for i in self.contract.inputs}
        constants = {c.name: inputs[c.name] for c in self.contract.constants if c.name in inputs}
        tensors = {}
        for name, value in inputs.items():
            if name in declared:
                tensors[name] = values.info(declared[name], values.tensor_from(declared[name], value)[0])
            elif name not in constants:
                tensors[name] = TensorInfo("", ())  # unknown: the check says so
        return contracts.check(self.contract, tensors, values.scalars(constants), max_rows=max_rows)

    def _check_numpy(self) -> None:
        for output in self.contract.outputs:
            if output.dtype == "bfloat16":
                text = f"output '{output.name}' is bfloat16, which numpy does not have"
                raise ContractError(text, "give an input as a torch tensor: outputs are torch tensors then")

    def _check_usable(self) -> None:
        if not self._libraries:
            raise ClosedError("the session is closed")
        if os.getpid() != self._process:
            raise UsageError("a session cannot be used after a fork", "load the bundle in the process that calls it")


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
