"""Compiled code in a process that may die, hang or talk; eager in fp64; state."""

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from mctl.bundle_format.errors import HostError
from mctl.parity import runs
from mctl.parity.frames import Ask, pack, tensors_in, unpack
from mctl.parity.runs import Compiled, Crashed, CrashError, Double, Raised, Reference, Returned, attempt

X = {"x": torch.arange(6.0).reshape(2, 3)}

# A child whose model does what the name of its first input says.
STUB = """
import os, signal, sys, time
import torch
from mctl.bundle_format.errors import HostError
from mctl.parity import child

memory = torch.zeros(2, 3)

class Session:
    def call(self, inputs):
        wanted = next(iter(inputs))
        if wanted == "raise":
            raise ValueError("too much")
        if wanted == "crash":
            print("free(): invalid pointer", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGSEGV)
        if wanted == "hang":
            time.sleep(60)
        if wanted == "share":
            return {"y": memory.copy_(inputs[wanted])}
        if wanted == "views":
            x = inputs[wanted]
            return {"x": x, "again": x, "turned": x.t(), "row": x[0], "wide": x[:, :1].expand(2, 4), "none": x[:0]}
        print("hello from the model")
        return inputs

def load(bundle):
    LOAD
    return Session()

child.compiled = load
child.main(sys.argv[1])
"""


@contextmanager
def stub(folder: Path, load: str = "pass") -> Iterator[Compiled]:
    """A child that does `load` in the place of loading."""
    script = folder / "child.py"
    script.write_text(STUB.replace("LOAD", load))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "CHILD", (sys.executable, str(script)))
        with Compiled(folder / "bundle.pt2", call_seconds=5.0) as compiled:
            yield compiled


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compiled]:
    with stub(tmp_path_factory.mktemp("child")) as running:
        yield running


def test_outputs_come_back_as_they_are(compiled: Compiled) -> None:
    every = {
        "bf16": torch.tensor([1.5, float("nan")], dtype=torch.bfloat16),
        "scalar": torch.tensor(7, dtype=torch.int64),
        "empty": torch.zeros(0, 3),
        "flags": torch.tensor([True, False]),
        "u16": torch.tensor([65535], dtype=torch.uint16),
    }
    found = compiled(every)
    assert {n: (t.dtype, t.shape) for n, t in found.items()} == {n: (t.dtype, t.shape) for n, t in every.items()}
    assert found["bf16"].view(torch.int16).equal(every["bf16"].view(torch.int16))
    assert found["u16"].tolist() == [65535] and found["scalar"].item() == 7
    assert compiled.peak > 10_000_000


def test_a_call_that_raises_and_the_next_that_does_not(compiled: Compiled) -> None:
    assert attempt(compiled, {"raise": X["x"]}) == Raised("ValueError: too much")
    assert isinstance(attempt(compiled, X), Returned)


def test_outputs_that_were_kept_are_seen_as_they_are_now(compiled: Compiled) -> None:
    first = compiled.ask(Ask("call", keep=True), {"share": X["x"]})
    compiled({"share": X["x"] + 1})
    assert first["y"].equal(X["x"]) and compiled.ask(Ask("kept"))["y"].equal(X["x"] + 1)


def test_outputs_that_share_memory(compiled: Compiled) -> None:
    x = X["x"]
    wanted = {"x": x, "again": x, "turned": x.t(), "row": x[0], "wide": x[:, :1].expand(2, 4), "none": x[:0]}
    found = compiled({"views": x})
    assert list(found) == list(wanted) and all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_crash_is_a_verdict_and_the_next_call_gets_a_new_process(compiled: Compiled) -> None:
    expected = Crashed("the process was killed by SIGSEGV: free(): invalid pointer")
    assert attempt(compiled, {"crash": X["x"]}) == expected
    assert isinstance(attempt(compiled, X), Returned)


def test_a_call_that_hangs_and_no_process_is_left(tmp_path: Path) -> None:
    with stub(tmp_path) as compiled:
        compiled.wait()
        process = compiled._process
        compiled.call_seconds = 0.5
        assert attempt(compiled, {"hang": X["x"]}) == Crashed("no answer within 0.5 s")
    assert process is not None and process.returncode == -9


def test_a_bundle_that_the_runner_refuses(tmp_path: Path) -> None:
    refuse = "raise HostError('no avx512 here', 'compile again')"
    with stub(tmp_path, refuse) as compiled, pytest.raises(HostError) as caught:
        compiled.wait()
    assert (caught.value.message, caught.value.hint) == ("no avx512 here", "compile again")


def test_loading_that_kills(tmp_path: Path) -> None:
    with stub(tmp_path, "os.abort()") as compiled, pytest.raises(CrashError, match="SIGABRT"):
        compiled.wait()


# --- eager -------------------------------------------------------------------------------------------------------


class Narrow(nn.Module):
    """Asks for float32 and float16 on the way, as models do that were written for them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.scale = torch.full((3,), 1 / 3)  # no buffer: a cast of the module misses it

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x).to(torch.float16).float() * self.scale + torch.arange(3, dtype=torch.float32) / 3
        return nn.functional.layer_norm(y.to(torch.bfloat16), (3,)) + torch.tensor(1 / 3)


def test_fp64_reaches_every_step() -> None:
    torch.manual_seed(0)
    model = Narrow()
    found = Double(lambda: lambda inputs: {"y": model(inputs["x"])})(X)["y"]
    weight, bias = model.linear.weight.double(), model.linear.bias.double()
    y = (X["x"].double() @ weight.T + bias) * model.scale.double() + torch.arange(3.0).double() / 3
    wanted = (y - y.mean(1, keepdim=True)) / (y.var(1, keepdim=True, unbiased=False) + 1e-5).sqrt() + 1 / 3
    assert found.dtype is torch.float64
    assert (found - wanted).abs().max() < 1e-12
    assert model.linear.weight.dtype is torch.float32 and torch.get_default_dtype() is torch.float32


def test_a_model_may_write_to_its_inputs() -> None:
    given = {"x": torch.ones(2)}
    run = Reference(lambda: lambda inputs: {"y": inputs["x"].add_(1)})
    assert run(given)["y"].tolist() == [2, 2] and given["x"].tolist() == [1, 1]


def test_reset_makes_a_fresh_model() -> None:
    def fresh():
        count = torch.zeros(1)
        return lambda inputs: {"n": count.add_(1)}

    run = Reference(fresh)
    assert [run({})["n"].item() for _ in range(2)] == [1, 2]
    run.reset()
    assert run({})["n"].item() == 1


def test_a_frame_that_is_cut_is_none() -> None:
    whole = pack(Ask("call"), X)
    stream = io.BytesIO(whole)
    frame = unpack(stream.read)
    assert frame is not None and tensors_in(frame)["x"].equal(X["x"]) and unpack(stream.read) is None
    for length in (0, 7, 16, 20, len(whole) - 1):
        assert unpack(io.BytesIO(whole[:length]).read) is None
