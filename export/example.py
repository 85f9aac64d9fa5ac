"""Inputs of any size inside the declared ranges, made from the given example and a seed."""

import zlib
from collections.abc import Mapping, Sequence
from math import prod

import torch

from ..bundle_format.contract import Dim, evaluate
from .dims import Shape, ValueRange
from .naming import Tensors

Ranges = Mapping[str, ValueRange | None]


def tracing_sizes(dims: Sequence[Dim], given: Mapping[str, int], least_factor: int = 2) -> dict[str, int]:
    """A size for each dim that torch does not specialise: at least twice the multiple (never 0 or 1), no two alike.

    The given example's sizes are kept where they allow it; others are `least_factor` times the multiple or more, where
    the range has that.
    """
    chosen: dict[str, int] = {}
    for dim in sorted(dims, key=lambda dim: dim.max - dim.min):  # the narrowest range chooses first
        least = max(dim.min, 2 * dim.multiple)
        start = min(max(least, least_factor * dim.multiple), dim.max)
        upward = range(start, min(dim.max, start + 64 * dim.multiple) + 1, dim.multiple)
        options = [given.get(dim.name, 0), *upward, *range(start, least - 1, -dim.multiple)]
        allowed = [size for size in options if dim.allows(size) and size >= least]
        chosen[dim.name] = next((size for size in allowed if size not in chosen.values()), allowed[0])
    return {dim.name: chosen[dim.name] for dim in dims}


def make_inputs(
    examples: Tensors, shapes: Mapping[str, Shape], sizes: Mapping[str, int], ranges: Ranges, seed: int
) -> Tensors:
    """One tensor for each input, with `sizes` for the dims in its shape; the same for the same seed and sizes.

    Values are taken from the example, so that they stay plausible: integers and booleans are repeated or cut, floats
    are scaled a little besides. Where the example is one constant, values are drawn from the input's range. A
    range over dims may be narrower than the example's: integers beyond it are counted round in it.
    """
    made: Tensors = {}
    for name, example in examples.items():
        key = f"{seed} {name} {sorted(sizes.items())}"
        generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
        shape = tuple(sizes[axis] if isinstance(axis, str) else axis for axis in shapes[name])
        bounds = ranges.get(name)
        limits = bounds and (evaluate(bounds[0], sizes), evaluate(bounds[1], sizes))
        made[name] = _like(example, shape, limits, generator)
    return made


def _like(
    example: torch.Tensor, shape: tuple[int, ...], limits: tuple[int, int] | None, generator: torch.Generator
) -> torch.Tensor:
    constant = example.numel() == 0 or bool((example == example.flatten()[0]).all())
    if example.dtype.is_floating_point:
        return _float_like(resized(example, shape), constant, generator).to(example.dtype)
    if constant and limits is not None:
        low, high = limits
        return torch.randint(low, high + 1, shape, generator=generator, dtype=torch.int64).to(example.dtype)
    repeated = resized(example, shape)
    if limits is None or not repeated.numel() or example.dtype is torch.bool:
        return repeated
    return _within(repeated, *limits)


def _within(values: torch.Tensor, low: int, high: int) -> torch.Tensor:
    wide = values.to(torch.int64)
    outside = (wide < low) | (wide > high)
    return torch.where(outside, low + (wide - low) % (high - low + 1), wide).to(values.dtype)


def _float_like(tiled: torch.Tensor, constant: bool, generator: torch.Generator) -> torch.Tensor:
    draw = torch.rand(tiled.shape, generator=generator, dtype=torch.float64)
    values = tiled.to(torch.float64)
    if bool(((values == 0) | (values == 1)).all()):
        return draw if constant else values  # a stand-in like `torch.zeros(…)` says nothing of values; a mask does
    return values * (1 - draw / 8)  # keeps signs, and what was bounded stays bounded


def resized(example: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Repeated or cut along each axis."""
    if example.numel() == 0:
        return torch.zeros(shape, dtype=example.dtype)
    for axis, size in enumerate(shape):
        if example.shape[axis] != size:
            example = example.index_select(axis, torch.arange(size) % example.shape[axis])
    return example.clone(memory_format=torch.contiguous_format)


def elements(shapes: Mapping[str, Shape], sizes: Mapping[str, int]) -> int:
    """The number of elements of all inputs together."""
    return sum(prod(sizes[axis] if isinstance(axis, str) else axis for axis in shape) for shape in shapes.values())
