"""What a caller gives: torch tensors and numpy arrays, made into plain dense tensors in main memory."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..bundle_format import contract as contracts
from ..bundle_format.contract import Input, Scalar, TensorInfo
from ..bundle_format.errors import ContractError

Array = np.ndarray[Any, np.dtype[Any]]
Value = Tensor | Array

DTYPE_NAMES: dict[torch.dtype, str] = {getattr(torch, name): name for name in contracts.DTYPES}

_NUMPY_DTYPES = {np.dtype(name) for name in contracts.DTYPES if name != "bfloat16"}  # in the machine's byte order


def tensor_from(declared: Input, value: object) -> tuple[Tensor, bool]:
    """A contiguous tensor of the same elements, and whether their order had to be changed. ContractError for the rest.

    Shares memory with `value` where it is contiguous and, for an array, writable and aligned.
    """
    name = declared.name
    if isinstance(value, Tensor):
        return _dense(name, value)
    if isinstance(value, np.ndarray | np.generic):
        return _from_numpy(declared, np.asarray(value))
    kind = type(value).__name__
    hint = f"write `torch.tensor(…)` or `numpy.asarray(…)` around it, with the dtype {declared.dtype}"
    raise ContractError(f"input '{name}': is a Python {kind}, allowed a torch tensor or a numpy array", hint)


def _dense(name: str, tensor: Tensor) -> tuple[Tensor, bool]:
    if not tensor.is_cpu:
        raise ContractError(f"input '{name}': device is {tensor.device}, allowed cpu", "call `.cpu()` on it first")
    if tensor.layout is not torch.strided:
        raise ContractError(f"input '{name}': layout is {tensor.layout}, allowed torch.strided")
    if type(tensor) is not Tensor:
        tensor = _plain(name, tensor)
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.is_neg():  # lazily negated: its memory holds the opposite
        return tensor.resolve_neg().contiguous(), True
    if tensor.is_contiguous():
        return tensor, False
    return tensor.contiguous(), True


def _plain(name: str, tensor: Tensor) -> Tensor:
    """Drops a subclass that only adds behaviour; refuses one whose elements are elsewhere."""
    try:
        has_memory = not tensor.numel() or tensor.untyped_storage().data_ptr() != 0
    except RuntimeError:  # torch's answer for a tensor without storage
        has_memory = False
    if not has_memory:
        raise ContractError(f"input '{name}': is a {type(tensor).__name__} without memory, allowed a torch tensor")
    return tensor.as_subclass(Tensor)


def _from_numpy(declared: Input, array: Array) -> tuple[Tensor, bool]:
    native = array.dtype
    if native not in _NUMPY_DTYPES:
        native = native.newbyteorder("=")
        if native not in _NUMPY_DTYPES:
            raise ContractError(f"input '{declared.name}': dtype is {array.dtype}, allowed {declared.dtype}")
    same = native is array.dtype and array.flags.c_contiguous
    if same and array.flags.carray:
        return torch.from_numpy(array), False
    # torch has no read-only tensors, and a model may write to its inputs; nor has it unaligned ones
    return torch.from_numpy(np.array(array, dtype=native, order="C", copy=True)), not same


def info(declared: Input, tensor: Tensor) -> TensorInfo:
    """What the contract's check needs to know; extreme values only where a range is declared."""
    dtype = DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))
    if declared.range is None or dtype != declared.dtype or not tensor.numel():
        return TensorInfo(dtype, tuple(tensor.shape))
    return TensorInfo(dtype, tuple(tensor.shape), *extremes(tensor))


def extremes(tensor: Tensor) -> tuple[int, int]:
    """Smallest and largest element of a tensor of integers that has at least one."""
    array = tensor.numpy()  # torch has no minimum of unsigned integers
    return int(array.min()), int(array.max())


def scalars(constants: Mapping[str, object]) -> dict[str, Scalar]:
    """Arguments that are no tensors, as the contract's check compares them. ContractError for what JSON cannot hold."""
    checked: dict[str, Scalar] = {}
    for name, value in constants.items():
        if not isinstance(value, bool | int | float | str | None):
            raise ContractError(f"constant '{name}': is a {type(value).__name__}, allowed what JSON can hold")
        checked[name] = value
    return checked


def pad_value(declared: Input, dims: Mapping[str, int]) -> int | float:
    """Of rows and positions that are no one's: the declared pad value, else 0, or the allowed value next to it."""
    if declared.pad is not None:
        return declared.pad
    low, high = contracts.limits_of(declared, dims) or (0, 0)
    return min(max(0, low), high)
