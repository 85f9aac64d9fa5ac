"""Servers over the samples' bundles, and the numbers that eager torch gives."""

import runpy
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from mctl.runner import native

from ..conftest import make_once, session_folder
from . import faulty
from .server import Server, runner

SAMPLES = Path(__file__).parents[2] / "samples"

FRAGILE = '''
"""Divides integers: by zero floor division raises, the other kind ends the process."""
import torch
from torch import nn

class Divide(nn.Module):
    def forward(self, x, floor, trunc):
        return torch.div(x, floor, rounding_mode="floor"), torch.div(x, trunc, rounding_mode="trunc")

model = Divide
example_inputs = tuple(torch.full((2, 2), n) for n in (7, 2, 3))
'''

Mlp = Callable[[np.ndarray], np.ndarray]


@pytest.fixture(scope="session")
def mlp() -> Mlp:
    """The MLP by eager torch, with the weights that its bundle has."""
    torch.manual_seed(0)  # the default of `mctl export --seed`
    model = runpy.run_path(str(SAMPLES / "mlp.py"))["model"]().eval().requires_grad_(False)
    return lambda x: model(torch.from_numpy(x)).numpy()


@pytest.fixture(scope="module")
def server(mlp_bundle: Path) -> Iterator[Server]:
    """A server of the MLP with the default settings."""
    with Server(mlp_bundle) as running:
        yield running


@pytest.fixture
def refusal() -> Callable[..., tuple[int, str]]:
    """`refusal(bundle, *options)`: exit code and stderr of a server that must not start."""

    def run(bundle: Path, *options: str, prepare: Callable[[], object] | None = None) -> tuple[int, str]:
        words = [runner(), "serve", bundle, "--libtorch", native.find_libtorch(), "--port", "0", *options]
        done = subprocess.run(
            [*map(str, words)], capture_output=True, text=True, timeout=60, check=False, preexec_fn=prepare
        )
        return done.returncode, "".join(line for line in done.stderr.splitlines(True) if "listening" not in line)

    return run


@pytest.fixture(scope="session")
def fragile_bundle(tmp_path_factory: pytest.TempPathFactory, mctl_ok: Callable[..., object]) -> Path:
    folder = tmp_path_factory.mktemp("fragile")
    (folder / "divide.py").write_text(FRAGILE)

    def make(path: Path) -> None:
        mctl_ok("export", folder / "divide.py", "--dim", "batch=1:8", "-o", folder / "program.pt2")
        mctl_ok("compile", folder / "program.pt2", "-o", path, "--name", "divide", "--no-parity")

    return make_once(session_folder(tmp_path_factory) / "fragile.pt2", make)


@pytest.fixture(scope="session")
def faulty_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that does to its process what a row asks for."""
    return faulty.library(tmp_path_factory.mktemp("faulty"))


@pytest.fixture(scope="session")
def faulty_bundle(faulty_library: Path) -> Path:
    return faulty.bundle(faulty_library, faulty_library.with_name("faulty.pt2"))
