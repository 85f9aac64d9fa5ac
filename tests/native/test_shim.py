"""libmctl_shim.so, called as compiled code calls it: torch's numbers and answers, and errors in place of crashes."""

import ctypes
import math
import os
import subprocess
import sys
from collections.abc import Callable
from ctypes import POINTER, byref, c_char_p, c_double, c_float, c_int64, c_void_p

import numpy as np
import pytest
import torch

from mctl.bundle_format import host
from mctl.runner.native import find_runner

FLOAT32 = 6


@pytest.fixture(scope="module")
def shim() -> ctypes.CDLL:
    named = os.environ.get("MCTL_TEST_SHIM")  # another build, with sanitizers for example
    if named is None:
        find_runner()
    library = ctypes.CDLL(named or str(host.find_shim()))
    library.torch_exception_get_what_without_backtrace.restype = c_char_p
    return library


@pytest.fixture(autouse=True)
def nothing_is_left(shim: ctypes.CDLL) -> object:
    before = usage(shim)[0]
    yield
    assert usage(shim)[0] == before


def usage(shim: ctypes.CDLL) -> tuple[int, int]:
    """Tensors that there are, and bytes that are held for them."""
    tensors, held = c_int64(), c_int64()
    shim.mctl_shim_usage(byref(tensors), byref(held))
    return tensors.value, held.value


def numbers(*values: int) -> ctypes.Array[c_int64]:
    return (c_int64 * max(len(values), 1))(*values)


def strides_of(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(sizes[axis + 1 :]) for axis in range(len(sizes)))


def empty(shim: ctypes.CDLL, *sizes: int, strides: tuple[int, ...] | None = None, dtype: int = FLOAT32) -> c_void_p:
    made = c_void_p()
    strides = strides_of(sizes) if strides is None else strides
    call(shim.aoti_torch_empty_strided, len(sizes), numbers(*sizes), numbers(*strides), dtype, 0, 0, byref(made))
    return made


def blob(shim: ctypes.CDLL, tensor: torch.Tensor, dtype: int = FLOAT32) -> c_void_p:
    """A handle on the tensor's own memory."""
    made = c_void_p()
    sizes, strides = numbers(*tensor.shape), numbers(*tensor.stride())
    data = c_void_p(tensor.data_ptr())
    call(
        shim.aoti_torch_create_tensor_from_blob,
        data, tensor.dim(), sizes, strides, c_int64(0), dtype, 0, 0, byref(made),
    )  # fmt: skip
    return made


def call(function: Callable[..., int], *arguments: object) -> None:
    assert function(*arguments) == 0


def refused(shim: ctypes.CDLL, function: Callable[..., int], *arguments: object) -> str:
    assert function(*arguments) == 1
    text: bytes = shim.torch_exception_get_what_without_backtrace()
    return text.decode()


def delete(shim: ctypes.CDLL, *handles: c_void_p) -> None:
    for handle in handles:
        call(shim.aoti_torch_delete_tensor_object, handle)


def shape_of(shim: ctypes.CDLL, handle: c_void_p) -> tuple[list[int], list[int]]:
    rank, sizes, strides = c_int64(), POINTER(c_int64)(), POINTER(c_int64)()
    call(shim.aoti_torch_get_dim, handle, byref(rank))
    call(shim.aoti_torch_get_sizes, handle, byref(sizes))
    call(shim.aoti_torch_get_strides, handle, byref(strides))
    return sizes[: rank.value], strides[: rank.value]


def address_of(shim: ctypes.CDLL, handle: c_void_p) -> int:
    data = c_void_p()
    call(shim.aoti_torch_get_data_ptr, handle, byref(data))
    return data.value or 0


def floats_in(shim: ctypes.CDLL, handle: c_void_p, count: int) -> list[float]:
    return list((c_float * count).from_address(address_of(shim, handle)))


# --- the same as torch --------------------------------------------------------------------------------------------

COMPARE = """
import ctypes, sys
torch, shim = (ctypes.CDLL(path) for path in sys.argv[1:3])
for name in sys.argv[3:]:
    for library in (torch, shim):
        getattr(library, name).restype = ctypes.c_int32
    print(name, getattr(torch, name)(), getattr(shim, name)())
"""


def test_numbers_are_those_of_libtorch(shim: ctypes.CDLL) -> None:
    listed = subprocess.run(["nm", "-D", "--defined-only", shim._name], capture_output=True, text=True, check=True)
    kinds = ("dtype_", "device_type_", "layout_", "memory_format_")
    names = [line.split()[-1] for line in listed.stdout.splitlines()]
    names = [
        n for n in names if n.startswith(tuple(f"aoti_torch_{kind}" for kind in kinds)) and "element_size" not in n
    ]
    assert len(names) > 30
    libtorch = host.find_libtorch()
    assert libtorch is not None
    command = [sys.executable, "-c", COMPARE, str(libtorch / "libtorch_cpu.so"), shim._name, *names]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    for line in done.stdout.splitlines():
        name, torchs, own = line.split()
        assert torchs == own, name
    assert host.shim_lacks(libtorch / "libtorch_cpu.so", names) == []


def test_it_says_what_it_speaks(shim: ctypes.CDLL) -> None:
    shim.mctl_shim_abi.restype = c_char_p
    shim.aoti_torch_abi_version.restype = ctypes.c_uint64
    said = shim.mctl_shim_abi().decode()
    assert said.endswith(f"of torch 2.13; tested with {', '.join(host.TORCH_TESTED)}")
    assert shim.aoti_torch_abi_version() >> 48 == 0x020D


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t,
        lambda t: t.t(),
        lambda t: t[:, ::2],
        lambda t: t.reshape(3, 2, 4).permute(2, 0, 1),
        lambda t: t[:1].expand(5, 8),
        lambda t: t[:, 3],
        lambda t: t[:0],
    ],
)
def test_clone(shim: ctypes.CDLL, view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """torch's strides for a copy of a dense tensor, row-major ones else; and the elements."""
    source = view(torch.arange(24.0).reshape(3, 8))
    wanted = source.clone()
    handle, copy = blob(shim, source), c_void_p()
    call(shim.aoti_torch_clone, handle, byref(copy))
    sizes, strides = shape_of(shim, copy)
    assert sizes == list(wanted.shape)
    if wanted.numel():
        assert strides == list(wanted.stride())
        assert address_of(shim, copy) % 64 == 0
        assert floats_in(shim, copy, wanted.numel()) == wanted.as_strided((wanted.numel(),), (1,)).tolist()
    delete(shim, handle, copy)


@pytest.mark.parametrize("to", [torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int8, torch.bool])
@pytest.mark.parametrize("of", [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8])
def test_copy_casts_as_torch_does(shim: ctypes.CDLL, of: torch.dtype, to: torch.dtype) -> None:
    known = {torch.float32: 6, torch.float16: 5, torch.bfloat16: 15, torch.float64: 7, torch.int64: 4}
    known |= {torch.int8: 1, torch.uint8: 0, torch.bool: 11}
    values = [0.0, 1.0, 2.5, 3.14159, 100.0, 65.0, 0.1, 3.0000001, 1e-7, 6e-8, 2.0**-24]
    if of in (torch.float32, torch.bfloat16) and to.is_floating_point:
        values += [-0.0, 65504.0, 65519.0, 65520.0, 1e30, math.inf, -math.inf, math.nan]
    source = torch.tensor(values, dtype=torch.float64).to(of)
    target = torch.zeros(source.shape, dtype=to)
    one, two = blob(shim, source, known[of]), blob(shim, target, known[to])
    call(shim.aoti_torch_copy_, two, one, 0)
    assert torch.equal(torch.nan_to_num(target.double(), 123.0), torch.nan_to_num(source.to(to).double(), 123.0))
    delete(shim, one, two)


def test_copy_broadcasts(shim: ctypes.CDLL) -> None:
    target, source = torch.zeros(2, 3), torch.tensor([[1.0], [2.0]])
    one, two = blob(shim, target), blob(shim, source)
    call(shim.aoti_torch_copy_, one, two, 0)
    assert target.tolist() == [[1.0] * 3, [2.0] * 3]
    assert refused(shim, shim.aoti_torch_copy_, two, one, 0) == "axis 1 has the size 1 where 3 is copied to it"
    delete(shim, one, two)


def test_views_share_memory_and_keep_it(shim: ctypes.CDLL) -> None:
    base, view, other = empty(shim, 4, 6), c_void_p(), c_void_p()
    sizes, strides = numbers(2, 6), numbers(6, 1)
    call(shim.aoti_torch__reinterpret_tensor, base, 2, sizes, strides, c_int64(12), byref(view))
    assert address_of(shim, view) == address_of(shim, base) + 48
    call(shim.aoti_torch_new_tensor_handle, view, byref(other))
    delete(shim, base, view)
    again = empty(shim, 4, 6)  # the memory is in use: it is not given out
    assert address_of(shim, again) + 48 != address_of(shim, other)
    outside = refused(shim, shim.aoti_torch__reinterpret_tensor, other, 2, sizes, strides, c_int64(1), byref(view))
    assert outside == "a view of 100 bytes into a storage of 96"
    delete(shim, other, again)


def test_assign_makes_an_alias(shim: ctypes.CDLL) -> None:
    one, two = empty(shim, 4), empty(shim, 5, 5)
    call(shim.aoti_torch_assign_tensors, one, two)
    assert address_of(shim, one) == address_of(shim, two) and shape_of(shim, two) == ([4], [1])
    call(shim.aoti_torch_assign_tensors, two, two)
    delete(shim, one, two)


def test_numbers_of_one_element(shim: ctypes.CDLL) -> None:
    made, real, whole = c_void_p(), c_double(), c_int64()
    call(shim.aoti_torch_scalar_to_tensor_float32, c_float(2.75), byref(made))
    call(shim.aoti_torch_item_float64, made, byref(real))
    call(shim.aoti_torch_item_int64, made, byref(whole))
    assert (real.value, whole.value) == (2.75, 2)
    delete(shim, made)
    two = empty(shim, 2)
    assert "2 elements" in refused(shim, shim.aoti_torch_item_float64, two, byref(real))
    delete(shim, two)


def test_fill_and_look(shim: ctypes.CDLL) -> None:
    data = torch.full((3, 4), 7.0)
    handle = blob(shim, data[:, 1:3])
    call(shim.aoti_torch_cpu_fill__Scalar, handle, c_double(2.5))
    assert data.tolist() == [[7.0, 2.5, 2.5, 7.0]] * 3
    call(shim.aoti_torch_zero_, handle)
    assert data.sum() == 42
    call(shim.aoti_torch_check_inf_and_nan, b"x", handle)
    data[1, 1] = math.nan
    assert "tensor x has" in refused(shim, shim.aoti_torch_check_inf_and_nan, b"x", handle)
    delete(shim, handle)


# --- faults -------------------------------------------------------------------------------------------------------


def test_handles_that_are_wrong(shim: ctypes.CDLL) -> None:
    handle, count = empty(shim, 2), c_int64()
    inside = c_void_p((handle.value or 0) + 7)
    for wrong in (c_void_p(), c_void_p(0x1234), c_void_p(2**64 - 8), inside):
        assert "is no tensor" in refused(shim, shim.aoti_torch_get_numel, wrong, byref(count))
        assert "is no tensor" in refused(shim, shim.aoti_torch_delete_tensor_object, wrong)
    delete(shim, handle)
    assert "was deleted" in refused(shim, shim.aoti_torch_delete_tensor_object, handle)
    again = empty(shim, 2)  # in the same place, and another
    assert "was deleted" in refused(shim, shim.aoti_torch_get_numel, handle, byref(count))
    delete(shim, again)


@pytest.mark.parametrize(
    ("sizes", "strides", "words"),
    [
        ((2**62,), (1,), "more elements than can be counted"),
        ((2**31, 2**31), (2**31, 1), "more elements than can be counted"),
        ((2**40, 2**40), (0, 0), "more elements than can be counted"),
        ((2, 2), (2**62, 2**62), "more elements than can be counted"),
        ((2**60 - 1,), (1,), "no memory for a tensor of 4611686018427387900 bytes"),
        ((2**45,), (1,), "no memory for a tensor of 140737488355328 bytes"),
        ((-1,), (1,), "axis 0 has the size -1"),
        ((2,), (-1,), "the stride -1"),
        ((1,) * 25, (1,) * 25, "25 axes"),
    ],
)
def test_sizes_that_cannot_be(shim: ctypes.CDLL, sizes: tuple[int, ...], strides: tuple[int, ...], words: str) -> None:
    made = c_void_p()
    arguments = len(sizes), numbers(*sizes), numbers(*strides), FLOAT32, 0, 0, byref(made)
    assert words in refused(shim, shim.aoti_torch_empty_strided, *arguments)
    assert usage(shim)[1] < 2**31


def test_devices_dtypes_and_layouts_that_it_does_not_have(shim: ctypes.CDLL) -> None:
    made, one = c_void_p(), numbers(1)
    assert "device type 1" in refused(shim, shim.aoti_torch_empty_strided, 1, one, one, FLOAT32, 1, 0, byref(made))
    assert "dtype 99" in refused(shim, shim.aoti_torch_empty_strided, 1, one, one, 99, 0, 0, byref(made))
    v2 = shim.aoti_torch_create_tensor_from_blob_v2
    arguments = None, 1, one, one, c_int64(0), FLOAT32, 0, 0, byref(made), 3, None, c_int64(0)
    assert "layout 3" in refused(shim, v2, *arguments)


def test_memory_is_used_again(shim: ctypes.CDLL) -> None:
    """What calls of many sizes leave behind stays within what was in use at once, and a half, and a megabyte."""
    generator = np.random.default_rng(0)
    most = 0
    for _ in range(3000):
        sizes = [int(size) for size in generator.integers(1, 200_000, 4)]
        handles = [empty(shim, size) for size in sizes]
        most = max(most, sum(4 * size for size in sizes) * 5 // 4)  # a block is up to a quarter larger
        delete(shim, *handles)
    assert usage(shim)[1] <= most * 3 // 2 + 2**20
    first = usage(shim)
    for _ in range(1000):
        one, two = empty(shim, 64, 256), empty(shim, 64, 10)
        delete(shim, one, two)
    assert usage(shim) == first


# --- SLEEF --------------------------------------------------------------------------------------------------------

SLEEF = r"""
#include <cmath>
#include <cstdio>
#include <dlfcn.h>
typedef float Floats __attribute__((vector_size(4 * LANES)));
int main(int, char** words) {
  void* library = dlopen(words[1], RTLD_NOW);
  for (int at = 2; words[at] != nullptr; at += 2) {
    auto got = reinterpret_cast<Floats (*)(Floats)>(dlsym(library, words[at]));
    auto wanted = reinterpret_cast<double (*)(double)>(dlsym(nullptr, words[at + 1]));
    if (got == nullptr || wanted == nullptr) return 1;
    double worst = 0;
    for (unsigned bits = 0; bits < 0xff800000u; bits += 0x2357) {
      float x;
      __builtin_memcpy(&x, &bits, 4);
      if (std::isnan(x)) continue;
      Floats lanes = {};
      const int lane = bits % LANES;
      lanes[lane] = x;
      const float y = got(lanes)[lane];
      const double exact = wanted(x);
      const float near = static_cast<float>(exact);
      if (std::isinf(near) || std::isnan(near)) {
        if (std::isnan(near) ? !std::isnan(y) : y != near) worst = INFINITY;
        continue;
      }
      const double ulp = std::nextafter(std::fabs(near), INFINITY) - std::fabs(near);
      worst = std::fmax(worst, std::fabs(y - exact) / ulp);
    }
    Floats nan = {};
    nan[1] = NAN;
    if (!std::isnan(got(nan)[1])) worst = INFINITY;
    std::printf("%s %.3f\n", words[at], worst);
  }
}
"""


@pytest.mark.parametrize(("lanes", "flags", "feature"), [(8, "-mavx2", "avx2"), (16, "-mavx512f", "avx512f")])
def test_sleef_by_libm(shim: ctypes.CDLL, tmp_path, lanes: int, flags: str, feature: str) -> None:  # type: ignore[no-untyped-def]
    """Over floats of every exponent: at most as far from libm in float64 as SLEEF promises by the function's name."""
    if feature not in host.cpu_features():
        pytest.skip(f"this CPU has no {feature}")
    (tmp_path / "sleef.cc").write_text(SLEEF)
    build = ["g++", "-O2", flags, f"-DLANES={lanes}", "-Wno-psabi", "sleef.cc", "-o", "sleef", "-ldl", "-lm"]
    subprocess.run([*build, "-rdynamic", "-Wl,--no-as-needed"], cwd=tmp_path, check=True)
    functions = ("exp", "tanh", "log", "erf", "expm1", "log1p")
    names = [word for name in functions for word in (f"Sleef_{name}f{lanes}_u10", name)]
    done = subprocess.run([tmp_path / "sleef", shim._name, *names], capture_output=True, text=True, check=True)
    errors = {line.split()[0]: float(line.split()[1]) for line in done.stdout.splitlines()}
    assert len(errors) == len(functions)
    for name, error in errors.items():
        assert error <= 1.0 or ("tanh" in name and error <= 1.5), errors
