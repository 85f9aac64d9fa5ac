"""Loops that torch's compiler generates stay on one thread where starting the others takes longer than the loop.

torch opens a parallel region for every loop, since it knows neither the number of threads nor, often, the sizes. Here
`#pragma omp parallel` becomes `#pragma omp parallel if(WORK >= N)`. A team of one does what one thread would.
"""

import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# Work is elements times the lines of code for 16 of them, where a function counts as many lines. Two threads that are
# awake are as fast as one at about 20,000 (tanh), 40,000 (softmax), 30,000 to 120,000 (gelu), 110,000 to 230,000 (x+1),
# and not yet at 110,000 in a layer norm of four loops: tests/bench/loops.py. Where threads sleep or lack a core, a
# region costs a hundred times as much, so that the limit is among the larger of these.
ENOUGH_WORK = 1 << 17
_VECTOR = 16
_FUNCTION_LINES = 16
_FUNCTION = re.compile(r"\b(?:a?(?:sin|cos|tan)h?|atan2|erf\w*|f?exp\w*|log(?:1p|2|10)?|pow|lgamma|hypot)\(")
_PRAGMA = "#pragma omp parallel"
_LINES = "get_lines_ref"


@contextmanager
def small_loops_alone() -> Iterator[None]:
    """For what inductor generates inside the block. A torch whose generator is another writes what it always does."""
    from torch._inductor.codegen.cpp import CppKernel
    from torch._inductor.utils import IndentedBuffer

    original = getattr(CppKernel, "codegen_loops_impl", None)
    known = ["self", "loop_nest", "code", "worksharing"]
    if not original or [*inspect.signature(original).parameters] != known or not hasattr(IndentedBuffer, _LINES):
        yield
        return

    def codegen_loops_impl(self: Any, loop_nest: Any, code: Any, worksharing: Any) -> None:
        lines = getattr(code, _LINES)()
        begin = len(lines)
        original(self, loop_nest, code, worksharing)
        if region := _opened(lines, begin):
            worksharing.mctl_region = region
        elif getattr(worksharing, "in_parallel", False):
            region = getattr(worksharing, "mctl_region", None)
        if region:
            region.add(loop_nest)

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

    def add(self, loop_nest: Any) -> None:
        from torch._inductor.codegen.cpp import cexpr_index

        if self._work is None:
            return
        try:
            self._work += work_of(loop_nest)
        except (AttributeError, TypeError, IndexError):  # the nests of this torch are others
            self._work = None
        condition = "" if self._work is None else f" if({cexpr_index(self._work)} >= {ENOUGH_WORK})"
        self._lines[self._at] = self._pragma + condition


def _opened(lines: list[Any], begin: int) -> _Region | None:
    found = [at for at in range(begin, len(lines)) if isinstance(lines[at], str) and _PRAGMA in lines[at]]
    return _Region(lines, found[-1]) if found else None


def work_of(loop_nest: Any) -> Any:
    """An expression of the sizes: that of the loops times what is inside them, which may be more loops."""
    inner = getattr(loop_nest.kernel, "inner", None)
    work = _lines_of(loop_nest.kernel) if inner is None else sum(map(work_of, inner))
    for loop in loop_nest.loops or ():
        work = work * loop.size
    return work


def _lines_of(kernel: Any) -> int:
    """Lines of code for 16 elements. `kernels`: the first is the one for whole vectors, if there is one."""
    main = kernel.kernels[0]
    code = "\n".join(part.getvalue() for part in (main.loads, main.compute, main.stores))
    lines = code.count("\n") + _FUNCTION_LINES * len(_FUNCTION.findall(code))
    return -(-lines * _VECTOR // getattr(main, "tiling_factor", 1))
