"""mctl's kernels beside torch's: the least of many turns that follow one another. "bf16" is mctl's in bfloat16.

python tests/bench/kernels.py [--rounds N] [--threads N] [--only WORD]
"""

import argparse
import ctypes
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from mctl.aoti import kernel_library, packing
from mctl.aoti.workspace import find_compiler

TURN = 2e-3  # seconds
MLP = [(m, k, n) for m in (1, 8, 32, 64) for k, n in ((128, 256), (256, 256), (256, 10))]
MINILM = [(m, k, n) for m in (1, 8, 32, 77, 256, 2048) for k, n in ((384, 384), (384, 1536), (1536, 384))]
ATTENTION = [(b, 12, length, 32) for b, length in ((1, 32), (1, 128), (1, 512), (8, 128), (8, 256), (32, 32))]
ATTENTION += [(b, 12, length, 64) for b, length in ((1, 32), (1, 128), (8, 128), (8, 256), (32, 32))]
# batch, channels, height, width, outputs, kernel, stride, groups; the padding is half of the kernel
CNN = [
    shape
    for b in (1, 8)
    for shape in (
        (b, 3, 32, 48, 16, 3, 1, 1),
        (b, 16, 32, 48, 16, 3, 1, 1),
        (b, 16, 32, 48, 32, 3, 2, 1),
        (b, 32, 16, 24, 32, 3, 1, 1),
        (b, 32, 16, 24, 64, 3, 2, 1),
        (b, 64, 8, 12, 64, 3, 1, 1),
        (b, 16, 32, 48, 32, 1, 2, 1),
    )
]
RESNET = [(1, 3, 224, 224, 64, 7, 2, 1)]
RESNET += [(1, c, size, size, c, 3, 1, 1) for c, size in ((64, 56), (128, 28), (256, 14), (512, 7))]
RESNET += [(1, c, size, size, 2 * c, 3, 2, 1) for c, size in ((64, 56), (128, 28), (256, 14))]
RESNET += [(1, c, size, size, n, 1, 1, 1) for c, size, n in ((256, 56, 64), (512, 28, 128), (1024, 14, 256))]
RESNET += [(1, 64, 56, 56, 256, 1, 1, 1), (1, 256, 14, 14, 1024, 1, 1, 1), (1, 256, 56, 56, 512, 1, 2, 1)]
MOBILENET = [(1, c, size, size, c, 3, 1, c) for c, size in ((32, 112), (144, 56), (192, 28), (384, 14), (576, 14))]
MOBILENET += [(1, c, size, size, c, 3, 2, c) for c, size in ((96, 112), (144, 56), (192, 28), (576, 14))]
MOBILENET += [(1, 72, 56, 56, 72, 5, 2, 72), (1, 120, 28, 28, 120, 5, 1, 120), (1, 480, 14, 14, 480, 5, 1, 480)]

Seconds = Callable[[int], float]  # a call's, of so many


def build(folder: Path) -> ctypes.CDLL:
    compiler = find_compiler()
    archive = kernel_library.build(compiler, "native", folder)
    source, library = Path(__file__).with_suffix(".cc"), folder / "kernels.so"
    flags = ["-std=c++20", "-O3", "-march=native", "-fopenmp", "-fPIC", "-shared"]
    subprocess.run([*compiler, *flags, str(source), str(archive), "-o", str(library)], check=True)
    made = ctypes.CDLL(str(library))
    made.bench_tensor.restype = ctypes.c_void_p
    for name in ("bench_linear", "bench_conv2d", "bench_attention", "bench_peak"):
        getattr(made, name).restype = ctypes.c_double
    return made


def handle(library: ctypes.CDLL, tensor: Tensor) -> ctypes.c_void_p:
    rank = tensor.dim()
    sizes, strides = (ctypes.c_int64 * rank)(*tensor.shape), (ctypes.c_int64 * rank)(*tensor.stride())
    data = ctypes.c_void_p(tensor.data_ptr())
    dtype = ctypes.c_int32(15 if tensor.dtype is torch.bfloat16 else 6)
    return ctypes.c_void_p(library.bench_tensor(data, ctypes.c_int64(rank), sizes, strides, dtype))


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
    numbers = [ctypes.c_int64(n), ctypes.c_int64(0)]
    packed = {dtype: packing.pack_linear(weight, dtype) for dtype in (torch.float32, torch.bfloat16)}

    def ours(dtype: torch.dtype) -> Seconds:
        arguments = [handle(library, tensor) for tensor in (x, packed[dtype], bias)]
        return lambda calls: library.bench_linear(calls, *arguments, *numbers)

    return least([ours(torch.float32), of_python(lambda: F.linear(x, weight, bias)), ours(torch.bfloat16)], rounds)


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


def conv(library: ctypes.CDLL, shape: tuple[int, ...], rounds: int) -> list[float]:
    b, c, h, w, n, kernel, stride, groups = shape
    x = torch.randn(b, c, h, w).contiguous(memory_format=torch.channels_last)
    weight, bias = torch.randn(n, c // groups, kernel, kernel), torch.randn(n)
    numbers = [ctypes.c_int64(number) for number in (n, kernel, stride, kernel // 2, groups, 0)]
    dtypes = (torch.float32, torch.bfloat16) if groups == 1 else (torch.float32,)
    packed = {dtype: packing.pack_conv2d(weight, groups, dtype) for dtype in dtypes}

    def ours(dtype: torch.dtype) -> Seconds:
        arguments = [handle(library, tensor) for tensor in (x, packed[dtype], bias)]
        return lambda calls: library.bench_conv2d(calls, *arguments, *numbers)

    weight = weight.contiguous(memory_format=torch.channels_last)
    theirs = of_python(lambda: F.conv2d(x, weight, bias, stride, kernel // 2, groups=groups))
    first, *narrow = (ours(dtype) for dtype in dtypes)
    return least([first, theirs, *narrow], rounds)


@torch.inference_mode()
def main(rounds: int, threads: int, only: str) -> None:
    torch.set_num_threads(threads)  # of both: they share one OpenMP
    with tempfile.TemporaryDirectory() as folder:
        library = build(Path(folder))
    peak = max(library.bench_peak() for _ in range(20)) * threads
    print(f"peak: {2 * peak / 1e9:.1f} GFLOP/s")
    print(
        f"{'shape':36}{'ours us':>10}{'torch us':>10}{'torch/ours':>11}{'of peak':>9}{'bf16 us':>10}{'ours/bf16':>10}"
    )
    rows: list[tuple[str, int, Callable[[], list[float]]]] = []
    for m, k, n in MLP + MINILM:
        rows.append((f"linear {m} x {k} -> {n}", m * k * n, partial(linear, library, m, k, n, rounds)))
    for b, h, length, e in ATTENTION:
        work = 2 * b * h * length * length * e
        rows.append((f"attention b{b} h{h} l{length} e{e}", work, partial(attention, library, b, h, length, e, rounds)))
    for shape in CNN + RESNET + MOBILENET:
        b, c, height, width, n, kernel, stride, groups = shape
        kind = f"conv {kernel}x{kernel}" + (f"/{stride}" if stride > 1 else "") + (" depth" if groups > 1 else "")
        name = f"{kind} b{b} {height}x{width} {c} -> {n}"
        work = b * -(-height // stride) * -(-width // stride) * n * kernel * kernel * (c // groups)
        rows.append((name, work, partial(conv, library, shape, rounds)))
    for name, work, measure in rows:
        if only not in name:
            continue
        ours, theirs, *narrow = measure()
        row = f"{name:36}{ours * 1e6:10.2f}{theirs * 1e6:10.2f}{theirs / ours:11.2f}{work / ours / peak:9.0%}"
        print(row + "".join(f"{bf16 * 1e6:10.2f}{ours / bf16:10.2f}" for bf16 in narrow), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", default="", help="shapes that contain this")
    options = parser.parse_args()
    main(options.rounds, options.threads, options.only)
