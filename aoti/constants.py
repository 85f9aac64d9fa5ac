"""A program's constants (parameters, buffers, literals) as tensors that a file can hold."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from ..bundle_format.contract import DTYPES
from ..bundle_format.errors import CompileError
from ..bundle_format.manifest import ConstantRef
from ..bundle_format.tensors import Tensor as StoredTensor
from ..bundle_format.tensors import deduplicate

if TYPE_CHECKING:
    import torch


def is_dense(shape: Iterable[int], stride: Iterable[int]) -> bool:
    """Each element has a place of its own and there is none between them, in whatever order of the axes."""
    expected = 1
    axes = sorted((step, size) for size, step in zip(shape, stride, strict=True) if size != 1)
    if any(size == 0 for _, size in axes):
        return True
    for step, size in axes:
        if step != expected:
            return False
        expected *= size
    return True


def make_dense(tensors: dict[str, "torch.Tensor"]) -> None:
    """Replaces views with holes or repeated elements by row-major copies: a file cannot hold them as they are."""
    import torch

    for name, tensor in tensors.items():
        plain = isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided
        if plain and not is_dense(tensor.shape, tensor.stride()):
            copy = tensor.detach().contiguous()
            tensors[name] = torch.nn.Parameter(copy, tensor.requires_grad) if _is_parameter(tensor) else copy


def _is_parameter(tensor: "torch.Tensor") -> bool:
    import torch

    return isinstance(tensor, torch.nn.Parameter)


def store(
    constants: Mapping[str, "torch.Tensor"], state: Iterable[str]
) -> tuple[dict[str, StoredTensor], dict[str, ConstantRef]]:
    """Tensors for one weights file, equal ones once, and where each constant is found in it.

    `state` names the constants that the model writes to. CompileError for a tensor that no file can hold.
    """
    tensors = {name: _stored(name, tensor) for name, tensor in constants.items()}
    unique, stands_for = deduplicate(tensors)
    written = set(state)
    references = {}
    for name, tensor in constants.items():
        row_major = tensor.is_contiguous()
        references[name] = ConstantRef(
            tensor=stands_for[name], stride=None if row_major else tuple(tensor.stride()), state=name in written
        )
    return unique, references


def check_storable(constants: Mapping[str, "torch.Tensor"]) -> None:
    """CompileError names a tensor that no file can hold."""
    import torch

    for name, tensor in constants.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in DTYPES or tensor.layout != torch.strided:
            kind = dtype if tensor.layout == torch.strided else f"{tensor.layout} {dtype}"
            hint = (
                "keep it as pairs of real numbers, and see them through `torch.view_as_complex`"
                if tensor.is_complex()
                else None
            )
            raise CompileError(f"constant `{name}` is a {kind} tensor, which a bundle cannot hold", hint)


def _stored(name: str, tensor: "torch.Tensor") -> StoredTensor:
    """The bytes in the order in which they lie in memory; the strides in ConstantRef say which element is where."""
    import torch

    check_storable({name: tensor})
    if not is_dense(tensor.shape, tensor.stride()):
        raise CompileError(f"constant `{name}` is a view with strides {tuple(tensor.stride())}, which has holes")
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    dtype = str(tensor.dtype).removeprefix("torch.")
    return dtype, tuple(tensor.shape), flat.view(torch.uint8).numpy().data if tensor.numel() else b""
