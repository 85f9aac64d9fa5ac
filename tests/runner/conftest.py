"""Sessions for the runner's tests: over the samples' bundles, and over plain functions in place of compiled code."""

import runpy
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from mctl.bundle_format.contract import Contract
from mctl.bundle_format.manifest import Tuning
from mctl.runner.session import Session

SAMPLES = Path(__file__).parents[2] / "samples"


@pytest.fixture(scope="session")
def eager() -> Callable[[str], nn.Module]:
    """`eager("mlp")`: the sample's model with the weights that its bundle has, run by torch itself."""

    def model_of(sample: str) -> nn.Module:
        torch.manual_seed(0)  # the default of `mctl export --seed`
        return runpy.run_path(str(SAMPLES / f"{sample}.py"))["model"]().eval().requires_grad_(False)

    return model_of


MakeSession = Callable[..., Session]


@pytest.fixture
def session_over() -> MakeSession:
    """`session_over(contract, function, buckets={}, tuning=None)`: a function of a list of tensors stands for code."""

    def make(
        contract: Contract,
        function: Callable[[list[Tensor]], list[Tensor]],
        buckets: Mapping[str, tuple[int, ...]] | None = None,
        tuning: Tuning | None = None,
    ) -> Session:
        variant = SimpleNamespace(name="dynamic", covers={}, threads=0)
        manifest = SimpleNamespace(
            contract=contract, buckets=buckets or {}, curve=(), variants=(variant,), tuning=tuning
        )
        archive = SimpleNamespace(manifest=manifest, close=lambda: None)
        library = SimpleNamespace(run=function, variant=variant)
        constants = SimpleNamespace(spans=list, reset=lambda: None)
        return Session(archive, constants, [library], 1)  # type: ignore[arg-type, list-item]

    return make
