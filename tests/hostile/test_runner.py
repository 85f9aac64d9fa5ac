"""mctl-runner refuses what Python's reader refuses, with the same exit code."""

import os
import socket
import subprocess
from pathlib import Path

import pytest

from mctl.bundle_format.archive import open_bundle
from mctl.bundle_format.errors import MctlError
from mctl.runner.native import find_libtorch

from ..serving.server import runner
from .bad_bundles import Bad, bad_bundles

BUNDLES = list(bad_bundles())
FRONT = [bad for bad in BUNDLES if bad.stage in ("good", "open", "manifest")]
# What a worker looks at before it loads the library, which is none here. A constant's place is looked at after that.
WORKER = [bad for bad in BUNDLES if bad.stage == "digest" or bad.name.startswith("weights: ")]
WORKER = [bad for bad in WORKER if bad.name != "weights: a constant missing"]


def serve(path: Path, *options: str) -> tuple[int | None, str]:
    """The exit code, and what was said on the way; None: it serves, and was stopped."""
    words = [runner(), "serve", path, "--port=0", f"--libtorch={find_libtorch()}", *options]
    said = ""
    with subprocess.Popen([str(word) for word in words], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            said += line
            if "--null" in options and line.startswith("listening on "):
                process.terminate()
                return None, said
        return process.wait(30), said


def refused_by_python(path: Path) -> int | None:
    try:
        open_bundle(path).close()
    except MctlError as error:
        return error.exit_code
    return None


@pytest.mark.parametrize("bad", FRONT, ids=[bad.name for bad in FRONT])
def test_front(bad: Bad, tmp_path: Path) -> None:
    path = tmp_path / "bundle.pt2"
    path.write_bytes(bad.data)
    code, said = serve(path, "--null")
    assert code == refused_by_python(path), said
    assert (code is None) == (bad.stage == "good")
    check_sentence(said, code)


@pytest.mark.parametrize("bad", WORKER, ids=[bad.name for bad in WORKER])
def test_worker(bad: Bad, tmp_path: Path) -> None:
    path = tmp_path / "bundle.pt2"
    path.write_bytes(bad.data)
    code, said = serve(path)
    assert code == 1
    assert "cannot load variant" not in said
    assert (bad.error if bad.stage == "digest" else "member `mctl/weights.safetensors`: ") in said
    check_sentence(said, code)


def make_fifo(path: Path) -> Path:
    os.mkfifo(path)
    return path


def make_socket(path: Path) -> Path:
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(path))
    return path


NOT_FILES = {
    "FIFO": make_fifo,
    "socket": make_socket,
    "device": lambda _: Path("/dev/zero"),
}


@pytest.mark.parametrize("kind", NOT_FILES)
def test_what_is_no_regular_file_is_refused_at_once(kind: str, tmp_path: Path) -> None:
    path = NOT_FILES[kind](tmp_path / "bundle.pt2")
    for code, said in (serve(path, "--null"), serve(path)):
        assert code == 1
        assert f"`{path}`" in said and ("no regular file" in said or kind == "socket")
        check_sentence(said, code)


def check_sentence(said: str, code: int | None) -> None:
    """One error, short and without an escape sequence."""
    assert said.count("error: ") == (code is not None)
    assert len(said) < 1500
    assert said.replace("\n", "").isprintable()
