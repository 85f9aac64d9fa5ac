"""Real compiled code with one fault each: what gets through the gate, and what does not."""

import shutil
import sys
from contextlib import nullcontext
from pathlib import Path

import msgspec
import pytest
import torch

from mctl.aoti.compiler import CompileOptions
from mctl.bundle_format.archive import open_bundle, open_program, rewrite
from mctl.bundle_format.contract import Dim, Input, Output
from mctl.bundle_format.manifest import Tolerance
from mctl.export.program import ExportRequest, export_model
from mctl.parity import runs
from mctl.parity.check import check_bundle
from mctl.parity.judge import Comparison
from mctl.parity.report import Report, Result
from mctl.parity.truth import live
from mctl.tuning import gate
from mctl.tuning.gate import FailedError, compile_checked

from ..parity.fakes import subject
from ..parity.faults import with_weights


def quiet(text: str) -> None:
    pass


def exported(folder: Path, code: str, **request: object) -> Path:
    """The program of a model file."""
    (folder / "model.py").write_text(code)
    path = folder / "program.pt2"
    export_model(ExportRequest(f"{folder / 'model.py'}", path, **request), quiet)  # type: ignore[arg-type]
    return path


def verdicts(report: Report) -> dict[str, str]:
    return {result.case: result.verdict for result in report.results}


# --- weights -----------------------------------------------------------------------------------------------------


def test_one_flipped_weight(mlp_bundle: Path, tmp_path: Path) -> None:
    def flip(name: str, tensor: torch.Tensor) -> None:
        if tensor.dim() >= 2 and not flipped:
            flipped.append(name)
            tensor.view(-1)[tensor.abs().argmax()] *= -1

    flipped: list[str] = []
    report = check_bundle(with_weights(mlp_bundle, tmp_path / "b.pt2", flip))
    assert flipped and not report.ok and report.verdict == "differs"
    golden = [result for result in report.results if result.check == "golden"]
    assert all(result.verdict == "differs" for result in golden)
    # nothing else is wrong with it: rows are apart, calls repeat
    assert {result.verdict for result in report.results if result.check != "golden"} == {"pass"}


def test_other_weights_against_live_eager(mlp_bundle: Path, tmp_path: Path) -> None:
    def other(name: str, tensor: torch.Tensor) -> None:
        tensor.copy_(tensor.flip(0))

    bad = with_weights(mlp_bundle, tmp_path / "b.pt2", other)
    report = check_bundle(bad, against="samples/mlp.py")
    assert report.verdict == "differs" and report.reference == "live eager of mlp.py:model"
    values = [result for result in report.results if result.check == "values"]
    assert values and all(result.verdict == "differs" for result in values)
    assert all(found.rule == "fp64" for result in values for found in result.outputs)


def test_a_nan_that_is_only_in_the_compiled_model(mlp_bundle: Path, tmp_path: Path) -> None:
    def spoil(name: str, tensor: torch.Tensor) -> None:
        tensor.view(-1)[0] = torch.nan

    report = check_bundle(with_weights(mlp_bundle, tmp_path / "b.pt2", spoil))
    failed = next(result for result in report.results if result.check == "golden")
    assert report.verdict == "differs" and "NaN at [0, 0] where eager has" in failed.outputs[0].fault


# --- programs ----------------------------------------------------------------------------------------------------

FIXED = """
import torch
model = torch.nn.Softmax(-1)
example_inputs = (torch.randn(4, 4),)
"""


def test_a_dim_that_was_specialised(tmp_path: Path) -> None:
    program = exported(tmp_path, FIXED)
    lying = tmp_path / "lying.pt2"
    with open_program(program) as archive:
        contract = msgspec.structs.replace(
            archive.manifest.contract,
            dims=(Dim(name="batch", min=1, max=8),),
            inputs=(Input(name="input", dtype="float32", shape=("batch", 4)),),
            outputs=(Output(name="output", dtype="float32", shape=("batch", 4)),),
            batch_dim="batch",
        )
        golden = tuple(msgspec.structs.replace(case, dims={"batch": 4}) for case in archive.manifest.golden)
        rewrite(archive, lying, msgspec.structs.replace(archive.manifest, contract=contract, golden=golden), {})
    output = tmp_path / "bundle.pt2"
    with pytest.raises(FailedError) as caught:
        compile_checked(
            lying, output, CompileOptions(), progress=quiet, truth=lambda m: live(str(tmp_path / "model.py"), None, m)
        )
    found = {result.case: result for result in caught.value.report.results}
    assert found["fixed"].verdict == "pass" and found["batch=8/normal"].verdict == "differs"
    assert found["batch=8/normal"].outputs[0].fault == "shape is [4, 4], eager gives [8, 4]"
    assert not output.exists()


LOOSE = """
import torch
from torch import nn

class Loose(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(10, 4))

    def forward(self, ids, x):
        return {"rows": self.table[ids + 1 - 1] + x, "noise": torch.rand_like(x)}

model = Loose
example_inputs = (torch.tensor([1, 9, 3]), torch.randn(3, 4))
"""


@pytest.fixture(scope="module")
def loose(tmp_path_factory: pytest.TempPathFactory) -> FailedError:
    """The gate's refusal of a model that is random (allowed) and indexes a table with any integer."""
    folder = tmp_path_factory.mktemp("loose")
    from mctl.export.dims import parse_dim

    program = exported(folder, LOOSE, dims=(parse_dim("batch=1:8"),), allow_random=True)
    before = set(folder.iterdir())
    with pytest.raises(FailedError) as caught:
        compile_checked(program, folder / "bundle.pt2", CompileOptions(work_dir=folder), progress=quiet)
    assert set(folder.iterdir()) == before  # nothing is left behind
    return caught.value


def test_an_id_out_of_range_that_kills_compiled_code_is_a_verdict(loose: FailedError) -> None:
    found = verdicts(loose.report)
    assert found["batch=2/above"] == found["batch=2/beside"] == "crash"
    assert found["batch=2/below"] == "pass"  # -1 is the last row for both
    assert loose.report.verdict == "crash" and loose.exit_code == 1
    failure = loose.report.failures[0]
    # two threads may die of it at once: then the C++ runtime says only that
    said = ("index out of bounds", "terminate called recursively")
    assert "SIGABRT" in failure.detail and any(text in failure.detail for text in said)
    assert loose.hint is not None and "--range ids=LOW:HIGH" in loose.hint


def test_a_random_model_is_told_from_one_with_state(loose: FailedError) -> None:
    (repeat,) = (result for result in loose.report.results if result.check == "repeat")
    assert repeat.verdict == "random" and repeat.ok and "'noise'" in repeat.detail
    assert all(result.check != "rows" for result in loose.report.results)


def test_a_bundle_that_kills_the_process_that_loads_it(mlp_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "CHILD", (sys.executable, "-c", "import os; os.abort()"))
    report = check_bundle(mlp_bundle)
    assert report.verdict == "crash" and [result.check for result in report.results] == ["load"]
    assert report.failures[0].detail == "the process was killed by SIGABRT"


class Staged(nullcontext[None]):
    """A compiled program that is there already."""

    def __init__(self, bundle: Path) -> None:
        super().__init__()
        self.bundle = bundle
        with open_bundle(bundle) as archive:
            self.manifest = archive.manifest

    def __enter__(self) -> "Staged":  # type: ignore[override]
        return self

    def write(self, path: Path) -> None:
        shutil.copy(self.bundle, path)


def test_an_interrupt_leaves_nothing_behind(
    mlp_bundle: Path, mlp_program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(text: str) -> None:
        seen.append(len(list(tmp_path.iterdir())))
        if text.startswith("parity: case"):
            raise KeyboardInterrupt

    seen: list[int] = []
    monkeypatch.setattr(gate, "compile_program", lambda *_: Staged(mlp_bundle))
    with pytest.raises(KeyboardInterrupt):
        compile_checked(mlp_program, tmp_path / "bundle.pt2", CompileOptions(), progress=interrupt)
    assert 1 in seen and list(tmp_path.iterdir()) == []


# --- what gets through -------------------------------------------------------------------------------------------


def test_a_good_program_and_its_report(mlp_bundle: Path) -> None:
    with open_bundle(mlp_bundle) as archive:
        stored = msgspec.json.decode(archive.read("extra/mctl/report.json"), type=Report)
        assert archive.manifest.parity == "pass" and archive.manifest.contract.batch_dim == "batch"
    assert stored.ok and stored.batchable and stored.reference == "the exported program, run by torch"
    assert {result.check for result in stored.results} == {"golden", "values", "repeat", "rows"}


def test_what_parity_found_goes_into_the_manifest() -> None:
    manifest = subject(lambda inputs: inputs).manifest
    needed = Tolerance(rtol=0.01, atol=0.001)
    fair = Comparison(
        output="y", dtype="float32", shape=(1,), rule="fp64", ok=True, tolerance=manifest.tolerances["y"], needed=needed
    )
    result = Result(check="golden", case="batch=1", verdict="pass", outputs=(fair,))
    fields = {
        "schema": "",
        "model": "",
        "file": "",
        "digest": "",
        "reference": "",
        "fp64": "",
        "seed": 0,
        "seconds": 0.0,
    }
    report = Report(ok=True, verdict="pass", results=(result,), batchable=False, **fields)  # type: ignore[arg-type]
    settled = gate._settled(manifest, report, {})
    assert settled.parity == "pass" and settled.contract.batch_dim is None and settled.buckets == {}
    assert settled.tolerances == {"y": Tolerance(rtol=0.02, atol=0.002)}  # twice what was needed
    assert any("tolerance of `y` is 2.0e-02,2.0e-03" in note for note in settled.notes)
    random = msgspec.structs.replace(report, verdict="random", batchable=None)
    assert gate._settled(manifest, random, {}).parity == "skipped"  # values were not compared
    given = {"y": Tolerance(rtol=0.5, atol=0.0)}
    plain = msgspec.structs.replace(report, results=(), batchable=True)
    assert gate._settled(manifest, plain, given).tolerances == given


def test_state_is_compared_call_by_call(stateful_bundle: Path) -> None:
    report = check_bundle(stateful_bundle, against="samples/stateful.py")
    assert report.ok and report.batchable is None
    assert {result.check for result in report.results} == {"golden", "values"}
