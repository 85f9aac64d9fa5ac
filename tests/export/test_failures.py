"""Models that cannot be exported as they are declared: each fails in the user's terms, with the user's line."""

from pathlib import Path
from typing import NamedTuple

import pytest

from mctl.bundle_format.errors import ExportError, UsageError
from mctl.export.program import ExportReport

from .models import export, forward, line_of, write


class Wrong(NamedTuple):
    """A model file's body (the line to be named ends with `# here`), options, and what has to be said."""

    body: str
    options: tuple[str, ...]
    message: str
    hint: str = ""


BATCH = ("--dim batch=1:64",)
SEQ = ("--dim batch=1:8", "--dim seq=1:64@x:1")
IDS = "torch.randint(0, 20, (3, 5))"
TABLE = "self.table = nn.Parameter(torch.randn(32, 8))"

MODELS = {
    "branch on a value": Wrong(
        forward("if x.sum() > 0:  # here\n    return x + 1\nreturn x - 1"),
        BATCH,
        "the model decides by a tensor's value which way to go",
        "torch.where",
    ),
    "a size from a value": Wrong(
        forward("return x[: int(x.abs().sum().item())]  # here"),
        BATCH,
        "the model makes a Python number of a tensor's value",
        "keep it a tensor",
    ),
    "a loop over a value": Wrong(
        forward("for _ in range(int(x.abs().max())):  # here\n    x = x + 1\nreturn x"),
        BATCH,
        "the model decides by a tensor's value which way to go",
    ),
    "an output of as many as there are": Wrong(
        forward("return x[x > 0]"),
        BATCH,
        "output `output`: axis 0 depends on the values of a tensor",
        "a mask or a count",
    ),
    "state in a tensor that is nobody's": Wrong(
        "memory = torch.zeros(8)\n" + forward("memory.add_(x.sum(0))  # here\nreturn x + memory"),
        (),
        "the model changes a tensor that is no buffer",
        "register_buffer",
    ),
    "an input that is so many times as long as another": Wrong(
        """
        class model(nn.Module):
            def forward(self, x, y):
                v = x.view(5, -1)
                return torch.stack([v[i] - y for i in range(5)])
        example_inputs = {"x": torch.randn(20), "y": torch.randn(4)}
        """,
        ("--dim n=1:8@y:0", "--dim m=5:40:5@x:0"),
        "the model needs `m` to be `5*n`",
        "make the one from the other inside the model",
    ),
    "a complex output": Wrong(
        forward("return torch.fft.rfft(x)"),
        BATCH,
        "output `output` has dtype complex64",
        "return `torch.view_as_real(z)`",
    ),
    "a complex output among others": Wrong(
        forward("return {'x': x, 'parts': [torch.polar(x, x)]}"),
        BATCH,
        "output `parts.0` has dtype complex64",
        "return `torch.view_as_real(z)`",
    ),
    "a sparse output": Wrong(
        forward("return x.relu().to_sparse()"),
        (),
        "output `output` is not a dense tensor (sparse_coo)",
        "return `x.to_dense()`",
    ),
    "a fixed reshape": Wrong(
        forward("return x.reshape(6, 2, 4)  # here"),
        BATCH,
        "dimension `batch` became static: the model fixes it at 6",
        "x.shape[0]",
    ),
    "a reshape that fits the example alone": Wrong(
        forward("return x.reshape(1, 2, 4)  # here", example="torch.randn(1, 8)"),
        BATCH,
        "dimension `batch` is static: the model runs with 1 and fails with 2: RuntimeError: shape '[1, 2, 4]'",
        "-1",
    ),
    "a fixed arange": Wrong(
        forward("return x + torch.arange(6).unsqueeze(1)  # here"),
        BATCH,
        "dimension `batch` became static: the model fixes it at 6",
    ),
    "int() of a size": Wrong(
        forward("return x * int(x.shape[0])  # here"),
        BATCH,
        "dimension `batch` became static",
    ),
    "a Python loop over rows": Wrong(
        forward("return torch.stack([x[i] * i for i in range(x.shape[0])])  # here"),
        BATCH,
        "dimension `batch` became static",
    ),
    "a position table that is too short": Wrong(
        forward("return x + self.table[: x.shape[0]]  # here", init=TABLE),
        BATCH,
        "the model takes `batch` from 1 to 32 only, declared are 1 to 64",
        "write `--dim batch=1:32`",
    ),
    "a position embedding that is too short": Wrong(
        forward(
            "return x + self.table(torch.arange(x.shape[1])).sum(-1)  # here",
            example="torch.randn(2, 9)",
            init="self.table = nn.Embedding(48, 4)",
        ),
        SEQ,
        "the model takes `seq` from 1 to 48 only, declared are 1 to 64: IndexError: index out of range in self",
        "write `--dim seq=1:48`",
    ),
    "an assertion on a size": Wrong(
        forward("assert x.shape[0] <= 32  # here\nreturn x + 1"),
        BATCH,
        "the model takes `batch` from 1 to 32 only",
        "--dim batch=1:32",
    ),
    "a branch on a size": Wrong(
        forward("if x.shape[0] > 4:  # here\n    return x + 1\nreturn x - 1"),
        BATCH,
        "the model takes `batch` from 5 to 64 only, declared are 1 to 64",
        "write `--dim batch=5:64`",
    ),
    "a kernel that is larger than the input": Wrong(
        forward("return self.conv(x)  # here", example="torch.randn(2, 3, 20)", init="self.conv = nn.Conv1d(3, 4, 7)"),
        ("--dim batch=1:8", "--dim length=2:64@x:2"),
        "the model takes `length` from 7 to 64 only",
        "write `--dim length=7:64`",
    ),
    "a multiple that torch finds": Wrong(
        forward("return x.reshape(-1, 4, 8).sum(1)  # here", example="torch.randn(8, 8)"),
        ("--dim n=1:64",),
        "`n` must be a multiple of 4",
        "write `--dim n=4:64:4`",
    ),
    "a multiple of what is declared": Wrong(
        forward("return x.reshape(-1, 8, 8).sum(1)  # here", example="torch.randn(8, 8)"),
        ("--dim n=4:64:4",),
        "`n` must be a multiple of 8",
        "write `--dim n=8:64:8`",
    ),
    "a multiple that the model needs": Wrong(
        forward(
            "half = F.avg_pool2d(x, 2)\nreturn torch.cat([x, F.interpolate(half, scale_factor=2)], 1)  # here",
            example="torch.randn(2, 3, 8, 8)",
        ),
        ("--dim batch=1:8", "--dim side=4:33@x:2"),
        "`side` must be a multiple of 2",
        "write `--dim side=4:32:2`",
    ),
    "two dims that are one": Wrong(
        "class model(nn.Module):\n    def forward(self, x, y):\n        return x + y  # here\n"
        "example_inputs = (torch.randn(6, 8), torch.randn(6, 8))",
        ("--dim a=1:8@x:0", "--dim b=1:8@y:0"),
        "`b` and `a` must be equal",
        "declare one dim for both",
    ),
    "a dim that an input lacks": Wrong(
        "class model(nn.Module):\n    def forward(self, x, y):\n        return x + y  # here\n"
        "example_inputs = (torch.randn(6, 8), torch.randn(6, 8))",
        ("--dim a=1:8@x:0",),
        "dimension `a` became static: the model fixes it at 6",
        "axis 0 of `y` is 6 as well: write `--dim a=1:8@x:0,y:0`",
    ),
    "an LSTM over a varying length": Wrong(
        forward("return self.rnn(x)[0]  # here", "torch.randn(2, 5, 8)", "self.rnn = nn.LSTM(8, 4, batch_first=True)"),
        SEQ,
        "dimension `seq` became static: the model fixes it at 5",
        "torch unrolls an LSTM",
    ),
    "an output size that is a maximum": Wrong(
        forward("return x.new_zeros(max(x.shape[0], 3))"),
        BATCH,
        "output `output`: axis 0 is `Max(3, batch)`, which a contract cannot say",
    ),
    "an unregistered container going in": Wrong(
        "class Box:\n    def __init__(self, x):\n        self.x = x\n"
        "class model(nn.Module):\n    def forward(self, box):\n        return box.x\n"
        "example_inputs = (Box(torch.ones(2)),)",
        (),
        "input `box` is a `Box`, which mctl cannot take apart",
        "dataclass, or register the class",
    ),
    "an unregistered container coming out": Wrong(
        "class Box:\n    def __init__(self, x):\n        self.x = x\n" + forward("return Box(x)"),
        BATCH,
        "the output is a `Box`, which mctl cannot take apart",
    ),
    "a number among the outputs": Wrong(
        forward("return x, 3"), BATCH, "output `output_1` is an `int`, not a tensor", "make it a tensor"
    ),
    "a custom operator that is not there": Wrong(
        forward("return torch.ops.nobody.has_this(x)  # here"),
        BATCH,
        "'_OpNamespace' 'nobody' object has no attribute 'has_this'",
        "import the package that registers this operator",
    ),
    "a custom operator without a shape": Wrong(
        "@torch.library.custom_op('mctl_test::shapeless', mutates_args=())\n"
        "def shapeless(x: torch.Tensor) -> torch.Tensor:\n    return x * 2\n"
        + forward("return torch.ops.mctl_test.shapeless(x)  # here"),
        BATCH,
        "a custom operator does not say what shape it gives",
        "register_fake",
    ),
    "dropout left on": Wrong(
        forward("return F.dropout(x, 0.25)  # here"),
        BATCH,
        "dropout of 0.25 is left in training",
        "training=self.training",
    ),
    "attention's dropout left on": Wrong(
        forward("return F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)  # here", "torch.randn(4, 2, 8)"),
        BATCH,
        "dropout of 0.5 is left in training",
    ),
    "a model that stays in training": Wrong(
        forward("return self.norm(x)  # here", init="self.norm = nn.BatchNorm1d(8)")
        + "Model.eval = lambda self: self.train()\n",
        BATCH,
        "batch norm is left in training",
        "do not override `eval`",
    ),
    "random numbers": Wrong(
        forward("return x + torch.randn_like(x)  # here"),
        BATCH,
        "the model draws random numbers: `randn_like`",
        "--allow-random",
    ),
    "random numbers of Python": Wrong(
        "import random\n" + forward("return x * random.random()"),
        BATCH,
        "the model gives other numbers for the same inputs",
        "draws random numbers in Python",
    ),
    "state in Python": Wrong(
        forward("self.calls += 1\nreturn x + self.calls", init="self.calls = 0"),
        BATCH,
        "the model keeps state in Python (`calls`), which an exported program cannot",
        "register_buffer",
    ),
    "a size that torch cannot see": Wrong(
        forward("return x + len(str(x.shape[0]))", example="torch.randn(3, 8)"),
        BATCH,
        "the exported program is not the model: at batch=",
        "decides something in Python",
    ),
    "a size of 1 that is something else": Wrong(
        forward("return x.squeeze(0)"),
        BATCH,
        "the exported program is not the model: at batch=1, output `output` has the shape [1, 8], eager gives [8]",
        "write `--dim batch=2:64`",
    ),
    "a wrong example": Wrong(
        forward("return x @ torch.ones(9, 2)  # here"),
        BATCH,
        "the model fails on its example inputs: RuntimeError: mat1 and mat2 shapes cannot be multiplied",
    ),
    "no example": Wrong(
        "model = nn.Linear(3, 2)", (), "`model.py` has no example inputs", "--input x=float32[batch,128]"
    ),
    "a part of the example": Wrong(
        "class model(nn.Module):\n    def forward(self, x, y):\n        return x\nexample_inputs = (torch.ones(2),)",
        (),
        "missing a required argument: 'y'",
        "--input",
    ),
    "a part that is TorchScript": Wrong(
        forward("return self.part(x)", init="self.part = torch.jit.script(nn.Linear(8, 8))"),
        BATCH,
        "a part of which is TorchScript",
    ),
    "numpy inside": Wrong(
        forward("return torch.from_numpy(x.numpy() * 2)  # here"),
        BATCH,
        "the model takes a tensor out of torch, to numpy",
        "use torch's functions",
    ),
    "a gradient by torch.func": Wrong(
        forward("return torch.func.grad(lambda t: self.net(t).sum())(x)  # here", init="self.net = nn.Linear(8, 1)"),
        BATCH,
        "torch.export cannot trace a transform of `torch.func`",
        "make_fx",
    ),
    "a gradient by autograd": Wrong(
        forward(
            "with torch.enable_grad():\n    x = x.requires_grad_()\n"
            "    return torch.autograd.grad(self.net(x).sum(), x)[0]  # here",
            init="self.net = nn.Linear(8, 1)",
        ),
        BATCH,
        "the model computes something that torch.export does not see",
        "make_fx",
    ),
    "a copy of a tensor's memory": Wrong(
        "import copy\n" + forward("return copy.deepcopy(x)  # here"),
        BATCH,
        "the model asks for the memory of a tensor",
        ".clone()",
    ),
    "an operator that torch.export does not know": Wrong(
        forward("return torch.nested.nested_tensor([x, x]).to_padded_tensor(0.0)  # here"),
        BATCH,
        "torch.export has no rule for the operator `aten._nested_tensor_from_tensor_list`",
        "other operators",
    ),
    "a sparse tensor": Wrong(
        forward("return torch.sparse.mm(x.to_sparse(), torch.ones(8, 2))  # here"),
        (),
        "the model makes a sparse tensor",
        "index_add",
    ),
    "a sparse tensor of a varying size": Wrong(
        forward("return torch.sparse.mm(x.to_sparse(), torch.ones(8, 2))  # here"),
        BATCH,
        "the model makes a sparse tensor",
    ),
    "a sparse tensor of rows": Wrong(
        forward("return x.to_sparse_csr() @ torch.ones(8, 2)  # here"), (), "the model makes a sparse tensor"
    ),
    "a quantized tensor": Wrong(
        forward("return torch.quantize_per_tensor(x, 0.1, 0, torch.quint8).dequantize()  # here"),
        (),
        "the model makes a quantized tensor",
        "int8",
    ),
    "linspace over a size": Wrong(
        forward("return torch.linspace(0, 1, x.shape[0]).unsqueeze(1) * x  # here"),
        BATCH,
        "dimension `batch` became static: the model fixes it at 6",
        "`torch.linspace(0, 1, x.shape[0])` takes the size for a fixed number: write `start + (end - start)",
    ),
    "a window as long as the input": Wrong(
        forward("w = torch.hann_window(x.shape[0])  # here\nreturn x * w[:, None]"),
        BATCH,
        "dimension `batch` became static",
        "`torch.hann_window(x.shape[0])` takes the size for a fixed number: write its formula",
    ),
    "a root by Python's math": Wrong(
        "import math\n" + forward("return x / math.sqrt(x.shape[0])  # here"),
        BATCH,
        "dimension `batch` became static",
        "write `n ** 0.5`",
    ),
    "a branch on oddness": Wrong(
        forward("if x.shape[0] % 2 == 1:  # here\n    return x + 1\nreturn x - 1", example="torch.randn(7, 8)"),
        BATCH,
        "the model goes one way at 3, 5, 7, … and another at other sizes of `batch`",
        "write `--dim batch=2:64:2`",
    ),
    "a module without a name": Wrong(
        "try:\n    raise RuntimeError('operator torchvision::nms does not exist')\n"
        "except RuntimeError as error:\n    raise ModuleNotFoundError('Could not import Bert') from error  # here\n",
        (),
        "cannot be imported: ModuleNotFoundError: Could not import Bert",
        "the installed `torchvision` was made for another torch",
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_cannot_be_exported(tmp_path: Path, name: str) -> None:
    wrong = MODELS[name]
    path = write(tmp_path, wrong.body)
    with pytest.raises(ExportError) as refused:
        export(path, *wrong.options)
    assert wrong.message in refused.value.message
    assert wrong.hint in (refused.value.hint or "")
    assert ("# here" in wrong.body) == (
        f"({line_of(path)})" in refused.value.message if "# here" in wrong.body else False
    )
    assert not list(tmp_path.glob("*.pt2")) and not list(tmp_path.glob(".*"))  # nothing half-written


@pytest.mark.parametrize(
    ("options", "more", "message"),
    [
        (("--range y=0:1",), {}, "`--range`: there is no input `y`"),
        (("--pad y=0",), {}, "`--pad`: there is no input `y`"),
        ((), {"batch_dim": "rows"}, "`--batch-dim rows`: no such dim is declared"),
        ((), {"output_names": ("a", "b")}, "`--output-name` names 2 outputs, the model has 1"),
        (("--dim c=1:4@x:3",), {}, "input `x` has no axis 3"),
    ],
)
def test_options_that_do_not_fit_the_model(
    tmp_path: Path, options: tuple[str, ...], more: dict[str, object], message: str
) -> None:
    path = write(tmp_path, forward("return x + 1"))
    with pytest.raises(UsageError) as refused:
        export(path, "--dim batch=1:64@x:0", *options, **more)
    assert message in refused.value.message


def test_an_example_whose_inputs_disagree(tmp_path: Path) -> None:
    body = "class model(nn.Module):\n    def forward(self, x, table): return x @ table\n"
    path = write(tmp_path, body + "example_inputs = (torch.ones(2, 4), torch.ones(4, 3))")
    with pytest.raises(UsageError) as refused:
        export(path, "--dim batch=1:8")
    assert "`batch` is 2 in the example (axis 0 of `x`), but axis 0 of `table` is 4" in refused.value.message


def test_the_cause_of_an_error_is_told(tmp_path: Path) -> None:
    body = "try:\n    {}['seq']\nexcept KeyError as error:\n    raise ValueError('bad settings') from error  # here\n"
    path = write(tmp_path, body)
    with pytest.raises(ExportError) as refused:
        export(path)
    said = "`model.py` cannot be imported: ValueError: bad settings (model.py:7), because of KeyError: 'seq'"
    assert refused.value.message == said


@pytest.mark.parametrize(
    ("code", "example", "options"),
    [
        ("return F.max_pool2d(x, 3, 2, 1, ceil_mode=True)", "torch.randn(2, 3, 9, 14)", ("--dim h=6:40@x:2",)),
        ("return F.max_pool2d(x, 3, 2, ceil_mode=True)", "torch.randn(2, 3, 9, 14)", ("--dim h=6:40@x:2",)),
        ("return x.chunk(3, 1)[1]", "torch.randn(2, 9)", ("--dim n=7:64@x:1",)),
        ("return x.topk(x.shape[1] // 2, 1)[0]", "torch.randn(2, 9)", ("--dim n=4:64@x:1",)),
        (
            "return self.conv(F.pad(x, (0, (-x.shape[-1]) % 8)))",
            "torch.randn(2, 6, 21)",
            ("--dim batch=1:4", "--dim seq=1:64@x:2"),
        ),
    ],
)
def test_a_guard_that_torch_cannot_prove_is_no_fault(
    tmp_path: Path, code: str, example: str, options: tuple[str, ...]
) -> None:
    """`2*(h//2) < h + 1` holds for every h, which torch does not see."""
    path = write(tmp_path, forward(code, example, "self.conv = nn.Conv1d(6, 10, 8, stride=8)"))
    report = export(path, *options)
    declared = {dim.name: (dim.min, dim.max) for dim in report.manifest.contract.dims}
    assert all(f"--dim {name}={low}:{high}" in " ".join(options) for name, (low, high) in declared.items())
    assert max(report.proven.values()) < 1e-6
    assert {dims[name] for name, (low, _) in declared.items() for dims in _proven(report)} >= {
        low for low, _ in declared.values()
    }


def _proven(report: ExportReport) -> list[dict[str, int]]:
    return [{n: int(v) for n, _, v in (part.partition("=") for part in name.split(","))} for name in report.proven]


def test_a_library_whose_name_begins_with_torch_is_told(tmp_path: Path) -> None:
    """`torchvision/` is no part of `torch/`."""
    import sys

    from torch import __file__ as torch_file

    from mctl.export.usercode import user_line

    site = Path(torch_file).parents[1]
    frames = [(str(tmp_path / "model.py"), 3), (str(site / "torchvision" / "models" / "resnet.py"), 97)]
    inside = (str(site / "torch" / "nn" / "modules" / "module.py"), 1)
    assert user_line([*frames, inside]) == "model.py:3, in resnet.py:97"
    standard = str(Path(sys.modules["json"].__file__ or "").parent / "decoder.py")
    assert user_line([*frames[:1], (standard, 5)]) == "model.py:3"


def test_a_library_line_is_told_beside_the_users(tmp_path: Path) -> None:
    """`transformers` is no part of torch: where it fails matters too."""
    body = (
        "from transformers import BertConfig, BertModel\n"
        "class model(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,\n"
        "                            intermediate_size=16, max_position_embeddings=32)\n"
        "        self.bert = BertModel(config)\n"
        "    def forward(self, ids):\n        return self.bert(ids).last_hidden_state  # here\n"
        f"example_inputs = ({IDS},)\n"
    )
    path = write(tmp_path, body)
    with pytest.raises(ExportError) as refused:
        export(path, "--dim batch=1:4", "--dim seq=1:64@ids:1")
    assert f"({line_of(path)}, in " in refused.value.message and "seq" in refused.value.message
