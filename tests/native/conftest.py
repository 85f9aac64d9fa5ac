"""Builds the C++ tests while the tests before them run: it takes longer than any of those."""

import fcntl
import os
import subprocess
import sys
import sysconfig
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "runner" / "cpp"

_build: Future[Path] | None = None


def call(*words: str | Path) -> str:
    """The output of a command in the sources' folder, with the environment's tools; it has to succeed."""
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])
    done = subprocess.run(
        [str(word) for word in words], cwd=SOURCES, env=os.environ | {"PATH": path}, text=True, capture_output=True
    )
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def pytest_collection_finish(session: pytest.Session) -> None:
    global _build
    if any("cpp_tests" in getattr(item, "fixturenames", ()) for item in session.items):
        _build = ThreadPoolExecutor(1).submit(_built)


def _built() -> Path:
    build = ROOT / "build" / "asan"
    build.mkdir(parents=True, exist_ok=True)
    with (build / "tests.lock").open("w") as lock:  # each process of a parallel run is here
        fcntl.flock(lock, fcntl.LOCK_EX)
        call("nice", "cmake", "--preset", "asan", f"-DPYTHON={sys.executable}")
        call("nice", "cmake", "--build", "--preset", "asan", "--target", "runner-tests")
    return build / "runner-tests"


@pytest.fixture(scope="session")
def cpp_tests() -> Path:
    """The C++ tests, under ASan and UBSan: `cmake --preset native` makes them without."""
    assert _build is not None
    return _build.result()
