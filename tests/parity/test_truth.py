"""Eager as it was exported: the recorded name, seed and weights, and a word where something has changed."""

from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from mctl.bundle_format.contract import Input, Output
from mctl.bundle_format.errors import UsageError
from mctl.export.source import load_source
from mctl.parity.truth import live

from .fakes import contract, subject

CODE = """
import torch
net = torch.nn.Linear(4, 4)
other = torch.nn.Identity()
example_inputs = (torch.zeros(2, 4),)
"""
X = torch.arange(8.0).reshape(2, 4)
MODEL = contract(
    inputs=(Input(name="input", dtype="float32", shape=("batch", 4)),),
    outputs=(Output(name="renamed", dtype="float32", shape=("batch", 4)),),
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.py"
    path.write_text(CODE)
    return path


def manifest_of(file: Path, **options: object):
    record = load_source(f"{file}:net", **options).record  # type: ignore[arg-type]
    return msgspec.structs.replace(subject(lambda i: i, model=MODEL).manifest, source=record)


def test_the_recorded_name_and_seed_are_used(file: Path) -> None:
    torch.manual_seed(7)
    expected = torch.nn.Linear(4, 4)(X)
    truth = live(str(file), None, manifest_of(file, seed=7))
    assert truth.reference({"input": X})["renamed"].equal(expected)
    assert truth.double({"input": X})["renamed"].dtype is torch.float64
    assert truth.label == "live eager of model.py:net" and truth.notes == ()
    assert live(f"{file}:other", None, manifest_of(file, seed=7)).reference({"input": X})["renamed"].equal(X)


def test_recorded_weights_are_found_beside_the_file(file: Path) -> None:
    weights = file.parent / "w.safetensors"
    save_file({"weight": torch.eye(4) * 2, "bias": torch.zeros(4)}, weights)
    manifest = manifest_of(file, weights=weights)
    assert live(str(file), None, manifest).reference({"input": X})["renamed"].equal(X * 2)
    moved = weights.rename(file.parent / "moved.safetensors")
    with pytest.raises(UsageError, match="which are not here"):
        live(str(file), None, manifest)
    assert live(str(file), moved, manifest).notes == ()  # by content


def test_what_has_changed_is_said(file: Path) -> None:
    weights = file.parent / "w.safetensors"
    save_file({"weight": torch.eye(4), "bias": torch.zeros(4)}, weights)
    manifest = manifest_of(file, weights=weights)
    save_file({"weight": torch.eye(4) * 3, "bias": torch.zeros(4)}, weights)
    file.write_text(CODE + "# edited\n")
    assert live(str(file), None, manifest).notes == (
        "`model.py` is not the file that was exported: its SHA-256 differs",
        "the weights `w.safetensors` are not those that were exported",
    )
