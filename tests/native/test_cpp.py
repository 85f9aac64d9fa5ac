"""mctl-runner's own tests: plain, under ASan and UBSan, and its worker on the samples' bundles."""

import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from mctl.bundle_format.host import find_libtorch

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
def built() -> Callable[[str], Path]:
    """`built("asan")` is the folder of that preset, with the tests in it."""
    folders: dict[str, Path] = {}

    def build(preset: str) -> Path:
        if preset not in folders:
            _call("cmake", "--preset", preset, f"-DPYTHON={sys.executable}")
            _call("cmake", "--build", "--preset", preset, "--target", "runner-tests")
            folders[preset] = ROOT / "build" / preset
        return folders[preset]

    return build


@pytest.mark.parametrize("preset", ["native", "asan"])
def test_cpp(built: Callable[[str], Path], preset: str) -> None:
    built(preset)
    assert "100% tests passed" in _call("ctest", "--preset", preset)


@pytest.mark.parametrize("sample", ["mlp", "cnn", "mixed", "stateful"])
def test_worker_on_a_bundle(built: Callable[[str], Path], make_bundle: Callable[[str], Path], sample: str) -> None:
    libtorch = find_libtorch()
    assert libtorch
    said = _call(built("native") / "runner-tests", "--run_test=bundle_", "--", make_bundle(sample), libtorch)
    assert "No errors detected" in said


def test_the_binary_is_small_and_links_no_torch(built: Callable[[str], Path], tmp_path: Path) -> None:
    _call("cmake", "--build", "--preset", "native", "--target", "mctl-runner")
    binary = built("native") / "mctl-runner"
    _call("strip", "-o", tmp_path / "stripped", binary)
    assert (tmp_path / "stripped").stat().st_size < MAX_BINARY
    needed = {line.split("[")[1][:-1] for line in _call("readelf", "-d", binary).splitlines() if "(NEEDED)" in line}
    assert needed <= {"libc.so.6", "libm.so.6", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
