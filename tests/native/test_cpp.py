"""mctl-runner's own tests, its worker on the samples' bundles, both under ASan and UBSan; what the binary is."""

import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from mctl.bundle_format.host import find_libtorch
from mctl.runner.native import find_runner

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "runner" / "cpp"
MAX_BINARY = 3_000_000  # bytes, stripped


def _call(*words: str | Path) -> str:
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])
    done = subprocess.run(
        [str(word) for word in words], cwd=SOURCES, env=os.environ | {"PATH": path}, text=True, capture_output=True
    )
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


@pytest.fixture(scope="session")
def tests() -> Path:
    """The C++ tests, under ASan and UBSan: `cmake --preset native` makes them without."""
    _call("cmake", "--preset", "asan", f"-DPYTHON={sys.executable}")
    _call("cmake", "--build", "--preset", "asan", "--target", "runner-tests")
    return ROOT / "build" / "asan" / "runner-tests"


@pytest.mark.usefixtures("tests")
def test_cpp() -> None:
    assert "100% tests passed" in _call("ctest", "--preset", "asan")


@pytest.mark.parametrize("sample", ["mlp", "cnn", "mixed", "stateful"])
def test_worker_on_a_bundle(tests: Path, make_bundle: Callable[[str], Path], sample: str) -> None:
    libtorch = find_libtorch()
    assert libtorch
    said = _call(tests, "--run_test=bundle_", "--", make_bundle(sample), libtorch)
    assert "No errors detected" in said


def test_the_binary_is_small_and_links_no_torch(tmp_path: Path) -> None:
    binary = find_runner()
    _call("strip", "-o", tmp_path / "stripped", binary)
    assert (tmp_path / "stripped").stat().st_size < MAX_BINARY
    needed = {line.split("[")[1][:-1] for line in _call("readelf", "-d", binary).splitlines() if "(NEEDED)" in line}
    assert needed <= {"libc.so.6", "libm.so.6", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
