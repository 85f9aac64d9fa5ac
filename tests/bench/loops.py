"""Loops that torch's compiler generates: from which size on two threads are faster than one.

python tests/bench/loops.py [--threads N]

For the number in aoti/small_loops.py: "work" is in its units. Threads that wait spin, as in the server.
"""

import argparse
import ctypes
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from mctl.aoti.inductor import settings
from mctl.aoti.torch_private import small_loops_alone
from mctl.aoti.workspace import find_compiler
from mctl.runner.stopwatch import SPIN_COUNT

OPENMP = ctypes.CDLL("libgomp.so.1")  # that of the compiled code; torch has its own
COLUMNS = 64
SIZES = [1 << n for n in range(8, 19)]
LOOPS: dict[str, Callable[[Tensor], Tensor]] = {
    "add": lambda x: x + 1,
    "gelu": F.gelu,
    "tanh": torch.tanh,
    "softmax": lambda x: x.softmax(-1),
    "layer norm": lambda x: F.layer_norm(x, (COLUMNS,)),
}


class Generated(BaseException):
    """Carries the C++ code; what would follow is not needed."""


@contextmanager
def stopped_at_the_code() -> Iterator[None]:
    from torch._inductor.codecache import AotCodeCompiler

    def stop(graph: object, wrapper: str, kernels: str, *rest: object, **options: object) -> None:
        raise Generated(kernels)

    original = AotCodeCompiler.compile
    AotCodeCompiler.compile = stop
    try:
        yield
    finally:
        AotCodeCompiler.compile = original


class Model(torch.nn.Module):
    def __init__(self, loop: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.loop = loop

    def forward(self, x: Tensor) -> Tensor:
        return self.loop(x)


def generate(loop: Callable[[Tensor], Tensor]) -> str:
    x = torch.randn(8, COLUMNS)
    program = torch.export.export(
        Model(loop), (x,), dynamic_shapes=({0: torch.export.Dim("rows", min=2, max=1 << 20)},)
    )
    chosen = settings((), "native", find_compiler()[0], stateful=False)
    with stopped_at_the_code(), small_loops_alone(print):
        try:
            torch._inductor.aot_compile(program.module(), (x,), options=chosen)
        except Generated as generated:
            return str(generated)
    raise RuntimeError("inductor generated no code")


class Kernel:
    """The one function of generated code; `work` is the number of units for one row."""

    def __init__(self, code: str, folder: Path) -> None:
        [(name, parameters)] = re.findall(r'extern "C"\s+void\s+(\w+)\(([^)]*)\)', code)
        conditions = re.findall(r" if\(static_cast<int64_t>\((\d+)L\*ks0\) >= \d+\)", code)
        self.work = sum(map(int, conditions))
        source, library = folder / f"{name}.cpp", folder / f"{name}.so"
        source.write_text(re.sub(r"(omp parallel) if\(.*", r"\1", code))
        installed = Path(torch.__file__).parent
        flags = ["-std=c++20", "-O3", "-ffast-math", "-fno-finite-math-only", "-march=native", "-fopenmp", "-fPIC"]
        flags += ["-shared", f"-I{installed}/include", "-DCPU_CAPABILITY=AVX512", "-DCPU_CAPABILITY_AVX512"]
        subprocess.run(
            [*find_compiler(), *flags, str(source), "-o", str(library), f"-L{installed}/lib", "-lc10", "-ltorch_cpu"],
            check=True,
        )
        self._call = ctypes.CDLL(str(library))[name]
        self._parameters = [parameter.strip() for parameter in parameters.split(",")]

    def least(self, rows: int, threads: int) -> Callable[[], float]:
        """Seconds that one call takes, the least of a turn."""
        buffers = [torch.rand(rows, COLUMNS) for parameter in self._parameters if "*" in parameter]
        arguments: list[object] = [ctypes.c_void_p(buffer.data_ptr()) for buffer in buffers] + [ctypes.c_int64(rows)]

        def turn() -> float:
            OPENMP.omp_set_num_threads(threads)
            taken = []
            until = time.perf_counter() + 0.02
            while not taken or time.perf_counter() < until:
                begin = time.perf_counter()
                self._call(*arguments)
                taken.append(time.perf_counter() - begin)
            return min(taken)

        turn.buffers = buffers
        return turn


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=2)
    threads = parser.parse_args().threads
    if "GOMP_SPINCOUNT" not in os.environ:  # read when the library is loaded
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"GOMP_SPINCOUNT": SPIN_COUNT})
    with tempfile.TemporaryDirectory() as folder:
        for name, loop in LOOPS.items():
            kernel = Kernel(generate(loop), Path(folder))
            print(f"{name}\n  elements      work   1 thread  {threads} threads")
            for size in SIZES:
                rows = size // COLUMNS
                turns = [kernel.least(rows, number) for number in (1, threads)]
                one, many = (
                    min(taken) * 1e6 for taken in zip(*([turn() for turn in turns] for _ in range(10)), strict=True)
                )
                print(f"  {size:8}  {kernel.work * rows:8}  {one:6.2f} us  {many:6.2f} us")


if __name__ == "__main__":
    main()
