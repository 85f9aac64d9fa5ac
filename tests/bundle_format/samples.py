"""Small manifests and archives that the tests of this folder share."""

from collections.abc import Iterable
from pathlib import Path

from mctl.bundle_format import archive
from mctl.bundle_format.contract import Contract, Dim, Input, Output
from mctl.bundle_format.manifest import Manifest, Producer, Source

CONTRACT = Contract(
    dims=(Dim(name="batch", min=1, max=8),),
    inputs=(Input(name="x", dtype="float32", shape=("batch", 4)),),
    outputs=(Output(name="y", dtype="float32", shape=("batch", 2)),),
    batch_dim="batch",
)


def program_manifest() -> Manifest:
    return Manifest(
        schema="mctl.program/1",
        name="small",
        version="1",
        created="2026-01-02T03:04:05+00:00",
        producer=Producer(mctl="0.1.0", torch="2.13.0"),
        source=Source(file="small.py", sha256="0" * 64, model="model", seed=0),
        contract=CONTRACT,
        golden=(),
        tolerances={},
        members={},
    )


def write_program(path: Path, members: Iterable[tuple[str, archive.Data]] = (), top: str = "small") -> Manifest:
    return archive.write(path, top, members, program_manifest())
