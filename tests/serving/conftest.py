"""Servers over the samples' bundles, and the numbers that eager torch gives."""

import runpy
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from mctl.runner import native

from .server import Server, runner

SAMPLES = Path(__file__).parents[2] / "samples"

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

    def run(bundle: Path, *options: str) -> tuple[int, str]:
        words = [runner(), "serve", bundle, "--libtorch", native.find_libtorch(), "--port", "0", *options]
        done = subprocess.run([*map(str, words)], capture_output=True, text=True, timeout=60, check=False)
        return done.returncode, "".join(line for line in done.stderr.splitlines(True) if "listening" not in line)

    return run
