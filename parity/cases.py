"""Which inputs to try: the sweep over a contract, made from it and a seed."""

import zlib
from collections.abc import Iterable, Mapping
from itertools import chain
from math import prod
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..bundle_format.contract import Contract, Dim, Input, Output, evaluate, nbytes, shape_of

Dims = Mapping[str, int]
Values = Literal["normal", "zeros", "large", "low", "high", "beside", "below", "above"]
Bounds = tuple[int | str, int | str]
Spans = Mapping[str, Bounds]  # integer input -> smallest and largest value to draw; texts are expressions over dims

UNDECLARED: tuple[Values, ...] = ("beside", "below", "above")  # integers that only a declared range would refuse
MAX_BYTES = 256 << 20  # of a case's inputs and outputs
LARGE = {"float16": 1e2, "bfloat16": 1e3, "float32": 1e3, "float64": 1e3}  # standard deviation of "large"


class Case(NamedTuple):
    """Sizes and the kind of values; `tensors` makes the same inputs of it every time."""

    dims: dict[str, int]
    values: Values

    @property
    def name(self) -> str:
        sizes = ",".join(f"{name}={size}" for name, size in self.dims.items())
        return f"{sizes or 'fixed'}/{self.values}"


def sweep(contract: Contract, example: Dims, buckets: Mapping[str, tuple[int, ...]]) -> list[Case]:
    """The cases to compare, the most telling first.

    Sizes: every dim's own list (`sizes_of`) with the other dims at their example; all smallest, all largest, and one
    dim at its largest or smallest with the others at the other end. Not the product: it grows beyond any budget.
    Values: at the example's sizes every kind that changes an input; elsewhere normal ones.
    """
    middle = {dim.name: example.get(dim.name, default_size(dim)) for dim in contract.dims}
    cases = [Case(middle, "normal")]
    cases += [Case(middle, kind) for kind in kinds(contract)]
    points = [
        {**middle, dim.name: size}
        for dim in contract.dims
        for size in sizes_of(dim, middle[dim.name], buckets.get(dim.name, ()))
    ]
    points += _corners(contract.dims)
    cases += [Case(point, "normal") for point in sorted(points, key=lambda dims: work(contract, dims))]
    if any(_unbounded(declared) for declared in contract.inputs):
        cases += [Case(middle, kind) for kind in UNDECLARED]
    return list({case.name: case for case in cases}.values())


def default_size(dim: Dim) -> int:
    """The size of a dim for which no example is known: the second that it allows."""
    return min(dim.min + dim.multiple, dim.max)


def sizes_of(dim: Dim, example: int, buckets: Iterable[int]) -> list[int]:
    """Ascending, in steps of the multiple: smallest, 2, example, the one after it, a prime, largest, buckets."""
    step = dim.multiple
    middle = (dim.min + dim.max) // 2 // step
    wanted = {dim.min, 2 * step, example, example + step, _prime_below(middle) * step, dim.max, *buckets}
    return sorted(size for size in wanted if dim.allows(size))


def _prime_below(limit: int) -> int:
    """The largest prime up to `limit`; 0 if there is none."""
    return next((n for n in range(limit, 1, -1) if all(n % k for k in range(2, int(n**0.5) + 1))), 0)


def _corners(dims: tuple[Dim, ...]) -> list[dict[str, int]]:
    low, high = {d.name: d.min for d in dims}, {d.name: d.max for d in dims}
    mixed = chain.from_iterable(({**low, d.name: d.max}, {**high, d.name: d.min}) for d in dims)
    return [low, high, *mixed] if dims else []


def unranged(contract: Contract, case: Case) -> tuple[str, ...]:
    """Inputs of which the case tries integers that only a declared range would refuse."""
    if case.values not in UNDECLARED:
        return ()
    return tuple(declared.name for declared in contract.inputs if _unbounded(declared))


def kinds(contract: Contract) -> list[Values]:
    """Those beside normal values that change an input."""
    floats = any(i.dtype.startswith(("float", "bfloat")) for i in contract.inputs)
    others = not all(i.dtype.startswith(("float", "bfloat")) for i in contract.inputs)
    return ["zeros", *(("large",) if floats else ()), *(("low", "high") if others else ())]


def volume(contract: Contract, dims: Dims) -> int:
    """Bytes of all inputs and outputs at these sizes."""
    tensors: tuple[Input | Output, ...] = (*contract.inputs, *contract.outputs)
    return sum(nbytes(tensor, dims) for tensor in tensors)


def work(contract: Contract, dims: Dims) -> float:
    """A number that grows with the cost of a call: linear in rows, and between linear and quadratic in other dims."""
    return prod(size if name == contract.batch_dim else size**1.5 for name, size in dims.items())


def spans(contract: Contract, seen: Iterable[Mapping[str, Tensor]]) -> dict[str, Bounds]:
    """What to draw for each integer input: its declared range, else what examples (`seen`) have shown, else 0..1."""
    found: dict[str, Bounds] = {}
    examples = [case for case in seen if case]
    for declared in contract.inputs:
        if _is_integer(declared):
            # numpy: torch has no extremes of the unsigned dtypes
            shown = [case[declared.name].numpy() for case in examples if case[declared.name].numel()]
            ends = (min((int(t.min()) for t in shown), default=0), max((int(t.max()) for t in shown), default=1))
            found[declared.name] = declared.range or ends
    return found


def tensors(contract: Contract, case: Case, seed: int, span: Spans) -> dict[str, Tensor]:
    """The case's inputs; each depends on the seed, the case's name and the input's name, not on the order of calls."""
    made = {}
    for declared in contract.inputs:
        draw = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{case.name}/{declared.name}".encode()))
        made[declared.name] = _tensor(declared, case, draw, span)
    return made


def _tensor(declared: Input, case: Case, draw: torch.Generator, span: Spans) -> Tensor:
    dtype, shape, kind = getattr(torch, declared.dtype), shape_of(declared, case.dims), case.values
    if declared.dtype == "bool":
        constant = {"zeros": False, "low": False, "high": True}.get(kind)
        drawn = torch.randint(0, 2, shape, generator=draw).bool()
        return drawn if constant is None else torch.full(shape, constant)
    if _is_integer(declared):
        low, high = (evaluate(end, case.dims) for end in span[declared.name])
        return _integers(declared, shape, kind, draw, (low, high))
    if kind == "zeros":
        return torch.zeros(shape, dtype=dtype)
    scale = LARGE[declared.dtype] if kind == "large" else 1.0
    return (torch.randn(shape, generator=draw, dtype=torch.float64) * scale).to(dtype)


def _integers(
    declared: Input, shape: tuple[int, ...], kind: Values, draw: torch.Generator, ends: tuple[int, int]
) -> Tensor:
    dtype, (low, high) = getattr(torch, declared.dtype), ends
    constants = {"zeros": max(low, min(high, 0)), "low": low, "high": high}
    if kind == "beside" and _unbounded(declared):
        beside = torch.tensor(_beside(low, high, dtype), dtype=torch.int64)
        return beside[torch.arange(prod(shape)) % len(beside)].reshape(shape).to(dtype)
    if _unbounded(declared):
        constants |= {"below": max(-1, torch.iinfo(dtype).min), "above": torch.iinfo(dtype).max}
    if kind in constants:
        return torch.full(shape, constants[kind], dtype=dtype)
    offset = torch.randint(0, min(high - low, 2**62) + 1, shape, generator=draw)  # randint spans no more than int64
    return (offset + (low - 2**64 if low >= 2**63 else low)).to(dtype)  # uint64 wraps


def _beside(low: int, high: int, dtype: torch.dtype) -> list[int]:
    """Just outside of what examples have shown: an index made of them (`2*ids - 5`) wraps round at the far ends.

    The farthest on each side first: a small input takes no more than these, and examples may show little.
    """
    span, limits = high - low + 1, torch.iinfo(dtype)
    wanted = (high + 64 * span, low - 4 * span, high + span, low - span, high + 1, low - 1, high + 4 * span)
    return [value for value in wanted if limits.min <= value <= min(limits.max, 2**63 - 1)] or [0]


def _is_integer(declared: Input) -> bool:
    return declared.dtype.startswith(("int", "uint"))


def _unbounded(declared: Input) -> bool:
    """No range was declared, so that the model itself has to deal with any value."""
    return _is_integer(declared) and declared.range is None
