"""Inputs for `mctl run`: rows of a mapped file, or made up."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from ..bundle_format import tensors as safetensors
from ..bundle_format.contract import Contract, Input, limits_of, names_in, shape_of, signature
from ..bundle_format.errors import BundleError, UsageError
from .values import Array

Filling = Literal["zeros", "ones", "random"]
FORM = "write `NAME=@FILE.npy`, `NAME=@FILE.safetensors[:KEY]`, or `NAME=` and `zeros`, `ones` or `random`"

_RANDOM_LOW, _RANDOM_HIGH = 0, 100  # of integers without a declared range; the second is not reached


class Source(Protocol):
    """An input that can be read in pieces, in order."""

    dtype: str
    shape: tuple[int, ...]

    def rows(self, begin: int, end: int) -> Tensor:
        """A part of axis 0."""

    def whole(self) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Spec:
    """What `--input NAME=…` asks for."""

    name: str
    file: Path | None
    key: str | None  # of a safetensors file
    filling: Filling | None


def parse_spec(text: str) -> Spec:
    """UsageError if `text` does not have the form."""
    name, _, what = text.partition("=")
    if name and what in ("zeros", "ones", "random"):
        return Spec(name, None, None, what)  # type: ignore[arg-type]
    if not name or not what.startswith("@") or len(what) == 1:
        raise UsageError(f"`--input {text}` cannot be read", FORM)
    path, found, key = what[1:].rpartition(".safetensors:")
    return Spec(name, Path(path + ".safetensors"), key, None) if found else Spec(name, Path(what[1:]), None, None)


class FileSource:
    """A tensor of a file, mapped: only the rows that are asked for are read."""

    def __init__(self, spec: Spec) -> None:
        assert spec.file is not None
        suffix = spec.file.suffix.lower()
        if suffix not in (".npy", ".safetensors"):
            raise UsageError(f"cannot read `{spec.file}` as an input", FORM)
        try:
            self.dtype, self._array = _open_npy(spec.file) if suffix == ".npy" else _open_safetensors(spec)
        except OSError as error:
            raise UsageError(f"cannot read `{spec.file}`: {(error.strerror or str(error)).lower()}") from error
        self.shape = self._array.shape

    def rows(self, begin: int, end: int) -> Tensor:
        return self._tensor(self._array[begin:end])

    def whole(self) -> Tensor:
        return self._tensor(self._array)

    def _tensor(self, part: Array) -> Tensor:
        native = part.dtype.newbyteorder("=")
        tensor = torch.from_numpy(np.array(part, dtype=native, order="C", copy=True))
        return tensor.view(torch.bfloat16) if self.dtype == "bfloat16" else tensor


class MadeSource:
    """An input of zeros, ones or random numbers: normal, or inside the range that it has at these sizes."""

    def __init__(self, declared: Input, sizes: Mapping[str, int], filling: Filling, seed: int) -> None:
        self.dtype = declared.dtype
        self.shape = shape_of(declared, sizes)
        self._limits = limits_of(declared, sizes)
        self._filling = filling
        self._random = torch.Generator().manual_seed(seed)

    def rows(self, begin: int, end: int) -> Tensor:
        return self._make((end - begin, *self.shape[1:]))

    def whole(self) -> Tensor:
        return self._make(self.shape)

    def _make(self, shape: tuple[int, ...]) -> Tensor:
        dtype = getattr(torch, self.dtype)
        if self._filling != "random":
            return torch.full(shape, int(self._filling == "ones"), dtype=dtype)
        if dtype.is_floating_point:
            return torch.randn(shape, generator=self._random).to(dtype)
        low, high = (0, 1) if self.dtype == "bool" else self._limits or (_RANDOM_LOW, _RANDOM_HIGH - 1)
        return torch.randint(low, min(high, 2**63 - 2) + 1, shape, generator=self._random).to(dtype)


def open_sources(
    contract: Contract, specs: list[Spec], dims: Mapping[str, int], seed: int
) -> dict[str, FileSource | MadeSource]:
    """A source for each of the contract's inputs, in its order; UsageError for what is missing or cannot be read."""
    asked = {spec.name: spec for spec in specs}
    names = [declared.name for declared in contract.inputs]
    for index, spec in enumerate(specs):
        if spec.name not in names:
            raise UsageError(f"there is no input `{spec.name}`", f"the model takes {', '.join(names)}")
        if any(spec.name == other.name for other in specs[:index]):
            raise UsageError(f"input `{spec.name}` is given twice")
    for declared in contract.inputs:
        if declared.name not in asked:
            hint = f"add `--input {declared.name}=@FILE.npy`, or `zeros`, `ones` or `random` in place of the file"
            raise UsageError(f"missing input `{declared.name}`: {signature(declared)}", hint)
    files = {spec.name: FileSource(spec) for spec in specs if spec.file is not None}
    sizes = _sizes(contract, files, dims)
    sources: dict[str, FileSource | MadeSource] = {}
    for index, declared in enumerate(contract.inputs):
        filling = asked[declared.name].filling
        if filling is None:
            sources[declared.name] = files[declared.name]
        else:
            _check_known(contract, declared, sizes)
            sources[declared.name] = MadeSource(declared, sizes, filling, seed + index)
    return sources


def _sizes(contract: Contract, files: Mapping[str, FileSource], dims: Mapping[str, int]) -> dict[str, int]:
    """The sizes of dims that files have, completed by those that were given."""
    sizes: dict[str, int] = {}
    for declared in contract.inputs:
        if declared.name in files:
            for axis, size in zip(declared.shape, files[declared.name].shape, strict=False):
                if isinstance(axis, str):
                    sizes.setdefault(axis, size)
    known = [dim.name for dim in contract.dims]
    for name, size in dims.items():
        if name not in known:
            raise UsageError(f"there is no dim `{name}`", f"the model has {', '.join(known) or 'none'}")
        if sizes.setdefault(name, size) != size:
            raise UsageError(f"`--dim {name}={size}`, but the files have {sizes[name]}")
    return sizes


def _check_known(contract: Contract, declared: Input, sizes: Mapping[str, int]) -> None:
    """UsageError where a dim that the input's shape or values depend on has no size."""
    for expression in (*declared.shape, *(declared.range or ())):
        for dim in sorted(names_in(expression) - set(sizes)):
            allowed = contract.dim(dim).allowed
            raise UsageError(f"the dim `{dim}` has no size", f"add `--dim {dim}=SIZE`, allowed {allowed}")


def _open_npy(path: Path) -> tuple[str, Array]:
    try:
        array = np.lib.format.open_memmap(path, mode="r")  # reads no pickle, whatever the file says
    except (ValueError, EOFError, SyntaxError) as error:
        if "Python objects" in str(error):
            hint = "save an array of numbers"
            raise UsageError(f"`{path}` holds pickled Python objects, which are never read", hint) from error
        raise UsageError(f"`{path}` is no array of numpy: {str(error).splitlines()[0]}") from error
    return array.dtype.newbyteorder("=").name, array


def _open_safetensors(spec: Spec) -> tuple[str, Array]:
    assert spec.file is not None
    try:
        data = np.memmap(spec.file, mode="r")
        entries = safetensors.read_header(data.data)
    except (BundleError, ValueError) as error:
        raise UsageError(f"`{spec.file}` is no safetensors file: {error}") from error
    key = spec.key or (next(iter(entries)) if len(entries) == 1 else spec.name)
    if key not in entries:
        listed = ", ".join(list(entries)[:10])
        raise UsageError(
            f"`{spec.file}` has no tensor `{key}`", f"it has {listed}: name one as `@FILE.safetensors:KEY`"
        )
    entry = entries[key]
    stored = np.uint16 if entry.dtype == "bfloat16" else np.dtype(entry.dtype)
    return entry.dtype, np.ndarray(entry.shape, stored, data[entry.begin : entry.end].data)


def parse_size(text: str) -> tuple[str, int]:
    """`batch=8`."""
    name, _, size = text.partition("=")
    if not name or not size.isdecimal() or not 1 <= int(size) <= 2**40:
        raise UsageError(f"`--dim {text}` cannot be read", "write `--dim NAME=SIZE`")
    return name, int(size)
