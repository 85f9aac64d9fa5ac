"""The bytes of a tensor."""

import torch


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The elements, row-major; shares the tensor's memory where they lie like that already."""
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.numel() == 1:  # with any stride it counts as contiguous, but not with any can it be viewed
        flat = flat.clone(memory_format=torch.contiguous_format)
    return memoryview(flat.view(torch.uint8).numpy())
