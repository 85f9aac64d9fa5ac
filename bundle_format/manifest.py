"""The manifest: everything that is known about a program or a bundle, strict both ways.

SPEC.md says what each field means; `mctl.bundle_format.manifest.json_schema()` makes the JSON schema from these types.
"""

from typing import Any, Literal

import msgspec

from . import contract as contracts
from .contract import Contract, Scalar, Strict
from .errors import BundleError, ContractError
from .layout import BUNDLE_SCHEMA, MAX_JSON_DEPTH, MAX_MANIFEST, PROGRAM_SCHEMA, path_fault
from .strict_json import refuse_depth, refuse_repeated_keys

Isa = Literal["x86-64-v2", "x86-64-v3", "x86-64-v4", "aarch64"]


class Member(Strict, frozen=True):
    """Size in bytes and SHA-256 (hex) of one member; keyed by its path below the top folder."""

    size: int
    sha256: str


class Producer(Strict, frozen=True):
    """What made the file."""

    mctl: str
    torch: str
    torch_git: str = ""
    python: str = ""
    compiler: str = ""
    flags: tuple[str, ...] = ()


class Source(Strict, frozen=True):
    """Where the model came from: a record for people, never opened."""

    file: str
    sha256: str
    model: str
    seed: int
    weights: str = ""
    weights_sha256: str = ""


class Target(Strict, frozen=True):
    """The machine that the code was compiled for. `features` are the CPU flags it needs, named as in /proc/cpuinfo."""

    os: Literal["linux", "darwin", "windows"]
    arch: Literal["x86_64", "aarch64", "arm64"]
    isa: Isa
    device: Literal["cpu"] = "cpu"
    features: tuple[str, ...] = ()
    glibc: str = ""  # the oldest version that the libraries need, "2.34"
    glibcxx: str = ""  # the oldest GLIBCXX symbol version that they need, "3.4.29"


class ConstantRef(Strict, frozen=True):
    """A constant of a variant: a tensor of weights.safetensors, seen with these strides (elements; None: row-major)."""

    tensor: str
    stride: tuple[int, ...] | None = None
    state: bool = False  # the model writes to it: every worker has a copy of its own


class Variant(Strict, frozen=True):
    """One compiled library. `constants` is keyed by the original (fully qualified) name of each constant."""

    name: str
    library: str  # path below the top folder
    covers: dict[str, tuple[int, int]]  # dim -> smallest and largest size
    constants: dict[str, ConstantRef]
    imports: tuple[str, ...]  # symbols that it needs of libtorch
    threads: int = 0  # 0: the caller's number


class Tolerance(Strict, frozen=True):
    """|got - wanted| <= atol + rtol * |wanted| for one output."""

    rtol: float
    atol: float


class Golden(Strict, frozen=True):
    """One stored case: tensors `input.<name>` and `output.<name>` of eager, at these sizes."""

    name: str
    member: str  # path below the top folder
    dims: dict[str, int]


class Manifest(Strict, frozen=True):
    """Of a bundle (`mctl.bundle/1`) or a program (`mctl.program/1`, which has no target, buckets and variants)."""

    schema: Literal["mctl.bundle/1", "mctl.program/1"]
    name: str
    version: str
    created: str  # ISO 8601, UTC
    producer: Producer
    source: Source
    contract: Contract
    golden: tuple[Golden, ...]
    tolerances: dict[str, Tolerance]  # by output
    members: dict[str, Member]  # every member but the manifest itself
    exporter: Producer | None = None  # what made the program, in a bundle
    target: Target | None = None
    buckets: dict[str, tuple[int, ...]] = msgspec.field(
        default_factory=dict
    )  # dim -> ascending sizes that are served exactly
    variants: tuple[Variant, ...] = ()
    parity: Literal["pass", "skipped"] | None = None
    preprocessing: dict[str, Any] = msgspec.field(default_factory=dict)  # a free record, never executed
    notes: tuple[str, ...] = ()  # what export or compile had to say


def encode(manifest: Manifest) -> bytes:
    """Readable JSON, the same bytes for the same manifest."""
    return msgspec.json.format(msgspec.json.encode(manifest, order="sorted"), indent=1) + b"\n"


def decode(data: bytes) -> Manifest:
    """A sound manifest, or a BundleError that says which field is wrong."""
    if len(data) > MAX_MANIFEST:
        raise BundleError(f"the manifest has {len(data)} bytes, allowed {MAX_MANIFEST}")
    try:
        head = msgspec.json.decode(data, type=_Head)
        if head.schema not in (BUNDLE_SCHEMA, PROGRAM_SCHEMA):
            hint = "it was made by another version of mctl: use that one, or make the file again"
            raise BundleError(f"unknown manifest schema `{head.schema[:64]}`", hint)
        manifest = msgspec.json.decode(data, type=Manifest)
        refuse_depth(manifest.preprocessing, depth=2)  # the one field whose depth its type does not fix
        refuse_repeated_keys(data)
        contracts.validate(manifest.contract)
    except (msgspec.MsgspecError, ContractError, ValueError) as error:
        raise BundleError(f"the manifest is not valid: {error}") from error
    except RecursionError as error:
        raise BundleError(f"the manifest is not valid: it nests more than {MAX_JSON_DEPTH} levels deep") from error
    _validate(manifest)
    return manifest


def json_schema() -> dict[str, Any]:
    """The JSON schema (2020-12) of the manifest."""
    return msgspec.json.schema(Manifest)


class _Head(msgspec.Struct):
    schema: str


def _validate(manifest: Manifest) -> None:
    paths = [g.member for g in manifest.golden] + [v.library for v in manifest.variants]
    for path in (*paths, *manifest.members):
        if fault := path_fault(path):
            raise BundleError(f"the manifest names the path `{path[:128]}`, which is not allowed: {fault}")
    for path in paths:
        if path not in manifest.members:
            raise BundleError(f"the manifest names `{path}`, which is not in its list of members")
    if manifest.schema == BUNDLE_SCHEMA and (manifest.target is None or not manifest.variants):
        raise BundleError("the manifest of a bundle needs a target and a variant")
    for dim, sizes in manifest.buckets.items():
        declared = next((d for d in manifest.contract.dims if d.name == dim), None)
        if declared is None or list(sizes) != sorted(set(sizes)) or not all(declared.allows(s) for s in sizes):
            raise BundleError(f"the buckets of dim `{dim}` are not ascending sizes inside its range")
        if not sizes:
            raise BundleError(f"dim `{dim}` has an empty list of buckets")


__all__ = [
    "ConstantRef",
    "Golden",
    "Isa",
    "Manifest",
    "Member",
    "Producer",
    "Scalar",
    "Source",
    "Target",
    "Tolerance",
    "Variant",
    "decode",
    "encode",
    "json_schema",
]
