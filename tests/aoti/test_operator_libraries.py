"""Operators of a C++ library: exported with it, compiled, and called in this process, in another and in mctl-runner."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mctl.bundle_format.archive import open_bundle
from mctl.bundle_format.errors import ModelError, UsageError
from mctl.bundle_format.tensors import save_file
from mctl.export import operators
from mctl.runner import load, native
from mctl.runner.stopwatch import Ask, Failed, runner_stopwatch

from ..conftest import mctl

# Written for torch's stable interface, whose headers are the smallest. x times the sum of `by` and `more`.
LIBRARY = """
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

using torch::stable::Tensor;

Tensor scale(Tensor x, double by, std::vector<int64_t> more, std::string how) {
  if (how != "plain") throw std::runtime_error("scale knows one way");
  Tensor y = torch::stable::empty_like(x);
  for (int64_t each : more) by += static_cast<double>(each);
  for (int64_t i = 0; i < x.numel(); ++i) {
    const float value = static_cast<const float*>(x.const_data_ptr())[i];
    if (value > 1000) throw std::runtime_error("scale takes no number above 1000");
    static_cast<float*>(y.mutable_data_ptr())[i] = static_cast<float>(value * by);
  }
  return y;
}

Tensor shape(Tensor x, double, std::vector<int64_t>, std::string) { return torch::stable::empty_like(x); }

STABLE_TORCH_LIBRARY(testops, m) {
  m.def("scale(Tensor x, float by, int[] more, str how) -> Tensor");
  m.def("shapeless(Tensor x, float by, int[] more, str how) -> Tensor");
}
STABLE_TORCH_LIBRARY_IMPL(testops, CPU, m) {
  m.impl("scale", TORCH_BOX(&scale));
  m.impl("shapeless", TORCH_BOX(&scale));
}
STABLE_TORCH_LIBRARY_IMPL(testops, Meta, m) { m.impl("scale", TORCH_BOX(&shape)); }
"""

MODEL = """
import torch

class model(torch.nn.Module):
    def forward(self, x):
        return torch.ops.testops.scale(x, 0.5, [1, 2], "plain") + 1

example_inputs = (torch.randn(4, 8),)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, mctl_ok: Callable[..., object]) -> Path:
    """With `libtest.so`, `model.py`, `program.pt2` and `bundle.pt2`."""
    path = tmp_path_factory.mktemp("operators")
    (path / "model.py").write_text(MODEL)
    (path / "library.cc").write_text(LIBRARY)
    torch_folder = Path(torch.__file__).parent
    command = ["g++", "-std=c++20", "-shared", "-fPIC", f"-I{torch_folder / 'include'}", "library.cc", "-o"]
    command += ["libtest.so", f"-L{torch_folder / 'lib'}", "-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu"]
    subprocess.run(command, cwd=path, check=True)
    mctl_ok("export", "model.py", "--dim", "batch=1:8", "--library", "libtest.so", "-o", "program.pt2", cwd=path)
    mctl_ok("compile", "program.pt2", "-o", "bundle.pt2", cwd=path)
    return path


X = torch.arange(24.0).reshape(3, 8)
WANTED = X * 3.5 + 1


def test_the_library_is_in_the_bundle(folder: Path) -> None:
    with open_bundle(folder / "bundle.pt2") as archive:
        (library,) = archive.manifest.libraries
        assert bytes(archive.view(library.member)) == (folder / "libtest.so").read_bytes()
        assert archive.manifest.needs == ("libraries",)
        assert "testops::scale" in archive.manifest.variants[0].imports
    said = mctl("inspect", folder / "bundle.pt2").stdout
    assert "libtest.so, testops::scale, testops::shapeless\n" in said
    assert "calls torch for `testops::scale` (model.py:6)\n" in said


CALL = """
import torch
{before}
from mctl.runner import load
print(load({bundle!r})(x=torch.arange(24.0).reshape(3, 8))["output"].sum().item())
"""


@pytest.mark.parametrize("before", ["", "torch.ops.load_library({library!r})"])
def test_in_another_process(folder: Path, before: str) -> None:
    """One that has the same library from elsewhere already, too: torch ends a process that registers it twice."""
    other = shutil.copy(folder / "libtest.so", folder / "same.so")
    script = CALL.format(bundle=str(folder / "bundle.pt2"), before=before.format(library=str(other)))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == WANTED.sum().item()


def test_in_this_process(folder: Path) -> None:
    """Two sessions, and an error of the operator's, which is the call's."""
    first, second = load(folder / "bundle.pt2"), load(folder / "bundle.pt2")
    with pytest.raises(ModelError, match="scale takes no number above 1000"):
        first(x=X * 1000)
    for session in (first, second):
        torch.testing.assert_close(session(x=X)["output"], WANTED)


def test_in_the_runner(folder: Path) -> None:
    from safetensors.torch import load_file

    def ask(x: torch.Tensor) -> Ask:
        save_file(folder / "asked", {"input.x": ("float32", tuple(x.shape), x.numpy().data)})
        return Ask(str(folder / "asked"), {"batch": 3}, "", 0.0, calls=1, outputs=str(folder / "answered"))

    with runner_stopwatch(native.find_runner(), folder / "bundle.pt2", native.find_libtorch(), 1) as process:
        with pytest.raises(Failed, match="scale takes no number above 1000"):
            process.time(ask(X * 1000))
        process.time(ask(X))
    torch.testing.assert_close(load_file(folder / "answered")["output.output"], WANTED)


def refusal(folder: Path, source: str, *options: str) -> str:
    (folder / "other.py").write_text(source)
    done = mctl("export", "other.py", "--dim", "batch=1:8", "-o", "other.pt2", *options, cwd=folder)
    assert done.returncode in (1, 2) and not (folder / "other.pt2").exists()
    return done.stderr


def test_a_library_that_is_not_named(folder: Path) -> None:
    source = f"import torch\ntorch.ops.load_library({str(folder / 'libtest.so')!r})\n{MODEL}"
    said = refusal(folder, source)
    assert "the model calls `testops::scale` (other.py:8) of a C++ library, which would be missing" in said
    assert "`--library FILE.so`" in said


def test_an_operator_whose_shapes_are_python_s(folder: Path) -> None:
    source = MODEL.replace("testops.scale", "testops.shapeless")
    fake = "@torch.library.register_fake('testops::shapeless')\ndef _(x, *_):\n    return torch.empty_like(x)\n"
    said = refusal(folder, f"{source}\n{fake}", "--library", "libtest.so")
    assert "`testops::shapeless` (other.py:6), which has no code in C++ for the shapes of its results" in said
    assert "TORCH_LIBRARY_IMPL(testops, Meta, m)" in said


@pytest.mark.parametrize(
    "registration",
    [
        '@torch.library.custom_op("mine::twice", mutates_args=())\ndef twice(x: torch.Tensor) -> torch.Tensor:\n'
        "    return x * 2\ntwice.register_fake(torch.empty_like)\n",
        'library = torch.library.Library("mine", "DEF")\nlibrary.define("twice(Tensor x) -> Tensor")\n'
        'library.impl("twice", lambda x: x * 2, "CPU")\nlibrary.impl("twice", torch.empty_like, "Meta")\n',
        'library = torch.library.Library("mine", "DEF")\nlibrary.define("twice(Tensor x) -> Tensor")\n'
        'library.impl("twice", lambda x: x * 2, "CompositeImplicitAutograd")\n',
    ],
)
def test_operators_of_python_are_refused(tmp_path: Path, registration: str) -> None:
    model = "class model(torch.nn.Module):\n    def forward(self, x):\n        return torch.ops.mine.twice(x) + 1\n"
    said = refusal(tmp_path, f"import torch\n{registration}{model}example_inputs = (torch.randn(4, 8),)\n")
    assert "the model calls `mine::twice` (other.py:" in said and "whose code is Python" in said
    assert "--library" in said


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [("no.so", None, "there is no file"), ("text.so", b"text", "cannot load"), ("libm.so.6", b"", "cannot load")],
)
def test_files_that_are_no_libraries(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=message):
        operators.load_files([tmp_path / name])


def test_a_library_without_operators(tmp_path: Path) -> None:
    (tmp_path / "empty.c").write_text("int nothing;\n")
    subprocess.run(["gcc", "-shared", "-fPIC", "empty.c", "-o", "empty.so"], cwd=tmp_path, check=True)
    with pytest.raises(UsageError, match="registers no operators"):
        operators.load_files([tmp_path / "empty.so"])


def test_two_libraries_of_one_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"two libraries are named `a\.so`"):
        operators.load_files([tmp_path / "a.so", tmp_path / "b" / "a.so"])


def test_inspect_json_has_them(folder: Path) -> None:
    (library,) = json.loads(mctl("inspect", folder / "program.pt2", "--json").stdout)["libraries"]
    assert library == {"member": "mctl/libraries/libtest.so", "operators": ["testops::scale", "testops::shapeless"]}
