"""Tensors as bytes and back, and as members of safetensors."""

import torch

from ..bundle_format import tensors
from .naming import Tensors, dtype_name, dtype_of


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The elements, row-major; shares the tensor's memory where they lie like that already."""
    flat = tensor.detach().resolve_neg().contiguous().reshape(-1)
    if flat.numel() == 1:  # with any stride it counts as contiguous, but not with any can it be viewed
        flat = flat.clone(memory_format=torch.contiguous_format)
    return memoryview(flat.view(torch.uint8).numpy())


def stored(named: Tensors) -> dict[str, tensors.Tensor]:
    """What bundle_format writes. Tensors that share memory, as views of one another do, become separate ones."""
    return {name: (dtype_name(tensor.dtype), tuple(tensor.shape), bytes_of(tensor)) for name, tensor in named.items()}


def loaded(view: tensors.Buffer) -> Tensors:
    """The tensors of a safetensors member, in memory of their own. BundleError where it is damaged."""
    view = memoryview(view)
    named: Tensors = {}
    for name, entry in tensors.read_header(view).items():
        flat = torch.frombuffer(bytearray(view[entry.begin : entry.end]) or bytearray(8), dtype=dtype_of(entry.dtype))
        count = (entry.end - entry.begin) // flat.element_size()
        named[name] = flat[:count].reshape(entry.shape)
    return named
