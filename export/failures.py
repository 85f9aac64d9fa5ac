"""Why a model cannot be exported, in the user's terms and with the user's file and line."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError, GuardOnDataDependentSymNode

from ..bundle_format.contract import Dim
from ..bundle_format.errors import ExportError, MctlError
from .dims import Shape
from .usercode import at, describe

_FEW_SIZES = 4096  # so many are looked at one by one
_MAX_DOUBTFUL = 8  # sizes of one dim


_NO_RELATIONS = "a contract's inputs have sizes of their own: make the one from the other inside the model"


class FixedDimError(ExportError):
    """A declared dim came out with one size."""


@dataclass(slots=True)
class Trace:
    """What is traced, and torch's view of the dims; filled while the model runs."""

    dims: Sequence[Dim]
    inputs: Mapping[str, torch.Tensor]
    shapes: Mapping[str, Shape]
    units: dict[str, str]  # torch's name of each dim: of the size divided by its multiple
    symbols: dict[Any, Dim] = field(default_factory=dict)  # torch's symbols for sizes of inputs
    env: Any = None  # the ShapeEnv, with the guards that the model's code made


def explain(error: Exception, trace: Trace, model: nn.Module) -> MctlError:
    """The error for what torch.export raised."""
    if isinstance(error, MctlError):
        return error
    if isinstance(error, GuardOnDataDependentSymNode):
        return _data_dependent(error)
    if _is_about_dims(error):
        return _about_dims(error, trace, model)
    return _other(error, model)


def _data_dependent(error: Exception) -> ExportError:
    place = at(error)
    if "Could not extract specialized integer" in str(error):
        return ExportError(
            f"the model makes a Python number of a tensor's value, which no exported program can depend on{place}",
            "keep it a tensor: no `.item()`, `int(…)` or `.tolist()` for sizes, indices and loops",
        )
    return ExportError(
        f"the model decides by a tensor's value which way to go{place}",
        "an exported program has one way: use `torch.where(…)`, or `torch.cond(…)` where both ways are costly",
    )


def _is_about_dims(error: BaseException) -> bool:
    return any(isinstance(each, ConstraintViolationError) for each in (error, error.__cause__, error.__context__))


def _about_dims(error: Exception, trace: Trace, model: nn.Module) -> ExportError:
    """torch found that the declared dims are not what the model's code allows; its suggestions say how."""
    suggestions = dict(re.findall(r"^  (_*d\d+) = (.+)$", str(error), re.MULTILINE))
    for dim in trace.dims:
        unit = trace.units[dim.name]
        if unit in suggestions:
            return _about_dim(dim, suggestions[unit], trace, model)
    named = [dim for dim in trace.dims if re.search(rf"\b{trace.units[dim.name]}\b", str(error))]
    names = " and ".join(f"`{dim.name}`" for dim in named or trace.dims)
    place = next((_guard_line(dim, trace) for dim in named), "")
    return ExportError(f"the model does not allow all sizes of {names} that were declared{place}", FOLLOW_THE_SIZE)


def _about_dim(dim: Dim, suggestion: str, trace: Trace, model: nn.Module) -> ExportError:
    place = _guard_line(dim, trace)
    if re.fullmatch(r"\d+", suggestion):
        return _fixed(dim, int(suggestion) * dim.multiple, place, trace, model)
    if found := re.fullmatch(r"(\d+)\*(_+d\d+)", suggestion):
        return needs_multiple(dim, int(found[1]) * dim.multiple, place)
    if found := re.fullmatch(r"Dim\('\w+'(?:, min=(\d+))?(?:, max=(\d+))?\)", suggestion):
        low = int(found[1]) * dim.multiple if found[1] else dim.min
        high = int(found[2]) * dim.multiple if found[2] else dim.max
        return narrower(dim, max(low, dim.min), min(high, dim.max), place)
    for other in trace.dims:
        if re.search(rf"\b{trace.units[other.name]}\b", suggestion):
            relation = suggestion.replace(trace.units[other.name], other.name)
            if relation == other.name:
                return must_be_equal(dim, other, place)
            return ExportError(f"the model needs `{dim.name}` to be `{relation}`{place}", _NO_RELATIONS)
    return ExportError(f"the model needs `{dim.name}` to be `{suggestion}`{place}")


def _fixed(dim: Dim, size: int, place: str, trace: Trace, model: nn.Module) -> ExportError:
    message = f"dimension `{dim.name}` became static: the model fixes it at {size}{place}"
    if hint := bind_too(dim, size, trace.inputs, trace.shapes):
        return FixedDimError(message, hint)
    if any(isinstance(module, nn.RNNBase) for module in model.modules()):
        hint = f"torch unrolls an LSTM, GRU or RNN over its steps: leave `--dim {dim.name}` out if it counts them"
        return FixedDimError(message, hint)
    return FixedDimError(message, f"{FOLLOW_THE_SIZE}; or leave `--dim {dim.name}` out")


FOLLOW_THE_SIZE = "let the code follow the input's size: `x.shape[0]`, `-1` in a reshape"


def bind_too(dim: Dim, size: int, inputs: Mapping[str, torch.Tensor], shapes: Mapping[str, Shape]) -> str | None:
    """The hint that other axes of this size may be the same dim; None where there are none."""
    places, others = [], []
    for name, shape in shapes.items():
        for axis, declared in enumerate(shape):
            if declared == dim.name:
                places.append(f"{name}:{axis}")
            elif isinstance(declared, int) and inputs[name].shape[axis] == size:
                others.append((name, axis))
    if not others:
        return None
    name, axis = others[0]
    steps = f":{dim.multiple}" if dim.multiple > 1 else ""
    option = f"--dim {dim.name}={dim.min}:{dim.max}{steps}@{','.join([*places, *(f'{n}:{a}' for n, a in others)])}"
    return f"axis {axis} of `{name}` is {size} as well: write `{option}` if it is the same"


def needs_multiple(dim: Dim, multiple: int, place: str) -> ExportError:
    """The error for a dim whose sizes have to be multiples; `place` says where that is seen."""
    low = -(-dim.min // multiple) * multiple
    high = dim.max // multiple * multiple
    hint = f"write `--dim {dim.name}={low}:{high}:{multiple}`" if low < high else None
    return ExportError(f"`{dim.name}` must be a multiple of {multiple}{place}", hint)


def narrower(dim: Dim, low: int, high: int, place: str) -> ExportError:
    """The error for a dim that goes from `low` to `high` only; `place` says where that is seen."""
    steps = f":{dim.multiple}" if dim.multiple > 1 else ""
    return ExportError(
        f"the model takes `{dim.name}` from {low} to {high} only, declared are {dim.min} to {dim.max}{place}",
        f"write `--dim {dim.name}={low}:{high}{steps}`" if low < high else None,
    )


def must_be_equal(dim: Dim, other: Dim, place: str) -> ExportError:
    """The error for two dims that are one; `place` says where that is seen."""
    return ExportError(
        f"`{dim.name}` and `{other.name}` must be equal{place}",
        "declare one dim for both: `--dim NAME=MIN:MAX@INPUT:AXIS,INPUT:AXIS`",
    )


def _guard_line(dim: Dim, trace: Trace) -> str:
    """` (model.py:31)`: the line whose guard excludes a size that was declared."""
    for symbol, own in trace.symbols.items():
        if own == dim:
            for line in _excluding(symbol, dim, trace.env):
                return f" ({line})"
    return ""


def _excluding(symbol: Any, dim: Dim, env: Any) -> Iterator[str]:
    for guard in getattr(env, "guards", ()):
        line = guard.sloc.maybe_user_loc
        if line and symbol in guard.expr.free_symbols:
            others = guard.expr.free_symbols - {symbol}
            if others or any(guard.expr.subs(symbol, size) == False for size in _some_sizes(dim)):  # noqa: E712
                yield line


def _some_sizes(dim: Dim) -> list[int]:
    """The ends of a range, what lies near them, and the middle."""
    step = dim.multiple
    middle = dim.min + (dim.max - dim.min) // step // 2 * step
    near = {dim.min, dim.min + step, dim.min + 2 * step, middle, dim.max - step, dim.max}
    return sorted(size for size in near if dim.allows(size))


def doubtful_sizes(error: Exception, trace: Trace) -> dict[str, list[int]]:
    """Sizes for which torch took no way of its own, but did not look either: it only found them to be unlike others.

    Such guards (`seq != 64`, from cutting a table of 64 rows) come from the layout of tensors and change no result;
    whoever traces on has to prove it at these sizes. Empty where other guards stand in the way.
    """
    if not _is_about_dims(error) or "Suggested fixes" in str(error):
        return {}
    by_dim: dict[str, list[int]] = {}
    for guard in trace.env.guards:
        found = _dim_of(guard.expr, trace)
        if found is None:
            return {}
        dim, expression = found
        symbol = sympy.Symbol(dim.name)
        if isinstance(expression, sympy.Ne):
            by_dim.setdefault(dim.name, []).extend(_equal_sizes(expression, symbol, dim))
        elif any(expression.subs(symbol, size) == False for size in _some_sizes(dim) if size > 1):  # noqa: E712
            return {}
    return {name: sizes for name, sizes in by_dim.items() if 0 < len(sizes) <= _MAX_DOUBTFUL}


def _equal_sizes(expression: sympy.Ne, symbol: sympy.Symbol, dim: Dim) -> list[int]:
    """The sizes from 2 on at which both sides of an inequality are the same after all."""
    if dim.max - dim.min < _FEW_SIZES:
        sizes = range(max(dim.min, 2), dim.max + 1)
        return [size for size in sizes if dim.allows(size) and expression.subs(symbol, size) == False]  # noqa: E712
    try:
        solutions = sympy.solve(expression.lhs - expression.rhs, symbol)
    except NotImplementedError:  # sympy's word for what it cannot solve, a division that rounds down for example
        return [size for size in _some_sizes(dim) if size > 1 and expression.subs(symbol, size) == False]  # noqa: E712
    return [int(size) for size in solutions if size.is_Integer and size > 1 and dim.allows(int(size))]


def _dim_of(expression: Any, trace: Trace) -> tuple[Dim, Any] | None:
    """The one dim that a guard is about, and the guard with that dim's name; None for a guard about several."""
    dims = {trace.symbols[symbol] for symbol in expression.free_symbols if symbol in trace.symbols}
    if len(dims) != 1 or not expression.free_symbols <= set(trace.symbols):
        return None
    dim = dims.pop()
    renamed = expression.xreplace({symbol: sympy.Symbol(dim.name) for symbol in expression.free_symbols})
    return (dim, renamed) if dim.multiple == 1 else None


def _other(error: Exception, model: nn.Module) -> ExportError:
    text = str(error)
    if "fake impl" in text or "no fake" in text.lower():
        return ExportError(
            f"a custom operator does not say what shape it gives: {describe(error)}",
            "register its shape function: `torch.library.register_fake`",
        )
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        return ExportError(
            f"torch cannot trace the model, a part of which is TorchScript: {describe(error)}",
            "use the `nn.Module` that it was made from",
        )
    return ExportError(f"torch cannot trace the model: {describe(error)}")
