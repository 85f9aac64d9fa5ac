"""A model that fails at some sizes that were declared: which dim it is, and how far it goes."""

from collections.abc import Callable, Mapping, Sequence

from ..bundle_format.contract import Dim
from ..bundle_format.errors import ExportError, ModelError
from .golden import case_name

Attempt = Callable[[Mapping[str, int]], object]  # runs eager at these sizes; ModelError where it raises


def explain_sizes(
    attempt: Attempt, dims: Sequence[Dim], works: Mapping[str, int], fails: Mapping[str, int], error: ModelError
) -> ExportError:
    """The error for an eager model that runs with the sizes `works` and raises with `fails`."""
    for dim in dims:
        if fails[dim.name] == works[dim.name]:
            continue
        alone = {**works, dim.name: fails[dim.name]}
        if (own_error := _failure(attempt, alone)) is not None:
            limit = _last_that_works(attempt, dim, works, fails[dim.name])
            return _limited(dim, works[dim.name], fails[dim.name], limit, own_error)
    return ExportError(
        f"the model runs at {case_name(dict(works))}, but not at {case_name(dict(fails))}: {_why(error)}"
    )


def _failure(attempt: Attempt, sizes: Mapping[str, int]) -> ModelError | None:
    try:
        attempt(sizes)
    except ModelError as error:
        return error
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


def _limited(dim: Dim, works: int, fails: int, limit: int, error: ModelError) -> ExportError:
    low, high = (dim.min, limit) if fails > works else (limit, dim.max)
    why = _why(error)
    if limit == works:
        return ExportError(
            f"dimension `{dim.name}` is static: the model runs with {works} and fails with {fails}: {why}",
            "let the code follow the input's size: `x.shape[0]`, `-1` in a reshape",
        )
    steps = f":{dim.multiple}" if dim.multiple > 1 else ""
    side = f"up to {limit}" if fails > works else f"from {limit} on"
    return ExportError(
        f"the model takes `{dim.name}` {side} only, declared are {dim.min} to {dim.max}: {why}",
        f"write `--dim {dim.name}={low}:{high}{steps}`",
    )


def _why(error: ModelError) -> str:
    return error.message.removeprefix("the model failed: ")
