"""Constants and state of every kind, compiled once and compared with eager; programs that cannot be a variant."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch._inductor.codecache import AotCodeCompiler

from mctl.aoti import variant
from mctl.aoti.protocol import Recipe
from mctl.aoti.variant import explained
from mctl.bundle_format.archive import open_bundle
from mctl.bundle_format.contract import Contract
from mctl.bundle_format.errors import BundleError, CompileError
from mctl.runner import load

MODEL = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 12), nn.Linear(16, 12), nn.Linear(16, 12)
        self.b.weight = self.a.weight
        self.c.load_state_dict(self.a.state_dict())
        self.register_buffer("transposed", torch.randn(12, 16).t())
        self.register_buffer("repeated", torch.randn(1, 12).expand(16, 12))
        self.register_buffer("holes", torch.randn(32, 24)[::2, ::2])
        self.register_buffer("offset", torch.randn(100)[36:48])
        self.register_buffer("scalar", torch.tensor(2.5))
        self.register_buffer("flags", torch.tensor([True, False] * 6))
        self.register_buffer("integers", torch.arange(12))
        self.register_buffer("halves", torch.randn(12, dtype=torch.bfloat16))
        self.register_buffer("last", torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last))
        self.register_buffer("empty", torch.empty(0, 12))
        self.register_buffer("unused", torch.randn(70))
        self.parameter = nn.Parameter(torch.randn(12, 12).t())
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("one", torch.zeros(1))
        self.register_buffer("number", torch.tensor(1.0))
        self.register_buffer("mean", torch.zeros(12))

    def forward(self, x):
        y = self.a(x) + 2 * self.b(x) + 3 * self.c(x) + x @ self.repeated
        y = y + x[:, :1] * (self.transposed + self.holes).sum(0)  # weights of layers would be packed
        y = y * self.scalar + self.offset + torch.where(self.flags, 1.0, -1.0) + self.integers + self.halves.float()
        y = y @ self.parameter + torch.cat([self.empty, y]) + torch.tensor([0.5] * 12)
        y = y + self.last.sum() + self.last[0, 1, 2, 3]
        self.calls += 1
        self.one.add_(1)
        self.number.mul_(2)
        self.mean.mul_(0.5).add_(y.mean(0))
        changed = {"calls": self.calls, "one": self.one, "number": self.number, "mean": self.mean}
        steps = torch.arange(x.shape[0]) * torch.tensor([10**9]) + self.calls  # beyond 32 bits from the fourth row on
        return {"y": y, "steps": steps} | {name: buffer.clone() for name, buffer in changed.items()}


model = Model


def example_inputs():
    return (torch.randn(4, 16),)
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("everything") / "everything.py"
    path.write_text(MODEL)
    return path


@pytest.fixture(scope="module")
def bundle(source: Path, mctl_ok: Callable[..., object]) -> Path:
    program, path = source.with_name("program.pt2"), source.with_name("bundle.pt2")
    mctl_ok("export", source, "--dim", "batch=1:8", "-o", program, "--seed", 3)
    mctl_ok("compile", program, "-o", path, "--no-parity")
    return path


def test_every_call_is_eager_s(source: Path, bundle: Path) -> None:
    """Buffers that the model changes go on from call to call, those with one element too."""
    names: dict[str, type[torch.nn.Module]] = {}
    torch.manual_seed(3)
    exec(compile(source.read_text(), source, "exec"), names)
    eager = names["Model"]().eval()
    session = load(bundle)
    for call in range(4):
        x = torch.randn(1 + 2 * call, 16)
        with torch.no_grad():
            wanted = eager(x)
        got = session(x=x)
        assert set(got) == set(wanted)
        for name in wanted:
            torch.testing.assert_close(
                got[name], wanted[name], rtol=1e-5, atol=1e-4, msg=lambda text, at=(call, name): f"{at}: {text}"
            )


def test_what_the_manifest_says_of_the_constants(bundle: Path) -> None:
    with open_bundle(bundle) as archive:
        constants = archive.manifest.variants[0].constants
    assert {name for name, constant in constants.items() if constant.state} == {"calls", "one", "number", "mean"}
    assert constants["last"].stride == (75, 1, 15, 3)
    assert constants["transposed"].stride == (1, 16)
    assert constants["holes"].stride is None
    weights = {constant.tensor for name, constant in constants.items() if name.endswith("_weight_packed")}
    assert len(weights) == 1  # tied, or of equal bytes
    assert "unused" not in constants


class Placing(torch.nn.Module):
    def forward(self, x: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, ...]:
        zeros = torch.zeros_like(x)
        zeros[:, x[0] > 0] = x[:, :2]
        return torch.zeros_like(x).scatter_reduce(1, at, x, "sum"), zeros, x.sort()[0]


def test_what_every_operator_returns_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_cpp(graph: object, wrapper: str, *_: object, **__: object) -> None:
        wrappers.append(wrapper)
        raise MemoryError

    wrappers: list[str] = []
    monkeypatch.setattr(AotCodeCompiler, "compile", compile_cpp)
    inputs = torch.randn(4, 4), torch.zeros(4, 4, dtype=torch.int64)
    program = torch.export.export(Placing(), inputs)
    with pytest.raises(CompileError):
        variant.compile_variant(
            program, Contract((), (), ()), Recipe("dynamic"), {"cpp_wrapper": True}, lambda: None, pytest.fail
        )
    calls = re.findall(r"^.*\baoti_torch_(?:cpu_\w+|index_put_out)\(.*\);$", wrappers[0], re.MULTILINE)
    assert len(calls) == 3
    assert all(call.strip().startswith("AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_") for call in calls), calls


class CppCompileError(Exception):
    """Named as torch's."""


def wrapped(cause: Exception) -> Exception:
    outer = RuntimeError("backend failed\n\nlong text")
    outer.__cause__ = cause
    return outer


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (wrapped(CompileError("the cause")), "the cause"),
        (wrapped(MemoryError()), "there is not enough memory to compile the program"),
        (wrapped(RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes")), "there is not enough memory"),
        (OSError(28, "No space left on device", "f"), "cannot compile the program: no space left on device (`f`)"),
        (OSError(27, "File too large"), "cannot compile the program: file too large"),
        (CppCompileError("x\nfatal error: /d/f.o: No space left on device"), "the disk is full"),
        (CppCompileError("g++: fatal error: Killed signal terminated program cc1plus"), "the C++ compiler was killed"),
        (
            CppCompileError("f.cpp: note\nf.cpp:1: error: no `x` here\nmore"),
            "the generated code: f.cpp:1: error: no `x`",
        ),
        (CppCompileError(""), "the C++ compiler refuses the generated code"),
        (wrapped(KeyError("z")), "torch cannot compile the program: RuntimeError: backend failed long text"),
    ],
)
def test_failures_of_torch_are_told_in_one_line(error: Exception, message: str) -> None:
    told = explained(error)
    assert message in told.message
    assert "\n" not in told.message


def test_a_program_error_keeps_its_kind() -> None:
    assert isinstance(explained(wrapped(BundleError("damaged"))), BundleError)
