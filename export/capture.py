"""torch.export of a model whose inputs and outputs are flat: named tensors in, a dict of named tensors out."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import Parameter, Signature
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from ..bundle_format.contract import Dim
from .dims import Shape
from .naming import Named, Tensors, name_outputs


def capture(
    model: nn.Module, named: Named, inputs: Tensors, shapes: Mapping[str, Shape], dims: Sequence[Dim]
) -> ExportedProgram:
    """The exported program of `model`: tensors in the order of `named.tensors` in, `{output name: tensor}` out.

    The user's containers stay outside of the program, so that it can be read where their classes are not.
    """
    identifiers = [_identifier(name) for name in inputs]
    symbols = {dim.name: _symbol(dim) for dim in dims}
    dynamic = {
        identifier: {axis: symbols[dim] for axis, dim in enumerate(shapes[name]) if isinstance(dim, str)}
        for identifier, name in zip(identifiers, inputs, strict=True)
    }
    with _flat(model, named, identifiers), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.export.export(model, tuple(inputs.values()), dynamic_shapes=dynamic, strict=False)


def _symbol(dim: Dim) -> Any:
    """A `Dim` of torch, or an expression over one where the size is a multiple."""
    if dim.multiple == 1:
        return torch.export.Dim(dim.name, min=dim.min, max=dim.max)
    unit = torch.export.Dim(f"_{dim.name}", min=dim.min // dim.multiple, max=dim.max // dim.multiple)
    return dim.multiple * unit


@contextmanager
def _flat(model: nn.Module, named: Named, identifiers: list[str]) -> Iterator[None]:
    """While the body runs, `model.forward` takes one tensor per input and returns named tensors."""
    original: Callable[..., Any] = model.forward

    def forward(*tensors: torch.Tensor) -> Tensors:
        args, kwargs = named.call(dict(zip(named.tensors, tensors, strict=True)))
        return name_outputs(original(*args, **kwargs))[0]

    parameters = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in identifiers]
    forward.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    shadowed = model.__dict__.get("forward")
    model.forward = forward
    try:
        yield
    finally:
        del model.forward
        if shadowed is not None:
            model.forward = shadowed


def _identifier(name: str) -> str:
    """A parameter name for an input: `batch.ids` is `batch__ids`."""
    safe = name.replace(".", "__").replace("-", "_")
    return safe if safe.isidentifier() else f"_{safe}"
