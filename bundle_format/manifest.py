"""The manifest: everything that is known about a program or a bundle, strict both ways.

SPEC.md says what each field means; `mctl.bundle_format.manifest.json_schema()` makes the JSON schema from these types.
"""

import re
import unicodedata
from math import isfinite
from typing import Annotated, Any, Literal

import msgspec

from . import contract as contracts
from .contract import Contract, Strict, is_name
from .errors import BundleError, ContractError, NewerError, UsageError
from .layout import (
    BUNDLE_SCHEMA,
    GOLDEN,
    HANDLER,
    LIBRARIES,
    MAX_JSON_DEPTH,
    MAX_MANIFEST,
    NEEDING_SCHEMA,
    NEEDS,
    PROGRAM_SCHEMA,
    VARIANTS,
    WEIGHTS,
    path_fault,
)
from .strict_json import refuse_ambiguity, refuse_depth, refuse_many_parts

GENERATE = "generate"  # the need of a bundle that continues text
STOCK = "stock:"  # + the name of a handler that is mctl's own

Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]  # bytes, elements, sizes: signed 64 bits in C++
Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$", max_length=64)]  # SHA-256
Threads = Annotated[int, msgspec.Meta(ge=1, le=4096)]
Isa = Literal["x86-64-v2", "x86-64-v3", "x86-64-v4", "aarch64"]


class Member(Strict, frozen=True):
    """Size in bytes and SHA-256 (hex) of one member; keyed by its path below the top folder."""

    size: Count
    sha256: Digest


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
    seed: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
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
    stride: tuple[Count, ...] | None = None
    state: bool = False  # the model writes to it: every worker has a copy of its own


class OperatorLibrary(Strict, frozen=True):
    """A C++ library with operators that the model calls by their names. It is loaded before the variants."""

    member: str  # path below the top folder
    operators: tuple[str, ...]  # that it registers: "myops::twice"


class Variant(Strict, frozen=True):
    """One compiled library. `constants` is keyed by the original (fully qualified) name of each constant."""

    name: str
    library: str  # path below the top folder
    covers: dict[str, tuple[Count, Count]]  # every dim -> smallest and largest size
    constants: dict[str, ConstantRef]
    imports: tuple[str, ...]  # what it needs of libtorch: symbols, and operators by their names ("aten::median.dim")
    threads: Annotated[int, msgspec.Meta(ge=0, le=4096)] = 0  # 0: the caller's number
    bf16: bool = False  # linear layers and convolutions multiply in bfloat16, and sum in float32
    tuning_ms: Count = 0  # what compiling and measuring it took, where it is there by tuning
    # an operator of libtorch that it calls -> where in the model it is called; a record for people
    callers: dict[str, tuple[str, ...]] = msgspec.field(default_factory=dict)


class Tolerance(Strict, frozen=True):
    """|got - wanted| <= atol + rtol * |wanted| for one output."""

    rtol: float
    atol: float


class Golden(Strict, frozen=True):
    """One stored case: tensors `input.<name>` and `output.<name>` of eager, at these sizes."""

    name: str
    member: str  # path below the top folder
    dims: dict[str, Count]


class Measured(Strict, frozen=True):
    """One point of the curve: what a call of these sizes took on `threads` threads, the median of several."""

    dims: dict[str, Count]
    threads: Threads
    median_us: Count


class Machine(Strict, frozen=True):
    """Where variants were measured: the CPU's name, the cores that could be used, the ISA level."""

    cpu: str
    cores: Threads
    isa: str = ""


class Timing(Strict, frozen=True):
    """What a call of these sizes took with one variant, the median of several."""

    dims: dict[str, Count]
    threads: Threads
    variant: str
    median_ns: Count


class Choice(Strict, frozen=True):
    """Which variant runs at these sizes on `threads` threads.

    `pad`: sizes below that have no choice of their own are padded to these; else they run as they are.
    """

    dims: dict[str, Count]
    threads: Threads
    variant: str
    pad: bool = True


class Tuning(Strict, frozen=True):
    """What was measured to choose among the variants. `choices` are looked up in their order: lookup.py."""

    machine: Machine
    noise: Annotated[float, msgspec.Meta(ge=0)]  # by which share a variant differs from itself
    choices: tuple[Choice, ...]
    timings: tuple[Timing, ...] = ()
    threads: Annotated[int, msgspec.Meta(ge=0, le=4096)] = 0  # the best number for the largest sizes; 0: not known
    total_ms: Count = 0  # what compiling and measuring took, of variants that were not kept too; 0: not known


class CacheGroup(Strict, frozen=True):
    """Layers whose keys and values have the same sizes: they lie in one tensor, the input `kv<index>`."""

    layers: Annotated[int, msgspec.Meta(ge=1, le=65536)]
    heads: Annotated[int, msgspec.Meta(ge=1, le=65536)]  # of keys
    key_size: Annotated[int, msgspec.Meta(ge=1, le=65536)]
    value_size: Annotated[int, msgspec.Meta(ge=1, le=65536)]


class AttentionLayer(Strict, frozen=True):
    """One layer's attention: a query sees `window` keys up to its own, or all of them (0)."""

    group: Count
    window: Count = 0
    softcap: Annotated[float, msgspec.Meta(ge=0)] = 0.0  # scores are softcap * tanh(score / softcap); 0: as they are
    sinks: bool = False  # each head has one more score, without a value


class Generation(Strict, frozen=True):
    """A model that continues text, as one step over the tokens of many requests: SPEC.md, "Generation"."""

    vocabulary: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
    context: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]  # tokens of one request, at most
    groups: tuple[CacheGroup, ...]
    layers: tuple[AttentionLayer, ...]
    eos: tuple[Count, ...] = ()  # tokens that end a text
    cache_dtype: Literal["float32", "bfloat16"] = "float32"
    block: Literal[16] = 16  # positions
    invariant: bool = False  # parity saw the same bits however steps were made up


class Handler(Strict, frozen=True):
    """What makes tensors of raw requests and answers of tensors: Python code that the bundle brings, or names.

    `source`: `stock:NAME`, which is mctl's own code, or the member that holds the code.
    """

    source: str
    assets: tuple[str, ...] = ()  # members that it reads: a tokenizer, labels
    requirements: tuple[str, ...] = ()  # Python packages as pip names them: "tokenizers==0.23.3"
    python: str = ""  # that it was tried with
    golden: str = ""  # the member with golden requests, one JSON object a line

    @property
    def is_stock(self) -> bool:
        return self.source.startswith(STOCK)


class Manifest(Strict, frozen=True):
    """Of a bundle (`mctl.bundle/1`, or `/2` if it has `needs`) or a program (`mctl.program/1`: nothing compiled)."""

    schema: Literal["mctl.bundle/1", "mctl.bundle/2", "mctl.program/1"]
    name: str
    version: str
    created: str  # ISO 8601, UTC
    producer: Producer
    source: Source
    contract: Contract
    golden: tuple[Golden, ...]
    tolerances: dict[str, Tolerance]  # by output
    members: dict[str, Member]  # every member but the manifest itself
    needs: tuple[str, ...] = ()  # what a reader has to know to run it: names of `layout.NEEDS`
    exporter: Producer | None = None  # what made the program, in a bundle
    target: Target | None = None
    # dim -> the sizes that are served exactly, ascending up to the dim's maximum
    buckets: dict[str, tuple[Count, ...]] = msgspec.field(default_factory=dict)
    variants: tuple[Variant, ...] = ()
    curve: tuple[Measured, ...] = ()  # what batches cost: a server begins with it
    tuning: Tuning | None = None
    libraries: tuple[OperatorLibrary, ...] = ()  # a bundle that has some needs "libraries"
    parity: Literal["pass", "skipped"] | None = None
    standalone: bool = False  # checked without libtorch: mctl's own C library has all that the variants import
    generation: Generation | None = None  # it continues text
    handler: Handler | None = None  # it takes raw requests; a bundle that has one needs "handler"
    preprocessing: dict[str, Any] = msgspec.field(default_factory=dict)  # a free record, never executed
    notes: tuple[str, ...] = ()  # what export or compile had to say

    @property
    def kind(self) -> Literal["bundle", "program"]:
        return "program" if self.schema == PROGRAM_SCHEMA else "bundle"


def code_of(manifest: Manifest) -> tuple[str, ...]:
    """The members that are machine code."""
    return (*(library.member for library in manifest.libraries), *(variant.library for variant in manifest.variants))


def needing(manifest: Manifest, need: str) -> Manifest:
    """The manifest of a bundle that only a reader who knows `need` may run: that is `mctl.bundle/2`."""
    needs = tuple(sorted({*manifest.needs, need}))
    return msgspec.structs.replace(manifest, schema=NEEDING_SCHEMA, needs=needs)


def with_needs(manifest: Manifest) -> Manifest:
    """The manifest with what its contract needs of a reader."""
    bounds = [bound for declared in manifest.contract.inputs for bound in declared.range or ()]
    return needing(manifest, "ranges-over-dims") if any(isinstance(bound, str) for bound in bounds) else manifest


def encode(manifest: Manifest) -> bytes:
    """Readable JSON, the same bytes for the same manifest."""
    return msgspec.json.format(msgspec.json.encode(manifest, order="sorted"), indent=1) + b"\n"


def decode(data: bytes) -> Manifest:
    """A sound manifest, or a BundleError that says which field is wrong; NewerError where a newer mctl is needed."""
    if len(data) > MAX_MANIFEST:
        raise BundleError(f"the manifest has {len(data)} bytes, allowed {MAX_MANIFEST}")
    try:
        refuse_many_parts(data)
        _check_head(msgspec.json.decode(data, type=_Head))
        manifest = msgspec.json.decode(data, type=Manifest)
        refuse_depth(manifest.preprocessing, depth=2)  # the one field whose depth its type does not fix
        refuse_ambiguity(data)
        contracts.validate(manifest.contract)
    except (msgspec.MsgspecError, ContractError, ValueError) as error:
        raise BundleError(f"the manifest is not valid: {str(error)[:512]}") from error
    except RecursionError as error:
        raise BundleError(f"the manifest is not valid: it nests more than {MAX_JSON_DEPTH} levels deep") from error
    _validate(manifest)
    return manifest


def json_schema() -> dict[str, Any]:
    """The JSON schema (2020-12) of the manifest."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **msgspec.json.schema(Manifest)}


class _Head(msgspec.Struct):
    """What is read first: a manifest with a need that is not known may hold anything else."""

    schema: str
    needs: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    producer: Any = None


def _check_head(head: _Head) -> None:
    if head.schema not in (BUNDLE_SCHEMA, NEEDING_SCHEMA, PROGRAM_SCHEMA):
        hint = "it was made by another version of mctl: use that one, or make the file again"
        raise NewerError(f"has the unknown manifest schema `{head.schema[:64]}`", hint)
    if head.needs is msgspec.UNSET:
        return
    if head.schema != NEEDING_SCHEMA:
        raise ValueError(f"only `{NEEDING_SCHEMA}` has `needs`")
    for need in head.needs:
        if need not in NEEDS:
            maker = str(head.producer.get("mctl"))[:32] if isinstance(head.producer, dict) else "?"
            hint = f"it was made by mctl {maker}: use that one or a newer one"
            raise NewerError(f"needs `{need[:64]}`, which this mctl does not have", hint)


_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z")


def checked_name(name: str) -> str:
    """A model's name as a user gave it. UsageError where it cannot be one."""
    if not _MODEL_NAME.match(name):
        raise UsageError(
            f"`{name}` cannot be the name of a model",
            "use letters, digits, `.`, `_` and `-`, at most 128 of them, first a letter or digit",
        )
    return name


def name_from(text: str) -> str:
    """A name that a model may have, close to `text`: `mon modèle` gives `mon_modele`."""
    bare = "".join(letter for letter in unicodedata.normalize("NFKD", text) if not unicodedata.combining(letter))
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", bare).strip("._-")[:128] or "model"


def _validate(manifest: Manifest) -> None:
    if not is_name(manifest.name) or not is_name(manifest.version):
        raise BundleError("name and version of the manifest have letters, digits, `_`, `.` and `-` only")
    for path in manifest.members:
        if fault := path_fault(path):
            raise BundleError(f"the manifest names the path `{path[:128]}`, which is not allowed: {fault}")
    _unique("golden case", [golden.name for golden in manifest.golden])
    _unique("variant", [variant.name for variant in manifest.variants])
    for library in manifest.libraries:
        _listed(manifest, library.member, LIBRARIES)
    if manifest.handler is not None:
        _validate_handler(manifest, manifest.handler)
    for golden in manifest.golden:
        _validate_golden(manifest, golden)
    for variant in manifest.variants:
        _validate_variant(manifest, variant)
    for point in manifest.curve:
        _validate_sizes(manifest, point.dims, "a point of the curve")
    if manifest.tuning is not None:
        _validate_tuning(manifest, manifest.tuning)
    for dim, sizes in manifest.buckets.items():
        _validate_buckets(manifest.contract, dim, sizes)
    if manifest.generation is not None:
        _validate_generation(manifest, manifest.generation)
    outputs = {output.name for output in manifest.contract.outputs}
    for name, tolerance in manifest.tolerances.items():
        sound = tolerance.rtol >= 0 and tolerance.atol >= 0 and isfinite(tolerance.rtol) and isfinite(tolerance.atol)
        if name not in outputs or not sound:
            raise BundleError(f"the tolerance of output `{name[:128]}` is not sound")
    if manifest.kind == "bundle":
        _validate_bundle(manifest)
    elif any((manifest.target, manifest.variants, manifest.buckets, manifest.curve, manifest.tuning, manifest.parity)):
        raise BundleError("the manifest of a program has no target, variants, buckets, curve, tuning or parity")
    elif manifest.standalone:
        raise BundleError("a program is not `standalone`: that is said of compiled code")


def _validate_bundle(manifest: Manifest) -> None:
    if manifest.target is None or not manifest.variants:
        raise BundleError("the manifest of a bundle needs a target and a variant")
    if manifest.libraries and "libraries" not in manifest.needs:
        raise BundleError("the manifest lists libraries, which are no need of it")
    if manifest.handler and "handler" not in manifest.needs:
        raise BundleError("the manifest has a handler, which is no need of it")
    whole = {dim.name: (dim.min, dim.max) for dim in manifest.contract.dims}
    if all(variant.covers != whole for variant in manifest.variants):
        raise BundleError("no variant covers the whole contract")


def _validate_handler(manifest: Manifest, handler: Handler) -> None:
    for member in (*([] if handler.is_stock else [handler.source]), *handler.assets):
        _listed(manifest, member, HANDLER)
    if handler.golden:
        _listed(manifest, handler.golden, HANDLER)


def _validate_golden(manifest: Manifest, golden: Golden) -> None:
    _listed(manifest, golden.member, GOLDEN)
    _validate_sizes(manifest, golden.dims, f"golden case `{golden.name}`")


def _validate_sizes(manifest: Manifest, dims: dict[str, int], where: str) -> None:
    declared = {dim.name: dim for dim in manifest.contract.dims}
    if dims.keys() != declared.keys() or not all(declared[d].allows(size) for d, size in dims.items()):
        raise BundleError(f"{where} does not give each dim a size inside its range")


def _validate_tuning(manifest: Manifest, tuning: Tuning) -> None:
    if not isfinite(tuning.noise):
        raise BundleError("the noise of the tuning is no finite number")
    covers = {variant.name: variant.covers for variant in manifest.variants}
    for what, points in (("a choice", tuning.choices), ("a timing", tuning.timings)):
        seen = set()
        for point in points:
            _validate_sizes(manifest, point.dims, what)
            ranges = covers.get(point.variant)
            if ranges is None or not all(ranges[d][0] <= size <= ranges[d][1] for d, size in point.dims.items()):
                raise BundleError(f"{what} names the variant `{point.variant[:128]}`, which does not cover its sizes")
            key = (point.threads, point.variant if isinstance(point, Timing) else "", *sorted(point.dims.items()))
            if key in seen:
                raise BundleError(f"{what} is there twice")
            seen.add(key)


def _validate_generation(manifest: Manifest, generation: Generation) -> None:
    if manifest.kind == "bundle" and GENERATE not in manifest.needs:
        raise BundleError(f"a bundle that continues text needs `{GENERATE}`")
    of_group = [sum(layer.group == at for layer in generation.layers) for at in range(len(generation.groups))]
    if of_group != [group.layers for group in generation.groups] or sum(of_group) != len(generation.layers):
        raise BundleError("the layers that generate do not fit the groups of their caches")
    shapes = {declared.name: declared.shape for declared in manifest.contract.inputs}
    for at, group in enumerate(generation.groups):
        size = generation.block * (group.key_size + group.value_size)
        if shapes.get(f"kv{at}") != (group.layers, "pool", group.heads, size):
            raise BundleError(f"the contract's input `kv{at}` is not the cache of its group")
    if any(token >= generation.vocabulary for token in generation.eos):
        raise BundleError("a token that ends a text is not in the vocabulary")


def _validate_variant(manifest: Manifest, variant: Variant) -> None:
    where = f"variant `{variant.name}`"
    _listed(manifest, variant.library, f"{VARIANTS}{variant.name}/")
    declared = {dim.name: dim for dim in manifest.contract.dims}
    if variant.covers.keys() != declared.keys():
        raise BundleError(f"{where} does not say which sizes of each dim it covers")
    for dim, (low, high) in variant.covers.items():
        if not declared[dim].min <= low <= high <= declared[dim].max:
            raise BundleError(f"{where} covers sizes of dim `{dim}` outside its range")
    if variant.constants and WEIGHTS not in manifest.members:
        raise BundleError(f"{where} has constants, but the manifest lists no `{WEIGHTS}`")


def _validate_buckets(contract: Contract, dim: str, sizes: tuple[int, ...]) -> None:
    declared = next((d for d in contract.dims if d.name == dim), None)
    if declared is None or list(sizes) != sorted(set(sizes)) or not all(declared.allows(s) for s in sizes):
        raise BundleError(f"the buckets of dim `{dim[:128]}` are not ascending sizes inside its range")
    if not sizes or sizes[-1] != declared.max:
        raise BundleError(f"the buckets of dim `{dim}` do not end with its maximum, {declared.max}")


def _listed(manifest: Manifest, path: str, folder: str) -> None:
    if path not in manifest.members or not path.startswith(folder):
        raise BundleError(f"the manifest names `{path[:128]}`, which is not a member listed under `{folder}`")


def _unique(what: str, names: list[str]) -> None:
    seen = set()
    for name in names:
        if path_fault(name) or "/" in name or name in seen:  # it is a part of its member's path
            raise BundleError(f"the name of {what} `{name[:128]}` is not allowed, or there twice")
        seen.add(name)
