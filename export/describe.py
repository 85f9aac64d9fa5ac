"""The contract of an exported program, read from the program itself and compared with what was declared."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch.export import ExportedProgram

from ..bundle_format import contract as contracts
from ..bundle_format.contract import Constant, Contract, Dim, Input, Output, State
from ..bundle_format.errors import ContractError, ExportError, UsageError
from . import graph
from .declare import Declared
from .dims import Shape, ValueRange
from .expressions import Symbols, axis_of
from .failures import related
from .naming import Named, dtype_name


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the user said of inputs and outputs, beside their dims."""

    ranges: Mapping[str, ValueRange] = field(default_factory=dict)
    pads: Mapping[str, int | float] = field(default_factory=dict)
    output_names: tuple[str, ...] = ()
    batch_dim: str | None = None  # None: found by mctl; "none": there is none


def check_names(wishes: Wishes, named: Named, dims: Sequence[Dim]) -> None:
    """UsageError where `--range`, `--pad` or `--batch-dim` name what is not there."""
    for option, names in (("range", wishes.ranges), ("pad", wishes.pads)):
        for name in names:
            if name not in named.tensors:
                raise UsageError(f"`--{option}`: there is no input `{name}`", f"there are {', '.join(named.tensors)}")
    known = {dim.name for dim in dims}
    for name, bounds in wishes.ranges.items():
        for bound in bounds:
            if unknown := contracts.names_in(bound) - known:
                hint = f"the dims are {', '.join(sorted(known))}" if known else "declare it with `--dim`"
                raise UsageError(f"`--range {name}`: the dim `{min(unknown)}` is not declared", hint)
    if wishes.batch_dim not in (None, "none", *(dim.name for dim in dims)):
        raise UsageError(f"`--batch-dim {wishes.batch_dim}`: no such dim is declared")


def describe(
    exported: ExportedProgram,
    declared: Declared,
    output_names: Sequence[str],
    state: Sequence[str],
    wishes: Wishes,
) -> Contract:
    """The contract of a program with these outputs, that changes the buffers in `state`.

    ExportError where the program is not what was declared, or the contract cannot say what it is.
    """
    symbols = _prove_dims(exported, declared.dims, declared.shapes)
    contract = Contract(
        dims=declared.dims,
        inputs=_inputs(exported, declared, symbols, wishes),
        outputs=_outputs(exported, symbols, _renamed(output_names, wishes.output_names)),
        constants=tuple(Constant(name=name, value=value) for name, value in declared.named.constants.items()),
        state=_state(exported, state),
        random=graph.random_line(exported) is not None,
    )
    try:
        contracts.validate(contract)
    except ContractError as error:
        hint = "rename what is wrong: in the model, or with `--output-name A,B`"
        raise ExportError(f"the contract does not hold: {error.message}", hint) from error
    return _with_batch_dim(contract, wishes.batch_dim)


def _prove_dims(exported: ExportedProgram, dims: Sequence[Dim], shapes: Mapping[str, Shape]) -> Symbols:
    """Each declared dim is a symbol (or a multiple of one) with its whole range, and no other axis is one.

    Returns torch's symbols, each with the dim that it is, divided by the dim's multiple.
    """
    symbols: dict[Any, Dim] = {}
    values = graph.input_values(exported).values()
    for (name, shape), value in zip(shapes.items(), values, strict=True):
        for axis, (declared, size) in enumerate(zip(shape, value.shape, strict=True)):
            where = f"axis {axis} of input `{name}`"
            if isinstance(declared, int):
                if not isinstance(size, int):
                    raise ExportError(f"{where} became dynamic, though no dim is declared for it")
                continue
            dim = next(dim for dim in dims if dim.name == declared)
            if isinstance(size, int):
                raise ExportError(f"dimension `{declared}` became static: {where} is {size} in the exported program")
            expression = size.node.expr
            limits = exported.range_constraints.get(expression)
            if limits is None or (limits.lower, limits.upper) != (dim.min, dim.max):
                raise ExportError(f"dimension `{declared}` is not dynamic over its whole range at {where}")
            for symbol in expression.free_symbols:
                if (other := symbols.setdefault(symbol, dim)) != dim:
                    raise related(dim, other)
    return symbols


def _inputs(exported: ExportedProgram, declared: Declared, symbols: Symbols, wishes: Wishes) -> tuple[Input, ...]:
    found = graph.index_sizes(exported)
    inputs = []
    for torch_name, (name, value) in zip(graph.input_values(exported), declared.named.tensors.items(), strict=True):
        dtype = dtype_name(value.dtype)
        limits = wishes.ranges.get(name) or _index_range(found.get(torch_name), symbols)
        shape, pad = declared.shapes[name], _pad(name, dtype, wishes)
        inputs.append(Input(name=name, dtype=dtype, shape=shape, range=limits, pad=pad))
    return tuple(inputs)


def _index_range(indexed: graph.Indexed | None, symbols: Symbols) -> ValueRange | None:
    """The values that may index a tensor of this size (of several, the smallest); None where it is unknown."""
    if indexed is None:
        return None
    largest = {dim.name: dim.max for dim in symbols.values()}
    try:
        size = min(indexed.sizes, key=lambda size: contracts.evaluate(axis_of(size, symbols, ""), largest))
        low, high = (axis_of(bound, symbols, "") for bound in (-size if indexed.wraps else 0, size - 1))
    except ExportError:  # it depends on the values of a tensor
        return None
    return _compact(low), _compact(high)


def _compact(bound: int | str) -> int | str:
    return bound.replace(" ", "") if isinstance(bound, str) else bound


def _pad(name: str, dtype: str, wishes: Wishes) -> int | float | None:
    pad = wishes.pads.get(name)
    return int(pad) if pad is not None and "float" not in dtype and float(pad).is_integer() else pad


def _renamed(names: Sequence[str], wanted: Sequence[str]) -> Sequence[str]:
    if wanted and len(wanted) != len(names):
        raise UsageError(
            f"`--output-name` names {len(wanted)} outputs, the model has {len(names)}", f"they are {', '.join(names)}"
        )
    return wanted or names


def _outputs(exported: ExportedProgram, symbols: Symbols, names: Sequence[str]) -> tuple[Output, ...]:
    outputs = []
    for name, value in zip(names, graph.result_values(exported), strict=True):
        shape = [axis_of(size, symbols, f"output `{name}`: axis {axis}") for axis, size in enumerate(value.shape)]
        outputs.append(Output(name=name, dtype=dtype_name(value.dtype), shape=tuple(shape)))
    return tuple(outputs)


def _state(exported: ExportedProgram, changed: Sequence[str]) -> tuple[State, ...]:
    values: dict[str, Any] = {**exported.state_dict, **exported.constants}
    return tuple(
        State(name=name, dtype=dtype_name(values[name].dtype), shape=tuple(values[name].shape))
        for name in changed
        if isinstance(values.get(name), torch.Tensor)
    )


def _with_batch_dim(contract: Contract, wanted: str | None) -> Contract:
    """The dim that requests may be joined along, or a note that says why there is none."""
    note = _batch_note(contract)
    if wanted == "none":
        note = "the export asked for none"
    elif wanted is not None:
        fault = note or contracts.batch_fault(contract, wanted)
        if fault:
            raise UsageError(f"`--batch-dim {wanted}`: {fault}", "leave the option out, or write `--batch-dim none`")
        return msgspec.structs.replace(contract, batch_dim=wanted)
    candidate = _candidate(contract)
    if note or candidate is None:
        return msgspec.structs.replace(contract, batch_note=note or "no dim is axis 0 of every input")
    fault = contracts.batch_fault(contract, candidate)
    return (
        msgspec.structs.replace(contract, batch_note=f"{candidate}: {fault}")
        if fault
        else msgspec.structs.replace(contract, batch_dim=candidate)
    )


def _batch_note(contract: Contract) -> str:
    if contract.state:
        return f"the model keeps state between calls ({', '.join(state.name for state in contract.state[:3])})"
    return "the model draws random numbers" if contract.random else ""


def _candidate(contract: Contract) -> str | None:
    names = [dim.name for dim in contract.dims]
    if "batch" in names:
        return "batch"
    leading = [
        name for name in names if all(declared.shape[0] == name for declared in contract.inputs if declared.shape)
    ]
    return leading[0] if len(leading) == 1 else None
