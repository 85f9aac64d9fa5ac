"""Do the members hold what the manifest says they hold? Digests prove who wrote a member, not that it is sound."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from . import contract as contracts
from .archive import Archive
from .errors import BundleError
from .layout import MAX_REPORT, WEIGHTS
from .manifest import ConstantRef, Golden
from .tensors import TensorEntry, read_header

_EXTRA = "extra/"


@dataclass(frozen=True, slots=True)
class Verified:
    """A file without a fault: how many members it has, their bytes, and the digest that names its content."""

    kind: Literal["bundle", "program"]
    members: int
    bytes: int
    digest: str


def verify(path: Path) -> Verified:
    """Every limit, every digest, then what the members hold. Errors as Archive.open; they name the member."""
    with Archive.open(path) as archive:
        archive.verify()
        check(archive)
        sizes = [entry.size for entry in archive.members.values()]
        return Verified(archive.kind, len(sizes), sum(sizes), archive.digest)


def check(archive: Archive) -> None:
    """BundleError names the member that stock torch or a runner could not read as the manifest describes it."""
    for path in archive.members:
        if path.startswith(_EXTRA):
            _check_text(archive, path)
    for golden in archive.manifest.golden:
        _check_golden(archive, golden)
    if WEIGHTS in archive.members:
        stored = _tensors(archive, WEIGHTS)
        for variant in archive.manifest.variants:
            for name, constant in variant.constants.items():
                _check_constant(archive, f"constant `{name}` of variant `{variant.name}`", constant, stored)


def _tensors(archive: Archive, path: str) -> dict[str, TensorEntry]:
    try:
        return read_header(archive.view(path), aligned=True)
    except BundleError as error:
        raise archive.damage(f"member `{path}`: {error.message}") from error


def _check_text(archive: Archive, path: str) -> None:
    try:
        archive.read(path, MAX_REPORT).decode()
    except UnicodeDecodeError:
        raise archive.damage(f"member `{path}` is not UTF-8, as all of `{_EXTRA}` has to be") from None


def _check_golden(archive: Archive, golden: Golden) -> None:
    contract = archive.manifest.contract
    stored = _tensors(archive, golden.member)
    wanted = {f"input.{i.name}": (i.dtype, contracts.shape_of(i, golden.dims)) for i in contract.inputs}
    wanted |= {f"output.{o.name}": (o.dtype, contracts.shape_of(o, golden.dims)) for o in contract.outputs}
    for name, (dtype, shape) in wanted.items():
        found = stored.get(name)
        if found is None or (found.dtype, found.shape) != (dtype, shape):
            raise archive.damage(f"member `{golden.member}` has no tensor `{name}` of {dtype}{list(shape)}")


def _check_constant(archive: Archive, where: str, constant: ConstantRef, stored: Mapping[str, TensorEntry]) -> None:
    tensor = stored.get(constant.tensor)
    if tensor is None:
        raise archive.damage(f"member `{WEIGHTS}` has no tensor `{constant.tensor}` for {where}")
    stride = constant.stride
    if stride is None:
        return
    if len(stride) != len(tensor.shape):
        raise archive.damage(f"{where} has {len(stride)} strides for {len(tensor.shape)} axes")
    item = contracts.DTYPES[tensor.dtype].size
    last = sum((size - 1) * step for size, step in zip(tensor.shape, stride, strict=True))
    if 0 not in tensor.shape and (last + 1) * item > tensor.end - tensor.begin:
        raise archive.damage(f"{where} has strides that reach beyond its tensor `{constant.tensor}`")
