"""Which sizes are served exactly, and which compiled variants there are."""

from collections.abc import Iterable, Mapping

from ..bundle_format.contract import Contract, Dim
from ..bundle_format.errors import UsageError

DYNAMIC = "dynamic"  # the variant that covers the whole contract


def covers(contract: Contract) -> dict[str, tuple[int, int]]:
    """What the dynamic variant covers: every dim from its smallest to its largest size."""
    return {dim.name: (dim.min, dim.max) for dim in contract.dims}


def parse_buckets(options: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """`["batch=1,8", "seq=32,128"]` as dim -> sizes. UsageError for what is no list of numbers."""
    wanted: dict[str, tuple[int, ...]] = {}
    for option in options:
        name, equals, values = option.partition("=")
        parts = [part.strip() for part in values.split(",")]
        if not equals or not name or not all(part.isascii() and part.isdecimal() for part in parts):
            raise UsageError(f"`--bucket {option}` is not understood", "write it as `--bucket batch=1,8,32`")
        if name in wanted:
            raise UsageError(f"`--bucket` names the dim `{name}` twice", "give all its sizes at once")
        wanted[name] = tuple(int(part) for part in parts)
    return wanted


def choose_buckets(contract: Contract, wanted: Mapping[str, Iterable[int]]) -> dict[str, tuple[int, ...]]:
    """Ascending sizes by dim. The batch dim has powers of two unless it is in `wanted`; the largest size is always one,
    so that every request has a bucket. UsageError for what the contract does not allow.
    """
    buckets = {}
    for name, sizes in wanted.items():
        dim = _dim(contract, name)
        for size in sizes:
            if not dim.allows(size):
                raise UsageError(f"bucket {size} of dim `{name}` is outside its range, allowed {dim.allowed}")
        buckets[name] = tuple(sorted({*sizes, dim.max}))
    if contract.batch_dim is not None and contract.batch_dim not in buckets:
        buckets[contract.batch_dim] = _powers_of_two(contract.dim(contract.batch_dim))
    return buckets


def _dim(contract: Contract, name: str) -> Dim:
    """A dim that may have buckets: the batch dim, or one that can be padded wherever it occurs."""
    dim = next((dim for dim in contract.dims if dim.name == name), None)
    if dim is None:
        known = ", ".join(f"`{dim.name}`" for dim in contract.dims) or "none"
        raise UsageError(f"`--bucket` names the dim `{name}`, which the program does not have", f"its dims: {known}")
    if name == contract.batch_dim:
        return dim
    without = [declared.name for declared in contract.inputs if name in declared.shape and declared.pad is None]
    if without:
        hint = f"export with `--pad {without[0]}=VALUE` if padding does not change the real part of the outputs"
        raise UsageError(f"dim `{name}` has no buckets: input `{without[0]}` has no value to pad it with", hint)
    return dim


def _powers_of_two(dim: Dim) -> tuple[int, ...]:
    powers = {1 << n for n in range(dim.max.bit_length())}
    return tuple(sorted({size for size in powers | {dim.min, dim.max} if dim.allows(size)}))
