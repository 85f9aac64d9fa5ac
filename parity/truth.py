"""What a compiled model is compared with: the live eager model, or the exported program run by torch."""

from dataclasses import dataclass
from pathlib import Path

from ..bundle_format.errors import UsageError
from ..bundle_format.manifest import Manifest
from ..export.program import Program, run_exported
from ..export.source import Source, eager, load_source
from .runs import Double, Reference


@dataclass(frozen=True, slots=True)
class Truth:
    """The model run by torch, the same in fp64, what to call it, and what was noticed."""

    reference: Reference
    double: Double
    label: str
    notes: tuple[str, ...] = ()


def live(spec: str, weights: Path | None, manifest: Manifest) -> Truth:
    """Eager from `MODEL.py[:NAME]`, made as the manifest records."""
    return live_source(recorded_source(spec, weights, manifest), manifest)


def recorded_source(spec: str, weights: Path | None, manifest: Manifest) -> Source:
    """`MODEL.py[:NAME]`, made as the manifest records: its seed, its weights (here or beside the file)."""
    recorded = manifest.source
    if spec.endswith(".py") or Path(spec).is_dir():
        spec = f"{spec}:{recorded.model}"
    file = Path(spec.rpartition(":")[0])
    weights = weights or _recorded_weights(manifest, file)
    return load_source(spec, weights=weights, seed=recorded.seed)


def live_source(source: Source, manifest: Manifest) -> Truth:
    """Eager from a loaded source, with a note on what has changed since the export."""
    contract = manifest.contract
    return Truth(
        Reference(lambda: eager(source, contract)),
        Double(lambda: eager(source, contract, double=True)),
        f"live eager of {source.record.file}:{source.record.model}",
        _changes(source, manifest),
    )


def exported(program: Program) -> Truth:
    """The exported program, run operator by operator by torch."""
    return Truth(
        Reference(lambda: run_exported(program)),
        Double(lambda: run_exported(program, double=True)),
        "the exported program, run by torch",
    )


def _recorded_weights(manifest: Manifest, file: Path) -> Path | None:
    name = manifest.source.weights
    if not name:
        return None
    for folder in (Path(), file.parent):
        if (folder / name).is_file():
            return folder / name
    raise UsageError(f"the bundle was exported with the weights `{name}`, which are not here", "give `--weights FILE`")


def _changes(source: Source, manifest: Manifest) -> tuple[str, ...]:
    was, now = manifest.source, source.record
    notes = []
    if was.sha256 != now.sha256:
        notes.append(f"`{now.file}` is not the file that was exported: its SHA-256 differs")
    if was.weights_sha256 != now.weights_sha256:
        notes.append(f"the weights `{now.weights or 'made by the seed'}` are not those that were exported")
    return tuple(notes)
