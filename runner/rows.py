"""Joins requests into one padded batch, and cuts answers out of its outputs."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..bundle_format.contract import Input, Output, rows_per_item, shape_of
from .values import pad_value


def join(declared: Input, parts: Sequence[Tensor], batch_dim: str | None, dims: Mapping[str, int]) -> Tensor:
    """The rows of `parts` after one another in a tensor of the sizes `dims`; what is left over holds the pad value.

    An input without the batch dim is the same in all parts: the first stands for them.
    """
    batched = batch_dim is not None and batch_dim in declared.shape[:1]
    return fill(declared, parts if batched else parts[:1], shape_of(declared, dims), dims)


def fill(declared: Input, parts: Sequence[Tensor], shape: tuple[int, ...], dims: Mapping[str, int]) -> Tensor:
    """`parts` after one another along axis 0, in a tensor of this shape; what is left over holds the pad value, one
    that is allowed at the sizes `dims`.
    """
    if parts[0].shape == shape:
        return parts[0]
    joined = torch.full(shape, pad_value(declared, dims), dtype=parts[0].dtype)
    at = 0
    for part in parts:  # none is a scalar: that would have the shape
        joined[(slice(at, at + part.shape[0]), *map(slice, part.shape[1:]))] = part
        at += part.shape[0]
    return joined


def cut(output: Output, tensor: Tensor, batch_dim: str | None, dims: Mapping[str, int], row: int = 0) -> Tensor:
    """A view of the part of a padded batch's output that belongs to inputs of the sizes `dims` from `row` on."""
    for axis, size in enumerate(shape_of(output, dims)):
        per_row = rows_per_item(output, batch_dim) if axis == 0 and batch_dim is not None else None
        tensor = tensor.narrow(axis, row * (per_row or 0), size)
    return tensor
