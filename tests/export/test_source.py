"""The user's model file: what is found in it, and how its mistakes are told."""

from pathlib import Path

import pytest
import torch

from mctl.bundle_format.contract import Contract, Input, Output
from mctl.bundle_format.errors import ExportError, ModelError, UsageError
from mctl.export.source import eager, load_source

from .models import forward, line_of, write

ONE = "example_inputs = (torch.ones(2, 3),)\n"


@pytest.mark.parametrize(
    "body",
    [
        "model = nn.Linear(3, 2)",
        "def model(): return nn.Linear(3, 2)",
        "class model(nn.Module):\n    def forward(self, x): return x",
        "model = lambda: nn.Linear(3, 2)",
    ],
)
def test_the_kinds_of_model(tmp_path: Path, body: str) -> None:
    source = load_source(str(write(tmp_path, f"{body}\n{ONE}")))
    assert isinstance(source.model, torch.nn.Module) and not source.model.training


@pytest.mark.parametrize(
    "example",
    [
        "(torch.ones(2, 3),)",
        "{'x': torch.ones(2, 3)}",
        "lambda: (torch.ones(2, 3),)",
        "lambda: {'x': torch.ones(2, 3)}",
    ],
)
def test_the_kinds_of_example(tmp_path: Path, example: str) -> None:
    path = write(tmp_path, forward("return x * 2") + f"\nexample_inputs = {example}\n")
    assert list(load_source(str(path)).named().tensors) == ["x"]


def test_another_name_and_a_neighbour_and_the_record(tmp_path: Path) -> None:
    write(tmp_path, "SCALE = 3.0", "layers.py")
    body = "import layers\nclass Other(nn.Module):\n    def forward(self, x): return x * layers.SCALE\n"
    path = write(tmp_path, f"{body}{ONE}preprocessing = {{'size': 224}}", "my model é.py")
    source = load_source(f"{path}:Other", seed=5)
    assert eager(source)({"x": torch.ones(1)})["output"].item() == 3
    assert (source.record.file, source.record.model, source.record.seed) == ("my model é.py", "Other", 5)
    assert source.preprocessing == {"size": 224}


def test_neighbours_of_two_models_do_not_mix(tmp_path: Path) -> None:
    for number in (1, 2):
        folder = tmp_path / str(number)
        folder.mkdir()
        write(folder, f"VALUE = {number}", "constants_beside.py")
        path = write(folder, "import constants_beside\n" + forward("return x * constants_beside.VALUE"))
        assert eager(load_source(str(path)))({"x": torch.ones(1)})["output"].item() == number


def test_the_seed_is_set_before_the_model_is_made(tmp_path: Path) -> None:
    path = str(write(tmp_path, "import random, numpy\nmodel = nn.Linear(3, 2)\nbias = random.random()\n" + ONE))
    first, again, other = (load_source(path, seed=seed).model.weight for seed in (1, 1, 2))
    assert first.equal(again) and not first.equal(other)


@pytest.mark.parametrize(
    ("body", "why", "hint"),
    [
        ("x = 1", "`model.py` defines no `model`", "define `model`"),
        ("model = 3", "`model` is int, not an `nn.Module`", ""),
        ("def model(): return 3", "`model()` returns int, not an `nn.Module`", ""),
        (
            "model = nn.Linear(3, 2)\nexample_inputs = torch.ones(2)",
            "`example_inputs` in `model.py` is a Tensor",
            "(x,)",
        ),
        ("model = nn.Linear(3, 2)\npreprocessing = 3", "`preprocessing` in `model.py` is not a dict", ""),
        ("model = torch.jit.script(nn.Linear(3, 2))", "the model is TorchScript", ""),
        ("model = nn.Linear(3, 2, device='meta')", "2 weights of the model have no values", "--weights"),
    ],
)
def test_what_a_file_lacks(tmp_path: Path, body: str, why: str, hint: str) -> None:
    with pytest.raises(ExportError) as refused:
        load_source(str(write(tmp_path, f"{ONE}{body}")))
    assert why in refused.value.message and hint in (refused.value.hint or "")


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("raise ValueError('too big')  # here", "cannot be imported: ValueError: too big"),
        ("import no_such_module  # here", "no module named `no_such_module`"),
        ("import sys\nsys.exit(3)  # here", "it calls `sys.exit(3)`"),
        ("def broken(:  # here", "invalid syntax"),
        ("def model():\n    return 1 / 0  # here", "`model()` failed: ZeroDivisionError: division by zero"),
        (
            "model = nn.ReLU\ndef example_inputs():\n    return {}['x']  # here",
            "`example_inputs()` failed: KeyError: 'x'",
        ),
        ("class model(nn.Module):\n    def eval(self):\n        raise OSError('no')  # here", "OSError: no"),
        ("from .layers import Layer  # here", "attempted relative import"),
    ],
)
def test_mistakes_are_told_with_the_users_line(tmp_path: Path, body: str, why: str) -> None:
    path = write(tmp_path, body)
    with pytest.raises(ExportError) as refused:
        load_source(str(path))
    assert why in refused.value.message and refused.value.message.endswith(f"({line_of(path)})")


def test_the_line_is_the_users_where_a_library_fails(tmp_path: Path) -> None:
    path = write(tmp_path, "def model():\n    return nn.Linear('a', 2)  # here\n")
    with pytest.raises(ExportError) as refused:
        load_source(str(path))
    assert line_of(path) in refused.value.message and "linear.py" not in refused.value.message


@pytest.mark.parametrize(
    ("spec", "why"),
    [("none.py", "there is no file"), (".", "is a folder"), ("notes.txt", "not a Python file"), ("", "is a folder")],
)
def test_no_such_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: str, why: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(UsageError, match=why):
        load_source(spec)


def test_what_the_file_prints_goes_to_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load_source(str(write(tmp_path, f"print('loading')\nmodel = nn.ReLU\n{ONE}")))
    out, err = capsys.readouterr()
    assert (out, "loading" in err) == ("", True)


# --- eager -------------------------------------------------------------------------------------------------------

COUNTER = forward(
    "self.n.add_(1)\nself.calls += 1\nreturn {'sum': x + self.n, 'calls': x * self.calls}",
    init="self.register_buffer('n', torch.zeros(1))\nself.calls = 0",
)


def test_eager_starts_in_a_fresh_state_and_keeps_it(tmp_path: Path) -> None:
    source = load_source(str(write(tmp_path, COUNTER)))
    for _ in range(2):
        run = eager(source)
        assert [float(run({"x": torch.zeros(1)})["sum"]) for _ in range(3)] == [1, 2, 3]
    assert source.model.n.item() == 0 and source.model.calls == 0


def test_eager_leaves_its_inputs_alone(tmp_path: Path) -> None:
    source = load_source(str(write(tmp_path, forward("return x.add_(1)"))))
    x = torch.zeros(1)
    assert eager(source)({"x": x})["output"].item() == 1 and x.item() == 0


def test_eager_in_fp64(tmp_path: Path) -> None:
    source = load_source(str(write(tmp_path, "model = nn.Linear(3, 2)\n" + ONE)))
    x = torch.randn(4, 3)
    exact = x.double() @ source.model.weight.double().T + source.model.bias.double()
    assert eager(source, double=True)({"input": x})["output"].allclose(exact, rtol=1e-15, atol=1e-15)
    assert source.model.weight.dtype == torch.float32


def test_eager_by_the_names_of_a_contract(tmp_path: Path) -> None:
    """A file without example inputs, as when `--input` and `--output-name` described them."""
    path = write(tmp_path, "class model(nn.Module):\n    def forward(self, x, y): return x, x - y\n")
    contract = Contract(
        dims=(),
        inputs=(Input(name="y", dtype="float32", shape=(1,)), Input(name="x", dtype="float32", shape=(1,))),
        outputs=(Output(name="same", dtype="float32", shape=(1,)), Output(name="less", dtype="float32", shape=(1,))),
    )
    found = eager(load_source(str(path)), contract)({"x": torch.tensor([5.0]), "y": torch.tensor([3.0])})
    assert {name: value.item() for name, value in found.items()} == {"same": 5, "less": 2}


def test_eager_tells_where_the_model_fails(tmp_path: Path) -> None:
    path = write(tmp_path, forward("return x.reshape(7, 7)  # here"))
    with pytest.raises(ModelError) as failed:
        eager(load_source(str(path)))({"x": torch.zeros(3)})
    assert failed.value.message.endswith(f"({line_of(path)})") and "shape '[7, 7]'" in failed.value.message
