"""What `inspect` tells of a program or bundle: the manifest and the directory, nothing hashed, no member decoded."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .archive import Archive
from .contract import DTYPES, Contract, range_text, signature
from .errors import printable
from .interface import operators, with_callers
from .layout import GOLDEN, HANDLER, ONNX, WEIGHTS
from .manifest import (
    Choice,
    Generation,
    Golden,
    Handler,
    Manifest,
    Member,
    OperatorLibrary,
    Producer,
    Source,
    Target,
    Timing,
    Tuning,
    Variant,
    code_of,
)
from .tensors import TensorEntry, read_header


@dataclass(frozen=True, slots=True)
class VariantSummary:
    """A compiled library: `bytes` of its file, how many constants it has, and what it imports of AOTI's C interface, of
    which `operators` are the operators of libtorch that were not compiled; `callers`: the modules that they come from.
    """

    name: str
    bytes: int
    covers: dict[str, tuple[int, int]]
    constants: int
    imports: tuple[str, ...]
    operators: tuple[str, ...]
    callers: dict[str, tuple[str, ...]]
    threads: int
    bf16: bool  # products of linear layers and convolutions
    own_bytes: int  # of the tensors that no other variant uses
    tuning_ms: int


@dataclass(frozen=True, slots=True)
class Host:
    """Can this machine run it, and why (not)?"""

    verdict: Literal["optimal", "runs", "recompile", "unsupported"]
    reason: str
    hint: str | None


@dataclass(frozen=True, slots=True)
class Summary:
    """Sizes are bytes. `sizes` adds up the members by what they are for; `digest` names the file's content."""

    file: str
    kind: Literal["bundle", "program"]
    bytes: int
    sizes: dict[str, int]
    digest: str
    name: str
    version: str
    created: str
    producer: Producer
    needs: tuple[str, ...]
    exporter: Producer | None
    source: Source
    target: Target | None
    parity: Literal["pass", "skipped"] | None
    standalone: bool
    host: Host | None
    contract: Contract
    buckets: dict[str, tuple[int, ...]]
    libraries: tuple[OperatorLibrary, ...]
    variants: tuple[VariantSummary, ...]
    tuning: Tuning | None
    golden: tuple[Golden, ...]
    generation: Generation | None
    handler: Handler | None
    preprocessing: tuple[str, ...]
    notes: tuple[str, ...]


def summarize(path: Path) -> Summary:
    """Reads the zip's directory and the manifest, and compares the target with this machine. Errors as Archive.open."""
    with Archive.open(path) as archive:
        manifest = archive.manifest
        return Summary(
            file=printable(str(path)),
            kind=archive.kind,
            bytes=path.stat().st_size,
            sizes=_sizes(manifest),
            digest=archive.digest,
            name=manifest.name,
            version=manifest.version,
            created=manifest.created,
            producer=manifest.producer,
            needs=manifest.needs,
            exporter=manifest.exporter,
            source=manifest.source,
            target=manifest.target,
            parity=manifest.parity,
            standalone=manifest.standalone,
            host=_host(manifest),
            contract=manifest.contract,
            buckets=manifest.buckets,
            libraries=manifest.libraries,
            variants=_variants(archive),
            tuning=manifest.tuning,
            golden=manifest.golden,
            generation=manifest.generation,
            handler=manifest.handler,
            preprocessing=tuple(manifest.preprocessing),
            notes=manifest.notes,
        )


def _variants(archive: Archive) -> tuple[VariantSummary, ...]:
    manifest = archive.manifest
    several = len(manifest.variants) > 1 and WEIGHTS in archive.members
    own = own_bytes(manifest, read_header(archive.view(WEIGHTS)) if several else {})
    return tuple(_variant(variant, manifest.members, own[variant.name]) for variant in manifest.variants)


def _variant(variant: Variant, members: dict[str, Member], own: int) -> VariantSummary:
    return VariantSummary(
        variant.name,
        members[variant.library].size,
        variant.covers,
        len(variant.constants),
        variant.imports,
        operators(variant.imports),
        variant.callers,
        variant.threads,
        variant.bf16,
        own,
        variant.tuning_ms,
    )


def own_bytes(manifest: Manifest, stored: Mapping[str, TensorEntry]) -> dict[str, int]:
    """By variant: the bytes of the tensors that no other variant uses."""
    users: dict[str, set[str]] = {}
    for variant in manifest.variants:
        for ref in variant.constants.values():
            users.setdefault(ref.tensor, set()).add(variant.name)
    own = {variant.name: 0 for variant in manifest.variants}
    for tensor, names in users.items():
        if len(names) == 1 and tensor in stored:
            own[next(iter(names))] += stored[tensor].end - stored[tensor].begin
    return own


def _host(manifest: Manifest) -> Host | None:
    if manifest.target is None:
        return None
    from .host import host_verdict

    verdict = host_verdict(manifest)
    return Host(verdict.kind, verdict.reason, verdict.hint)


def _sizes(manifest: Manifest) -> dict[str, int]:
    libraries = set(code_of(manifest))
    sizes = {"code": 0, "weights": 0, "program": 0, "golden": 0, "onnx": 0, "other": 0}
    for path, member in manifest.members.items():
        if path in libraries:
            sizes["code"] += member.size
        elif path == WEIGHTS or path.startswith("data/weights/"):
            sizes["weights"] += member.size
        elif path.startswith("models/"):
            sizes["program"] += member.size
        elif path.startswith(GOLDEN):
            sizes["golden"] += member.size
        elif path == ONNX:
            sizes["onnx"] += member.size
        else:
            sizes["other"] += member.size
    return {what: size for what, size in sizes.items() if size}


# --- as text -----------------------------------------------------------------------------------------------------


def lines(summary: Summary) -> list[str]:
    """The summary for a person: a title, then rows of a label and a value."""
    rows = [*_origin_rows(summary), *_contract_rows(summary)]
    if summary.generation is not None:
        rows += _generation_rows(summary.generation, summary.kind == "bundle")
    if summary.handler is not None:
        rows += _handler_rows(summary.handler)
    rows += _content_rows(summary)
    width = max(len(label) for label, _ in rows)
    what = {"bundle": "a bundle", "program": "a program that is not compiled"}[summary.kind]
    below = "\n" + " " * (width + 2)  # a line break in a note does not start a row
    texts = [f"{label:{width}}  {value}".replace("\n", below).rstrip() for label, value in rows]
    return [f"{summary.file}: {what} ({human_bytes(summary.bytes)})", "", *texts]


Rows = list[tuple[str, str]]


def _origin_rows(summary: Summary) -> Rows:
    made, source, target = summary.producer, summary.source, summary.target
    rows = [
        ("model", f"{summary.name}, version {summary.version}"),
        ("digest", summary.digest),
        ("made", f"{summary.created} by mctl {made.mctl}, torch {made.torch}" + _with(", Python ", made.python)),
        ("source", f"{source.file}:{source.model}" + _with(", weights ", source.weights)),
    ]
    if target:
        needs = f"{target.os} {target.arch}, {target.isa}" + _with(", glibc ", target.glibc)
        rows += [("runs on", needs + _with(", libstdc++ ", target.glibcxx))]
        rows += [("needs", ", ".join(summary.needs))] if summary.needs else []
        rows += [("compiled by", made.compiler)] if made.compiler else []
        rows += [("parity", summary.parity or "never checked")]
    if summary.host:
        rows += [("this host", f"{summary.host.verdict}: {summary.host.reason}")]
        rows += [("", summary.host.hint)] if summary.host.hint else []
    return rows


def _contract_rows(summary: Summary) -> Rows:
    contract = summary.contract
    rows: Rows = []
    for dim in contract.dims:
        text = f"{dim.name} {dim.allowed}" + (", batched" if dim.name == contract.batch_dim else "")
        buckets = summary.buckets.get(dim.name)
        rows.append(("dim", text + (f", buckets {' '.join(map(str, buckets))}" if buckets else "")))
    if contract.batch_dim is None:
        rows.append(("batching", "none" + _with(": ", contract.batch_note)))
    for declared in contract.inputs:
        text = f"{declared.name} {signature(declared)}"
        text += f", values {range_text(declared)}" if declared.range else ""
        rows.append(("input", text + (f", padded with {declared.pad}" if declared.pad is not None else "")))
    rows += [("constant", f"{constant.name} = {constant.value!r}") for constant in contract.constants]
    rows += [("output", f"{output.name} {signature(output)}") for output in contract.outputs]
    rows += [("state", f"{state.name} {signature(state)}") for state in contract.state]
    return rows + ([("random", "the model draws random numbers")] if contract.random else [])


def _generation_rows(generation: Generation, compiled: bool) -> Rows:
    """What a model that continues text is like."""
    of_token = sum(group.layers * group.heads * (group.key_size + group.value_size) for group in generation.groups)
    size = human_bytes(of_token * DTYPES[generation.cache_dtype].size)
    text = f"{len(generation.layers)} layers, vocabulary {generation.vocabulary:,}, context {generation.context:,}"
    rows = [("text", text), ("cache", f"{size} a token, {generation.cache_dtype}")]
    if windows := sorted({layer.window for layer in generation.layers if layer.window}):
        rows.append(("windows", ", ".join(map(str, windows))))
    rows += [("ends with", ", ".join(map(str, generation.eos)))] if generation.eos else []
    same = "the same in any batch, to the bit" if generation.invariant else "may depend on what else is in a batch"
    return rows + ([("its tokens", same)] if compiled else [])


def _handler_rows(handler: Handler) -> Rows:
    """What answers raw requests; loud where that is code which the file brings."""
    rows: Rows = [("handler", f"{handler.source.partition(':')[2]}, mctl's own")]
    if not handler.is_stock:
        text = f"PYTHON CODE that this file brings: {handler.source.removeprefix(HANDLER)}"
        rows = [("HANDLER", text), ("", "a server runs it only with `--allow-handler`: read it first")]
    rows += [("reads", ", ".join(name.removeprefix(HANDLER) for name in handler.assets))] if handler.assets else []
    tried = ", ".join(filter(None, (f"Python {handler.python}" if handler.python else "", *handler.requirements)))
    return rows + ([("tried with", tried)] if tried else [])


def _content_rows(summary: Summary) -> Rows:
    rows: Rows = [
        ("library", f"{library.member.rpartition('/')[2]}, {', '.join(library.operators)}")
        for library in summary.libraries
    ]
    for variant in summary.variants:
        whole = all(variant.covers[dim.name] == (dim.min, dim.max) for dim in summary.contract.dims)
        covers = ", ".join(f"{dim} {low}..{high}" for dim, (low, high) in variant.covers.items())
        text = f"{variant.name}, {human_bytes(variant.bytes)}, {'all sizes' if whole else covers}"
        text += ", products in bfloat16" if variant.bf16 else ""
        text += f", {variant.constants} constants"
        text += f", {human_bytes(variant.own_bytes)} of its own" if variant.own_bytes else ""
        rows.append(("variant", f"{text}, {_needs(summary, variant)}"))
    rows += _tuning_rows(summary.tuning) if summary.tuning else []
    rows += [("cost" if at == 0 else "", line) for at, line in enumerate(tuning_costs(summary))]
    if summary.golden:
        rows.append(("golden cases", "; ".join(golden.name for golden in summary.golden)))
    if summary.preprocessing:
        rows.append(("preprocessing", ", ".join(summary.preprocessing)))
    rows.append(("sizes", ", ".join(f"{what} {human_bytes(size)}" for what, size in summary.sizes.items())))
    return rows + [("note", note) for note in summary.notes]


def tuning_lines(tuning: Tuning) -> list[str]:
    """What was measured where, and what was chosen, for a person."""
    return [f"{label:8}  {text}".rstrip() for label, text in _tuning_rows(tuning)]


def _tuning_rows(tuning: Tuning) -> Rows:
    machine = tuning.machine
    where = f"{machine.cpu or 'an unnamed CPU'}, {machine.cores} core{'s' if machine.cores != 1 else ''}"
    rows = [("tuned on", f"{where}{_with(', ', machine.isa)}, differences below {tuning.noise:.1%} are noise")]
    taken = {_place(timing): timing.median_ns for timing in tuning.timings}
    table = [("sizes", "threads", "variant", "time", "")]
    for choice in tuning.choices:
        sizes = ",".join(f"{dim}={size}" for dim, size in choice.dims.items()) or "fixed"
        ns = taken.get(_place(choice))
        time = "" if ns is None else f"{ns / 1000:.4g} us"
        table.append((sizes, str(choice.threads), choice.variant, time, "" if choice.pad else "not padded to"))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    texts = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
    return [*rows, *(("choices" if at == 0 else "", text) for at, text in enumerate(texts))]


def tuning_costs(summary: Summary) -> list[str]:
    """What tuning took, and what each variant that came of it bought where it gains the most."""
    tuning = summary.tuning
    if tuning is None or not tuning.total_ms:
        return []
    lines = [f"tuning took {tuning.total_ms / 1000:.0f} s"]
    taken = {_place(timing): timing.median_ns for timing in tuning.timings}
    base = summary.variants[0].name
    for variant in summary.variants[1:]:
        gains = [
            (taken[_place(choice, base)] / taken[_place(choice)], choice)
            for choice in tuning.choices
            if choice.variant == variant.name and {_place(choice), _place(choice, base)} <= taken.keys()
        ]
        if gains:
            gain, choice = max(gains, key=lambda pair: pair[0])
            spent = f"{variant.tuning_ms / 1000:.0f} s and {human_bytes(variant.bytes + variant.own_bytes)}"
            lines.append(f"{variant.name}: {_sizes_of(choice)} is {gain:.2f} times as fast, for {spent}")
    return lines


def _place(point: Choice | Timing, variant: str = "") -> tuple[object, ...]:
    return point.threads, variant or point.variant, *sorted(point.dims.items())


def _sizes_of(choice: Choice) -> str:
    return ",".join(f"{dim}={size}" for dim, size in choice.dims.items()) or "the fixed size"


def _needs(summary: Summary, variant: VariantSummary) -> str:
    from .host import lacking_operators

    if summary.standalone:
        return "needs no libtorch"
    if lacking := lacking_operators(variant.imports):
        return f"calls torch for {', '.join(with_callers(name, variant.callers.get(name, ())) for name in lacking)}"
    if variant.operators:
        return "calls operators that mctl's shim has too (`compile --standalone`)"
    return "calls no operator of libtorch"


def _with(before: str, text: str) -> str:
    return before + text if text else ""


def human_bytes(size: float) -> str:
    """`512 B`, `1.5 kB`, `91.3 MB`: powers of ten."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5 or unit == "GB":
            break
        size /= 1000
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
