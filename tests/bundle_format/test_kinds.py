"""Files of every kind that people have, told apart."""

import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch

from mctl.bundle_format.archive import open_bundle, open_program
from mctl.bundle_format.errors import BundleError, MctlError
from mctl.bundle_format.kinds import Name, identify

from .samples import write_program

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # files of it are still about

MODEL = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.GELU()).eval()


def _exported(path: Path) -> None:
    torch.export.save(torch.export.export(MODEL, (torch.ones(3, 4),)), path)


def _aoti(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("model/archive_format", "pt2")
        file.writestr("model/data/aotinductor/model/x.wrapper.so", b"\x7fELF")


def _onnx(path: Path) -> None:
    from onnx import TensorProto, helper, save

    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", [value], [out])
    save(helper.make_model(graph), str(path))


def _cut(path: Path) -> None:
    write_program(path)
    path.write_bytes(path.read_bytes()[:-1])


def _damaged(path: Path) -> None:
    write_program(path, [("x", b"hello")])
    path.write_bytes(path.read_bytes().replace(b"mctl.program/1", b"mctl.pr\0gram/1"))


FILES: dict[str, tuple[Name, Callable[[Path], object]]] = {
    "program.pt2": ("program", write_program),
    "damaged.pt2": ("damaged", _damaged),
    "cut.pt2": ("cut", _cut),
    "exported.pt2": ("exported program", _exported),
    "package.pt2": ("aoti package", _aoti),
    "scripted.pt": ("torchscript", lambda path: torch.jit.save(torch.jit.trace(MODEL, torch.ones(1, 4)), path)),
    "weights.pt": ("checkpoint", lambda path: torch.save(MODEL.state_dict(), path)),
    "old.pth": ("checkpoint", lambda path: torch.save(MODEL.state_dict(), path, _use_new_zipfile_serialization=False)),
    "model.onnx": ("onnx", _onnx),
    "onnx without its name": ("onnx", _onnx),
    "x.safetensors": ("safetensors", lambda path: path.write_bytes(safetensors.numpy.save({"x": np.ones(3)}))),
    "empty.safetensors": ("safetensors", lambda path: path.write_bytes(safetensors.numpy.save({}))),
    "model.py": ("python", lambda path: path.write_text("model = None\n")),
    "pointer.pt2": ("lfs pointer", lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\n")),
    "notes.txt": ("text", lambda path: path.write_text("Grüße " * 2000)),
    "page.pt2": ("text", lambda path: path.write_text("<!doctype html><title>404</title>")),
    "arrays.npz": ("zip", lambda path: np.savez(path.open("wb"), x=np.ones(3))),
    "empty.zip": ("zip", lambda path: zipfile.ZipFile(path, "w").close()),
    "model.so": ("library", lambda path: path.write_bytes(Path(torch._C.__file__).read_bytes()[:5000])),
    "object.pkl": ("pickle", lambda path: path.write_bytes(pickle.dumps({"a": 1}))),
    "empty": ("empty", lambda path: path.touch()),
    "one byte": ("unknown", lambda path: path.write_bytes(b"\xff")),
    "zeros": ("unknown", lambda path: path.write_bytes(bytes(5000))),
    "folder": ("folder", lambda path: path.mkdir()),
    "link to nothing": ("missing", lambda path: path.symlink_to("nowhere")),
    "missing": ("missing", lambda path: None),
}


@pytest.mark.parametrize("name", FILES)
def test_identify(name: str, tmp_path: Path) -> None:
    kind, make = FILES[name]
    path = tmp_path / name
    make(path)
    assert identify(path).name == kind


@pytest.mark.parametrize("name", [name for name in FILES if name not in ("program.pt2",)])
def test_what_is_not_ours_is_refused_with_a_way_out(name: str, tmp_path: Path) -> None:
    kind, make = FILES[name]
    path = tmp_path / name
    make(path)
    for opener in (open_bundle, open_program):
        with pytest.raises(MctlError) as caught:
            opener(path)
        assert str(path) in caught.value.message
        if kind not in ("missing", "cut", "damaged"):
            assert identify(path).what in caught.value.message
            assert isinstance(caught.value, BundleError)
        assert caught.value.hint or kind == "missing"


def test_other_things(tmp_path: Path) -> None:
    assert identify("/dev/null").name == "device"
    assert identify("a\0b").name == "missing"
    assert identify(tmp_path / ("x" * 300)).name == "unreadable"


def test_a_pickle_is_never_read(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Callable[[Path], object], tuple[Path]]:
            return Path.touch, (tmp_path / "sprung",)

    torch.save(Trap(), tmp_path / "trap.pt")
    (tmp_path / "trap.pkl").write_bytes(pickle.dumps(Trap()))
    for name in ("trap.pt", "trap.pkl"):
        identify(tmp_path / name)
        with pytest.raises(BundleError):
            open_bundle(tmp_path / name)
    assert not (tmp_path / "sprung").exists()
