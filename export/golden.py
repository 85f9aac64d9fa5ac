"""Golden cases: inputs and what eager made of them, stored in the program and in the bundle."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isqrt

from ..bundle_format import layout, manifest, tensors
from ..bundle_format.archive import Archive
from ..bundle_format.contract import Dim
from .naming import Tensors
from .raw import loaded, stored


@dataclass(frozen=True, slots=True)
class Case:
    """One case: the sizes of the dims, and tensors by the contract's names."""

    name: str
    dims: dict[str, int]
    inputs: Tensors
    outputs: Tensors


def load_golden(archive: Archive) -> list[Case]:
    """The golden cases of a program or bundle. BundleError where a member is damaged."""
    return [_load(archive, golden) for golden in archive.manifest.golden]


def _load(archive: Archive, golden: manifest.Golden) -> Case:
    archive.verify(golden.member)
    inputs: Tensors = {}
    outputs: Tensors = {}
    for name, tensor in loaded(archive.view(golden.member)).items():
        kind, _, rest = name.partition(".")
        (inputs if kind == "input" else outputs)[rest] = tensor
    return Case(golden.name, dict(golden.dims), inputs, outputs)


def dump_case(case: Case) -> list[tensors.Buffer]:
    """The pieces of the case's safetensors member."""
    named = {f"input.{name}": value for name, value in case.inputs.items()}
    named |= {f"output.{name}": value for name, value in case.outputs.items()}
    return tensors.dump(stored(named))


def member_of(case: Case) -> str:
    """The path of a case's member below the archive's top folder."""
    return f"{layout.GOLDEN}{case.name}.safetensors"


def case_points(dims: Sequence[Dim]) -> list[dict[str, int]]:
    """Sizes to try: all dims at their ends, in the middle and at a prime, and each dim at its maximum by itself."""
    smallest = {dim.name: dim.min for dim in dims}
    points = [{dim.name: _at(dim, share) for dim in dims} for share in (0.0, 0.5, 1.0)]
    points.append({dim.name: _prime(dim) for dim in dims})
    points += [{**smallest, dim.name: dim.max} for dim in dims]
    return list({tuple(point.items()): point for point in points}.values())


def _at(dim: Dim, share: float) -> int:
    steps = (dim.max - dim.min) // dim.multiple
    return dim.min + int(steps * share) * dim.multiple


def _prime(dim: Dim) -> int:
    """A prime (times the multiple) near the geometric middle of the range; the middle where there is none."""
    low, high = dim.min // dim.multiple, dim.max // dim.multiple
    middle = max(isqrt(low * high), 2)
    candidates = sorted(range(max(low, 2), min(high, 4 * middle + 8) + 1), key=lambda n: abs(n - middle))
    return dim.multiple * next((n for n in candidates if all(n % k for k in range(2, isqrt(n) + 1))), low)


def case_name(sizes: Mapping[str, int]) -> str:
    """`batch=2,seq=77`; `fixed` where there is no dim."""
    return ",".join(f"{name}={size}" for name, size in sizes.items()) or "fixed"
