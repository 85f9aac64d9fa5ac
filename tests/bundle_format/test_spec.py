"""SPEC.md says what is: its limits, its table of members, and the lines of stock torch that open a bundle."""

import re
import subprocess
import sys
import zipfile
from pathlib import Path

from mctl.bundle_format import contract, layout

SPEC = (Path(__file__).parents[2] / "bundle_format/SPEC.md").read_text(encoding="utf-8")

COMPARE = """
import sys
with open(sys.argv[1], "rb") as golden:
    case = safetensors.torch.load(golden.read())
got = bundle.aoti_runners["dynamic"](case["input.x"])
wanted = case["output.output"]
got = got if isinstance(got, torch.Tensor) else [*got.values()][0]
assert got.shape == wanted.shape
print((got - wanted).abs().max().item())
"""


def test_limits() -> None:
    text = " ".join(SPEC.split())
    for limit in (
        f"{layout.MAX_MEMBERS:,} members",
        f"names of {layout.MAX_NAME} bytes",
        f"{layout.MAX_MANIFEST >> 20} MiB of manifest, {layout.MAX_JSON_DEPTH} levels deep",
        f"{contract.MAX_DIMS} dims",
        f"{contract.MAX_RANK} axes",
        f"sizes up to 2^{contract.MAX_DIM.bit_length() - 1}",
        f"2^{layout.MAX_TENSORS.bit_length() - 1} tensors a member",
        f"header of {layout.MAX_TENSORS_HEADER >> 20} MiB",
        f"{layout.MAX_REPORT >> 20} MiB of report",
    ):
        assert limit in text


def test_every_path_is_in_the_table() -> None:
    for path in (layout.MANIFEST, layout.REPORT, layout.WEIGHTS, layout.GOLDEN, layout.VARIANTS):
        assert f"`{path}" in SPEC


def test_it_fits_on_one_page() -> None:
    assert len(SPEC.splitlines()) <= 100


def test_stock_torch_opens_a_bundle(mlp_bundle: Path, tmp_path: Path) -> None:
    """The lines of SPEC.md, run as they stand, then compared with eager's outputs from the same file."""
    found = re.search(r"```python\n(.*?)```", SPEC, re.DOTALL)
    assert found
    (tmp_path / "bundle.pt2").symlink_to(mlp_bundle)
    with zipfile.ZipFile(mlp_bundle) as file:
        case = max(n for n in file.namelist() if layout.GOLDEN in n)
        (tmp_path / "case.safetensors").write_bytes(file.read(case))
    command = [sys.executable, "-c", found[1] + COMPARE, "case.safetensors"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1e-5
