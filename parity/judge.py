"""What two answers may differ by, and what they differ by: pure functions of tensors.

Rules, by output:
- bool and integers are equal, exactly; where they are made from floats (rounded, compared, the place of the largest),
  a value also passes that the model gives at this place in fp64 with every operation off by a few roundings: there it
  stands at an edge, and eager could as well have fallen to the other side;
- NaN and infinities are at the same positions, infinities with the same sign;
- floats pass where they agree to the floor: a few roundings of the dtype, relative to the element plus the mean one;
- else, where an fp64 reference is at hand, if |got - reference| <= FAIR * E + floor everywhere, E being the largest
  error of eager itself: a compiled model need not be better than eager, nor pay for eager's own errors;
- else if |got - wanted| <= atol + rtol * |wanted| everywhere, with the direct tolerance of the dtype or a given one.
A tolerance that the user gave decides alone, for integers too.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
import torch
from torch import Tensor

from ..bundle_format.contract import Strict
from ..bundle_format.manifest import Tolerance
from ..bundle_format.tolerances import CLOSENESS, EXACT

Rule = Literal["exact", "edge", "floor", "fp64", "direct"]
Tensors = Mapping[str, Tensor]

FAIR = 4.0  # times eager's own largest error


class Comparison(Strict, frozen=True):
    """One output against what it should be. Errors are over the elements that are finite on both sides.

    `worst` is the index of the element that needs the largest tolerance, `got` and `wanted` its values; `needed` is the
    direct tolerance that would have let everything pass (None: no tolerance would); `fault` says what is wrong, or "".
    """

    output: str
    dtype: str
    shape: tuple[int, ...]
    rule: Rule
    ok: bool
    fault: str = ""
    max_abs: float = 0.0
    mean_abs: float = 0.0
    cosine: float = 1.0
    worst: tuple[int, ...] = ()
    got: float = 0.0
    wanted: float = 0.0
    tolerance: Tolerance | None = None
    needed: Tolerance | None = None
    error64: float | None = None  # largest error of the compiled model against fp64
    eager64: float | None = None  # largest error of eager against fp64


def name_of(dtype: torch.dtype) -> str:
    """`float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def direct_tolerance(wanted: Tensor) -> Tolerance:
    """The default for outputs like `wanted`: relative by dtype, absolute as large a part of their root mean square."""
    relative = CLOSENESS.get(name_of(wanted.dtype), EXACT).rtol
    values = wanted[torch.isfinite(wanted)].double() if wanted.is_floating_point() else wanted.new_empty(0)
    scale = float(values.square().mean().sqrt()) if values.numel() else 0.0
    return Tolerance(rtol=relative, atol=relative * scale)


def compare(
    output: str,
    got: Tensor,
    wanted: Tensor,
    *,
    tolerance: Tolerance | None = None,
    strict: bool = False,
    slack: float = 1.0,
    reference: Tensor | None = None,
    shaken: Sequence[Tensor] = (),
) -> Comparison:
    """`got` against eager's `wanted`, and against `reference` (float64, same shape) where the model can run in fp64.

    `tolerance` replaces the direct one of the dtype; `strict`: it decides alone. `slack` multiplies it. `shaken`: what
    the model gave with its operations off by a few roundings, for an output that is no float.
    """
    if (got.dtype, got.shape) != (wanted.dtype, wanted.shape):
        return _misfit(output, got, wanted)
    if not got.is_floating_point() and not strict:
        return _beside_edges(_exact(output, got, wanted), got, wanted, tolerance, shaken)
    given = tolerance or direct_tolerance(wanted)
    result = _direct(output, got, wanted, _scaled(given, slack))
    if reference is not None:
        result = msgspec.structs.replace(result, **_errors64(got, wanted, reference))
    if strict or not has_floor(got, wanted):
        return result
    if agrees_to_the_floor(got, wanted):
        return msgspec.structs.replace(result, rule="floor", ok=True, fault="")
    if reference is None:
        return result
    fault = _unfair(got, wanted, reference.double().flatten(), result.eager64 or 0.0)
    return msgspec.structs.replace(result, rule="fp64", ok=not fault, fault=fault)


def agrees_to_the_floor(got: Tensor, wanted: Tensor) -> bool:
    """|got - wanted| <= floor, and the same special values. Then the fairness rule holds too, whatever fp64 says."""
    if not _same_specials(got, wanted):
        return False
    finite = torch.isfinite(wanted)
    got64, wanted64 = got[finite].double(), wanted[finite].double()
    return bool(((got64 - wanted64).abs() <= _floor(wanted64, name_of(got.dtype))).all())


def has_floor(got: Tensor, wanted: Tensor) -> bool:
    """Whether the two can be compared by floor and fp64: floats of the same dtype, narrower than it, and shape."""
    narrower = name_of(got.dtype) in CLOSENESS and got.dtype is not torch.float64
    return narrower and got.dtype == wanted.dtype and got.shape == wanted.shape


def _floor(values: Tensor, dtype: str) -> Tensor:
    mean = values.abs().mean() if values.numel() else values.new_zeros(())
    return CLOSENESS[dtype].floor * (values.abs() + mean)


def _misfit(output: str, got: Tensor, wanted: Tensor) -> Comparison:
    shape = tuple(got.shape)
    if got.dtype != wanted.dtype:
        fault = f"dtype is {name_of(got.dtype)}, eager gives {name_of(wanted.dtype)}"
    else:
        fault = f"shape is {list(shape)}, eager gives {list(wanted.shape)}"
    return Comparison(output=output, dtype=name_of(got.dtype), shape=shape, rule="exact", ok=False, fault=fault)


def _exact(output: str, got: Tensor, wanted: Tensor) -> Comparison:
    same = Comparison(output=output, dtype=name_of(got.dtype), shape=tuple(got.shape), rule="exact", ok=True)
    differ = (got != wanted).flatten()
    count = int(differ.sum())
    if not count:
        return same
    got64, wanted64 = got.double().flatten(), wanted.double().flatten()
    error = (got64 - wanted64).abs()
    at = int(torch.where(differ, error + 1, 0).argmax())  # + 1: neighbours above 2**53 are equal as doubles
    place = _index(at, got.shape)
    text = f"{count} of {got.numel()} values differ: {_value(got, at)} at {list(place)}"
    return msgspec.structs.replace(
        same,
        ok=False,
        fault=f"{text}, eager gives {_value(wanted, at)}",
        max_abs=float(error.max()),
        mean_abs=float(error.mean()),
        cosine=_cosine(got64, wanted64),
        worst=place,
        got=float(got64[at]),
        wanted=float(wanted64[at]),
    )


def _beside_edges(
    exact: Comparison, got: Tensor, wanted: Tensor, tolerance: Tolerance | None, shaken: Sequence[Tensor]
) -> Comparison:
    """The comparison of integers where some may stand at an edge: `tolerance` has the largest step seen before."""
    others = [other for other in shaken if other.shape == wanted.shape]
    steps = [float((other.double() - wanted.double()).abs().max()) for other in others if other.numel()]
    step = max(steps, default=0.0)
    fine = got == wanted
    for other in others:
        fine |= got == other
    if tolerance is not None and tolerance.atol:
        fine |= (got.double() - wanted.double()).abs() <= tolerance.atol
    if exact.ok:
        return msgspec.structs.replace(exact, needed=Tolerance(rtol=0.0, atol=step)) if step else exact
    if not bool(fine.all()):
        return exact
    needed = Tolerance(rtol=0.0, atol=max(step, exact.max_abs))
    return msgspec.structs.replace(exact, rule="edge", ok=True, fault="", needed=needed, tolerance=needed)


def _direct(output: str, got: Tensor, wanted: Tensor, tolerance: Tolerance) -> Comparison:
    """By |got - wanted| <= atol + rtol * |wanted| over the finite elements, after the special values."""
    got64, wanted64 = got.double().flatten(), wanted.double().flatten()
    finite = torch.isfinite(got64) & torch.isfinite(wanted64)
    error = torch.where(finite, (got64 - wanted64).abs(), 0.0)
    share = _share(error, torch.where(finite, wanted64.abs(), 0.0), tolerance)  # of what is allowed; > 1 is too much
    at = int(share.argmax()) if share.numel() else 0
    largest = float(share[at]) if share.numel() else 0.0
    special = _special_fault(got, wanted) if got.is_floating_point() else ""
    too_much = f"off by {float(error[at]):.3g} at {list(_index(at, got.shape))}" if largest > 1 else ""
    needed = None if special or largest == float("inf") else _scaled(tolerance, largest)
    count = int(finite.sum())
    return Comparison(
        output=output,
        dtype=name_of(got.dtype),
        shape=tuple(got.shape),
        rule="direct",
        ok=not special and largest <= 1,
        fault=special or too_much,
        max_abs=float(error.max()) if count else 0.0,
        mean_abs=float(error.sum()) / count if count else 0.0,
        cosine=_cosine(got64[finite], wanted64[finite]),
        worst=_index(at, got.shape),
        got=float(got64[at]) if share.numel() else 0.0,
        wanted=float(wanted64[at]) if share.numel() else 0.0,
        tolerance=tolerance,
        needed=needed,
    )


def _share(error: Tensor, magnitude: Tensor, tolerance: Tolerance) -> Tensor:
    allowed = tolerance.atol + tolerance.rtol * magnitude
    return torch.where(error == 0, 0.0, error / allowed)  # an error where nothing is allowed is infinitely too much


def _scaled(tolerance: Tolerance, factor: float) -> Tolerance:
    return Tolerance(rtol=tolerance.rtol * factor, atol=tolerance.atol * factor)


def _errors64(got: Tensor, wanted: Tensor, reference: Tensor) -> dict[str, float]:
    exact = reference.double().flatten()
    return {"error64": _largest(got, exact), "eager64": _largest(wanted, exact)}


def _unfair(got: Tensor, wanted: Tensor, exact: Tensor, eager_error: float) -> str:
    """What breaks the fairness rule, or ""."""
    known = torch.isfinite(exact)
    here = known & torch.isfinite(got.flatten())
    # Where eager overflowed and the compiled model did not, fp64 says whether it is right; else both must be the same.
    better = here & ~torch.isfinite(wanted.flatten())
    if special := _special_fault(got, wanted, ignore=better.reshape(got.shape)):
        return special
    error = torch.where(here, (got.double().flatten() - exact).abs(), 0.0)
    allowed = torch.zeros_like(error)
    allowed[known] = FAIR * eager_error + _floor(exact[known], name_of(got.dtype))
    over = error - allowed
    if not over.numel() or float(over.max()) <= 0:
        return ""
    at = int(over.argmax())
    text = f"off by {float(error[at]):.3g} from fp64 at {list(_index(at, got.shape))}, allowed {float(allowed[at]):.3g}"
    return f"{text} (eager itself is off by {eager_error:.3g})"


def _largest(tensor: Tensor, exact: Tensor) -> float:
    """The largest finite error."""
    values = tensor.double().flatten()
    finite = torch.isfinite(values) & torch.isfinite(exact)
    error = (values[finite] - exact[finite]).abs()
    return float(error.max()) if error.numel() else 0.0


def _specials(tensor: Tensor) -> Tensor:
    """0 finite, 1 NaN, 2 inf, 3 -inf."""
    kinds = torch.zeros(tensor.shape, dtype=torch.uint8)
    kinds[torch.isnan(tensor)] = 1
    kinds[torch.isposinf(tensor)] = 2
    kinds[torch.isneginf(tensor)] = 3
    return kinds


def _same_specials(got: Tensor, wanted: Tensor) -> bool:
    return bool(torch.equal(_specials(got), _specials(wanted)))


def _special_fault(got: Tensor, wanted: Tensor, ignore: Tensor | None = None) -> str:
    differ = _specials(got) != _specials(wanted)
    if ignore is not None:
        differ &= ~ignore
    count = int(differ.sum())
    if not count:
        return ""
    at = int(differ.flatten().int().argmax())
    more = f" (and at {count - 1} more)" if count > 1 else ""
    return f"{_value(got, at)} at {list(_index(at, got.shape))} where eager has {_value(wanted, at)}{more}"


def _cosine(left: Tensor, right: Tensor) -> float:
    lengths = float(left.norm()) * float(right.norm())
    if lengths == 0:
        return 1.0 if torch.equal(left, right) else 0.0
    return max(-1.0, min(1.0, float(left @ right) / lengths))


def _index(at: int, shape: torch.Size) -> tuple[int, ...]:
    place: list[int] = []
    for size in reversed(shape):
        place.insert(0, at % size if size else 0)
        at = at // size if size else 0
    return tuple(place)


def _value(tensor: Tensor, at: int) -> str:
    value = tensor.flatten()[at].item()
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return {"nan": "NaN", "inf": "Inf", "-inf": "-Inf"}.get(text, text)
