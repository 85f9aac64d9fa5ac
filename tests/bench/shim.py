"""The shim's operators beside libtorch's own, both called as compiled code calls them, in turns; the least counts.

python tests/bench/shim.py [--rounds N] [--threads N] [--only WORD]
"""

import argparse
import ctypes
from collections.abc import Callable, Sequence
from ctypes import byref, c_double, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from functools import partial

import torch
from kernels import least, of_python
from torch import Tensor

from mctl.bundle_format import host
from mctl.runner import native

DTYPES = {torch.float32: 6, torch.int64: 4, torch.bfloat16: 15}
FLASH = "_scaled_dot_product_flash_attention_for_cpu"


@dataclass
class Case:
    """A call: handles of the tensors in the order of `words`, in which a str is "i" for tensor i and "&i" for where its
    handle lies; then the places of the results.
    """

    name: str
    function: str  # without `aoti_torch_cpu_`, or whole
    tensors: Sequence[Tensor]
    words: Sequence[object]
    results: int = 0


def call_of(library: ctypes.CDLL, case: Case) -> Callable[[], None]:
    handles = [handle(library, tensor) for tensor in case.tensors]
    results = [c_void_p() for _ in range(case.results)]
    function = getattr(library, case.function if "aoti" in case.function else f"aoti_torch_cpu_{case.function}")
    words = [_argument(word, handles) for word in case.words] + [byref(result) for result in results]

    def call() -> None:
        if function(*words) != 0:
            raise SystemExit(f"{case.name}: {library._name} refuses")
        for result in results:
            library.aoti_torch_delete_tensor_object(result)

    return call


def _argument(word: object, handles: list[c_void_p]) -> object:
    if isinstance(word, str):
        return byref(handles[int(word[1:])]) if word.startswith("&") else handles[int(word)]
    if isinstance(word, list):  # of handles
        return (c_void_p * len(word))(*(handles[i] for i in word))
    return word


def handle(library: ctypes.CDLL, tensor: Tensor) -> c_void_p:
    made, rank = c_void_p(), tensor.dim()
    sizes, strides = (c_int64 * rank)(*tensor.shape), (c_int64 * rank)(*tensor.stride())
    number, data = DTYPES[tensor.dtype], c_void_p(tensor.data_ptr())
    create = library.aoti_torch_create_tensor_from_blob
    assert create(data, c_int64(rank), sizes, strides, c_int64(0), number, 0, 0, byref(made)) == 0
    return made


def products() -> list[Case]:
    found = []
    for dtype, kind in ((torch.float32, "f32"), (torch.bfloat16, "bf16")):
        for m in (1, 8, 32, 512):
            for layout in ("NN", "NT", "TN", "TT"):
                a = matrix(layout[0], m, 768, dtype)
                b = matrix(layout[1], 768, 768, dtype)
                out = torch.empty(m, 768, dtype=dtype)
                found.append(Case(f"mm {kind} {layout} {m} x 768 x 768", "mm_out", [out, a, b], "012"))
        for layout in ("NN", "NT"):
            a = torch.randn(12, 128, 64).to(dtype)
            b = torch.randn(12, 64, 128).to(dtype)
            b = b if layout == "NN" else b.transpose(1, 2).contiguous().transpose(1, 2)
            out = torch.empty(12, 128, 128, dtype=dtype)
            found.append(Case(f"bmm {kind} {layout} 12 x 128 x 64 x 128", "bmm_out", [out, a, b], "012"))
        for m in (1, 32):
            tensors = [torch.empty(m, 768), torch.randn(768), matrix("N", m, 768), matrix("T", 768, 768)]
            tensors = [tensor.to(dtype) for tensor in tensors]
            tensors[3] = tensors[3].T.contiguous().T
            words = [*"0123", c_double(1), c_double(1)]
            found.append(Case(f"addmm {kind} NT {m} x 768 x 768", "addmm_out", tensors, words))
    return found


def matrix(layout: str, rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    made = torch.randn(rows, columns).to(dtype)
    return made if layout == "N" else made.T.contiguous().T


def others() -> list[Case]:
    rows = torch.randn(256, 1000)
    q, mask = torch.randn(1, 12, 128, 64), torch.randn(1, 1, 128, 128)
    attention = [*"012", c_double(0), 0, "&3", None]
    image, weight = torch.randn(1, 64, 56, 56), torch.randn(64, 64, 3, 3)
    ones, none, two = (c_int64 * 2)(1, 1), (c_int64 * 2)(0, 0), (c_int64 * 2)(2, 2)
    pair = c_int64(2)
    convolution = ["0", "1", "&2", ones, pair, ones, pair, ones, pair, 0, none, pair, c_int64(1)]
    index = torch.randint(0, 1000, (256, 1000))
    columns = torch.randint(0, 1000, (4096,))
    table, bags = torch.randn(10_000, 64), torch.arange(0, 4096, 16)
    lstm = [torch.randn(4 * 256, 128), torch.randn(4 * 256, 256), torch.randn(1024), torch.randn(1024)]
    states = [torch.randn(1, 8, 256), torch.randn(1, 8, 256)]
    recurrent = [*"0123456", 0, None, c_int64(0), pair, c_int64(256), c_int64(1), 1, 0, 0, 0]
    yes = byref(c_int32(1))
    found = [
        Case("convolution 3x3 64->64 56x56", "convolution", [image, weight, torch.randn(64)], convolution, 1),
        Case("attention 12 x 128 x 64, mask", FLASH, [q, q.clone(), q.clone(), mask], attention, 2),
        Case("sort 256 x 1000", "sort_stable", [rows], ["0", yes, c_int64(1), 0], 2),
        Case("topk 10 of 256 x 1000", "topk", [rows], ["0", c_int64(10), c_int64(1), 1, 1], 2),
        Case("kthvalue 10 of 256 x 1000", "kthvalue", [rows], ["0", c_int64(10), c_int64(1), 0], 2),
        Case("cumsum 256 x 1000", "cumsum", [rows], ["0", c_int64(1), None], 1),
        Case("cumsum along rows 256 x 1000", "cumsum", [rows], ["0", c_int64(0), None], 1),
        Case("avg_pool2d 2x2 64 x 56x56", "avg_pool2d", [image],
             ["0", two, pair, two, pair, none, pair, 0, 1, None], 1),
        Case("adaptive_avg_pool2d 7x7", "_adaptive_avg_pool2d", [image], ["0", (c_int64 * 2)(7, 7), pair], 1),
        Case("searchsorted 4096 in 1000", "searchsorted_Tensor", [rows[0].sort().values, torch.randn(4096)],
             ["0", "1", 0, 0, None, None], 1),
        Case("embedding_bag 256 of 16", "_embedding_bag", [table, torch.randint(0, 10_000, (4096,)), bags],
             [*"012", 0, c_int64(0), 0, None, 0, c_int64(-1)], 4),
        Case("scatter 256 x 1000", "scatter_src_out", [rows.clone(), rows, index, torch.randn(256, 1000)],
             ["0", "1", c_int64(1), "2", "3"]),
        Case("scatter_reduce sum", "scatter_reduce_two_out", [rows.clone(), rows, index, torch.randn(256, 1000)],
             ["0", "1", c_int64(1), "2", "3", b"sum", 1]),
        Case("index_put 4096 rows of 64", "aoti_torch_index_put_out",
             [table[:1000].clone(), table[:1000], columns, torch.randn(4096, 64)], ["0", "1", [2], 1, "3", 0]),
        Case("index_put, adding", "aoti_torch_index_put_out",
             [table[:1000].clone(), table[:1000], columns, torch.randn(4096, 64)], ["0", "1", [2], 1, "3", 1]),
    ]  # fmt: skip
    for steps in (1, 32):
        x = torch.randn(steps, 8, 128)
        found.append(Case(f"lstm {steps} x 8, 128->256", "mkldnn_rnn_layer", [x, *lstm, *states], recurrent, 4))
    return found


def main(rounds: int, threads: int, only: str) -> None:
    torch.set_num_threads(threads)  # of both: they share one OpenMP
    torch.manual_seed(0)
    native.find_runner()  # a checkout builds the shim with it
    theirs = ctypes.CDLL(str(native.find_libtorch() / "libtorch_cpu.so"))
    ours = ctypes.CDLL(str(host.find_shim()))
    print(f"{'operator':36}{'shim us':>10}{'torch us':>10}{'torch/shim':>12}")
    for case in [*products(), *others()]:
        if only not in case.name:
            continue
        ways = [of_python(partial(call_of(library, case))) for library in (ours, theirs)]
        shim, torchs = least(ways, rounds)
        print(f"{case.name:36}{shim * 1e6:10.1f}{torchs * 1e6:10.1f}{torchs / shim:12.2f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", default="", help="operators that contain this")
    options = parser.parse_args()
    main(options.rounds, options.threads, options.only)
