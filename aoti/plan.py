"""Which sizes are served exactly, and which compiled variants there are."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from math import isqrt, prod
from typing import Literal

import msgspec

from ..bundle_format.contract import Contract, Dim
from ..bundle_format.errors import UsageError
from .protocol import Recipe

DYNAMIC = "dynamic"  # the variant that covers the whole contract


def covers(contract: Contract, dims: Mapping[str, int] = {}) -> dict[str, tuple[int, int]]:
    """What a variant covers that is made for the sizes `dims`; without them, all of the contract."""
    return {dim.name: (dims.get(dim.name, dim.min), dims.get(dim.name, dim.max)) for dim in contract.dims}


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


def unbucketed(contract: Contract, buckets: Mapping[str, tuple[int, ...]]) -> str:
    """A note where requests of different sizes cannot share a batch; "" where they can, or nothing is batched."""
    names = [dim.name for dim in contract.dims if dim.name != contract.batch_dim and dim.name not in buckets]
    if contract.batch_dim is None or not names:
        return ""
    pads = [each.name for each in contract.inputs if each.pad is None and set(names) & set(each.shape)]
    way_out = "".join(f" `--pad {name}=VALUE`" for name in pads)
    way_out = f"export with{way_out}, and compile" if pads else "compile"
    sizes = " ".join(f"`--bucket {name}=…`" for name in names)
    which = " and ".join(f"`{name}`" for name in names)
    return f"only requests of the same {which} share a batch: to pad them to a few sizes, {way_out} with {sizes}"


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


# --- what else to compile ----------------------------------------------------------------------------------------

Level = Literal["none", "fast", "full"]
MOST_POINTS = 16
_GEMM = ("max_autotune=true", "max_autotune_gemm_backends=CPP")  # torch's own templates, chosen by measuring
_GEMM_OR_ATEN = ("max_autotune=true", "max_autotune_gemm_backends=ATEN,CPP")
_SMALL = 8  # rows up to which the templates have been seen to win


def points(contract: Contract, buckets: Mapping[str, tuple[int, ...]], most: int = MOST_POINTS) -> list[dict[str, int]]:
    """The sizes at which variants are compared, small ones first: all combinations of the buckets, or, where these
    are more than `most`, of fewer of them. A dim without buckets is at the geometric middle of its range.
    """
    sizes = {dim.name: list(buckets.get(dim.name) or (_typical(dim),)) for dim in contract.dims}
    while prod(map(len, sizes.values())) > most:
        longest = max(sizes, key=lambda name: len(sizes[name]))
        sizes[longest] = _half(sizes[longest])
    combined = [dict(zip(sizes, point, strict=True)) for point in product(*sizes.values())]
    return sorted(combined, key=lambda dims: prod(dims.values()))


def candidates(
    contract: Contract,
    buckets: Mapping[str, tuple[int, ...]],
    base: Recipe,
    level: Level,
    *,
    bf16: bool,
    threads: int,
    layers: bool = True,
    most: int = MOST_POINTS,
) -> list[Recipe]:
    """Recipes beside `base`, the most promising first. `bf16`: it is allowed. `threads`: the most that are measured.
    `layers`: whether mctl's kernels have any. `most`: points.
    """
    if level == "none" or contract.state:
        return []
    if not layers:
        base, bf16 = msgspec.structs.replace(base, packed=False, bf16=False), False
    own = "packed" if layers else "plain"
    narrow = [_recipe(base, "bf16", packed=True, bf16=True)] if bf16 and not base.bf16 else []
    dynamic = [*narrow, _recipe(base, "plain", packed=False) if base.packed else _recipe(base, own, packed=layers)]
    fixed = points(contract, buckets, most) if all(dim.name in buckets for dim in contract.dims) else []
    ends_first = sorted(fixed, key=lambda dims: dims not in (fixed[0], fixed[-1]))
    small = [dims for dims in ends_first if dims.get(contract.batch_dim or "", 1) <= _SMALL]
    found = [*dynamic, *(_recipe(base, own, dims, packed=layers) for dims in ends_first)]
    found += [_recipe(base, "gemm", dims, packed=False, options=_GEMM) for dims in small]
    if level == "full":
        found += [_recipe(base, "bf16", dims, packed=True, bf16=True) for dims in ends_first if narrow]
        found += [_recipe(base, "plain", dims, packed=False) for dims in ends_first]
        found += [_recipe(base, "gemm", dims, packed=False, options=_GEMM) for dims in ends_first if dims not in small]
        found += [_recipe(base, "gemm-aten", dims, packed=False, options=_GEMM_OR_ATEN) for dims in ends_first]
        if threads > 1:
            options = ("cpp.dynamic_threads=false", f"cpp.threads={threads}")
            kind = f"{own}-threads{threads}"
            found += [_recipe(base, kind, dims, packed=layers, options=options) for dims in ends_first]
    return _different(base, found)


def _different(base: Recipe, found: Iterable[Recipe]) -> list[Recipe]:
    """Without those that another name has already, as sizes are where there is but one."""
    known = [msgspec.structs.replace(base, name="")]
    different = []
    for recipe in found:
        if (unnamed := msgspec.structs.replace(recipe, name="")) not in known:
            known.append(unnamed)
            different.append(recipe)
    return different


def threads_of(recipe: Recipe) -> int:
    """The number of threads that is compiled in; 0: the caller's."""
    numbers = [int(option.partition("=")[2]) for option in recipe.options if option.startswith("cpp.threads=")]
    return numbers[-1] if numbers and "cpp.dynamic_threads=false" in recipe.options else 0


def _recipe(
    base: Recipe,
    kind: str,
    dims: Mapping[str, int] | None = None,
    *,
    packed: bool,
    bf16: bool = False,
    options: tuple[str, ...] = (),
) -> Recipe:
    name = "-".join([kind, *(f"{dim}{size}" for dim, size in (dims or {}).items())])
    return Recipe(name, dict(dims or {}), packed, bf16 or (packed and base.bf16), (*base.options, *options))


def _half(sizes: Sequence[int]) -> list[int]:
    """Both ends and what lies evenly between; of two the larger."""
    count = (len(sizes) + 1) // 2
    steps = [(len(sizes) - 1) * at / (count - 1) for at in range(count)] if count > 1 else [-1]
    return [sizes[round(at)] for at in steps]


def _typical(dim: Dim) -> int:
    middle = isqrt(dim.min * dim.max)
    return min(dim.max, -(-max(middle, dim.min) // dim.multiple) * dim.multiple)
