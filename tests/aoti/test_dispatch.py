"""Operators that torch's C interface has no function for: called by their names, in this process and in mctl-runner."""

import ctypes
import json
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.export.pt2_archive._package import load_pt2

from mctl.bundle_format.archive import open_bundle
from mctl.bundle_format.errors import ModelError
from mctl.bundle_format.manifest import Variant
from mctl.bundle_format.tensors import save_file
from mctl.runner import load, native
from mctl.runner.stopwatch import Ask, Failed, runner_stopwatch

from ..conftest import mctl

# Their arguments are of every kind: numbers, texts, lists, optional ones, views; their results too.
MODEL = """
import torch
import torch.nn.functional as F
from torch import nn


class Gain(nn.Module):
    def forward(self, a, b):
        return torch.linalg.solve(a, b.unsqueeze(-1))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = Gain()

    def forward(self, a, b, image):
        square = a @ a.mT + torch.eye(3)
        factor = torch.linalg.cholesky(square)
        median = a.transpose(1, 2).median(-1)
        return {
            "solved": self.gain(a, b),
            "triangular": torch.linalg.solve_triangular(factor, b.unsqueeze(-1), upper=False),
            "values": torch.linalg.eigh(square).eigenvalues,
            "singular": torch.linalg.svd(a).S,
            "upper": torch.linalg.qr(a, mode="r").R.abs(),
            "exponential": torch.matrix_exp(a * 0.1),
            "median": median.values,
            "where": median.indices,
            "spectrum": torch.fft.irfft(torch.fft.rfft(b, n=8) * 0.5, n=8),
            "smaller": F.interpolate(image, scale_factor=0.5, mode="bicubic", antialias=True),
        }


model = Model


def example_inputs():
    return torch.randn(4, 3, 3), torch.randn(4, 3), torch.randn(4, 1, 8, 8)
"""


def inputs(rows: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(rows)
    return {"a": torch.randn(rows, 3, 3), "b": torch.randn(rows, 3), "image": torch.randn(rows, 1, 8, 8)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, mctl_ok: Callable[..., object]) -> Path:
    """With `model.py`, `program.pt2` and `bundle.pt2`."""
    path = tmp_path_factory.mktemp("by-name")
    (path / "model.py").write_text(MODEL)
    mctl_ok("export", "model.py", "--dim", "batch=1:8", "-o", "program.pt2", cwd=path)
    mctl_ok("compile", "program.pt2", "-o", "bundle.pt2", "--standalone=auto", "--no-parity", cwd=path)
    return path


@pytest.fixture(scope="module")
def variant(folder: Path) -> Variant:
    with open_bundle(folder / "bundle.pt2") as archive:
        return archive.manifest.variants[0]


Eager = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def eager(folder: Path) -> Eager:
    model = runpy.run_path(str(folder / "model.py"))["model"]().eval()
    return lambda given: model(**given)


def close(got: torch.Tensor, wanted: torch.Tensor, name: str) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-4, msg=lambda text: f"{name}: {text}")


@pytest.mark.parametrize("rows", [1, 5, 8])
def test_in_this_process(folder: Path, eager: Eager, rows: int) -> None:
    got = load(folder / "bundle.pt2").call(inputs(rows))
    for name, wanted in eager(inputs(rows)).items():
        close(got[name], wanted, name)


def ask(folder: Path, given: dict[str, torch.Tensor]) -> Ask:
    tensors = {f"input.{name}": ("float32", tuple(t.shape), t.numpy().data) for name, t in given.items()}
    save_file(folder / "asked", tensors)
    return Ask(str(folder / "asked"), {"batch": len(given["a"])}, "", 0.0, calls=1, outputs=str(folder / "answered"))


def test_in_the_runner(folder: Path, eager: Eager) -> None:
    """An operator that fails is that call's error, in its own words; the next call is right."""
    from safetensors.torch import load_file

    with runner_stopwatch(native.find_runner(), folder / "bundle.pt2", native.find_libtorch(), 1) as process:
        with pytest.raises(Failed, match=r"input matrix is singular"):
            process.time(ask(folder, inputs(2) | {"a": torch.zeros(2, 3, 3)}))
        process.time(ask(folder, inputs(3)))
    got = load_file(folder / "answered")
    for name, wanted in eager(inputs(3)).items():
        close(got[f"output.{name}"], wanted, name)


def test_what_an_operator_raises_is_the_call_s_error(folder: Path) -> None:
    session = load(folder / "bundle.pt2")
    with pytest.raises(ModelError, match="The solver failed because the input matrix is singular"):
        session.call(inputs(2) | {"a": torch.zeros(2, 3, 3)})
    session.call(inputs(2))


def test_stock_torch_runs_it(folder: Path, eager: Eager) -> None:
    ctypes.CDLL(str(native.find_libtorch() / "libtorch_cpu.so"), ctypes.RTLD_GLOBAL)
    runner = load_pt2(str(folder / "bundle.pt2")).aoti_runners["dynamic"]
    got = runner.loader.boxed_run(list(inputs(4).values()))
    for tensor, (name, wanted) in zip(got, eager(inputs(4)).items(), strict=True):
        close(tensor, wanted, name)


def test_what_is_said_of_them(folder: Path, variant: Variant) -> None:
    assert {name for name in variant.imports if "::" in name} >= {"aten::_linalg_solve_ex", "aten::median.dim"}
    said = mctl("inspect", folder / "bundle.pt2").stdout
    assert "calls torch for " in said
    assert "`_linalg_solve_ex` (gain at model.py:9)" in said
    assert "`median.dim` (model.py:20)" in said


def test_the_refusal_names_operators_only(folder: Path, variant: Variant) -> None:
    (note,) = json.loads(mctl("inspect", folder / "bundle.pt2", "--json").stdout)["notes"]
    assert note.startswith("not standalone: the compiled model needs libtorch for ")
    assert "`_linalg_solve_ex` (gain at model.py:9)" in note
    assert not any(symbol in note for symbol in variant.imports if symbol.startswith(("torch_", "aoti_torch_")))
    assert "bmm" not in note and "view" not in note  # the shim has them
