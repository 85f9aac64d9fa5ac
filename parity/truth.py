"""What a compiled model is compared with: the live eager model, or the exported program run by torch."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from ..bundle_format.contract import Contract
from ..bundle_format.errors import ModelError, UsageError
from ..bundle_format.manifest import Manifest
from ..export.program import Program, run_exported
from ..export.source import Source, eager, load_source
from .runs import Call, Double, Reference


@dataclass(frozen=True, slots=True)
class Truth:
    """The model run by torch, the same in fp64, what to call it, and what was noticed."""

    reference: Reference
    double: Double
    label: str
    notes: tuple[str, ...] = ()


def live(spec: str, weights: Path | None, manifest: Manifest) -> Truth:
    """Eager from `MODEL.py[:NAME]`, made as the manifest records: its seed, its weights (here or beside the file)."""
    recorded = manifest.source
    if spec.endswith(".py"):
        spec = f"{spec}:{recorded.model}"
    file = Path(spec.rpartition(":")[0])
    weights = weights or _recorded_weights(manifest, file)
    return live_source(load_source(spec, weights=weights, seed=recorded.seed), manifest)


def live_source(source: Source, manifest: Manifest) -> Truth:
    """Eager from a loaded source, with a note on what has changed since the export."""
    contract = manifest.contract

    def fresh() -> Call:  # a copy where calls leave traces
        model = copy.deepcopy(source.model) if contract.state else source.model
        return _renamed(eager(replace(source, model=model)), contract)

    def wide() -> Call:
        return _renamed(eager(replace(source, model=copy.deepcopy(source.model).double())), contract)

    label = f"live eager of {source.record.file}:{source.record.model}"
    return Truth(Reference(fresh), Double(wide), label, _changes(source, manifest))


def exported(program: Program) -> Truth:
    """The exported program, run operator by operator by torch."""
    return Truth(
        Reference(lambda: run_exported(program)),
        Double(lambda: run_exported(program, double=True)),
        "the exported program, run by torch",
    )


def _renamed(run: Call, contract: Contract) -> Call:
    """Outputs by the contract's names, which are in the order of eager's."""

    def call(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        outputs = list(run(inputs).values())
        if len(outputs) != len(contract.outputs):
            raise ModelError(f"eager gives {len(outputs)} outputs, the bundle {len(contract.outputs)}")
        return {declared.name: output for declared, output in zip(contract.outputs, outputs, strict=True)}

    return call


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
