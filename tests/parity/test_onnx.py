"""The ONNX twin is judged with the same cases as the compiled model."""

import json
from pathlib import Path

import onnx
import pytest
import torch
from onnx import numpy_helper

from mctl.bundle_format.errors import BundleError, UsageError
from mctl.export.onnx import to_onnx
from mctl.export.program import load_program
from mctl.parity import onnx as twins
from mctl.parity.check import check_bundle
from mctl.parity.onnx import OnnxSession


@pytest.fixture(scope="module")
def twin(mlp_program: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = load_program(mlp_program)
    path = tmp_path_factory.mktemp("twin") / "program.onnx"
    path.write_bytes(to_onnx(program.exported, program.manifest.contract, program.manifest.source))
    return path


@pytest.mark.parametrize("runtime", ["onnxruntime", "onnx-reference"])
def test_a_true_twin_passes(mlp_bundle: Path, twin: Path, runtime: twins.Runs) -> None:
    report = check_bundle(mlp_bundle, runs=runtime, onnx=twin)
    assert report.ok and not report.notes and report.runs == runtime
    assert {result.check for result in report.results} == {"golden", "values", "repeat", "rows"}


def test_the_one_in_the_bundle(mixed_bundle: Path, run_mctl) -> None:  # type: ignore[no-untyped-def]
    done = run_mctl("parity", mixed_bundle, "--runs", "onnxruntime", "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 0 and report["runs"] == "onnxruntime" and report["verdict"] == "pass"
    assert "mixed 1 by onnxruntime is the eager model" in done.stderr


def test_another_weight_is_found(mlp_bundle: Path, twin: Path, tmp_path: Path) -> None:
    model = onnx.load(twin)
    weight = next(t for t in model.graph.initializer if len(t.dims) == 2)
    changed = numpy_helper.to_array(weight).copy()
    changed[0, 0] += 0.1
    weight.CopyFrom(numpy_helper.from_array(changed, weight.name))
    onnx.save(model, tmp_path / "other.onnx")
    report = check_bundle(mlp_bundle, runs="onnxruntime", onnx=tmp_path / "other.onnx")
    assert report.verdict == "differs"


def test_the_twin_of_another_model(mixed_bundle: Path, twin: Path) -> None:
    report = check_bundle(mixed_bundle, runs="onnxruntime", onnx=twin)
    assert not report.ok
    assert report.notes == ("the ONNX model was exported from another model file, or with other weights",)


@pytest.mark.parametrize("name", ["program.onnx", "bundle.onnx", "p.onnx"])
def test_the_one_beside_the_bundle(mlp_bundle: Path, twin: Path, tmp_path: Path, name: str) -> None:
    """As `mctl export --onnx -o p.pt2` names it; others in the folder are not of this export."""
    (tmp_path / "bundle.pt2").write_bytes(mlp_bundle.read_bytes())
    model = onnx.load(twin)
    del model.metadata_props[:]
    onnx.save(model, tmp_path / "a.onnx")
    (tmp_path / "b.onnx").write_bytes(b"no model")
    (tmp_path / name).write_bytes(twin.read_bytes())
    assert twins.twin(tmp_path / "bundle.pt2", None) == (twin.read_bytes(), ())


def test_what_is_missing_is_said(mlp_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = tmp_path / "bundle.pt2"
    bundle.symlink_to(mlp_bundle)
    with pytest.raises(UsageError, match="there is no ONNX model in"):
        check_bundle(bundle, runs="onnxruntime", onnx=tmp_path / "none.onnx")
    with pytest.raises(UsageError, match="`--onnx` names a model that nothing runs"):
        check_bundle(bundle, onnx=tmp_path / "none.onnx")
    (tmp_path / "junk.onnx").write_bytes(b"\x00junk")
    with pytest.raises(BundleError, match="holds no sound ONNX model"):
        check_bundle(bundle, runs="onnxruntime", onnx=tmp_path / "junk.onnx")
    monkeypatch.setitem(twins.PACKAGES, "onnxruntime", "no_such_runtime")
    with pytest.raises(UsageError, match="`no_such_runtime` is not installed"):
        check_bundle(bundle, runs="onnxruntime")


@pytest.mark.parametrize("runtime", ["onnxruntime", "onnx-reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.bool, torch.int64, torch.uint16])
def test_every_dtype_gets_in_and_out(runtime: twins.Runtime, dtype: torch.dtype) -> None:
    kind = {
        torch.float32: onnx.TensorProto.FLOAT,
        torch.bfloat16: onnx.TensorProto.BFLOAT16,
        torch.float16: onnx.TensorProto.FLOAT16,
        torch.bool: onnx.TensorProto.BOOL,
        torch.int64: onnx.TensorProto.INT64,
        torch.uint16: onnx.TensorProto.UINT16,
    }[dtype]
    make = onnx.helper
    ends = [make.make_tensor_value_info(name, kind, ["n", 2]) for name in ("x", "y")]
    graph = make.make_graph([make.make_node("Identity", ["x"], ["y"])], "g", ends[:1], ends[1:])
    model = make.make_model(graph, opset_imports=[make.make_opsetid("", 20)], ir_version=10)
    session = OnnxSession(model.SerializeToString(), runtime, ("y",))
    for rows in (0, 1, 3):
        given = torch.arange(4 * rows).reshape(rows, 4)[:, ::2].to(dtype)  # with gaps in memory, where it has rows
        got = session.call({"x": given})["y"]
        assert got.dtype == dtype and torch.equal(got, given)
