"""Operators that are not torch's own: those of C++ libraries, which go with the model, and those of Python, refused."""

import ctypes
import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import fx
from torch._library.custom_ops import _maybe_get_opdef
from torch._ops import OpOverload
from torch.export import ExportedProgram

from ..bundle_format.archive import Archive
from ..bundle_format.errors import BundleError, ExportError, UsageError
from ..bundle_format.layout import LIBRARIES
from ..bundle_format.manifest import OperatorLibrary
from .graph import line_of

# The keys of torch's dispatcher under which code for the CPU is registered.
_COMPOSITE = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional", "CompositeImplicitAutograd")
_KEYS = ("CPU", *_COMPOSITE)
_SHAPES = ("Meta", *_COMPOSITE)  # those that tell the shape of what comes
_COMPILED = ("aten", "prims", "quantized_decomposed")  # namespaces that torch's compiler takes apart
_PYTHON = "write it in C++ and give the library with `--library FILE.so`, or compute it with torch's own operators"


def _registered() -> frozenset[str]:
    return frozenset(torch._C._dispatch_get_all_op_names())


_TORCHS = _registered()
_loaded: dict[Path, tuple[str, ...]] = {}  # file -> what it registered


@dataclass(frozen=True, slots=True)
class LibraryFile:
    """A library that was loaded, and the operators that it has: "myops::twice"."""

    path: Path
    operators: tuple[str, ...]

    @property
    def record(self) -> OperatorLibrary:
        return OperatorLibrary(f"{LIBRARIES}{self.path.name}", self.operators)


def load_files(paths: Sequence[Path]) -> tuple[LibraryFile, ...]:
    """Loads libraries of operators, which run code. UsageError for what is none."""
    names = [path.name for path in paths]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"two libraries are named `{name}`", "give one of them another name")
    return tuple(LibraryFile(path, _load_file(path)) for path in paths)


def _load_file(path: Path) -> tuple[str, ...]:
    full = path.resolve()
    if not full.is_file():
        raise UsageError(f"there is no file `{path}`", "give the library that registers the operators")
    if full not in _loaded:
        before = _registered()
        try:
            ctypes.CDLL(str(full))
        except OSError as error:
            raise UsageError(f"cannot load `{path}`: {error}", _hint(str(error))) from error
        _loaded[full] = tuple(sorted(_registered() - before))
    if not _loaded[full]:
        raise UsageError(f"`{path}` registers no operators", "they are made by TORCH_LIBRARY in its source")
    return _loaded[full]


def _hint(error: str) -> str | None:
    if "torch_python" in error or "Py" in error:
        return "build it without Python: `torch.utils.cpp_extension.load(…, is_python_module=False)`"
    return "build it with this torch, for this machine" if "torch" in error or "c10" in error else None


def load_members(archive: Archive) -> None:
    """Loads the libraries of a program or bundle, whose digests must have been verified; in each process once.

    Where their operators are there already, the same library was loaded from elsewhere, and a second one would end the
    process: torch allows one registration.
    """
    for library in archive.manifest.libraries:
        if _registered().isdisjoint(library.operators):
            name = Path(library.member).name
            try:
                _load_code(archive.view(library.member), name)
            except OSError as error:
                raise BundleError(f"cannot load `{name}`: {error}", _hint(str(error))) from error


def _load_code(code: memoryview, name: str) -> None:
    """From memory where that is possible. The file stays open: glibc takes the same path for the same library."""
    if hasattr(os, "memfd_create"):
        handle = os.memfd_create(name[:200])
        with os.fdopen(os.dup(handle), "wb") as file:
            file.write(code)
        ctypes.CDLL(f"/proc/self/fd/{handle}")
        return
    with tempfile.TemporaryDirectory(prefix="mctl-") as folder:
        path = Path(folder) / name
        path.write_bytes(code)
        ctypes.CDLL(str(path))


def check_operators(exported: ExportedProgram, libraries: Iterable[LibraryFile]) -> None:
    """ExportError names an operator that a bundle could not call, and where the model calls it."""
    known = {name for library in libraries for name in library.operators}
    for node in exported.graph.nodes:
        operator = node.target
        if isinstance(operator, OpOverload) and operator.namespace not in _COMPILED:
            _check(operator, node, known)


def _check(operator: OpOverload, node: fx.Node, known: set[str]) -> None:
    name = operator.name()
    line = line_of(node)
    called = f"the model calls `{name}`{f' ({line})' if line else ''}"
    if _in_python(operator, _KEYS):
        raise ExportError(f"{called}, whose code is Python: a bundle runs without it", _PYTHON)
    if name in known:
        shaped = any(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in _SHAPES)
        if not shaped or _in_python(operator, _SHAPES):
            space = operator.namespace
            hint = f"register one for `Meta` in the library: `TORCH_LIBRARY_IMPL({space}, Meta, m)`"
            raise ExportError(f"{called}, which has no code in C++ for the shapes of its results", hint)
    elif name not in _TORCHS:
        hint = "give the library that has it with `--library FILE.so`"
        raise ExportError(f"{called} of a C++ library, which would be missing in the bundle", hint)


def _in_python(operator: OpOverload, keys: Iterable[str]) -> bool:
    """Whether Python registered what runs for one of these keys, outside torch."""
    if operator.name() in _TORCHS:
        return False
    name = operator.name().replace("::", "/")
    made = _maybe_get_opdef(operator) is not None  # by `torch.library.custom_op`
    return made or any(f"{name}/{key}" in torch.library._impls for key in keys)
