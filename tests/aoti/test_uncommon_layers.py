"""What torch's compiler would fix to the example's size is right at every size, or is called as it is."""

import runpy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mctl.bundle_format.archive import open_bundle
from mctl.runner.session import Session, load

SOURCE = Path(__file__).parent / "uncommon_layers.py"
DIMS = ("--dim", "batch=1:3", "--dim", "h=4:40:2@x:2", "--dim", "w=4:40@x:3")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory, mctl_ok: Callable[..., object]) -> Path:
    folder = tmp_path_factory.mktemp("uncommon")
    mctl_ok("export", SOURCE, *DIMS, "-o", folder / "program.pt2")
    mctl_ok("compile", folder / "program.pt2", "-o", folder / "bundle.pt2")
    return folder / "bundle.pt2"


@pytest.fixture(scope="module")
def session(bundle: Path) -> Session:
    return load(bundle)


@pytest.mark.parametrize("shape", [(1, 3, 4, 4), (2, 3, 10, 14), (3, 3, 40, 37), (1, 3, 26, 5)])
def test_every_size_is_eagers(session: Session, shape: tuple[int, ...]) -> None:
    torch.manual_seed(sum(shape))
    x = torch.randn(shape)
    with torch.no_grad():
        wanted = runpy.run_path(str(SOURCE))["model"]()(x)
    got = session(x=x)
    for name in wanted:
        torch.testing.assert_close(got[name], wanted[name], rtol=1e-4, atol=1e-5 if name != "pixels" else 1)


def test_sizes_that_are_a_fraction(bundle: Path) -> None:
    with open_bundle(bundle) as archive:
        shapes = {output.name: output.shape for output in archive.manifest.contract.outputs}
    assert shapes["wider"] == ("batch", 3, "3*h//2", "3*w//2")
    assert shapes["gated"] == ("batch", 3, "h//2", "w")
