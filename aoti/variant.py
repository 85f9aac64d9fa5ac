"""One variant: a program through torch's compiler, and what has to be true of the result."""

import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..bundle_format.contract import Contract
from ..bundle_format.errors import CompileError, MctlError
from . import torch_private
from .building import Builds, Kept
from .constants import check_storable
from .dispatch import write_call
from .protocol import Recipe

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch.export import ExportedProgram

_NO_MEMORY = r"can't allocate memory|std::bad_alloc|Cannot allocate memory"  # of torch, C++ and libc
_MORE_MEMORY = "close other programs, or use a machine with more memory"
_TRY = "this is a fault of torch or of the C++ compiler: try another version, or other `--inductor` options"


@dataclass(frozen=True, slots=True)
class Compiled:
    """The library's path, its constants by their original names, and the names of those that it writes to; `callers`:
    operators that are not compiled, and where in the model they come from."""

    library: str
    constants: "dict[str, torch.Tensor]"
    state: set[str]
    callers: dict[str, tuple[str, ...]]
    by_name: tuple[str, ...]  # operators that it calls by their names: "aten::linalg_solve_ex"
    layers: int  # by mctl's kernels


def compile_variant(
    exported: "ExportedProgram",
    contract: Contract,
    recipe: Recipe,
    settings: dict[str, Any],
    starting_cpp: Callable[[], None],
    note: torch_private.Note,
    kept: Kept | None = None,
) -> Compiled:
    """Calls inductor; `starting_cpp` is called before the C++ compiler is, and `note` with what of mctl's changes to
    torch did not apply. `kept`: what compilers' runs have in common. CompileError says what torch cannot do."""
    import torch

    if recipe.dims:
        exported = at_sizes(exported, contract, recipe.dims)
    args, kwargs = exported.example_inputs
    module = exported.module(check_guards=False)
    layers = 0
    if recipe.packed:
        from .ops import C_SHIMS
        from .rewrite import rewrite

        dtype = torch.bfloat16 if recipe.bf16 else torch.float32
        layers = rewrite(module, {state.name for state in contract.state}, dtype, note)
        settings = settings | torch_private.c_functions(C_SHIMS)

    def starting(lowered: torch_private.Lowered, foreign: str | None) -> None:
        if foreign and not by_name:
            raise torch_private.unknown("calls some operators of this model in a way that this mctl does not know")
        check_storable(lowered.constants())
        starting_cpp()

    by_name: set[str] = set()
    builds = Builds(kept, _run)
    with (
        torch_private.every_size_stays(note),
        torch_private.small_loops_alone(note),
        torch_private.calls_by_name(lambda *call: by_name.add(write_call(*call)), note),
        torch_private.watching(starting, note) as graphs,
        torch_private.building(builds.start, builds.finish, note),
    ):
        try:
            library, constants = torch_private.compile_library(module, args, kwargs, for_any_threads(settings))
        except Exception as error:
            raise explained(error) from error
    state, callers = _check_constants(graphs[0], constants), graphs[0].callers(note)
    return Compiled(library, constants, state, callers, tuple(sorted(by_name)), layers)


def for_any_threads(settings: Mapping[str, Any]) -> dict[str, Any]:
    """With them torch writes code that any number of threads may run.

    Where it counts one thread, of this process or by `cpp.threads`, it leaves `omp single` out of its parallel regions,
    also of those that take as many threads as there are later: each of these would do the same sums in place.
    """
    import torch

    threads = settings.get("cpp.threads") or torch.get_num_threads()
    few = settings.get("cpp.dynamic_threads", False) and threads < 2
    return {**settings, "cpp.threads": 2} if few else dict(settings)


def at_sizes(exported: "ExportedProgram", contract: Contract, dims: Mapping[str, int]) -> "ExportedProgram":
    """The same program with every dim at one size, so that torch's compiler knows them all."""
    import torch

    declared = iter(contract.inputs)

    def sized(leaf: object) -> object:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        shape = [dims[axis] if isinstance(axis, str) else axis for axis in next(declared).shape]
        return torch.zeros(shape, dtype=leaf.dtype)

    args, kwargs = torch.utils._pytree.tree_map(sized, exported.example_inputs)
    with torch.no_grad():
        return torch.export.export(exported.module(check_guards=False), args, kwargs)


def _check_constants(lowered: torch_private.Lowered, constants: dict[str, Any]) -> set[str]:
    """Each constant of the library has a tensor of its own name; returns the names of those that it writes to."""
    names = lowered.library_names()
    if len(names) != len(constants) or set(names.values()) != set(constants):
        raise CompileError(
            f"torch lost constants: the compiled library has {len(names)} and torch gave {len(constants)}",
            "compile without the setting `freezing`",
        )
    return {names[name] for name in lowered.written()}


# --- torch's failures in a user's terms --------------------------------------------------------------------------


def explained(error: BaseException) -> MctlError:
    """The cause as an MctlError, however deep torch has wrapped it."""
    chain = list(_chain(error))
    if any(isinstance(link, MemoryError) or re.search(_NO_MEMORY, str(link)) for link in chain):
        return CompileError("there is not enough memory to compile the program", _MORE_MEMORY)
    for link in chain:
        if isinstance(link, MctlError):
            return link
        if torch_private.is_cpp_error(link):
            return _compiler_failed(str(link))
        if isinstance(link, OSError) and link.errno is not None:
            where = f" (`{link.filename}`)" if link.filename else ""
            hint = "choose another folder with `--work-dir`"
            return CompileError(f"cannot compile the program: {(link.strerror or str(link)).lower()}{where}", hint)
    first = re.sub(r"\s+", " ", str(error)).strip()[:500]
    return CompileError(f"torch cannot compile the program: {type(error).__name__}: {first}", _TRY)


def _chain(error: BaseException | None) -> "Iterator[BaseException]":
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _run(command: Sequence[str]) -> None:
    """Of the C++ compiler."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    if done.returncode:
        raise _compiler_failed(done.stdout)


def _compiler_failed(output: str) -> CompileError:
    if "No space left on device" in output:
        return CompileError("the disk is full", "free some space, or choose another folder with `--work-dir`")
    if "Killed signal" in output:
        return CompileError("the C++ compiler was killed: most likely the machine ran out of memory", _MORE_MEMORY)
    lines = output.strip().splitlines() or ["it said nothing"]
    line = next((line for line in lines if "error:" in line), lines[-1])
    return CompileError(f"the C++ compiler refuses the generated code: {line.strip()[:300]}", _TRY)
