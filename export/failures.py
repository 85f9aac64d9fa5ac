"""Why a model cannot be exported, in the user's terms and with the user's file and line."""

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise, product
from typing import Any, NamedTuple

import sympy  # type: ignore[import-untyped]
import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError, GuardOnDataDependentSymNode

from ..bundle_format.contract import Dim
from ..bundle_format.errors import ExportError, MctlError
from .dims import Shape
from .usercode import at, called, describe, user_line

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
    calls: dict[str, str] = field(default_factory=dict)  # line -> the call in it that took a size for a number
    raised: str = ""  # ` (model.py:12)`: what an exception passed first; torch strips some of their tracebacks


def explain(error: Exception, trace: Trace, model: nn.Module) -> MctlError:
    """The error for what torch.export raised."""
    if isinstance(error, MctlError):
        return error
    if isinstance(error, GuardOnDataDependentSymNode):
        return _data_dependent(error)
    if _is_about_dims(error):
        return _about_dims(error, trace, model)
    return _other(error, trace, model)


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
    violated = any(isinstance(each, ConstraintViolationError) for each in (error, error.__cause__, error.__context__))
    return violated or "Cannot create Dim with inconsistent" in str(error)  # torch, as it words its suggestions


def _about_dims(error: Exception, trace: Trace, model: nn.Module) -> ExportError:
    """torch found that the declared dims are not what the model's code allows; its suggestions say how."""
    suggestions = dict(re.findall(r"^  (_*d\d+) = (.+)$", str(error), re.MULTILINE))
    for dim in trace.dims:
        suggestion = suggestions.get(trace.units[dim.name], "")
        found = _about_dim(dim, suggestion, trace, model) if suggestion else _by_guards(dim, trace)
        if found:
            return found
    named = [dim for dim in trace.dims if re.search(rf"\b{trace.units[dim.name]}\b", str(error))]
    names = " and ".join(f"`{dim.name}`" for dim in named or trace.dims)
    place = next((_guard_line(dim, trace) for dim in named), "")
    return ExportError(f"the model does not allow all sizes of {names} that were declared{place}", FOLLOW_THE_SIZE)


def _by_guards(dim: Dim, trace: Trace) -> ExportError | None:
    """What the guards that are about this dim alone allow; None where that is all, nothing, or of no simple form."""
    symbol = next((symbol for symbol, own in trace.symbols.items() if own == dim), None)
    guards = [guard.expr for guard in getattr(trace.env, "guards", ()) if guard.expr.free_symbols == {symbol}]
    tried = [size for size in _many_sizes(dim) if size > 1]
    allowed = [size for size in tried if not any(_refuses(guard, symbol, size, dim) for guard in guards)]
    if len(allowed) < 3 or len(allowed) == len(tried):
        return None
    place = _guard_line(dim, trace)
    steps = {after - before for before, after in pairwise(allowed)} & set(range(1, _FEW_SIZES))
    if min(steps) == dim.multiple:
        return narrower(dim, allowed[0] if allowed[0] > tried[0] else dim.min, allowed[-1], place)
    if len({size % min(steps) for size in allowed}) > 1:
        return None
    if allowed[0] % min(steps) == 0:
        return needs_multiple(dim, min(steps), place)
    return ExportError(
        f"the model goes one way at {', '.join(map(str, allowed[:3]))}, … and another at other sizes of"
        f" `{dim.name}`{place}",
        needs_multiple(dim, min(steps), "").hint,
    )


def _about_dim(dim: Dim, suggestion: str, trace: Trace, model: nn.Module) -> ExportError | None:
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
    return _by_guards(dim, trace)


def relation(trace: Trace) -> ExportError | None:
    """The error for two dims that the model takes to be related, where torch has not said so: it traced on as if."""
    for guard in getattr(trace.env, "guards", ()):
        dims = {trace.symbols[symbol] for symbol in guard.expr.free_symbols if symbol in trace.symbols}
        if not isinstance(guard.expr, sympy.Eq) or len(dims) != 2:
            continue
        names = {symbol: sympy.Symbol(dim.name) for symbol, dim in trace.symbols.items()}
        left, right = (side.xreplace(names) for side in guard.expr.args)
        if type(left).__name__ == "FloorDiv" and left.args[0].is_Symbol:
            left, right = left.args[0], left.args[1] * right
        return ExportError(f"the model needs `{left}` to be `{right}`", _NO_RELATIONS)
    return None


def related(dim: Dim, other: Dim) -> ExportError:
    """The error for two dims whose sizes, each divided by its multiple, have to be the same."""
    larger, smaller = (dim, other) if dim.multiple >= other.multiple else (other, dim)
    factor, rest = divmod(larger.multiple, smaller.multiple)
    if larger.multiple == smaller.multiple:
        return must_be_equal(dim, other, "")
    right = f"{factor}*{smaller.name}" if not rest else f"{larger.multiple}*{smaller.name}//{smaller.multiple}"
    return ExportError(f"the model needs `{larger.name}` to be `{right}`", _NO_RELATIONS)


def _fixed(dim: Dim, size: int, place: str, trace: Trace, model: nn.Module) -> ExportError:
    message = f"dimension `{dim.name}` became static: the model fixes it at {size}{place}"
    if hint := bind_too(dim, size, trace.inputs, trace.shapes):
        return FixedDimError(message, hint)
    if any(isinstance(module, nn.RNNBase) for module in model.modules()):
        hint = f"torch unrolls an LSTM, GRU or RNN over its steps: leave `--dim {dim.name}` out if it counts them"
        return FixedDimError(message, hint)
    way_out = _instead(trace.calls.get(place.strip(" ()"), "")) or FOLLOW_THE_SIZE
    return FixedDimError(message, f"{way_out}; or leave `--dim {dim.name}` out")


FOLLOW_THE_SIZE = "let the code follow the input's size: `x.shape[0]`, `-1` in a reshape"

_STEPS = "`start + (end - start) / (n - 1) * torch.arange(n)`"
_LOOP = "do it for all at once: a loop over a size is unrolled for the example's"
_INSTEAD = {  # what follows a size, for functions that take a number
    "linspace": _STEPS,
    "logspace": f"`base ** (…)` of {_STEPS}",
    "one_hot": "`(index.unsqueeze(-1) == torch.arange(n)).to(dtype)`",
    "tril_indices": "a mask, `torch.ones(n, n).tril()`",
    "triu_indices": "a mask, `torch.ones(n, n).triu()`",
    "vander": "`x.unsqueeze(-1) ** torch.arange(n)`",
    "sqrt": "`n ** 0.5`",
    "log": "`torch.log(torch.full((), n))`",
    "int": "the size itself, without `int(…)`",
    "float": "the size itself, without `float(…)`",
    "range": _LOOP,
    "reversed": _LOOP,
    "zip": _LOOP,
    "enumerate": _LOOP,
    "avg_pool1d": "`x.mean(-1)`",
    "avg_pool2d": "`x.mean((-2, -1))`",
    "max_pool1d": "`x.amax(-1)`",
    "max_pool2d": "`x.amax((-2, -1))`",
} | dict.fromkeys(
    ("hann_window", "hamming_window", "blackman_window", "bartlett_window", "kaiser_window"),
    "its formula over `torch.arange(n)`",
)


def _instead(call: str) -> str:
    """The way out where a call takes a number in the place of a size; empty where that is not the reason."""
    name = called(call)
    if not name:
        return ""
    shown = call if len(call) <= 80 else f"{name}(…)"
    return (
        f"`{shown}` takes the size for a fixed number: write {_INSTEAD.get(name, 'it with functions that take sizes')}"
    )


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
            if others or any(_refuses(guard.expr, symbol, size, dim) for size in _some_sizes(dim)):
                yield line


def _refuses(guard: Any, symbol: Any, size: int, dim: Dim) -> bool:
    return bool(guard.subs(symbol, size // dim.multiple) == False)  # noqa: E712


def _some_sizes(dim: Dim) -> list[int]:
    """The ends of a range, what lies near them, and the middle."""
    step = dim.multiple
    middle = dim.min + (dim.max - dim.min) // step // 2 * step
    near = {dim.min, dim.min + step, dim.min + 2 * step, middle, dim.max - step, dim.max}
    return sorted(size for size in near if dim.allows(size))


def _many_sizes(dim: Dim) -> list[int]:
    """All sizes of a short range; of a long one the first and last hundred, and powers of two and their neighbours."""
    step = dim.multiple
    if dim.max - dim.min <= 256 * step:
        return list(range(dim.min, dim.max + 1, step))
    ends = [*range(dim.min, dim.min + 100 * step, step), *range(dim.max - 99 * step, dim.max + 1, step)]
    powers = [(1 << n) + beside for n in range(dim.max.bit_length()) for beside in (-1, 0, 1)]
    return sorted({*ends, *(size for size in powers if dim.allows(size))})


class _Guard(NamedTuple):
    """A condition on sizes that torch met, over the names of dims."""

    expression: Any
    dims: tuple[Dim, ...]


def doubtful_sizes(error: Exception, trace: Trace) -> dict[str, list[int]] | None:
    """Dims that torch would not take as declared, though nothing was found against it; each with the sizes for which
    torch took no way of its own, but did not look either.

    It cannot prove every guard that holds (`2*(h//2) < h + 1`), and some (`seq != 64`, from cutting a table of 64
    rows) come from the layout of tensors and change no result; whoever traces on has to prove it at these sizes.
    None where a guard does exclude sizes.
    """
    if not _is_about_dims(error):
        return None
    by_dim: dict[str, list[int]] = {}
    for guard in trace.env.guards:
        found = _guard_of(guard.expr, trace)
        if found is None:
            return None
        excluded = _excluded_by(found)
        if excluded and not isinstance(found.expression, sympy.Ne):
            return None
        for dim in found.dims:
            by_dim.setdefault(dim.name, []).extend(excluded)
    return by_dim if by_dim and all(len(sizes) <= _MAX_DOUBTFUL for sizes in by_dim.values()) else None


def _guard_of(expression: Any, trace: Trace) -> _Guard | None:
    """The guard with dims' names; None where it is about something else too, or about multiples."""
    if not expression.free_symbols <= set(trace.symbols):
        return None
    dims = {symbol: trace.symbols[symbol] for symbol in expression.free_symbols}
    if any(dim.multiple > 1 for dim in dims.values()):
        return None
    renamed = expression.xreplace({symbol: sympy.Symbol(dim.name) for symbol, dim in dims.items()})
    return _Guard(renamed, tuple({dim.name: dim for dim in dims.values()}.values()))


def _excluded_by(guard: _Guard) -> list[int]:
    """Sizes from 2 on at which the guard does not hold; of one about several dims some of the first."""
    symbols = [sympy.Symbol(dim.name) for dim in guard.dims]
    if len(guard.dims) != 1:
        sizes = [[size for size in _some_sizes(dim) if size > 1] for dim in guard.dims]
        points = (dict(zip(symbols, point, strict=True)) for point in product(*sizes))
        return [int(point[symbols[0]]) for point in points if guard.expression.subs(point) == False]  # noqa: E712
    (dim,), (symbol,) = guard.dims, symbols
    if isinstance(guard.expression, sympy.Ne):
        return _equal_sizes(guard.expression, symbol, dim)
    return [size for size in _many_sizes(dim) if size > 1 and _refuses(guard.expression, symbol, size, dim)]


def _equal_sizes(expression: sympy.Ne, symbol: sympy.Symbol, dim: Dim) -> list[int]:
    """The sizes from 2 on at which both sides of an inequality are the same after all."""
    if dim.max - dim.min < _FEW_SIZES:
        sizes = range(max(dim.min, 2), dim.max + 1)
        return [size for size in sizes if dim.allows(size) and expression.subs(symbol, size) == False]  # noqa: E712
    try:
        solutions = sympy.solve(expression.lhs - expression.rhs, symbol)
    except NotImplementedError:  # sympy's word for what it cannot solve, a division that rounds down for example
        return [size for size in _many_sizes(dim) if size > 1 and expression.subs(symbol, size) == False]  # noqa: E712
    return [int(size) for size in solutions if size.is_Integer and size > 1 and dim.allows(int(size))]


class _Known(NamedTuple):
    """A text of torch's, what it means for the model, the way out, and what the line in question has in it."""

    text: str
    message: str
    hint: str
    source: str = ""


_WRITTEN_OUT = (
    "write the gradient by hand, or let torch write it out in the model file: `model = make_fx(Model().eval()"
    '.requires_grad_(False), tracing_mode="symbolic", _allow_non_fake_inputs=True)(*example_inputs)`, with `make_fx`'
    " of `torch.fx.experimental.proxy_tensor`"
)
DENSE = "use dense tensors: `index_add` or `scatter_add` for a product with a sparse matrix"
WHOLE_NUMBERS = "keep int8 tensors, and multiply by their scales in the model"
_KNOWN = (
    _Known(r"^aten\._?(to_)?sparse", "the model makes a sparse tensor, which torch's compiler does not take", DENSE),
    _Known(
        r"^aten\.(de)?quantize",
        "the model makes a quantized tensor, which torch's compiler does not take",
        WHOLE_NUMBERS,
    ),
    _Known(
        r"functorch|no attribute 'constant'",
        "torch.export cannot trace a transform of `torch.func` (`grad`, `jacrev`, `vjp`, …) in this model",
        _WRITTEN_OUT,
        r"\b(grad|grad_and_value|vjp|jvp|jacrev|jacfwd|hessian)\(",
    ),
    _Known(
        r"fake tensor in the exported program constant's list|does not require grad and does not have a grad_fn",
        "the model computes something that torch.export does not see, such as `torch.autograd.grad` or another thread",
        _WRITTEN_OUT,
        r"\bautograd\.|\.backward\(|Thread",
    ),
    _Known(
        r"\.numpy\(\) is not supported",
        "the model takes a tensor out of torch, to numpy, which no exported program can",
        "use torch's functions (`torch.sin` for `numpy.sin`); what no input changes belongs into `__init__`",
    ),
    _Known(
        r"Cannot access data pointer|doesn't have storage",
        "the model asks for the memory of a tensor, which has none while it is traced",
        "use `.clone()` for `copy.deepcopy`, and no `.data_ptr()`",
    ),
)


def _other(error: Exception, trace: Trace, model: nn.Module) -> ExportError:
    text = str(error)
    place = at(error) or trace.raised
    for known in _KNOWN:
        if re.search(known.text, text):
            return ExportError(f"{known.message}{place or _line_with(known.source, model)}", known.hint)
    if type(error).__name__ == "UnsupportedOperatorException":
        operator = text.split()[0].removesuffix(".default")
        hint = "write that part of the model with other operators"
        return ExportError(f"torch.export has no rule for the operator `{operator}`{place}", hint)
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
    return ExportError(f"torch cannot trace the model: {describe(error)}{'' if at(error) else trace.raised}")


def _line_with(pattern: str, model: nn.Module) -> str:
    """` (model.py:31)`: the first line of the model's classes with the pattern: torch fails after it ran."""
    for kind in dict.fromkeys(type(module) for module in model.modules()) if pattern else ():
        with suppress(OSError, TypeError):  # no source at hand
            lines, start = inspect.getsourcelines(kind)
            file = inspect.getsourcefile(kind) or ""
            found = (user_line([(file, start + at)]) for at, text in enumerate(lines) if re.search(pattern, text))
            if line := next(found, None):
                return f" ({line})"
    return ""
