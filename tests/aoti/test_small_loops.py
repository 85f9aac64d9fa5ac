"""Generated loops: small ones stay on one thread, and the numbers are eager's on either side of the limit."""

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor
from torch._inductor.codecache import AotCodeCompiler
from torch._inductor.codegen.cpp import CppKernel
from torch.nn import functional as F

from mctl.aoti import torch_private, variant
from mctl.aoti.small_loops import ENOUGH_WORK
from mctl.aoti.torch_private import small_loops_alone
from mctl.bundle_format.contract import Contract
from mctl.bundle_format.errors import CompileError
from mctl.export.program import load_program

ROWS = (2, 5, 33, 4096)  # from far below the limit to far above
UNKNOWN = (
    f"small loops take all threads: torch {torch.__version__} generates them in a way that this mctl does not know"
)
Sources = list[str]


class Model(torch.nn.Module):
    """One region with loops over rows, one with a loop over all elements, and sums over everything."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = F.layer_norm(F.gelu(x), (40,))
        variance, mean = torch.var_mean(x)
        return {
            "softmax": y.softmax(-1),
            "transposed": (x.t() + 1).contiguous().exp(),
            "sum": F.gelu(x).sum(),
            "variance": variance,
            "mean": mean,
            "largest": x.flatten().argmax(),
        }


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Callable[[Tensor], dict[str, Tensor]], str]:
    """The model, compiled, and its generated kernels."""
    x = torch.randn(8, 40)
    program = torch.export.export(Model(), (x,), dynamic_shapes=({0: torch.export.Dim("rows", min=2, max=1 << 16)},))
    library = tmp_path_factory.mktemp("small_loops") / "model.so"
    options = {
        "cpp.dynamic_threads": True,
        "aot_inductor.output_path": str(library),
        "aot_inductor.precompile_headers": False,  # for one library they take longer than they save
        "aot_inductor.compile_wrapper_opt_level": "O0",  # the kernels beside it are what counts
    }
    with pytest.MonkeyPatch.context() as patch:
        sources = record(patch)
        with small_loops_alone(pytest.fail):
            torch._inductor.aot_compile(program.module(), (x,), options=options)
    return torch._export.aot_load(str(library), "cpu"), sources[0]


def record(patch: pytest.MonkeyPatch) -> Sources:
    """Gets the C++ kernels of what is compiled."""
    sources: Sources = []
    original = AotCodeCompiler.compile

    def compile_cpp(graph: Any, wrapper: str, kernels: str, *rest: Any, **options: Any) -> Any:
        sources.append(kernels)
        return original(graph, wrapper, kernels, *rest, **options)

    patch.setattr(AotCodeCompiler, "compile", compile_cpp)
    return sources


def conditions(source: str) -> list[Callable[[int], bool]]:
    """Of each parallel region: whether it takes all threads, by the number of rows."""
    pragmas = re.findall(r"#pragma omp parallel(.*)", source)
    texts = [re.fullmatch(r" if\(static_cast<int64_t>\((.*)\) >= (\d+)\)", pragma) for pragma in pragmas]
    assert texts
    assert all(texts), pragmas
    sides = [(re.sub(r"(\d)L", r"\1", text[1]), int(text[2])) for text in texts if text]
    return [lambda rows, side=side, least=least: eval(side, {"ks0": rows}) >= least for side, least in sides]


def test_a_region_takes_all_threads_from_some_size_on(compiled: tuple[Any, str]) -> None:
    for parallel in conditions(compiled[1]):
        assert not parallel(ROWS[0])
        assert parallel(ROWS[-1])


@pytest.mark.parametrize("rows", ROWS)
def test_the_numbers_are_eager_s(compiled: tuple[Any, str], rows: int) -> None:
    x = torch.randn(rows, 40, generator=torch.Generator().manual_seed(rows))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        got = compiled[0](x)
    finally:
        torch.set_num_threads(before)
    wanted = Model()(x.double())
    for name, value in wanted.items():
        torch.testing.assert_close(
            got[name].double(), value.double(), rtol=1e-5, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_code_of_one_thread_is_right_with_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch counts one thread, each thread of a team would divide the variance, in place."""

    def kernels_of(options: dict[str, object]) -> str:
        with pytest.raises(CompileError):
            variant.compile_variant(
                program, Contract((), (), ()), variant.Recipe("dynamic"), options, lambda: None, pytest.fail
            )
        return kernels.pop()

    def compile_cpp(graph: object, wrapper: str, *rest: Any, **_: object) -> None:
        kernels.append(rest[0])
        raise MemoryError

    kernels: list[str] = []
    monkeypatch.setattr(AotCodeCompiler, "compile", compile_cpp)
    rows = torch.export.Dim("rows", min=2, max=1 << 16)
    program = torch.export.export(Model(), (torch.randn(8, 40),), dynamic_shapes=({0: rows},))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        alone = kernels_of({"cpp.dynamic_threads": True, "cpp_wrapper": True})
        asked = kernels_of({"cpp.dynamic_threads": True, "cpp_wrapper": True, "cpp.threads": 1})
    finally:
        torch.set_num_threads(before)
    assert alone.count("omp single") == asked.count("omp single") == 1


def test_every_variant_is_generated_so(monkeypatch: pytest.MonkeyPatch, mlp_program: Path) -> None:
    original = CppKernel.codegen_loops_impl

    def aot_compile(*arguments: object, **options: object) -> None:
        raise MemoryError(CppKernel.codegen_loops_impl.__module__)

    monkeypatch.setattr(torch._inductor, "aot_compile", aot_compile)
    program = load_program(mlp_program)
    with pytest.raises(CompileError) as caught:
        variant.compile_variant(
            program.exported, program.manifest.contract, variant.Recipe("dynamic"), {}, lambda: None, pytest.fail
        )
    assert str(caught.value.__cause__) == torch_private.__name__
    assert CppKernel.codegen_loops_impl is original


class Code:
    """Lines, as inductor keeps them."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def get_lines_ref(self) -> list[str]:
        return self.lines


def test_loops_of_an_unknown_kind_leave_the_region_as_torch_writes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def codegen_loops_impl(self: Any, loop_nest: Any, code: Code, worksharing: Any) -> None:
        code.lines += ["for"] if code.lines else ["  #pragma omp parallel", "for"]

    monkeypatch.setattr(CppKernel, "codegen_loops_impl", codegen_loops_impl)
    known = SimpleNamespace(kernel=SimpleNamespace(inner=[]), loops=[SimpleNamespace(size=sympy.Integer(7))])
    code, worksharing = Code(), SimpleNamespace(in_parallel=True)
    notes: list[str] = []
    with small_loops_alone(notes.append):
        CppKernel.codegen_loops_impl(None, known, code, worksharing)
        assert not notes
        assert code.lines[0] == f"  #pragma omp parallel if(static_cast<int64_t>(0L) >= {ENOUGH_WORK})"
        for nest in (SimpleNamespace(), known):
            CppKernel.codegen_loops_impl(None, nest, code, worksharing)
            assert code.lines[0] == "  #pragma omp parallel"
    assert notes == [UNKNOWN]


def test_a_generator_that_takes_something_else_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def codegen_loops_impl(self: Any, nest: Any) -> None: ...

    notes: list[str] = []
    monkeypatch.setattr(CppKernel, "codegen_loops_impl", codegen_loops_impl)
    with small_loops_alone(notes.append):
        assert CppKernel.codegen_loops_impl is codegen_loops_impl
    monkeypatch.delattr(CppKernel, "codegen_loops_impl")
    with small_loops_alone(notes.append):
        assert not hasattr(CppKernel, "codegen_loops_impl")
    assert notes == [UNKNOWN] * 2
