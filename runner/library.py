"""A bundle's compiled libraries and their constants: mapped from the file, bound to AOTI's containers, ready to run."""

import ctypes
import os
import tempfile
import threading
import warnings
from collections.abc import Mapping
from math import prod
from pathlib import Path

import torch
from torch import Tensor
from torch._C._aoti import AOTIModelContainerRunnerCpu

from ..bundle_format.archive import Archive
from ..bundle_format.errors import BundleError
from ..bundle_format.layout import WEIGHTS
from ..bundle_format.manifest import ConstantRef, Manifest, Variant
from ..bundle_format.tensors import read_header
from ..export.operators import load_members

LIBTORCH = Path(torch.__file__).parent / "lib"

_loading = threading.Lock()  # loads of several packages at once race inside torch (pytorch#194128)

# SHA-256 of a library -> the path that it was loaded from, for the life of the process. glibc compares that path with
# those of libraries that are there already, and compiled models are never unloaded (they hold unique symbols): if a
# memfd were closed and its number taken by another library, that path would silently give the old one.
_paths: dict[str, str] = {}


class Constants:
    """The tensors of weights.safetensors, mapped and not copied; of those that the model writes to, private copies."""

    def __init__(self, archive: Archive) -> None:
        view = archive.view(WEIGHTS)
        self._entries = read_header(view, aligned=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the mapping is read-only, and so is what is made of it
            self._bytes = torch.frombuffer(view, dtype=torch.uint8)
        self._state: dict[str, tuple[Tensor, Tensor]] = {}  # constant -> the session's copy, the initial value

    def bind(self, variant: Variant) -> dict[str, Tensor]:
        """The tensor of each of the variant's constants. Variants share state by the name of the constant."""
        return {name: self._tensor(name, ref) for name, ref in variant.constants.items()}

    def reset(self) -> None:
        """Gives every buffer that the model writes to its initial value."""
        for current, initial in self._state.values():
            current.copy_(initial)

    def spans(self) -> list[tuple[int, int]]:
        """Where constants lie in memory: first address, and the one after the last."""
        own = [current for current, _ in self._state.values()]
        return [span(tensor) for tensor in (self._bytes, *own)]

    def _tensor(self, name: str, ref: ConstantRef) -> Tensor:
        if ref.state and name in self._state:
            return self._state[name][0]
        mapped = self._mapped(ref)
        if not ref.state:
            return mapped
        current = torch.empty_strided(mapped.shape, mapped.stride(), dtype=mapped.dtype).copy_(mapped)
        self._state[name] = (current, mapped)
        return current

    def _mapped(self, ref: ConstantRef) -> Tensor:
        entry = self._entries.get(ref.tensor)
        if entry is None:
            raise BundleError(f"the weights have no tensor `{ref.tensor}`, which a variant needs")
        dtype = getattr(torch, entry.dtype)
        flat = self._bytes[entry.begin : entry.end].view(dtype)
        if ref.stride is None:
            return flat.view(entry.shape)
        reach = 1 + sum((size - 1) * step for size, step in zip(entry.shape, ref.stride, strict=False))
        if len(ref.stride) != len(entry.shape) or any(step < 0 for step in ref.stride):
            raise BundleError(f"the strides of tensor `{ref.tensor}` do not fit its shape")
        if prod(entry.shape) and reach > flat.numel():
            raise BundleError(f"the strides of tensor `{ref.tensor}` reach past its end")
        return flat.as_strided(entry.shape, ref.stride)


class Library:
    """One variant that can run: `run([inputs in call order])` gives the outputs in the contract's order."""

    def __init__(self, path: str, variant: Variant, constants: Mapping[str, Tensor]) -> None:
        self.variant = variant
        self._container = AOTIModelContainerRunnerCpu(path, 1)
        self._constants = self._named(constants)  # AOTI runs on this memory and does not own it
        self._container.update_constant_buffer(self._constants, False, True, True)
        self.run = self._container.run

    def _named(self, constants: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Constants by the names that the library itself has for them; all of them, or BundleError."""
        named = {}
        for internal, original in self._container.get_constant_names_to_original_fqns().items():
            if original not in constants:
                raise BundleError(f"variant `{self.variant.name}` needs the constant `{original}`, which is not listed")
            named[internal] = constants[original]
        return named


def load_libraries(archive: Archive, constants: Constants) -> list[Library]:
    """Maps the code of every variant, after that of operators of its own. Their digests must have been verified."""
    manifest = archive.manifest
    with _loading, torch.inference_mode(False):
        # libraries are compiled without a link to libtorch and take its symbols from the process
        ctypes.CDLL(str(_libtorch_cpu()), ctypes.RTLD_GLOBAL)
        load_members(archive)
        return [_load(archive, manifest, variant, constants) for variant in manifest.variants]


def span(tensor: Tensor) -> tuple[int, int]:
    """The addresses of a dense tensor's memory: the first, and the one after the last."""
    start = tensor.data_ptr()
    return start, start + tensor.nbytes


def _libtorch_cpu() -> Path:
    return next(path for path in LIBTORCH.glob("libtorch_cpu.*") if path.suffix in (".so", ".dylib"))


def _load(archive: Archive, manifest: Manifest, variant: Variant, constants: Constants) -> Library:
    digest = manifest.members[variant.library].sha256
    code = archive.view(variant.library)
    tensors = constants.bind(variant)
    if digest in _paths:
        return Library(_paths[digest], variant, tensors)
    if hasattr(os, "memfd_create"):
        _paths[digest] = _in_memory(code, variant.name)
        return Library(_paths[digest], variant, tensors)
    with tempfile.TemporaryDirectory(prefix="mctl-") as folder:  # its random name is as good as a new number
        path = Path(folder) / "model.so"
        path.write_bytes(code)
        return Library(str(path), variant, tensors)


def _in_memory(code: memoryview, name: str) -> str:
    handle = os.memfd_create(f"mctl-{name[:200]}")
    with os.fdopen(os.dup(handle), "wb") as file:
        file.write(code)
    return f"/proc/self/fd/{handle}"
