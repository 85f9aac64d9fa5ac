"""Files appear whole or not at all, whatever stops the writer."""

import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mctl.bundle_format.errors import BundleError, UsageError
from mctl.bundle_format.files import atomic


@contextmanager
def unprivileged() -> Iterator[None]:
    """Permissions count for root, too."""
    was = os.geteuid()
    if was == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        if was == 0:
            os.seteuid(0)


def test_whole(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")
    with atomic(path) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, MemoryError])
def test_absent_after_any_exception(error: type[BaseException], tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")
    with pytest.raises(error), atomic(path) as file:
        file.write(b"new")
        raise error
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_new_files_have_the_usual_mode(tmp_path: Path) -> None:
    with atomic(tmp_path / "a") as file:
        file.write(b"x")
    (tmp_path / "b").write_bytes(b"x")
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "b").stat().st_mode


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"old")
    (tmp_path / "link").symlink_to(target)
    with atomic(tmp_path / "link") as file:
        file.write(b"new")
    assert (tmp_path / "link").is_symlink()
    assert target.read_bytes() == b"new"


def test_places_that_cannot_be_written() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        closed = folder / "closed"
        closed.mkdir(mode=0o555)
        for path, reason in (
            (closed / "a", "permission denied"),
            (folder / "none" / "a", "no such file or directory"),
            (folder, "it is a folder"),
            (Path("/dev/null"), "it is no regular file"),
            (folder / ("x" * 300), "file name too long"),
        ):
            with unprivileged(), pytest.raises(UsageError) as caught, atomic(path):
                raise AssertionError("the body ran")
            assert caught.value.message == f"cannot write `{path}`: {reason}"
        assert list(folder.iterdir()) == [closed]


def test_an_error_of_what_is_read_keeps_its_type(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), atomic(tmp_path / "a") as file:
        file.write((tmp_path / "source").read_bytes())
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk(tmp_path: Path) -> None:
    """A limit on file sizes stands in for it: the write fails in the middle, in the same way."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(BundleError, match="file too large") as caught, atomic(tmp_path / "a") as file:
            for _ in range(100):
                file.write(b"x" * (1 << 16))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.hint
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_in_the_middle(tmp_path: Path) -> None:
    code = """
import sys, time
from pathlib import Path
from mctl.bundle_format.files import atomic
with atomic(Path(sys.argv[1])) as file:
    while True:
        file.write(b"x" * 100_000)
        time.sleep(0.001)
"""
    child = subprocess.Popen([sys.executable, "-c", code, tmp_path / "a"], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 30
    while not list(tmp_path.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert list(tmp_path.iterdir())
    child.send_signal(signal.SIGINT)
    assert child.wait(30) != 0
    assert list(tmp_path.iterdir()) == []
