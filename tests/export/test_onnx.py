"""The ONNX twin: the program's computation, dims and names, in a file that other runtimes read."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from mctl.bundle_format.archive import open_program
from mctl.bundle_format.errors import ExportError, UsageError
from mctl.bundle_format.layout import ONNX
from mctl.export import onnx as twins
from mctl.export.program import ExportRequest, export_model, load_program

SAMPLES = Path(__file__).parents[2] / "samples"


def export(tmp_path: Path, source: str, **options: object) -> Path:
    """The path of the twin of a model that `source` makes."""
    (tmp_path / "m.py").write_text(source)
    request = ExportRequest(
        f"{tmp_path}/m.py",
        tmp_path / "program.pt2",
        onnx=tmp_path / "program.onnx",
        **options,  # type: ignore[arg-type]
    )
    export_model(request, lambda text: None)
    return tmp_path / "program.onnx"


def axes(value: onnx.ValueInfoProto) -> list[str | int]:
    return [axis.dim_param or axis.dim_value for axis in value.type.tensor_type.shape.dim]


def test_names_dims_and_numbers_are_the_contracts(mixed_program: Path) -> None:
    with open_program(mixed_program) as archive:
        data = bytes(archive.view(ONNX))
        source = archive.manifest.source
    model = onnx.load_model_from_string(data)
    onnx.checker.check_model(model, full_check=True)
    assert {each.name: axes(each) for each in (*model.graph.input, *model.graph.output)} == {
        "batch.ids": ["batch", "seq"],
        "batch.mask": ["batch", "seq"],
        "scale": ["batch"],
        "output_0": ["batch", "2*seq", 16],
        "output_1": ["batch"],
    }
    assert {prop.key: prop.value for prop in model.metadata_props}["mctl.source_sha256"] == source.sha256
    weight = next(t for t in model.graph.initializer if t.dims == [100, 16])
    ids = np.array([[7, 99, 0], [1, 2, 3]])
    mask, scale = np.array([[1, 1, 0], [1, 0, 1]], np.float32), np.array([2.0, -1.0], np.float32)
    session = onnxruntime.InferenceSession(data)
    twice, score = session.run(None, {"batch.ids": ids, "batch.mask": mask, "scale": scale})
    vectors = onnx.numpy_helper.to_array(weight)[ids] * mask[..., None] * scale[:, None, None]
    np.testing.assert_allclose(twice[:, ::2], 2 * vectors, rtol=1e-6)
    np.testing.assert_allclose(twice[:, 1::2], 2 * vectors[..., ::-1], rtol=1e-6)
    assert score.shape == (2,)


def test_the_same_program_gives_the_same_bytes(mlp_program: Path) -> None:
    program = load_program(mlp_program)
    made = [twins.to_onnx(program.exported, program.manifest.contract, program.manifest.source) for _ in range(2)]
    assert made[0] == made[1]


def test_beside_the_output_and_not_in_it(tmp_path: Path) -> None:
    path = export(tmp_path, "import torch\nmodel = torch.nn.Tanh()\nexample_inputs = (torch.ones(2, 3),)\n")
    with open_program(tmp_path / "program.pt2") as archive:
        assert ONNX not in archive.members
    (value,) = onnxruntime.InferenceSession(path).run(None, {"input": np.full((2, 3), 0.5, np.float32)})
    np.testing.assert_allclose(value, np.tanh(0.5), rtol=1e-6)


def test_state_has_no_place_in_it(tmp_path: Path) -> None:
    request = ExportRequest(f"{SAMPLES}/stateful.py", tmp_path / "p.pt2", embed_onnx=True)
    with pytest.raises(ExportError, match=r"keeps state between calls \(`.*`\), which an ONNX model cannot"):
        export_model(request, lambda text: None)
    assert not list(tmp_path.iterdir())


def test_an_operator_that_onnx_has_not(tmp_path: Path) -> None:
    source = (
        "import torch\nclass M(torch.nn.Module):\n    def forward(self, x):\n        return torch.linalg.qr(x)[0]\n"
    )
    with pytest.raises(ExportError, match=r"ONNX has no operator for torch's `aten.linalg_qr"):
        export(tmp_path, source + "model = M\nexample_inputs = (torch.eye(3),)\n")
    assert not list(tmp_path.glob("program*"))


def test_weights_beyond_what_one_file_holds(mlp_program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = load_program(mlp_program)
    monkeypatch.setattr(twins, "_MOST", 400_000)
    with pytest.raises(ExportError, match="the weights have "):
        twins.to_onnx(program.exported, program.manifest.contract, program.manifest.source)


def test_packages_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = twins.importlib.util.find_spec
    monkeypatch.setattr(twins.importlib.util, "find_spec", lambda name: None if name == "onnxscript" else find(name))
    with pytest.raises(UsageError, match="ONNX needs the package `onnxscript`"):
        export(tmp_path, "never read")


def test_it_does_not_take_the_programs_place(tmp_path: Path) -> None:
    request = ExportRequest("m.py", tmp_path / "m.onnx", onnx=tmp_path / "m.onnx")
    with pytest.raises(UsageError, match="is where the ONNX model goes"):
        export_model(request, lambda text: None)
