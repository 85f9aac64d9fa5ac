"""`mctl export` as a whole process: stdout, stderr, exit code, and what it leaves behind."""

import json
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mctl.bundle_format.archive import open_program

from ..conftest import mctl

MODEL = """\
import torch
from torch import nn

print("made by the user")

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(20, 4)

    def forward(self, ids, scale):
        return {"rows": self.table(ids) * scale.unsqueeze(-1)}

model = Net
example_inputs = (torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.ones(2, 1))
preprocessing = {"vocabulary": "none"}
"""
DIMS = ("--dim", "batch=1:8", "--dim", "seq=1:16@ids:1")
TEXT = """\
program.pt2: a program that is not compiled (SIZE)

model          model, version 1
digest         DIGEST
made           TIME by mctl VERSION, torch TORCH, Python PYTHON
source         model.py:model
dim            batch 1..8, batched
dim            seq 1..16
input          ids int64[batch,seq], values 0..19
input          scale float32[batch,1]
output         rows float32[batch,seq,4]
golden cases   batch=1,seq=1; batch=2,seq=3; batch=8,seq=1; batch=1,seq=16; batch=4,seq=8; batch=8,seq=16
preprocessing  vocabulary
sizes          SIZES

proven: equal to eager at 6 sizes, largest error 0
seconds: import T, trace T, prove T, write T
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    return path


def _filtered(text: str) -> str:
    text = re.sub(r"[0-9a-f]{64}", "DIGEST", text)
    text = re.sub(r"\(\d.* k?B\)", "(SIZE)", text)
    text = re.sub(
        r"(?m)^(made +)\S+ by mctl \S+, torch \S+, Python \S+$",
        r"\1TIME by mctl VERSION, torch TORCH, Python PYTHON",
        text,
    )
    text = re.sub(r"(?m)^(sizes +).*$", r"\1SIZES", text)
    return re.sub(r"\d+\.\d(,|$)", r"T\1", text, flags=re.MULTILINE)


def test_export(model: Path) -> None:
    done = mctl("export", model.name, *DIMS, cwd=model.parent)
    assert (done.returncode, _filtered(done.stdout)) == (0, TEXT)
    assert "made by the user\n" in done.stderr and "error" not in done.stderr
    assert open_program(model.parent / "program.pt2").manifest.name == "model"


def test_export_json(model: Path) -> None:
    done = mctl("export", model, *DIMS, "--pad", "ids=0", "--json", "-o", model.parent / "é x.pt2")
    found = json.loads(done.stdout)
    assert (found["schema"], found["ok"], found["kind"]) == ("mctl.export/1", True, "program")
    assert found["contract"]["inputs"][0] == {
        "name": "ids", "dtype": "int64", "shape": ["batch", "seq"], "range": [0, 19], "pad": 0,
    }  # fmt: skip
    assert set(found["seconds"]) == {"import", "trace", "prove", "write"}
    assert found["proven"]["batch=8,seq=16"] == 0 and found["file"].endswith("é x.pt2")


@pytest.mark.parametrize(
    ("options", "code", "error"),
    [
        (("--dim", "batch=4:1"), 2, "`--dim batch=4:1`: the minimum 4 is larger than the maximum 1"),
        (("--dim", "batch=1:8@x:0"), 2, "there is no input `x`"),
        (("--dim", "batch=1:8", "-o", "no/where.pt2"), 2, "cannot write `no/where.pt2`"),
        (("--weights", "none.pt"), 2, "there is no file `none.pt`"),
        (("--seed", "x"), 2, "--seed"),
        (("--batch-dim", "rows"), 2, "no such dim is declared"),
    ],
)
def test_wrong_usage(model: Path, options: tuple[str, ...], code: int, error: str) -> None:
    done = mctl("export", model.name, *options, cwd=model.parent)
    assert (done.returncode, done.stdout) == (code, "") and error in done.stderr and "Traceback" not in done.stderr
    assert [path.name for path in model.parent.glob("*.pt2")] == []


def test_a_model_that_fails_is_told_in_two_lines(model: Path) -> None:
    model.write_text(MODEL.replace("scale.unsqueeze(-1)", "scale.reshape(2, 1, 1)"))
    done = mctl("export", model.name, "--dim", "batch=1:8", cwd=model.parent)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.partition("made by the user\n")[2] == (
        "error: dimension `batch` became static: the model fixes it at 2 (model.py:12)\n\n"
        "hint: let the code follow the input's size: `x.shape[0]`, `-1` in a reshape; or leave `--dim batch` out\n"
    )


def test_an_error_as_json(model: Path) -> None:
    model.write_text("import nothing_like_this")
    done = mctl("export", model.name, "--json", cwd=model.parent)
    found = json.loads(done.stdout)
    assert done.returncode == 1 and not found["ok"] and "no module named `nothing_like_this`" in found["error"]


def test_a_full_disk(model: Path) -> None:
    """A limit on the size of files stands for it: writing fails half-way."""

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

    done = mctl("export", model.name, *DIMS, cwd=model.parent, preexec_fn=limit)
    assert done.returncode == 1 and "error: cannot write `program.pt2`" in done.stderr
    assert "Traceback" not in done.stderr
    assert [path.name for path in model.parent.iterdir() if path.suffix == ".pt2" or path.name[0] == "."] == []


def test_ctrl_c_leaves_nothing(model: Path) -> None:
    model.write_text(MODEL + "\nimport time, sys\nprint('waiting', file=sys.stderr, flush=True)\ntime.sleep(60)\n")
    command = [sys.executable, "-m", "mctl.cli.main", "export", model.name, *DIMS]
    process = subprocess.Popen(command, cwd=model.parent, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    while "waiting" not in process.stderr.readline():
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=20) == 130
    assert "Traceback" not in process.stderr.read()
    assert not list(model.parent.glob("*.pt2")) and not list(model.parent.glob(".program*"))
