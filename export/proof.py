"""Proof that the exported program is the model: on every golden case, and called several times in a row."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ..bundle_format.contract import Contract, Output, rows_per_item, shape_of
from ..bundle_format.errors import ExportError
from ..bundle_format.manifest import Tolerance
from ..bundle_format.tolerances import CLOSENESS, EXACT
from .golden import Case
from .naming import Tensors, dtype_name
from .running import Run

_CALLS = 3  # in a row on one instance


def tolerance_of(dtype: str) -> Tolerance:
    """What may lie between a program and eager; nothing for integers and booleans."""
    allowed = CLOSENESS.get(dtype, EXACT)
    return Tolerance(rtol=allowed.rtol, atol=allowed.atol)


def prove_case(case: Case, run: Run, contract: Contract) -> float:
    """The largest absolute error of `run` against the case's eager outputs; ExportError where the two differ."""
    try:
        got = run(case.inputs)
    except Exception as error:
        reason = " ".join(str(error).split())[:400]
        raise ExportError(f"the exported program fails at {case.name}: {reason}", _way_out(case, contract)) from error
    errors = [0.0]
    for output in contract.outputs:
        fault, worst = _compare(got[output.name], case.outputs[output.name], output, case.dims, contract.random)
        if fault:
            message = f"the exported program is not the model: at {case.name}, output `{output.name}` {fault}"
            raise ExportError(message, _way_out(case, contract))
        errors.append(worst)
    return max(errors)


def _compare(
    got: torch.Tensor, wanted: torch.Tensor, output: Output, dims: Mapping[str, int], random: bool
) -> tuple[str, float]:
    """What is wrong with an output (empty if nothing is), and its largest absolute error."""
    shape = shape_of(output, dims)
    if tuple(got.shape) != tuple(wanted.shape) or shape != tuple(wanted.shape):
        seen = list(got.shape if got.shape != wanted.shape else shape)
        return f"has the shape {seen}, eager gives {list(wanted.shape)}", 0.0
    if got.dtype != wanted.dtype:
        return f"is {dtype_name(got.dtype)}, eager gives {dtype_name(wanted.dtype)}", 0.0
    if random or not wanted.numel():
        return "", 0.0
    tolerance = tolerance_of(output.dtype)
    same = (got == wanted) | (got.isnan() & wanted.isnan()) if got.is_floating_point() else got == wanted
    error = torch.where(same, 0.0, (got.double() - wanted.double()).abs())
    worst = float(error.max())
    close = bool((same | (error <= tolerance.atol + tolerance.rtol * wanted.double().abs())).all())
    return "" if close else f"is off by {worst:.3g}", worst


def _way_out(case: Case, contract: Contract) -> str:
    for dim in contract.dims:  # the sizes that were traced are proven before
        if case.dims[dim.name] == dim.min == 1:
            return f"torch takes 1 for any other size: write `--dim {dim.name}=2:{dim.max}`, or treat 1 like the others"
    return "the model decides something in Python, by a size or by a global, that torch cannot see"


def rows_apart(run: Run, contract: Contract, case: Case) -> bool:
    """Whether the first and the last row of a batch come out as they do alone, as far as eager itself can tell."""
    batch = contract.batch_dim or ""
    size, least = case.dims[batch], contract.dim(batch).min
    batched = {each.name for each in contract.inputs if each.shape and each.shape[0] == batch}
    for row in {0, size - 1} if size > least else ():
        alone = run({name: value[[row] * least] if name in batched else value for name, value in case.inputs.items()})
        for output in contract.outputs:
            count = rows_per_item(output, batch) or 1
            together = case.outputs[output.name][row * count : (row + 1) * count]
            if not _alike(alone[output.name][:count], together):
                return False
    return True


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """But for roundings: sums of another batch may be made in another order."""
    if one.shape != other.shape:
        return False
    if not one.is_floating_point():
        return True  # parity judges them: an index of a maximum may turn on a rounding
    wide, scale = other.double(), float(other.double().abs().nan_to_num(0, 0, 0).max()) if other.numel() else 0.0
    return bool(torch.allclose(one.double(), wide, rtol=1e-2, atol=1e-2 * scale, equal_nan=True))


def prove_steady(models: Callable[[], nn.Module], bind: Callable[[nn.Module], Run], inputs: Tensors) -> None:
    """ExportError if two fresh copies of the model give different numbers."""
    if not _same(bind(models())(inputs), bind(models())(inputs)):
        raise ExportError(
            "the model gives other numbers for the same inputs, in two copies that were not called before",
            "it draws random numbers in Python: draw them with torch and write `--allow-random`, or take them out",
        )


def prove_repeated(
    models: Callable[[], nn.Module], bind: Callable[[nn.Module], Run], run: Run, inputs: Tensors
) -> None:
    """Calls both several times from a fresh state; ExportError if only one of them depends on the calls before."""
    model = models()
    before = _plain_attributes(model)
    eager = bind(model)
    for call in range(1, _CALLS + 1):
        if not _same(_copied(eager(inputs)), run(inputs)):
            changed = [name for name, value in _plain_attributes(model).items() if before.get(name) != value]
            names = f" ({', '.join(f'`{name}`' for name in changed[:3])})" if changed else ""
            raise ExportError(
                f"the model keeps state in Python{names}, which an exported program cannot: call {call} differs",
                "keep it in a buffer: `self.register_buffer(…)`, changed in place",
            )


def _copied(outputs: Tensors) -> Tensors:
    return {name: value.clone() for name, value in outputs.items()}  # a result may be the state itself


def _same(one: Tensors, other: Tensors) -> bool:
    return all(
        value.shape == other[name].shape and torch.allclose(value.double(), other[name].double(), 1e-3, 1e-4, True)
        for name, value in one.items()
    )


def _plain_attributes(model: nn.Module) -> dict[str, Any]:
    """Numbers, strings and lengths of containers among the attributes of all modules."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if value is None or isinstance(value, (bool, int, float, str)):
                found[f"{path}.{name}".lstrip(".")] = value
            elif isinstance(value, (list, dict, set)) and not name.startswith("_"):
                found[f"{path}.{name}".lstrip(".")] = len(value)
    return found
