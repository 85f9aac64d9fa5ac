"""mctl's kernels called from tests, over a host that is not torch."""

import ctypes
import subprocess
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mctl.aoti import packing
from mctl.aoti.compiler import kernels_for
from mctl.aoti.target import machine_for
from mctl.aoti.workspace import find_compiler
from mctl.bundle_format.host import LEVELS, cpu_features

HOST = Path(__file__).parent / "kernel_host.cc"
MARCHES = [m for m in ("native", "x86-64-v2", "x86-64-v3") if cpu_features() >= {*LEVELS.get(m, ())}]
DTYPES = {torch.float32: 6, torch.int64: 4, torch.bool: 11, torch.bfloat16: 15}
Handle = ctypes.c_void_p


class Refused(Exception):
    """The kernel said that it failed."""


class Kernels:
    """The kernels in a library of their own."""

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))
        self.library.host_tensor.restype = Handle
        self.library.host_fence_holds.restype = ctypes.c_bool

    def linear(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        *,
        act: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        packed = packing.pack_linear(weight, dtype)
        return self._call(
            "linear", [x, packed], [bias, residual], [ctypes.c_int64(weight.shape[0]), ctypes.c_int64(act)]
        )

    def conv2d(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        *,
        stride: tuple[int, int] = (1, 1),
        padding: tuple[int, int] = (0, 0),
        dilation: tuple[int, int] = (1, 1),
        groups: int = 1,
        act: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        numbers: list[Any] = [ctypes.c_int64(weight.shape[0])]
        for pair in (weight.shape[2:], stride, padding, dilation):
            numbers += [(ctypes.c_int64 * 2)(*pair), ctypes.c_int64(2)]
        numbers += [ctypes.c_int64(groups), ctypes.c_int64(act)]
        return self._call("conv2d", [x, packing.pack_conv2d(weight, groups, dtype)], [bias, residual], numbers)

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, scale: float = 0.5, causal: bool = False
    ) -> Tensor:
        return self._call("attention", [q, k, v], [mask], [ctypes.c_double(scale), ctypes.c_int32(causal)])

    def paged_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv: Tensor,
        step: list[Tensor],  # slots, tables, lengths, ends
        sinks: Tensor | None = None,
        *,
        layer: int = 0,
        scale: float = 0.5,
        window: int = 0,
        softcap: float = 0.0,
    ) -> Tensor:
        numbers = [ctypes.c_int64(layer), ctypes.c_double(scale), ctypes.c_int64(window), ctypes.c_double(softcap)]
        return self._call("paged_attention", [q, k, v, kv, *step], [sinks], numbers)

    def _call(self, name: str, tensors: list[Tensor], optional: list[Tensor | None], numbers: list[Any]) -> Tensor:
        handles = [self._handle(tensor) for tensor in tensors]
        pointers = [None if tensor is None else ctypes.byref(self._handle(tensor)) for tensor in optional]
        out = Handle()
        function = getattr(self.library, f"aoti_torch_cpu_mctl_{name}")
        if function(*handles, *pointers, *numbers, ctypes.byref(out)):
            raise Refused
        assert self.library.host_fence_holds(out), "it wrote beyond its output"
        return self._tensor(out)

    def _handle(self, tensor: Tensor) -> Handle:
        rank = tensor.dim()
        sizes, strides = (ctypes.c_int64 * rank)(*tensor.shape), (ctypes.c_int64 * rank)(*tensor.stride())
        dtype = ctypes.c_int32(DTYPES.get(tensor.dtype, 7))
        return Handle(self.library.host_tensor(Handle(tensor.data_ptr()), ctypes.c_int64(rank), sizes, strides, dtype))

    def _tensor(self, handle: Handle) -> Tensor:
        sizes, strides, data, rank = (
            ctypes.POINTER(ctypes.c_int64)(),
            ctypes.POINTER(ctypes.c_int64)(),
            Handle(),
            ctypes.c_int64(),
        )
        self.library.aoti_torch_get_dim(handle, ctypes.byref(rank))
        self.library.aoti_torch_get_sizes(handle, ctypes.byref(sizes))
        self.library.aoti_torch_get_strides(handle, ctypes.byref(strides))
        self.library.aoti_torch_get_data_ptr(handle, ctypes.byref(data))
        shape, steps = sizes[: rank.value], strides[: rank.value]
        count = 1
        for size in shape:
            count *= size
        flat = torch.frombuffer((ctypes.c_float * max(count, 1)).from_address(data.value), dtype=torch.float32)
        made = flat[:count].as_strided(shape, steps).clone()
        self.library.host_delete(handle)
        return made


def kernels_of(march: str, folder: Path) -> Kernels:
    """The host with mctl's kernels for a machine, as `mctl compile` makes and keeps them."""
    compiler = find_compiler()
    archive = kernels_for(machine_for(march, compiler), compiler, folder)
    library = folder / "kernels.so"
    # Its own C interface, also where another test made libtorch's global in this process.
    own = "-Wl,-Bsymbolic"
    whole = ["-Wl,--whole-archive", str(archive), "-Wl,--no-whole-archive"]
    command = [*compiler, "-O1", "-shared", "-fPIC", "-fopenmp", own, str(HOST), *whole, "-o", str(library)]
    subprocess.run(command, check=True)
    return Kernels(library)
