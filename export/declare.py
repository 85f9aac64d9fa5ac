"""What was declared, put together: the example arguments, which axis is which dim, and sizes to trace with."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ..bundle_format.contract import Dim
from ..bundle_format.errors import ExportError, UsageError
from .dims import DimSpec, InputSpec, Shape, ValueRange, bind
from .example import make_inputs, resized, tracing_sizes
from .naming import Named, Tensors, dtype_of
from .source import Source


@dataclass(frozen=True, slots=True)
class Declared:
    """Named example arguments; each input's shape with dims; the example's sizes and those that torch traces.

    `supplied`: mctl made some of the example, as `--input` describes it. `ranges` are those of `--range`.
    """

    named: Named
    shapes: dict[str, Shape]
    dims: tuple[Dim, ...]
    given: dict[str, int]
    sizes: dict[str, int]
    supplied: bool
    ranges: Mapping[str, ValueRange] = field(default_factory=dict)

    def inputs(self, sizes: Mapping[str, int], seed: int) -> Tensors:
        """Inputs of these sizes, with values as the user has declared them."""
        return make_inputs(self.named.tensors, self.shapes, sizes, self.ranges, seed)


def declare(
    source: Source, specs: Sequence[DimSpec], inputs: Sequence[InputSpec], ranges: Mapping[str, ValueRange]
) -> Declared:
    """UsageError and ExportError say what in the options or the example does not fit."""
    dims = tuple(spec.dim for spec in specs)
    names = [described.name for described in inputs]
    hint = "define `example_inputs` in the model file, or describe each input: `--input x=float32[batch,128]`"
    if not (source.args or source.kwargs or inputs):
        raise ExportError(f"`{source.record.file}` has no example inputs", hint)
    example = source.named({described.name: torch.empty(0) for described in inputs})
    if not example.tensors:
        raise ExportError("the model takes no tensor", hint)
    shapes: dict[str, Shape] = {name: tuple(value.shape) for name, value in example.tensors.items()}
    shapes |= {described.name: described.shape for described in inputs}
    shapes = bind(specs, shapes, inputs)
    kept = {name: value for name, value in example.tensors.items() if name not in names}
    given = _given_sizes(kept, shapes)
    sizes = tracing_sizes(dims, given)
    supplied = {described.name: _supplied(described, source, shapes, sizes) for described in inputs}
    return Declared(source.named(supplied), shapes, dims, {**sizes, **given}, sizes, bool(supplied), ranges)


def _given_sizes(examples: Tensors, shapes: Mapping[str, Shape]) -> dict[str, int]:
    """The example's size for each dim; UsageError where two inputs disagree."""
    given: dict[str, tuple[int, str]] = {}
    for name, example in examples.items():
        for axis, dim in enumerate(shapes[name]):
            if isinstance(dim, str):
                size, place = given.setdefault(dim, (example.shape[axis], f"axis {axis} of `{name}`"))
                if size != example.shape[axis]:
                    raise UsageError(
                        f"`{dim}` is {size} in the example ({place}), but axis {axis} of `{name}` is "
                        f"{example.shape[axis]}",
                        f"say which axes are `{dim}`: `--dim {dim}=MIN:MAX@INPUT:AXIS,…`",
                    )
    return {dim: size for dim, (size, _) in given.items()}


def _supplied(
    described: InputSpec, source: Source, shapes: Mapping[str, Shape], sizes: Mapping[str, int]
) -> torch.Tensor:
    """An example for `--input`: the file's own values where dtype and rank are the same, else random floats or ones."""
    shape = tuple(sizes[axis] if isinstance(axis, str) else axis for axis in shapes[described.name])
    dtype = dtype_of(described.dtype)
    own = Named.leaves(source.model.forward, source.args, source.kwargs).get(described.name)
    if isinstance(own, torch.Tensor) and own.dtype == dtype and own.dim() == len(shape):
        return resized(own, shape)
    return torch.randn(shape).to(dtype) if dtype.is_floating_point else torch.ones(shape, dtype=dtype)


def describe_change(declared: Declared) -> str | None:
    """A note where the model is not traced with the example's own sizes."""
    changed = {name: size for name, size in declared.sizes.items() if declared.given[name] != size}
    if not changed:
        return None
    was = ", ".join(f"{name}={declared.given[name]}" for name in changed)
    now = ", ".join(f"{name}={size}" for name, size in changed.items())
    return f"traced with an example of {now}, made from the given one ({was}): torch would take that size for fixed"
