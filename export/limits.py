"""A model that fails at some sizes that were declared: which dim it is, and how far it goes."""

from collections.abc import Callable, Mapping, Sequence
from math import lcm

from ..bundle_format.contract import Dim
from ..bundle_format.errors import ExportError, ModelError
from .declare import Declared
from .failures import FOLLOW_THE_SIZE, bind_too, must_be_equal, narrower, needs_multiple
from .golden import case_name

_MAX_FACTOR = 64  # of a dim's multiple that is looked for

Attempt = Callable[[Mapping[str, int]], object]  # runs eager at these sizes; ModelError where it raises


def explain_sizes(
    attempt: Attempt, declared: Declared, works: Mapping[str, int], fails: Mapping[str, int], error: ModelError
) -> ExportError:
    """The error for an eager model that runs with the sizes `works` and raises with `fails`."""
    for dim in declared.dims:
        if fails[dim.name] == works[dim.name]:
            continue
        alone = {**works, dim.name: fails[dim.name]}
        if (own_error := _failure(attempt, alone)) is not None:
            return _explain_dim(attempt, dim, declared, works, fails[dim.name], own_error)
    return ExportError(f"the model runs at {case_name(works)}, but not at {case_name(fails)}: {_why(error)}")


def _explain_dim(
    attempt: Attempt, dim: Dim, declared: Declared, works: Mapping[str, int], fails: int, error: ModelError
) -> ExportError:
    why = _why(error)
    for other in declared.dims:
        both = {**works, dim.name: fails, other.name: fails}
        if other != dim and works[other.name] == works[dim.name] and _failure(attempt, both) is None:
            return must_be_equal(dim, other, f": {why}")
    if multiple := _needed_multiple(attempt, dim, works, fails):
        return needs_multiple(dim, multiple, f": {why}")
    limit = _last_that_works(attempt, dim, works, fails)
    if limit == works[dim.name]:
        hint = bind_too(dim, limit, declared.named.tensors, declared.shapes) or FOLLOW_THE_SIZE
        return ExportError(
            f"dimension `{dim.name}` is static: the model runs with {limit} and fails with {fails}: {why}", hint
        )
    low, high = (dim.min, limit) if fails > limit else (limit, dim.max)
    return narrower(dim, low, high, f": {why}")


def find_working(attempt: Attempt, dims: Sequence[Dim]) -> dict[str, int] | None:
    """Sizes that the model runs with, where those that were tried first do not work; None if none is found."""
    for share in (1.0, 0.5, 0.25):
        for step in (64, 8, 1):  # round sizes first: a model that halves its input several times needs them
            sizes = {dim.name: _round_size(dim, share, step) for dim in dims}
            if _failure(attempt, sizes) is None:
                return sizes
    return None


def _round_size(dim: Dim, share: float, step: int) -> int:
    """A size at this share of the range, rounded down to a multiple of `step` where the range has one."""
    size = dim.min + int((dim.max - dim.min) * share)
    step = lcm(dim.multiple, step)
    rounded = size // step * step
    return rounded if rounded >= dim.min else size // dim.multiple * dim.multiple


def _failure(attempt: Attempt, sizes: Mapping[str, int]) -> ModelError | None:
    try:
        attempt(sizes)
    except ModelError as error:
        return error
    return None


def _needed_multiple(attempt: Attempt, dim: Dim, works: Mapping[str, int], fails: int) -> int | None:
    """The multiple that sizes have to be of: sizes near the failing one work if they are, and fail if not."""
    for multiple in (factor * dim.multiple for factor in range(2, _MAX_FACTOR + 1)):
        first = fails // multiple - 2
        near = [size for step in range(6) if dim.allows(size := (first + step) * multiple)][:3]
        if works[dim.name] % multiple or not fails % multiple or len(near) < 3:
            continue
        beside = [size for at in near for size in (at - dim.multiple, at + dim.multiple) if dim.allows(size)]
        if all(_failure(attempt, {**works, dim.name: size}) is None for size in near) and all(
            _failure(attempt, {**works, dim.name: size}) is not None for size in beside
        ):
            return multiple
    return None


def _last_that_works(attempt: Attempt, dim: Dim, works: Mapping[str, int], fails: int) -> int:
    """By halving the way from a size that works to one that fails."""
    good, bad = works[dim.name] // dim.multiple, fails // dim.multiple
    while abs(bad - good) > 1:
        middle = (good + bad) // 2
        if _failure(attempt, {**works, dim.name: middle * dim.multiple}) is None:
            good = middle
        else:
            bad = middle
    return good * dim.multiple


def _why(error: ModelError) -> str:
    return error.message.removeprefix("the model failed: ")
