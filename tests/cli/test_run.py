"""`mctl run` as a whole process: what it prints, what it writes, how it ends."""

import json
import runpy
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file
from torch import nn

Command = Callable[..., "subprocess.CompletedProcess[str]"]


def eager_mlp() -> nn.Module:
    """The sample's model with the weights that `mctl export` gives it."""
    torch.manual_seed(0)
    sample = Path(__file__).parents[2] / "samples" / "mlp.py"
    return runpy.run_path(str(sample))["model"]().eval().requires_grad_(False)


def test_more_rows_than_the_model_takes(mlp_bundle: Path, run_mctl: Command, tmp_path: Path) -> None:
    folder = tmp_path / "Übung 1"
    folder.mkdir()
    rows = np.random.default_rng(0).standard_normal((150, 128), np.float32)
    np.save(folder / "rows.npy", rows)
    done = run_mctl("run", mlp_bundle, "--input", "x=@rows.npy", "-o", "out.safetensors", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "output: float32[150,10]\n"
    said = done.stderr.splitlines()
    assert said[0].startswith("150 rows in ") and said[0].endswith(" rows/s")
    assert said[1:] == ["wrote out.safetensors"]
    got = torch.from_numpy(load_file(folder / "out.safetensors")["output"])
    torch.testing.assert_close(got, eager_mlp()(torch.from_numpy(rows)))
    assert sorted(path.name for path in folder.iterdir()) == ["out.safetensors", "rows.npy"]


def test_json(mlp_bundle: Path, run_mctl: Command) -> None:
    done = run_mctl("run", mlp_bundle, "--input", "x=random", "--dim", "batch=70", "--threads", "1", "--json")
    answer = json.loads(done.stdout)
    assert (answer["schema"], answer["ok"], answer["file"]) == ("mctl.run/1", True, None)
    assert (answer["rows"], answer["calls"]) == (70, 2)
    assert answer["outputs"] == [{"name": "output", "dtype": "float32", "shape": [70, 10]}]


def test_errors(mlp_bundle: Path, mlp_program: Path, run_mctl: Command, tmp_path: Path) -> None:
    for arguments, code, wanted in (
        ([mlp_bundle], 2, "error: missing input `x`: float32[batch,128]\n\nhint: add `--input x=@FILE.npy`"),
        (
            [mlp_bundle, "--input", "x=twos"],
            2,
            "error: `--input x=twos` cannot be read\n\nhint: write `NAME=@FILE.npy`",
        ),
        ([mlp_program, "--input", "x=ones"], 1, "is a program"),
        ([mlp_bundle, "--input", "x=ones", "--dim", "batch=2", "-o", tmp_path / "no" / "o"], 2, "error: cannot write"),
    ):
        done = run_mctl("run", *arguments)
        assert done.returncode == code, done.stderr
        assert wanted in done.stderr and "Traceback" not in done.stderr
        assert done.stdout == ""
