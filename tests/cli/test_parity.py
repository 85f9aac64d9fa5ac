"""`mctl parity` as a process: exit code, stdout, stderr, the files it writes, and what a CI sees."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from xml.etree import ElementTree

import pytest
import torch

from ..parity.faults import with_weights

Run = Callable[..., "CompletedProcess[str]"]


@pytest.fixture(scope="module")
def bad_bundle(mlp_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    def negate(name: str, tensor: torch.Tensor) -> None:
        tensor.neg_()

    return with_weights(mlp_bundle, tmp_path_factory.mktemp("bad") / "bad.pt2", negate)


def test_a_good_bundle_against_its_model(mlp_bundle: Path, run_mctl: Run, tmp_path: Path) -> None:
    files = {"--junit": tmp_path / "r.xml", "--report": tmp_path / "r.json", "--html": tmp_path / "r.html"}
    options = [word for pair in files.items() for word in pair]
    done = run_mctl("parity", mlp_bundle, "--against", "samples/mlp.py", "--json", *options)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["schema"] == "mctl.parity/1" and told["ok"] is True and told["verdict"] == "pass"
    assert told["reference"] == "live eager of mlp.py:model" and told["fp64"].startswith("used")
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("pass: mlp 1 is the eager model: ")
    assert json.loads(files["--report"].read_bytes()) == told
    assert ElementTree.parse(files["--junit"]).getroot().get("failures") == "0"
    assert files["--html"].read_text().startswith("<!doctype html>")


def test_a_bad_bundle_in_github_actions(bad_bundle: Path, run_mctl: Run, tmp_path: Path) -> None:
    summary = tmp_path / "summary.md"
    env = os.environ | {"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(summary)}
    done = run_mctl("parity", bad_bundle, env=env)
    assert done.returncode == 1 and done.stdout == ""
    annotations = [line for line in done.stderr.splitlines() if line.startswith("::error::")]
    assert re.match(r"::error::parity: differs in batch=1 and \d+ more: output 'output': off by ", annotations[0])
    assert len({line.rpartition("to do: ")[2] for line in annotations}) == len(annotations)  # one for each cause
    assert "%0Ato do: " in annotations[0]
    assert "differs: mlp 1 is not the eager model" in done.stderr
    assert summary.read_text().startswith("### ❌ Parity: differs: mlp 1 is not the eager model")


def test_a_tolerance_of_the_user_decides(bad_bundle: Path, run_mctl: Run) -> None:
    done = run_mctl("parity", bad_bundle, "--tolerance", "output=0,100")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "error", "hint"),
    [
        (["--tolerance", "output=1"], "`--tolerance output=1` is not understood", "--tolerance logits=1e-3,1e-5"),
        (["--tolerance", "output=-1,0"], "`--tolerance output=-1,0` is not understood", ""),
        (["--tolerance", "logits=1,0"], "there is no output `logits`", "the model gives `output`"),
        (["--against", "nowhere.py"], "there is no file `nowhere.py`", ""),
    ],
)
def test_wrong_usage(mlp_bundle: Path, run_mctl: Run, arguments: list[str], error: str, hint: str) -> None:
    done = run_mctl("parity", mlp_bundle, *arguments)
    assert done.returncode == 2
    assert f"error: {error}" in done.stderr and hint in done.stderr and "Traceback" not in done.stderr


def test_another_model_is_said_once(mlp_bundle: Path, run_mctl: Run, tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text(
        "import torch\nmodel = torch.nn.Linear(7, 3)\nexample_inputs = {'input': torch.ones(2, 7)}\n"
    )
    done = run_mctl("parity", mlp_bundle, "--against", tmp_path / "other.py")
    assert done.returncode == 1 and done.stderr.count("error: ") == 1
    assert "error: this model takes other inputs than the bundle (`x`)" in done.stderr
    assert "--range" not in done.stderr and "--against MODEL.py[:NAME]" in done.stderr


def test_an_annotation_has_file_and_line(run_mctl: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    (tmp_path / "broken.py").write_text(
        "import torch\nclass model(torch.nn.Module):\n    def forward(self, x):\n        return x.item()\n"
        "example_inputs = (torch.ones(2, 7),)\n"
    )
    done = run_mctl("export", tmp_path / "broken.py", "-o", tmp_path / "p.pt2")
    lines = [line for line in done.stderr.splitlines() if line.startswith("::")]
    assert len(lines) == 1 and lines[0].startswith(f"::error file={tmp_path / 'broken.py'},line=4::"), done.stderr


def test_a_program_is_not_a_bundle(mlp_program: Path, run_mctl: Run) -> None:
    done = run_mctl("parity", mlp_program)
    assert done.returncode == 1 and "not a bundle" in done.stderr and "mctl compile" in done.stderr


def test_ctrl_c_leaves_no_process(mlp_bundle: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mctl.cli.main", "parity", str(mlp_bundle), "--report", str(tmp_path / "r.json")]
    running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    child = _child_of(running.pid)
    running.send_signal(signal.SIGINT)
    assert running.wait(30) == 130 and "Traceback" not in (running.stderr or sys.stderr).read()
    assert not Path(f"/proc/{child}").exists() and list(tmp_path.iterdir()) == []


def _child_of(parent: int) -> int:
    """The process that the command starts for compiled code."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        for status in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                if int(status.read_text().rpartition(")")[2].split()[1]) == parent:
                    return int(status.parent.name)
        time.sleep(0.02)
    raise AssertionError("no child was started")
