"""One variant: a program through torch's compiler, and what has to be true of the result."""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..bundle_format.contract import Contract
from ..bundle_format.errors import CompileError, MctlError
from ..bundle_format.interface import operator
from .constants import check_storable
from .protocol import Recipe
from .small_loops import small_loops_alone

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch.export import ExportedProgram

_NO_MEMORY = r"can't allocate memory|std::bad_alloc|Cannot allocate memory"  # of torch, C++ and libc
_MORE_MEMORY = "close other programs, or use a machine with more memory"
_STATEMENT = re.compile(r"^(\s*)((\w+)\(.*\));$", re.MULTILINE)
_TRY = "this is a fault of torch or of the C++ compiler: try another version, or other `--inductor` options"


@dataclass(frozen=True, slots=True)
class Compiled:
    """The library's path, its constants by their original names, and the names of those that it writes to; `callers`:
    operators that are not compiled, and where in the model they come from."""

    library: str
    constants: "dict[str, torch.Tensor]"
    state: set[str]
    callers: dict[str, tuple[str, ...]]
    layers: int  # by mctl's kernels


def compile_variant(
    exported: "ExportedProgram",
    contract: Contract,
    recipe: Recipe,
    settings: dict[str, Any],
    starting_cpp: Callable[[], None],
) -> Compiled:
    """Calls inductor; `starting_cpp` is called before the C++ compiler is. CompileError says what torch cannot do."""
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
        layers = rewrite(module, {state.name for state in contract.state}, dtype)
        settings = settings | {"aot_inductor.custom_ops_to_c_shims": C_SHIMS}
    with small_loops_alone(), _watched(starting_cpp) as graphs:
        try:
            files = torch._inductor.aot_compile(module, args, kwargs, options=settings)
        except Exception as error:
            raise explained(error) from error
    library = next(file for file in files if isinstance(file, str) and file.endswith(".so"))
    weights: dict[str, Any] = next((file for file in files if not isinstance(file, str)), {})
    constants = {name: tensor for name, (tensor, _) in weights.items()}
    return Compiled(library, constants, _check_constants(graphs[0], constants), _callers(graphs[0]), layers)


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


@contextmanager
def _watched(starting_cpp: Callable[[], None]) -> "Iterator[list[Any]]":
    """The lowered graphs of the compiles inside the block: inductor gives back nothing but files."""
    from torch._inductor.codecache import AotCodeCompiler

    graphs: list[Any] = []
    original = AotCodeCompiler.compile

    def compile_cpp(graph: Any, wrapper: str, kernels: str, foreign: str | None, **options: Any) -> Any:
        _check_operators(foreign)
        check_storable({name: graph.constants[name] for name in graph.constants if name not in graph.folded_constants})
        graphs.append(graph)
        starting_cpp()
        return original(graph, with_checks(wrapper), kernels, foreign, **options)

    AotCodeCompiler.compile = compile_cpp
    try:
        yield graphs
    finally:
        AotCodeCompiler.compile = original


def with_checks(wrapper: str) -> str:
    """The generated code, with a look at what each operator returns. torch leaves it out for scatter and index_put: an
    index out of range would be wrong numbers."""

    def checked(found: re.Match[str]) -> str:
        indent, call, name = found.groups()
        return f"{indent}AOTI_TORCH_ERROR_CODE_CHECK({call});" if operator(name) else found[0]

    return _STATEMENT.sub(checked, wrapper)


def _check_operators(foreign: str | None) -> None:
    """Operators outside torch's C interface are called through a C++ object that only a Python process has."""
    if foreign:
        nodes = json.loads(foreign)["nodes"]
        names = dict.fromkeys(node["node"]["target"].removeprefix("torch.ops.") for node in nodes)
        raise CompileError(
            f"torch has no C interface for {_listed(names)}, so the compiled model could not be served",
            "write that part of the model with other operators",
        )


def _check_constants(graph: Any, constants: dict[str, Any]) -> set[str]:
    """Each constant of the library has a tensor of its own name; returns the names of those that it writes to."""
    names = {
        name: graph.allocated_constant_name[name] for name in graph.constants if name not in graph.folded_constants
    }
    if len(names) != len(constants) or set(names.values()) != set(constants):
        raise CompileError(
            f"torch lost constants: the compiled library has {len(names)} and torch gave {len(constants)}",
            "compile without the setting `freezing`",
        )
    return {names[name] for name in graph.mutated_buffers if name in names}


def _callers(graph: Any) -> dict[str, tuple[str, ...]]:
    """For each operator that is not compiled ("convolution"): the modules of the model that it comes from."""
    from torch._inductor.ir import ExternKernel

    found: dict[str, dict[str, None]] = {}
    for operation in graph.operations:
        if isinstance(operation, ExternKernel) and operation.cpp_kernel_name:
            name = _operator(operation.cpp_kernel_name)
            stacks = [node.meta.get("nn_module_stack") or {} for node in operation.origins]
            paths = [path for stack in stacks for path, _ in stack.values() if path]
            found.setdefault(name, {}).update(dict.fromkeys(sorted(paths, key=len)[-1:]))
    return {name: tuple(modules) for name, modules in found.items()}


def _operator(kernel: str) -> str:
    """As the library's imports have it: "sort_stable" for `at::_ops::sort_stable::call`."""
    name = kernel.removesuffix("::call").rpartition("::")[2]
    return name.removeprefix("aoti_torch_cpu_").removeprefix("aoti_torch_")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


# --- torch's failures in a user's terms --------------------------------------------------------------------------


def explained(error: BaseException) -> MctlError:
    """The cause as an MctlError, however deep torch has wrapped it."""
    chain = list(_chain(error))
    if any(isinstance(link, MemoryError) or re.search(_NO_MEMORY, str(link)) for link in chain):
        return CompileError("there is not enough memory to compile the program", _MORE_MEMORY)
    for link in chain:
        if isinstance(link, MctlError):
            return link
        if type(link).__name__ == "CppCompileError":
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


def _compiler_failed(output: str) -> CompileError:
    if "No space left on device" in output:
        return CompileError("the disk is full", "free some space, or choose another folder with `--work-dir`")
    if "Killed signal" in output:
        return CompileError("the C++ compiler was killed: most likely the machine ran out of memory", _MORE_MEMORY)
    lines = output.strip().splitlines() or ["it said nothing"]
    line = next((line for line in lines if "error:" in line), lines[-1])
    return CompileError(f"the C++ compiler refuses the generated code: {line.strip()[:300]}", _TRY)
