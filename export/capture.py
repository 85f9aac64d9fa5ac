"""torch.export of a model whose inputs and outputs are flat: tensors in, a dict of named tensors out."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import Parameter, Signature
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from ..bundle_format.contract import Dim
from .dims import Shape
from .failures import explain
from .naming import Named, Tensors, name_outputs
from .usercode import current_line, quiet


@dataclass(slots=True)
class Trace:
    """What is known of torch's view of the dims; filled while the model is traced."""

    dims: Sequence[Dim]
    units: dict[str, str]  # torch's name of each dim: of the size divided by its multiple
    symbols: dict[Any, Dim] = field(default_factory=dict)  # torch's symbol for that
    env: Any = None  # the ShapeEnv, with the guards that the model's code made


def capture(
    model: nn.Module,
    named: Named,
    inputs: Tensors,
    shapes: Mapping[str, Shape],
    dims: Sequence[Dim],
    copied: frozenset[str] = frozenset(),
) -> tuple[ExportedProgram, Trace]:
    """The exported program of `model`: tensors in the order of `named.tensors` in, `{output name: tensor}` out.

    The user's containers stay outside of the program, so that it can be read where their classes are not. The model
    gets a copy of the inputs in `copied`. ExportError tells why the model cannot be exported as it is declared.
    """
    trace = Trace(dims, {dim.name: f"d{at}" for at, dim in enumerate(dims)})
    symbols = {dim.name: _symbol(dim, trace.units[dim.name]) for dim in dims}
    identifiers = [_identifier(name) for name in inputs]
    dynamic = {
        identifier: {axis: symbols[dim] for axis, dim in enumerate(shapes[name]) if isinstance(dim, str)}
        for identifier, name in zip(identifiers, inputs, strict=True)
    }

    def flat(*tensors: torch.Tensor) -> Tensors:
        _watch(trace, shapes, dict(zip(inputs, tensors, strict=True)))
        given = {
            name: tensor.clone() if name in copied else tensor for name, tensor in zip(inputs, tensors, strict=True)
        }
        args, kwargs = named.call(given)
        return name_outputs(forward(*args, **kwargs))[0]

    forward = model.forward
    flat.__signature__ = Signature([Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in identifiers])  # type: ignore[attr-defined]
    try:
        with _in_place_of_forward(model, flat), torch.no_grad(), quiet():
            return torch.export.export(model, tuple(inputs.values()), dynamic_shapes=dynamic, strict=False), trace
    except Exception as error:
        raise explain(error, trace, model) from error


def _symbol(dim: Dim, unit: str) -> Any:
    """A `Dim` of torch, or an expression over one where the size is a multiple."""
    symbol = torch.export.Dim(unit, min=dim.min // dim.multiple, max=dim.max // dim.multiple)
    return symbol if dim.multiple == 1 else dim.multiple * symbol


def _watch(trace: Trace, shapes: Mapping[str, Shape], tensors: Tensors) -> None:
    """Remembers torch's symbols, and makes its guards remember the line of the user's code that they come from."""
    for name, tensor in tensors.items():
        for size, axis in zip(tensor.shape, shapes[name], strict=True):
            if isinstance(axis, str) and isinstance(size, torch.SymInt):
                expression = size.node.expr
                dim = next(dim for dim in trace.dims if dim.name == axis)
                trace.symbols |= dict.fromkeys(expression.free_symbols, dim)
                trace.env = size.node.shape_env
    if trace.env is not None and "_get_sloc" not in vars(trace.env):
        locate = trace.env._get_sloc  # torch 2.13 fills the user's line in strict mode only

        def located(*args: Any) -> Any:
            place = locate(*args)
            return type(place)(place.framework_loc, current_line())

        trace.env._get_sloc = located


@contextmanager
def _in_place_of_forward(model: nn.Module, flat: Any) -> Iterator[None]:
    shadowed = model.__dict__.get("forward")
    model.forward = flat
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
