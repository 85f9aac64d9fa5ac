"""Arrays of a handler as tensors of a frame, and back; what has no numpy dtype (bfloat16) is float32 for a handler."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from ..bundle_format.contract import DTYPES, Contract, Input, TensorInfo, check
from ..bundle_format.errors import ContractError
from .api import Refused

Array = np.ndarray[Any, np.dtype[Any]]

_NAME_OF_OIP = {info.oip: name for name, info in DTYPES.items()}
_NUMPY = {name: np.dtype(name) for name in DTYPES if name != "bfloat16"}
_OIP_OF_NUMPY = {dtype: DTYPES[name].oip for name, dtype in _NUMPY.items()}
_KINDS = {"b": "biuf", "i": "iuf", "f": "f"}  # kinds of numbers in lists -> kinds of dtypes that can hold them


def pack(contract: Contract | None, inputs: Mapping[str, object]) -> tuple[list[dict[str, Any]], list[memoryview]]:
    """Descriptions and bytes of named inputs. Refused (400), in the contract's words, for what cannot be sent.

    Sizes and values are checked by the server. Without a contract (another model's), lists of whole numbers are INT64,
    of others FP32.
    """
    described, buffers = [], []
    for name, value in inputs.items():
        declared = _declared(contract, inputs, name) if contract is not None else None
        array, dtype = _array_from(name, declared, value)
        described.append({"name": name, "dtype": dtype, "shape": array.shape})
        if array.size:
            buffers.append(array.reshape(-1).data.cast("B"))
    if contract is not None and len(described) < len(contract.inputs):
        _declared(contract, inputs, "")
    return described, buffers


def unpack(described: Sequence[Mapping[str, Any]], body: bytes | bytearray) -> dict[str, Array]:
    """Named arrays that view `body`. ValueError where descriptions and bytes do not fit."""
    arrays: dict[str, Array] = {}
    at = 0
    for tensor in described:
        name = _NAME_OF_OIP[tensor["dtype"]]
        shape = tuple(tensor["shape"])
        count = prod(shape)
        size = count * DTYPES[name].size
        if at + size > len(body):
            raise ValueError(f"the tensors have more bytes than the {len(body)} of the body")
        kind = np.dtype(np.uint16) if name == "bfloat16" else _NUMPY[name]
        array = np.frombuffer(body, kind, count, at) if at % kind.itemsize == 0 else _unaligned(body, kind, count, at)
        arrays[tensor["name"]] = (_widened(array) if name == "bfloat16" else array).reshape(shape)
        at += size
    if at != len(body):
        raise ValueError(f"the tensors have {at} bytes, the body {len(body)}")
    return arrays


def _declared(contract: Contract, inputs: Mapping[str, object], name: str) -> Input:
    """The input of this name; where there is none, or one is missing, the contract's check says so."""
    found = next((declared for declared in contract.inputs if declared.name == name), None)
    if found is not None:
        return found
    try:
        check(contract, {each: TensorInfo("", ()) for each in inputs if not _is_declared(contract, each)})
    except ContractError as error:
        if any(not _is_declared(contract, each) for each in inputs):
            raise Refused(400, error.message) from None
    missing = next(declared for declared in contract.inputs if declared.name not in inputs)
    shape = ",".join(map(str, missing.shape))
    raise Refused(400, f"missing input '{missing.name}': {missing.dtype}[{shape}]")


def _is_declared(contract: Contract, name: str) -> bool:
    return any(declared.name == name for declared in contract.inputs)


def _array_from(name: str, declared: Input | None, value: object) -> tuple[Array, str]:
    """A contiguous array in the machine's byte order, and its dtype in the frame."""
    if hasattr(value, "detach"):  # a torch tensor, without importing torch
        value = _from_torch(value)
    if isinstance(value, np.ndarray | np.generic):
        return _given(name, declared, np.asarray(value))
    return _listed(name, declared, value)


def _from_torch(tensor: Any) -> Array:
    tensor = tensor.detach().cpu()
    array: Array = (tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor).numpy()
    return array


def _given(name: str, declared: Input | None, array: Array) -> tuple[Array, str]:
    native = np.dtype(array.dtype.newbyteorder("="))
    if declared is not None and declared.dtype == "bfloat16" and native == np.float32:
        return _narrowed(array), "BF16"
    if native not in _OIP_OF_NUMPY or (declared is not None and native.name != declared.dtype):
        allowed = declared.dtype if declared else "a number"
        raise Refused(400, f"input '{name}': dtype is {array.dtype}, allowed {allowed}")
    return np.require(array, native, ["C"]), _OIP_OF_NUMPY[native]


def _listed(name: str, declared: Input | None, value: object) -> tuple[Array, str]:
    """Numbers in lists, as the dtype that the contract has."""
    try:
        array = np.asarray(value)
    except ValueError:
        raise Refused(400, f"input '{name}': its lists have different lengths") from None
    kind = array.dtype.kind.replace("u", "i") if array.size else "b"
    if kind not in _KINDS:
        raise Refused(400, f"input '{name}': is {type(value).__name__}, allowed an array or numbers in lists")
    dtype = declared.dtype if declared else {"b": "bool", "i": "int64", "f": "float32"}[kind]
    if dtype == "bfloat16":
        return _narrowed(array.astype(np.float32)), "BF16"
    wanted = _NUMPY[dtype]
    if wanted.kind not in _KINDS[kind]:
        what = "fractions" if kind == "f" else "whole numbers"
        raise Refused(400, f"input '{name}': holds {what}, allowed {dtype}")
    if kind == "i" and wanted.kind in "iu" and array.size:
        limits = np.iinfo(wanted)
        if int(array.min()) < limits.min or int(array.max()) > limits.max:
            raise Refused(400, f"input '{name}': holds a number outside of {dtype}")
    return np.ascontiguousarray(array.astype(wanted, copy=False)).reshape(array.shape), DTYPES[dtype].oip


def _unaligned(body: bytes | bytearray, kind: "np.dtype[Any]", count: int, at: int) -> Array:
    return np.frombuffer(bytes(memoryview(body)[at : at + count * kind.itemsize]), kind, count)


def _widened(bits: Array) -> Array:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _narrowed(array: Array) -> Array:
    """The bits of the nearest bfloat16, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32).reshape(array.shape)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1)).astype(np.uint32)) >> 16).astype(np.uint16)
    return np.where(np.isnan(array), np.uint16(0x7FC0), rounded)
