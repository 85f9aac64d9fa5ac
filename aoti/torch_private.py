"""Every touch of torch's private parts, one function each. Nothing else of mctl names them.

A docstring says what is touched and why, and what happens with a torch that is another inside ("Otherwise"): an error,
or a note, which the bundle keeps and `mctl inspect` shows. Each was tried with the torch versions of
`bundle_format.host.TORCH_TESTED`.
"""

import inspect
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..bundle_format.errors import CompileError
from ..bundle_format.host import TORCH_TESTED
from ..bundle_format.interface import operator
from ..export.graph import line_of
from . import small_loops

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.export import ExportedProgram

Note = Callable[[str], None]

OPTIONS = "torch._inductor.config"
_STATEMENT = re.compile(r"^(\s*)((\w+)\(.*\));$", re.MULTILINE)
_STEP = re.compile(r"(VectorizedN?<int64_t(?:, ?\d+)?>::arange\(\w+, )(-?\d+)\)")
_CALL = re.compile(r"\b(aoti_torch_\w+)\(")
_CHECKED = re.compile(r"\bAOTITorchError\b|\bAOTI_TORCH_ERROR_CODE_CHECK\(")  # or declared
_PRAGMA = "#pragma omp parallel"


def installed() -> str:
    import torch

    return f"torch {torch.__version__}"


def _of(owner: Any, name: str) -> Any:
    """A part without which there is no bundle; CompileError where this torch lacks it."""
    if not hasattr(owner, name):
        raise unknown(f"has no `{name}` where this mctl looks for it")
    return getattr(owner, name)


def unknown(what: str, way_round: str = "") -> CompileError:
    """This torch is another inside."""
    tested = f"use one that this mctl was tested with: {', '.join(TORCH_TESTED)}"
    return CompileError(f"{installed()} {what}", f"{way_round}; or {tested}" if way_round else tested)


# --- inductor's options -----------------------------------------------------------------------------------------------


def options() -> Mapping[str, Any]:
    """inductor's options with their values.

    Touches: `torch._inductor.config.get_config_copy`.
    Why: `--inductor KEY=VALUE` is checked before a child process compiles for a minute.
    Otherwise: CompileError, since nothing can be compiled without options.
    """
    return _of(_config(), "get_config_copy")()  # type: ignore[no-any-return]


def option_type(key: str) -> Any:
    """The type that torch declares for an option; NoneType where it declares none.

    Touches: `torch._inductor.config.get_type`.
    Why: the text of `--inductor KEY=VALUE` becomes a value of that type.
    Otherwise: CompileError.
    """
    return _of(_config(), "get_type")(key)


def _config() -> Any:
    from torch._inductor import config

    return config


def c_functions(declarations: dict[Any, list[str]]) -> dict[str, Any]:
    """The option that has inductor call operators of ours as C functions.

    Touches: the option `aot_inductor.custom_ops_to_c_shims`.
    Why: mctl's kernels are linked into the variant, and are called without libtorch.
    Otherwise: CompileError; `--kernels torch` needs none of it.
    """
    option = "aot_inductor.custom_ops_to_c_shims"
    if option not in options():
        raise unknown("cannot call mctl's kernels", "`--kernels torch` does without them")
    return {option: declarations}


def pretend_cpu(features: Sequence[str], note: Note) -> None:
    """inductor generates code for a CPU with these flags of /proc/cpuinfo, not for this machine's.

    Touches: `torch.cpu._is_*_supported`, which inductor asks, and `VecISA.check_build`, by which it tries then whether
    the compiler knows them, with up to six small libraries.
    Why: `--target` names another machine; vectors are as wide as that one has. These are flags that the compiler knows.
    Otherwise: noted; what inductor asks instead is this machine.
    """
    import torch

    answers = {
        "_is_avx2_supported": "avx2",
        "_is_avx512_supported": "avx512f",
        "_is_avx512_bf16_supported": "avx512_bf16",
        "_is_vnni_supported": "avx512_vnni",
        "_is_amx_tile_supported": "amx_tile",
        "_is_amx_fp16_supported": "amx_fp16",
    }
    for name, flag in answers.items():
        if not hasattr(torch.cpu, name):
            note(f"{installed()} has no `torch.cpu.{name}`: its code is for the machine that compiled, as to `{flag}`")
        setattr(torch.cpu, name, lambda found=flag in features: found)
    from torch._inductor.cpu_vec_isa import VecISA

    VecISA.check_build = lambda self, code: True


# --- compiling --------------------------------------------------------------------------------------------------------


def compile_library(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], settings: dict[str, Any]
) -> "tuple[str, dict[str, Tensor]]":
    """The path of the compiled library, and its constants by the names that it has for them.

    Touches: `torch._inductor.aot_compile`, which gives paths and one mapping of weights for
    `package_constants_on_disk_format`.
    Why: `torch._inductor.aoti_compile_and_package` would put the constants into an archive of its own.
    Otherwise: CompileError.
    """
    import torch

    files = torch._inductor.aot_compile(module, args, kwargs, options=settings)
    libraries = [file for file in files if isinstance(file, str) and file.endswith(".so")]
    if not libraries:
        raise unknown("gives no library where this mctl looks for it")
    weights: dict[str, Any] = next((file for file in files if not isinstance(file, str)), {})
    return libraries[0], {name: tensor for name, (tensor, _) in weights.items()}


@contextmanager
def every_size_stays(note: Note) -> Iterator[None]:
    """Inside the block a lowering that would put a number in the place of a size that varies is not taken: the operator
    itself is called, or, for `glu`, its parts are lowered. An operator on constants alone gets them as tensors.

    Touches: `torch._inductor.lowering.lowerings`, whose functions are wrapped; `fallback_handler`, `slice_`, `mul`,
    `sigmoid` and `_full` beside it; `SizeVarAllocator.guard_int`; `ir.Constant` and `ir.TensorBox`.
    Why: such a library takes the example's size for every size and gives wrong numbers (adaptive pools); a power of a
    constant that is a scalar ends in StopIteration.
    Otherwise: noted; parity finds the numbers, and torch's own error is told.
    """
    import torch

    try:
        from torch._inductor import ir, lowering
        from torch._inductor.sizevars import SizeVarAllocator

        guard_int, table = SizeVarAllocator.guard_int, dict(lowering.lowerings)
        own = {torch.ops.aten.glu.default: _glu}
        constant, box = ir.Constant, ir.TensorBox
        _ = lowering.fallback_handler, lowering.slice_, lowering.mul, lowering.sigmoid, lowering._full
    except (ImportError, AttributeError) as error:
        note(f"sizes may be fixed in silence: {installed()} lowers in a way that this mctl does not know ({error})")
        yield
        return

    def guarded(self: Any, expression: Any) -> int:
        if getattr(expression, "free_symbols", None) and not getattr(self.simplify(expression), "is_Integer", False):
            raise _FixesASizeError
        return guard_int(self, expression)  # type: ignore[no-any-return]

    def wrapped(target: Any, lower: Callable[..., Any]) -> Callable[..., Any]:
        def lowered(*args: Any, **kwargs: Any) -> Any:
            if any(isinstance(each, constant) for each in args) and not any(isinstance(each, box) for each in args):
                args = tuple(_as_tensor(each) if isinstance(each, constant) else each for each in args)
            try:
                return lower(*args, **kwargs)
            except _FixesASizeError:
                way_round = own.get(target) or lowering.fallback_handler(target, add_to_fallback_set=False)
                return way_round(*args, **kwargs)

        return lowered

    SizeVarAllocator.guard_int = guarded
    lowering.lowerings.update({target: wrapped(target, lower) for target, lower in table.items()})
    try:
        yield
    finally:
        SizeVarAllocator.guard_int = guard_int
        lowering.lowerings.update(table)


class _FixesASizeError(CompileError):
    def __init__(self) -> None:
        super().__init__(
            "torch's compiler puts the example's size in the place of one that varies",
            "write that part of the model with other operators, or leave the dim out",
        )


def _as_tensor(constant: Any) -> Any:
    from torch._inductor.lowering import _full

    return _full(constant.value, constant.device, constant.dtype, [])


def _glu(x: Any, dim: int = -1) -> Any:
    """The first half times the sigmoid of the other: https://docs.pytorch.org/docs/stable/generated/torch.nn.GLU.html."""
    from torch._inductor.lowering import mul, sigmoid, slice_
    from torch.utils._sympy.functions import FloorDiv

    size = x.get_size()[dim]
    half = FloorDiv(size, 2)
    return mul(slice_(x, dim, 0, half), sigmoid(slice_(x, dim, half, size)))


@contextmanager
def watching(starting_cpp: "Callable[[Lowered, str | None], None]", note: Note) -> "Iterator[list[Lowered]]":
    """The lowered graphs of the compiles inside the block; `starting_cpp` gets each, with what torch says of operators
    outside its C interface (JSON, which is for its proxy executor and is dropped), before the C++ compiler is called.

    Touches: `AotCodeCompiler.compile(graph, wrapper_code, kernel_code, serialized_extern_kernel_nodes, …)`, replaced.
    Why: inductor gives back nothing but files, and a model that could not be served is refused before C++ is compiled.
    Otherwise: CompileError; without it constants that the model changes would be taken for fixed ones.
    """
    from torch._inductor.codecache import AotCodeCompiler

    lowered: list[Lowered] = []
    original = getattr(AotCodeCompiler, "compile", None)
    if original is None or len(_positional(original)) != 4:
        raise unknown("compiles in a way that this mctl does not know")

    def compile_cpp(graph: Any, wrapper: str, kernels: str, foreign: str | None, **options: Any) -> Any:
        lowered.append(Lowered(graph))
        starting_cpp(lowered[-1], foreign)
        code = with_wide_steps(with_checks(wrapper, note))
        return original(graph, code, with_wide_steps(kernels), None, **options)

    AotCodeCompiler.compile = compile_cpp
    try:
        yield lowered
    finally:
        AotCodeCompiler.compile = original


@contextmanager
def building(
    start: Callable[[Sequence[str]], None], finish: Callable[[], Sequence[Path]], note: Note
) -> Iterator[None]:
    """`start` gets the command of each C++ file of a variant, and need not wait for it. `finish` waits for all, and
    names more objects for the library.

    Touches: `CppBuilder.build`, replaced; `get_command_line`, `_sources_args`.
    Why: torch compiles one file after another, each with all of its headers: building.py.
    Otherwise: noted; files are compiled as torch does it.
    """
    from torch._inductor import cpp_builder

    original = getattr(cpp_builder.CppBuilder, "build", None)
    if original is None or not hasattr(cpp_builder.CppBuilder, "get_command_line"):
        note(f"compiling takes longer: {installed()} calls the C++ compiler in a way that this mctl does not know")
        yield
        return

    def build(self: Any) -> None:
        command = shlex.split(self.get_command_line())
        if "-c" in command and command[1].endswith(".cpp"):
            start(command)
            return
        if command[1].endswith(".o"):
            self._sources_args += "".join(f" {shlex.quote(str(made))}" for made in finish())
        original(self)

    cpp_builder.CppBuilder.build = build
    try:
        yield
    finally:
        cpp_builder.CppBuilder.build = original


class Lowered:
    """A program as inductor has lowered it.

    Touches: `GraphLowering.constants`, `folded_constants`, `allocated_constant_name`, `mutated_buffers`, `operations`,
    and of these `ExternKernel.cpp_kernel_name`, `use_runtime_dispatch`, `op_overload` and `origins`.
    Why: which constant of the library is which of the model and which of them it writes to, and where in the model the
    operators come from that are not compiled.
    Otherwise: CompileError for the constants, without which there is no bundle; callers are left out, and noted.
    """

    def __init__(self, graph: Any) -> None:
        self._graph = graph

    def constants(self) -> "dict[str, Tensor]":
        """By the names of the program, which those that inductor folded no longer have."""
        folded = _of(self._graph, "folded_constants")
        return {name: tensor for name, tensor in _of(self._graph, "constants").items() if name not in folded}

    def library_names(self) -> dict[str, str]:
        """What the library calls each of them."""
        names = _of(self._graph, "allocated_constant_name")
        return {name: names[name] for name in self.constants()}

    def written(self) -> set[str]:
        """Those that the model changes, by the names of the program."""
        return set(_of(self._graph, "mutated_buffers")) & self.constants().keys()

    def callers(self, note: Note) -> dict[str, tuple[str, ...]]:
        """For each operator that is not compiled ("convolution"): where it is called, "stem.0 at model.py:7"."""
        try:
            return _callers(self._graph.operations)
        except (ImportError, AttributeError) as error:
            note(f"{installed()} does not say which modules call operators that are not compiled: {error}")
            return {}


def _callers(operations: Sequence[Any]) -> dict[str, tuple[str, ...]]:
    from torch._inductor.ir import ExternKernel

    found: dict[str, dict[str, None]] = {}
    for operation in operations:
        if isinstance(operation, ExternKernel) and (name := _operator(operation)):
            places = sorted(filter(None, map(_place, operation.origins)), key=len)
            found.setdefault(name, {}).update(dict.fromkeys(places[-1:]))
    return {name: tuple(places) for name, places in found.items()}


def _place(node: Any) -> str:
    """The innermost module and the user's line that a node comes from, as far as they are known."""
    stack = node.meta.get("nn_module_stack") or {}
    module = max((path for path, _ in stack.values()), key=len, default="")
    return " at ".join(filter(None, (module, line_of(node))))


def _operator(operation: Any) -> str | None:
    """As the variant's imports have it: "sort_stable" for `at::_ops::sort_stable::call`; None: it calls none."""
    if getattr(operation, "use_runtime_dispatch", False):
        return operator(operation.op_overload.name())
    name = (operation.cpp_kernel_name or "").removesuffix("::call").rpartition("::")[2]
    return name.removeprefix("aoti_torch_cpu_").removeprefix("aoti_torch_") or None


def is_cpp_error(error: BaseException) -> bool:
    """Whether the C++ compiler refused what torch generated; the error's text is then what it said.

    Touches: the name of `torch._inductor.exc.CppCompileError`.
    Why: a full disk or too little memory is told as that.
    Otherwise: it is told as a failure of torch.
    """
    return type(error).__name__ == "CppCompileError"


def with_checks(wrapper: str, note: Note) -> str:
    """The generated C++ with a look at what each operator returns.

    Touches: the text of the code, in which a call that is not looked at stands on a line of its own.
    Why: torch leaves it out for scatter and index_put, where an index out of range would be wrong numbers.
    Otherwise: the operators whose calls are still not looked at are noted.
    """

    def checked(found: re.Match[str]) -> str:
        indent, call, name = found.groups()
        return f"{indent}AOTI_TORCH_ERROR_CODE_CHECK({call});" if operator(name) else found[0]

    code = _STATEMENT.sub(checked, wrapper)
    lines = [line for line in code.splitlines() if not _CHECKED.search(line)]
    left = sorted({name for line in lines for call in _CALL.findall(line) if (name := operator(call))})
    if left:
        note(f"an error of {', '.join(f'`{name}`' for name in left)} is not seen: {installed()} writes the call anew")
    return code


def with_wide_steps(code: str) -> str:
    """The generated C++ with the steps of whole numbers in 64 bits.

    Touches: `Vectorized<int64_t>::arange(base, step)` in the text of the code.
    Why: lanes are multiplied by a step as C's `int`, so that `torch.arange(n) * 10**9` wraps round
    (https://github.com/pytorch/pytorch/issues/175966).
    Otherwise: the code stays as it is, and parity finds what wraps round.
    """
    return _STEP.sub(r"\1\2L)", code)


# --- operators by their names -----------------------------------------------------------------------------------------


@contextmanager
def calls_by_name(
    write: "Callable[[Wrapper, Any, Sequence[Any], Sequence[Any]], object]", note: Note
) -> Iterator[None]:
    """`write(wrapper, operator, arguments, names)` generates calls of operators that have no function in torch's C
    interface. `names`: the new variables for what comes back, as nested as that is; None: there is none.

    Touches: `CppWrapperCpu.generate_fallback_kernel_with_runtime_lookup_aot(operator, arguments, names, outputs)`,
    replaced; `MutationOutput`.
    Why: torch leaves these calls to its proxy executor, an object that only a Python process has.
    Otherwise: noted; a model with such operators is refused.
    """
    from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu
    from torch._inductor.ir import MutationOutput

    name = "generate_fallback_kernel_with_runtime_lookup_aot"
    original = getattr(CppWrapperCpu, name, None)
    if original is None or len(_positional(original)) != 5:
        note(f"operators are not called by their names: {installed()} calls them in a way that this mctl does not know")
        yield
        return

    def generate(self: Any, op: Any, arguments: Sequence[Any], names: Sequence[Any], outputs: Sequence[Any]) -> None:
        new = [
            None if isinstance(output, MutationOutput) else name for name, output in zip(names, outputs, strict=False)
        ]
        write(Wrapper(self), op, arguments, new)

    setattr(CppWrapperCpu, name, generate)
    try:
        yield
    finally:
        setattr(CppWrapperCpu, name, original)


class Wrapper:
    """The C++ of a program, while inductor generates it.

    Touches: `CppWrapperCpu.writeline`, `header`, `include_extra_header`, `codegen_device`, `codegen_dtype`,
    `codegen_layout`, `codegen_memory_format`; `IRNode.codegen_reference`; `cexpr`.
    Why: the calls that mctl generates use its variables and constants.
    Otherwise: AttributeError, told as a failure of torch.
    """

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper

    def line(self, text: str) -> None:
        self._wrapper.writeline(text)

    def include(self, header: str, code: str) -> None:
        """A header, and code that needs it, once."""
        if header not in self._wrapper._included_extra_headers:
            self._wrapper.include_extra_header(header)
            self._wrapper.header.splice(code)

    def tensor(self, argument: Any) -> str:
        """A handle that is borrowed."""
        return str(argument.codegen_reference())

    def device(self, device: "torch.device") -> tuple[str, str]:
        """Its type and index."""
        kind, index = self._wrapper.codegen_device(device).split(", ")
        return kind, index

    def setting(self, value: "torch.dtype | torch.layout | torch.memory_format") -> str:
        """As a number."""
        import torch

        if isinstance(value, torch.dtype):
            return str(self._wrapper.codegen_dtype(value))
        if isinstance(value, torch.layout):
            return str(self._wrapper.codegen_layout(value))
        return str(self._wrapper.codegen_memory_format(value))

    def size(self, value: Any) -> str:
        """Of an expression of the program's sizes."""
        from torch._inductor.codegen.cpp_utils import cexpr

        return str(cexpr(getattr(getattr(value, "node", None), "expr", value)))


# --- generated loops --------------------------------------------------------------------------------------------------


@contextmanager
def small_loops_alone(note: Note) -> Iterator[None]:
    """In what inductor generates inside the block, `#pragma omp parallel` is followed by `if(WORK >= N)`.

    Touches: `CppKernel.codegen_loops_impl(loop_nest, code, worksharing)`, replaced; of its arguments
    `IndentedBuffer.get_lines_ref`, `WorkSharing.in_parallel`, the nest's `loops` and `kernel`, down to the lines that
    are generated; `cexpr_index`.
    Why: torch opens a parallel region for every loop: small_loops.py.
    Otherwise: noted; regions are as torch writes them.
    """
    from torch._inductor.codegen.cpp import CppKernel
    from torch._inductor.utils import IndentedBuffer

    original = getattr(CppKernel, "codegen_loops_impl", None)
    known = ["self", "loop_nest", "code", "worksharing"]
    if not original or _positional(original) != known or not hasattr(IndentedBuffer, "get_lines_ref"):
        _note_loops(note)
        yield
        return

    def codegen_loops_impl(self: Any, loop_nest: Any, code: Any, worksharing: Any) -> None:
        lines = code.get_lines_ref()
        begin = len(lines)
        original(self, loop_nest, code, worksharing)
        if region := _opened(lines, begin):
            worksharing.mctl_region = region
        elif getattr(worksharing, "in_parallel", False):
            region = getattr(worksharing, "mctl_region", None)
        if region:
            region.add(loop_nest, note)

    CppKernel.codegen_loops_impl = codegen_loops_impl
    try:
        yield
    finally:
        CppKernel.codegen_loops_impl = original


class _Region:
    """A parallel region: line `at` has its pragma. Loops may be added as long as it is open."""

    def __init__(self, lines: list[Any], at: int) -> None:
        self._lines, self._at, self._pragma = lines, at, lines[at]
        self._work: Any = 0  # None: not known

    def add(self, loop_nest: Any, note: Note) -> None:
        from torch._inductor.codegen.cpp import cexpr_index

        if self._work is None:
            return
        try:
            self._work += _work_of(loop_nest)
        except (AttributeError, TypeError, IndexError):
            self._work = None
            _note_loops(note)
        condition = "" if self._work is None else f" if({cexpr_index(self._work)} >= {small_loops.ENOUGH_WORK})"
        self._lines[self._at] = self._pragma + condition


def _note_loops(note: Note) -> None:
    note(f"small loops take all threads: {installed()} generates them in a way that this mctl does not know")


def _opened(lines: list[Any], begin: int) -> _Region | None:
    found = [at for at in range(begin, len(lines)) if isinstance(lines[at], str) and _PRAGMA in lines[at]]
    return _Region(lines, found[-1]) if found else None


def _work_of(loop_nest: Any) -> Any:
    """An expression of the sizes: that of the loops times what is inside them, which may be more loops."""
    inner = getattr(loop_nest.kernel, "inner", None)
    work = _work_of_one(loop_nest.kernel) if inner is None else sum(map(_work_of, inner))
    for loop in loop_nest.loops or ():
        work = work * loop.size
    return work


def _work_of_one(kernel: Any) -> int:
    """`kernels`: the first is the one for whole vectors, if there is one."""
    main = kernel.kernels[0]
    code = "\n".join(part.getvalue() for part in (main.loads, main.compute, main.stores))
    return small_loops.work_of_code(code, getattr(main, "tiling_factor", 1))


# --- torch alone, as a peer -------------------------------------------------------------------------------------------


def stock_model(exported: "ExportedProgram", path: Path) -> Callable[..., Any]:
    """The model as torch alone compiles it ahead of time, with torch's settings; `path` ends in .pt2.

    Touches: `torch._inductor.aoti_compile_and_package` and `aoti_load_package`, which torch documents.
    Why: `mctl bench --against aoti`.
    Otherwise: what it raises is told as that peer's failure.
    """
    import torch

    once = {"aot_inductor.precompile_headers": False}  # pays from the second one on
    package = torch._inductor.aoti_compile_and_package(exported, package_path=str(path), inductor_configs=once)
    return torch._inductor.aoti_load_package(package)  # type: ignore[no-any-return]


def _positional(function: Any) -> list[str]:
    """Names of its parameters without those that are given by name only."""
    parameters = inspect.signature(function).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind is not parameter.KEYWORD_ONLY]
