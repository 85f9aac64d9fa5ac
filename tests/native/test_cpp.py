"""mctl-runner's own tests, its worker on the samples' bundles, both under ASan and UBSan; what the binary is."""

from collections.abc import Callable
from pathlib import Path

import pytest

from mctl.bundle_format.host import find_libtorch
from mctl.runner.native import find_runner

from .conftest import call

MAX_BINARY = 4_000_000  # bytes, stripped


@pytest.mark.usefixtures("cpp_tests")
def test_cpp() -> None:
    assert "100% tests passed" in call("ctest", "--preset", "asan")


@pytest.mark.parametrize("sample", ["mlp", "cnn", "mixed", "stateful"])
def test_worker_on_a_bundle(cpp_tests: Path, make_bundle: Callable[[str], Path], sample: str) -> None:
    libtorch = find_libtorch()
    assert libtorch
    said = call(cpp_tests, "--run_test=bundle_", "--", make_bundle(sample), libtorch)
    assert "No errors detected" in said


def test_the_binary_is_small_and_links_no_torch(tmp_path: Path) -> None:
    binary = find_runner()
    call("strip", "-o", tmp_path / "stripped", binary)
    assert (tmp_path / "stripped").stat().st_size < MAX_BINARY
    needed = {line.split("[")[1][:-1] for line in call("readelf", "-d", binary).splitlines() if "(NEEDED)" in line}
    assert needed <= {"libc.so.6", "libm.so.6", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
