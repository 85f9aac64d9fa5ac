"""torch.export of a model whose inputs and outputs are flat: tensors in, a dict of named tensors out."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import Parameter, Signature
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.utils._sympy.value_ranges import ValueRanges

from ..bundle_format.contract import Dim
from .dims import Shape
from .failures import Trace, doubtful_sizes, explain, relation
from .graph import input_values
from .held import Held, held_buffers, traced_as_buffers
from .naming import Named, Tensors, name_outputs
from .usercode import at, current_place, quiet


@dataclass(frozen=True, slots=True)
class Captured:
    """The exported program. torch is not sure that it is right at the sizes in `doubtful`: they have to be proven."""

    exported: ExportedProgram
    doubtful: dict[str, list[int]]


def capture(
    model: nn.Module,
    named: Named,
    inputs: Tensors,
    shapes: Mapping[str, Shape],
    dims: Sequence[Dim],
    copied: frozenset[str] = frozenset(),
    *,
    register: bool = False,
) -> Captured:
    """The exported program of `model`: tensors in the order of `named.tensors` in, `{output name: tensor}` out.

    The user's containers stay outside of the program, so that it can be read where their classes are not. The model
    gets a copy of the inputs in `copied`. With `register`, tensors that it holds in plain objects become its buffers.
    ExportError tells why the model cannot be exported as it is declared.
    """
    trace = Trace(dims, inputs, shapes, {dim.name: f"d{at}" for at, dim in enumerate(dims)})
    flat = _Flat(model, named, copied, trace, held_buffers(model, register=register))
    specs = {dim.name: _symbol(dim, unit) for dim, unit in zip(dims, trace.units.values(), strict=True)}
    try:
        exported = flat.export(specs)
        if related := relation(trace):
            raise related
        return Captured(exported, {})
    except Exception as error:
        doubtful = doubtful_sizes(error, trace)
        if doubtful is None:
            raise explain(error, trace, model) from error
    for dim in dims:
        if dim.name in doubtful:
            specs[dim.name] = torch.export.Dim.DYNAMIC(min=dim.min, max=dim.max)
    try:
        exported = flat.export(specs)
    except Exception as error:
        raise explain(error, trace, model) from error
    _widen(exported, shapes, {dim.name: dim for dim in dims if dim.name in doubtful})
    return Captured(exported, doubtful)


def _symbol(dim: Dim, unit: str) -> Any:
    """A `Dim` of torch, or an expression over one where the size is a multiple."""
    symbol = torch.export.Dim(unit, min=dim.min // dim.multiple, max=dim.max // dim.multiple)
    return symbol if dim.multiple == 1 else dim.multiple * symbol


def _widen(exported: ExportedProgram, shapes: Mapping[str, Shape], dims: Mapping[str, Dim]) -> None:
    """Declares the range of dims that torch did not take from us: it starts at 2, where 1 has to be proven as well."""
    for shape, value in zip(shapes.values(), input_values(exported).values(), strict=True):
        for axis, size in zip(shape, value.shape, strict=True):
            if isinstance(axis, str) and axis in dims and isinstance(size, torch.SymInt):
                exported.range_constraints[size.node.expr] = ValueRanges(dims[axis].min, dims[axis].max)


class _Holder(nn.Module):  # type: ignore[misc]
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


class _Flat:
    """The model as a function of one tensor for each input, with named tensors as its result."""

    def __init__(
        self, model: nn.Module, named: Named, copied: frozenset[str], trace: Trace, held: Sequence[Held]
    ) -> None:
        # hooks see the arguments as the user has them, and torch takes the outputs of a graph from the graph
        inner = bool(model._forward_hooks or model._forward_pre_hooks) or isinstance(model, GraphModule)
        self.root = _Holder(model) if inner else model
        self.call = model if inner else model.forward
        self.named = named
        self.copied = copied
        self.trace = trace
        self.held = held

    def export(self, specs: Mapping[str, Any]) -> ExportedProgram:
        """torch.export with one of `specs` for each dim."""
        inputs = self.trace.inputs
        identifiers = [_identifier(name) for name in inputs]
        dynamic = {
            identifier: {axis: specs[dim] for axis, dim in enumerate(self.trace.shapes[name]) if isinstance(dim, str)}
            for identifier, name in zip(identifiers, inputs, strict=True)
        }
        with self._in_place_of_forward(identifiers), torch.no_grad(), quiet():
            return torch.export.export(self.root, tuple(inputs.values()), dynamic_shapes=dynamic, strict=False)

    @contextmanager
    def _in_place_of_forward(self, identifiers: list[str]) -> Iterator[None]:
        shadowed = self.root.__dict__.get("forward")

        def flat(*tensors: torch.Tensor) -> Tensors:
            given = dict(zip(self.named.tensors, tensors, strict=True))
            _watch(self.trace, given)
            given = {name: value.clone() if name in self.copied else value for name, value in given.items()}
            args, kwargs = self.named.call(given)
            try:
                with traced_as_buffers(self.held):
                    return name_outputs(self.call(*args, **kwargs))[0]
            except Exception as error:
                self.trace.raised = at(error)
                raise

        parameters = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in identifiers]
        flat.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        self.root.forward = flat
        try:
            yield
        finally:
            del self.root.forward
            if shadowed is not None:
                self.root.forward = shadowed


def _watch(trace: Trace, tensors: Tensors) -> None:
    """Remembers torch's symbols, and makes its guards remember the line of the user's code that they come from.

    torch 2.13 fills that line in strict mode only.
    """
    for name, tensor in tensors.items():
        for size, axis in zip(tensor.shape, trace.shapes[name], strict=True):
            if isinstance(axis, str) and isinstance(size, torch.SymInt):
                expression = size.node.expr
                dim = next(dim for dim in trace.dims if dim.name == axis)
                trace.symbols |= dict.fromkeys(expression.free_symbols, dim)
                trace.env = size.node.shape_env
    locate = getattr(trace.env, "_get_sloc", None)  # without it, errors about sizes are told without a line
    if locate is not None and "_get_sloc" not in vars(trace.env):

        def located(*args: Any) -> Any:
            place = locate(*args)
            own = current_place()
            if own.line and own.call:
                trace.calls.setdefault(own.line, own.call)
            return type(place)(place.framework_loc, own.line)

        trace.env._get_sloc = located


def _identifier(name: str) -> str:
    """A parameter name for an input: `batch.ids` is `batch__ids`."""
    safe = name.replace(".", "__").replace("-", "_")
    return safe if safe.isidentifier() else f"_{safe}"
