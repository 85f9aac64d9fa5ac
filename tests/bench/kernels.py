"""mctl's kernels beside torch's, on one thread: the least of many turns that follow one another.

python tests/bench/kernels.py [rounds]
"""

import ctypes
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from mctl.aoti import kernel_library, packing
from mctl.aoti.workspace import find_compiler

TURN = 2e-3  # seconds
MLP = [(m, k, n) for m in (1, 8, 32, 64) for k, n in ((128, 256), (256, 256), (256, 10))]
MINILM = [(m, k, n) for m in (1, 8, 32, 77, 256, 1024) for k, n in ((384, 384), (384, 1536), (1536, 384))]
ATTENTION = [(b, 12, length, 32) for b, length in ((1, 32), (1, 128), (1, 512), (8, 128), (32, 32))]

Seconds = Callable[[int], float]  # a call's, of so many


def build(folder: Path) -> ctypes.CDLL:
    compiler = find_compiler()
    archive = kernel_library.build(compiler, "native", folder)
    source, library = Path(__file__).with_suffix(".cc"), folder / "kernels.so"
    flags = ["-std=c++20", "-O3", "-march=native", "-fopenmp", "-fPIC", "-shared"]
    subprocess.run([*compiler, *flags, str(source), str(archive), "-o", str(library)], check=True)
    made = ctypes.CDLL(str(library))
    made.bench_tensor.restype = ctypes.c_void_p
    for name in ("bench_linear", "bench_attention", "bench_peak"):
        getattr(made, name).restype = ctypes.c_double
    return made


def handle(library: ctypes.CDLL, tensor: Tensor) -> ctypes.c_void_p:
    rank = tensor.dim()
    sizes, strides = (ctypes.c_int64 * rank)(*tensor.shape), (ctypes.c_int64 * rank)(*tensor.stride())
    data = ctypes.c_void_p(tensor.data_ptr())
    return ctypes.c_void_p(library.bench_tensor(data, ctypes.c_int64(rank), sizes, strides))


def of_python(call: Callable[[], object]) -> Seconds:
    def seconds(calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - start) / calls

    return seconds


def least(ways: list[Seconds], rounds: int) -> list[float]:
    """Seconds of a call, for each way; they take turns."""
    calls = [max(1, int(TURN / way(2))) for way in ways]
    turns = [[way(count) for way, count in zip(ways, calls, strict=True)] for _ in range(rounds)]
    return [min(column) for column in zip(*turns, strict=True)]


def linear(library: ctypes.CDLL, m: int, k: int, n: int, rounds: int) -> list[float]:
    x, weight, bias = torch.randn(m, k), torch.randn(n, k), torch.randn(n)
    packed = packing.pack_linear(weight)
    arguments = [handle(library, tensor) for tensor in (x, packed, bias)]
    numbers = [ctypes.c_int64(n), ctypes.c_int64(0)]
    return least(
        [lambda calls: library.bench_linear(calls, *arguments, *numbers), of_python(lambda: F.linear(x, weight, bias))],
        rounds,
    )


def attention(library: ctypes.CDLL, b: int, h: int, length: int, e: int, rounds: int) -> list[float]:
    q, k, v = (torch.randn(b, length, h, e).transpose(1, 2) for _ in range(3))
    arguments = [handle(library, tensor) for tensor in (q, k, v)]
    scale = ctypes.c_double(e**-0.5)
    return least(
        [
            lambda calls: library.bench_attention(calls, *arguments, scale),
            of_python(lambda: F.scaled_dot_product_attention(q, k, v)),
        ],
        rounds,
    )


@torch.inference_mode()
def main(rounds: int) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        library = build(Path(folder))
    peak = max(library.bench_peak() for _ in range(20))
    print(f"peak of one thread: {2 * peak / 1e9:.1f} GFLOP/s")
    print(f"{'shape':32}{'ours us':>10}{'torch us':>10}{'torch/ours':>11}{'of peak':>9}")
    rows = []
    for m, k, n in MLP + MINILM:
        rows.append((f"linear {m} x {k} -> {n}", m * k * n, linear(library, m, k, n, rounds)))
    for b, h, length, e in ATTENTION:
        work = 2 * b * h * length * length * e
        rows.append((f"attention b{b} h{h} l{length} e{e}", work, attention(library, b, h, length, e, rounds)))
    for name, work, (ours, theirs) in rows:
        print(f"{name:32}{ours * 1e6:10.2f}{theirs * 1e6:10.2f}{theirs / ours:11.2f}{work / ours / peak:9.0%}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
