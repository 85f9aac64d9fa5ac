"""Requests of one row with the outputs that they should get: the golden rows of a bundle."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import bodies
import load
import numpy as np

from mctl.bundle_format.archive import open_bundle
from mctl.bundle_format.manifest import Manifest
from mctl.export.golden import Case, load_golden
from mctl.runner.session import Session

PER_CASE = 8  # rows that are taken of a golden case


@dataclass(frozen=True, slots=True)
class Row:
    """Inputs by name, [1, …] along the batch, and the outputs one after another, flat float32."""

    inputs: dict[str, np.ndarray]
    outputs: np.ndarray


@dataclass(frozen=True, slots=True)
class Examples:
    """What is sent to a model and how exact its answers have to be."""

    manifest: Manifest
    rows: tuple[Row, ...]

    @classmethod
    def of(cls, bundle: Path) -> Self:
        """The golden rows, with eager's outputs. All outputs have to be float32."""
        with open_bundle(bundle) as archive:
            rows = [row for case in load_golden(archive) for row in _rows(case, archive.manifest)]
            return cls(archive.manifest, tuple(rows))

    @property
    def rtol(self) -> float:
        return max(tolerance.rtol for tolerance in self.manifest.tolerances.values())

    @property
    def atol(self) -> float:
        return max(tolerance.atol for tolerance in self.manifest.tolerances.values())

    @property
    def infer_path(self) -> str:
        return f"/v2/models/{self.manifest.name}/infer"

    def sized(self, sizes: Mapping[str, int], session: Session) -> tuple[Row, ...]:
        """The rows at these sizes of dims besides the batch: golden ones that have them, else longer ones cut.

        What the cut ones should get comes from the bundle in this process, which has to be right on the golden rows.
        """
        if not sizes:
            return self.rows
        for row in self.rows:
            np.testing.assert_allclose(_run(session, row.inputs), row.outputs, self.rtol, self.atol)
        cut = [_cut(row.inputs, self.manifest, sizes) for row in self.rows]
        fitting = [inputs for inputs in cut if _sizes(inputs, self.manifest).items() >= sizes.items()]
        return tuple(Row(inputs, _run(session, inputs)) for inputs in fitting)

    def cases(self, headers: Mapping[str, str]) -> list[load.Case]:
        """The golden rows for the load generator, as binary tensors."""
        made = []
        for row in self.rows:
            body, fields = bodies.write_oip_binary(row.inputs)
            made.append(
                load.Case(load.http_request(self.infer_path, body, {**fields, **headers}), row.outputs.tobytes())
            )
        return made


def _rows(case: Case, manifest: Manifest) -> list[Row]:
    batch = manifest.contract.batch_dim
    assert batch is not None, "only models whose requests can be joined are measured"
    inputs = {name: tensor.numpy() for name, tensor in case.inputs.items()}
    outputs = [case.outputs[declared.name].numpy() for declared in manifest.contract.outputs]
    return [
        Row({name: array[i : i + 1] for name, array in inputs.items()}, _flat([array[i] for array in outputs]))
        for i in range(min(case.dims[batch], PER_CASE))
    ]


def _flat(outputs: list[np.ndarray]) -> np.ndarray:
    assert all(array.dtype == np.float32 for array in outputs), "only models with float32 outputs are measured"
    return np.concatenate([array.reshape(-1) for array in outputs])


def _run(session: Session, inputs: Mapping[str, np.ndarray]) -> np.ndarray:
    return _flat([np.asarray(array) for array in session.call(inputs).values()])


def _sizes(inputs: Mapping[str, np.ndarray], manifest: Manifest) -> dict[str, int]:
    """The size of each dim in a row."""
    axes = [(d.name, axis, dim) for d in manifest.contract.inputs for axis, dim in enumerate(d.shape)]
    return {dim: inputs[name].shape[axis] for name, axis, dim in axes if isinstance(dim, str)}


def _cut(inputs: Mapping[str, np.ndarray], manifest: Manifest, sizes: Mapping[str, int]) -> dict[str, np.ndarray]:
    """The start of each axis whose dim has a size in `sizes`."""
    cut = {}
    for declared in manifest.contract.inputs:
        within = tuple(slice(sizes.get(dim) if isinstance(dim, str) else None) for dim in declared.shape)
        cut[declared.name] = np.ascontiguousarray(inputs[declared.name][within])
    return cut
