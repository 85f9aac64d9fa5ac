"""Bundles that need no libtorch: compiled, checked and served without it."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from mctl.bundle_format import archive as archives
from mctl.bundle_format import host, summary, tensors
from mctl.bundle_format.errors import CompileError, HostError
from mctl.bundle_format.interface import operators
from mctl.bundle_format.manifest import Manifest, Producer
from mctl.parity import check
from mctl.parity.report import Report, Result
from mctl.parity.standalone import StandaloneSession
from mctl.runner import native
from mctl.runner.stopwatch import Ask, Failed, runner_stopwatch
from mctl.tuning import gate

from ..conftest import succeed
from ..parity import fakes
from .server import Server, runner

MODEL = """
import torch
from torch.nn import functional as F

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.w = torch.nn.Parameter(torch.linspace(-2, 2, 48))
        self.up = torch.nn.ConvTranspose1d(6, 4, 3, stride=2, dilation=2)
        self.recurrent = torch.nn.LSTM(8, 5, batch_first=True)
        self.wide = torch.nn.Linear(48, 6).double()

    def forward(self, x):
        return torch.softmax(torch.tanh(x * self.w), -1), torch.erf(x).sum(-1), self.operators(x)

    # What is not compiled: each is a call of the shim.
    def operators(self, x):
        rows = x.unflatten(1, (6, 8))
        mixed = torch.softmax(rows @ rows.transpose(1, 2), -1) @ rows  # bmm
        best, where = mixed.topk(3)
        turned = F.scaled_dot_product_attention(*[rows.double().unsqueeze(1)] * 3).flatten(1)
        counts = torch.zeros_like(rows).scatter_add(2, where, best)
        parts = best, self.up(rows), self.recurrent(rows)[0], self.wide(turned).float(), counts, rows.cumsum(1)
        return torch.cat([part.flatten(1) for part in parts], 1)

def model():
    return Model()

def example_inputs():
    return (torch.randn(4, 48),)
"""
OPERATORS = {
    "_scaled_dot_product_flash_attention_for_cpu", "addmm_out", "bmm_out", "convolution", "cumsum", "mkldnn_rnn_layer",
    "scatter_reduce_two_out", "topk",
}  # fmt: skip


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("standalone")
    (folder / "model.py").write_text(MODEL)
    succeed("export", "model.py", "--dim", "batch=1:16", "-o", "program.pt2", cwd=folder)
    succeed("compile", "program.pt2", "-o", "bundle.pt2", "--standalone", cwd=folder)
    return folder / "bundle.pt2"


def manifest_of(path: Path) -> Manifest:
    with archives.open_bundle(path) as archive:
        return archive.manifest


def changed(bundle: Path, path: Path, **changes: object) -> Path:
    with archives.open_bundle(bundle) as archive:
        archives.rewrite(archive, path, msgspec.structs.replace(archive.manifest, **changes), {})
    return path


def libraries(pid: int) -> set[str]:
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.rpartition("/")[2] for line in lines if ".so" in line}


def ask(server: Server, x: np.ndarray) -> list[np.ndarray]:
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": x.shape, "data": x.tolist()}]}
    answer = server.request("/v2/models/bundle/infer", json.dumps(body).encode())
    assert answer.status == 200, answer.body
    return [np.array(output["data"]).reshape(output["shape"]) for output in answer.json()["outputs"]]


def expected(x: np.ndarray) -> list[np.ndarray]:
    from math import erf

    powers = np.exp(np.tanh(x.astype(np.float64) * np.linspace(-2, 2, 48)))
    source: dict[str, Any] = {}
    exec(MODEL, source)
    with torch.no_grad():
        eager = source["model"]().operators(torch.from_numpy(x))
    return [powers / powers.sum(-1, keepdims=True), np.vectorize(erf)(x.astype(np.float64)).sum(-1), eager.numpy()]


def test_compile_says_and_checks_it(bundle: Path, mctl_ok: Callable) -> None:  # type: ignore[type-arg]
    manifest = manifest_of(bundle)
    assert (manifest.standalone, manifest.parity) == (True, "pass")
    imports = manifest.variants[0].imports
    assert (
        any(name.startswith("Sleef_") for name in imports)
        or manifest.target is None
        or "x86" not in manifest.target.isa
    )
    assert operators(imports) == tuple(sorted(OPERATORS))
    (measured,) = (note for note in manifest.notes if note.startswith("standalone"))
    assert re.match(
        r"standalone(, but slower)?: without libtorch a call takes .* times as long at batch \d+ \(", measured
    )
    assert "needs no libtorch" in mctl_ok("inspect", bundle).stdout


@pytest.mark.parametrize("libtorch", [False, True])
def test_served(bundle: Path, libtorch: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right answers; libtorch is in no process, even where the environment names one, unless an option asks for it."""
    monkeypatch.setenv("MCTL_LIBTORCH", str(native.find_libtorch()))
    name = changed(bundle, bundle.with_name(f"{libtorch}.pt2"), name="bundle")
    x = np.random.default_rng(0).normal(size=(5, 48)).astype(np.float32)
    with Server(name, "--debuggable", standalone=not libtorch) as server:
        for got, wanted in zip(ask(server, x), expected(x), strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
        for pid in (server.process.pid, *server.workers()):
            assert any("libtorch" in name for name in libraries(pid)) == (libtorch and pid != server.process.pid)
        assert any(host.SHIM in libraries(pid) for pid in server.workers()) == (not libtorch)


def test_the_whole_sweep(bundle: Path) -> None:
    """Parity's checks, of the binary under test (which may have sanitizers), against the stored cases of eager."""
    with archives.open_bundle(bundle) as archive:
        session = StandaloneSession(bundle, archive.manifest, runner())
        report = check.examine(archive, InProcess(session), None)  # type: ignore[arg-type]
    assert report.ok and {result.check for result in report.results} >= {"golden", "repeat", "rows"}


class InProcess(fakes.Compiled):
    def __init__(self, session: StandaloneSession) -> None:
        super().__init__(session.call, session.reset_state)
        self.seconds = 0.0

    def wait(self) -> None: ...


def test_memory_is_flat(bundle: Path, tmp_path: Path) -> None:
    """Of a process that calls it many times, at the largest size and at the smallest in turns."""
    files = {}
    for rows in (1, 16):
        files[rows] = tmp_path / f"{rows}"
        x = np.ones((rows, 48), np.float32)
        tensors.save_file(files[rows], {"input.x": ("float32", x.shape, x.data)})
    with runner_stopwatch(runner(), bundle, None, 1) as process:

        def resident() -> int:
            status = Path(f"/proc/{process.pid}/status").read_text()
            return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])

        def call(count: int) -> None:
            for rows, file in files.items():
                assert len(process.time(Ask(str(file), {"batch": rows}, "", 60.0, calls=count))) == count

        call(2_000)  # also room for as many times as are measured below
        before = resident()
        for _ in range(12):
            call(2_000)
        assert resident() <= before + 128  # kB


def test_a_symbol_that_the_shim_lacks_is_named(bundle: Path, tmp_path: Path) -> None:
    (variant,) = manifest_of(bundle).variants
    more = msgspec.structs.replace(variant, imports=(*variant.imports, "aoti_torch_cpu__fft_r2c"))
    path = changed(bundle, tmp_path / "more.pt2", variants=(more,))
    with pytest.raises(HostError, match="mctl's shim lacks `aoti_torch_cpu__fft_r2c`") as refused:
        native.prepare([path], None, {}, print)
    assert "--libtorch" in (refused.value.hint or "")
    with pytest.raises(HostError, match="mctl's shim lacks `aoti_torch_cpu__fft_r2c`; name a libtorch"):
        runner_stopwatch(runner(), path, None, 1)


def test_what_is_asked_of_the_process_is_checked(bundle: Path, tmp_path: Path) -> None:
    x = np.ones((1, 48), np.float32)
    tensors.save_file(tmp_path / "one", {"input.x": ("float32", x.shape, x.data)})
    with runner_stopwatch(runner(), bundle, None, 1) as process:
        lost = Ask(str(tmp_path / "one"), {"batch": 1}, "", 0.0, calls=1, outputs=str(tmp_path / "no" / "where"))
        with pytest.raises(Failed, match="cannot write"):
            process.time(lost)


LOGARITHMS = """
import torch

class Logarithms(torch.nn.Module):
    def forward(self, x):
        return torch.logcumsumexp(x, -1)

def model():
    return torch.nn.Sequential(torch.nn.Tanh(), torch.nn.Sequential(Logarithms()))

def example_inputs():
    return (torch.randn(4, 9),)
"""


def test_what_is_not_standalone_says_why(tmp_path: Path, mctl_ok: Callable) -> None:  # type: ignore[type-arg]
    (tmp_path / "model.py").write_text(LOGARITHMS)
    succeed("export", "model.py", "--dim", "batch=1:8", "-o", "program.pt2", cwd=tmp_path)
    succeed("compile", "program.pt2", "-o", "b.pt2", "--standalone=auto", "--no-parity", cwd=tmp_path)
    said = mctl_ok("inspect", tmp_path / "b.pt2").stdout
    assert "0 constants, calls torch for `logcumsumexp` (1.0 at model.py:6)\n" in said
    assert "not standalone: the compiled model needs libtorch for `logcumsumexp` (1.0 at model.py:6)\n" in said


@pytest.mark.parametrize("wanted", ["yes", "auto"])
def test_an_operator_that_is_left(wanted: str) -> None:
    """An error that says which, from where, and what helps; with `auto` a note."""
    manifest = msgspec.structs.replace(fakes.subject(lambda x: x).manifest, notes=("before",))
    staged = fakes.staged(manifest, ("aoti_torch_cpu__fft_r2c",), {"_fft_r2c": ("stem.0", "head")})
    if wanted == "yes":
        with pytest.raises(CompileError, match=r"needs libtorch for `_fft_r2c` \(stem.0, head\)$") as refused:
            gate._without_libtorch(staged, "yes", print)
        assert "--standalone=auto" in (refused.value.hint or "")
        return
    gate._without_libtorch(staged, "auto", print)
    assert not staged.manifest.standalone
    assert staged.manifest.notes == (
        "before",
        "not standalone: the compiled model needs libtorch for `_fft_r2c` (stem.0, head)",
    )


@pytest.mark.parametrize(("torch_version", "notes"), [("2.13.0+cpu", 0), ("2.14.1", 0), ("2.130.0", 1), ("2.99.0", 1)])
def test_a_torch_that_the_shim_was_not_tested_with(torch_version: str, notes: int) -> None:
    manifest = fakes.subject(lambda x: x).manifest
    manifest = msgspec.structs.replace(manifest, producer=Producer(mctl="", torch=torch_version))
    staged = fakes.staged(manifest, (), {})
    gate._without_libtorch(staged, "yes", print)
    assert staged.manifest.standalone
    assert [torch_version in note for note in staged.manifest.notes] == [True] * notes


REFUSED = Result(
    check="values", case="batch=2/normal", verdict="compiled-raises", detail="mctl's shim has no `mm` of bool"
)


@pytest.mark.parametrize("wanted", ["yes", "auto"])
@pytest.mark.parametrize("right", [True, False])
def test_what_is_right_with_libtorch_only(wanted: str, right: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator that the shim refuses when it is called: with `auto` the bundle keeps libtorch, if that helps."""
    passed = Report("", True, "pass", "m", "", "", "eager", "", 0, 0.0, ())
    failed = msgspec.structs.replace(passed, ok=False, verdict="compiled-raises", results=(REFUSED,))
    notes = ("before", "standalone; its time beside that with libtorch was not measured: it failed")
    manifest = msgspec.structs.replace(fakes.subject(lambda x: x).manifest, standalone=True, notes=notes)
    staged = fakes.staged(manifest, ("aoti_torch_cpu_mm_out",), {})
    monkeypatch.setattr(
        gate._Gate, "_examine", lambda _: passed if right and not staged.manifest.standalone else failed
    )
    found = gate._Gate(staged, Path(), None, {}, 0, wanted, lambda _: None)  # type: ignore[arg-type]
    if not right or wanted == "yes":
        with pytest.raises(gate.FailedError, match="compiled-raises in `batch=2/normal`") as refused:
            found.checked()
        assert ("--standalone=auto" in (refused.value.hint or "")) == right
        return
    assert found.checked() is passed
    assert staged.manifest.notes == (
        "before",
        "not standalone: without libtorch parity found compiled-raises in `batch=2/normal`: "
        "mctl's shim has no `mm` of bool",
    )


def test_which_operators_need_libtorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the shim has not; without one, all."""
    native.find_runner()
    imports = ("aoti_torch_clone", "aoti_torch_cpu__fft_r2c", "aoti_torch_cpu_mm_out")
    plain, both = (
        SimpleNamespace(standalone=False),
        SimpleNamespace(imports=imports, operators=operators(imports), callers={}),
    )
    known = SimpleNamespace(imports=imports[2:], operators=("mm_out",))
    assert host.lacking_operators(imports) == ("_fft_r2c",)
    assert summary._needs(plain, both) == "calls torch for `_fft_r2c`"  # type: ignore[arg-type]
    assert "that mctl's shim has too" in summary._needs(plain, known)  # type: ignore[arg-type]
    monkeypatch.setattr(host, "find_shim", lambda: None)
    assert host.lacking_operators(imports) == ("_fft_r2c", "mm_out")
