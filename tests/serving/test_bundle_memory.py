"""The served file is changed while it is served: no wrong number leaves the server."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from .faulty import INFER, Action, right, rows
from .server import Answer, Server, infer_binary, outputs_of
from .test_batching import eventually

CHANGED = "the bundle's file was changed while it was served: load it again, or start the server again"


def ask(server: Server) -> Answer:
    return server.request(INFER, *infer_binary(x=rows((Action.ANSWER, 7))))


def is_right(answer: Answer) -> bool:
    return outputs_of(answer)["y"].tolist() == right(rows((Action.ANSWER, 7))).tolist()


@pytest.fixture
def bundle(faulty_bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(faulty_bundle, tmp_path / "served.pt2"))


def overwrite(path: Path) -> None:
    """As `cp new.pt2 served.pt2` does: the file stays the same one."""
    data = path.read_bytes()
    with path.open("r+b") as file:
        file.truncate(0)
        file.write(data)


def flip_a_byte(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def flip_a_byte_and_hide_it(path: Path) -> None:
    before = path.stat()
    flip_a_byte(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def cut(path: Path) -> None:
    os.truncate(path, 4096)


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


CHANGES = (overwrite, flip_a_byte, flip_a_byte_and_hide_it, cut, grow)


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_is_changed_gives_no_more_answers(bundle: Path, change: Callable[[Path], None]) -> None:
    with Server(bundle, "--instances", "2") as server:
        assert is_right(ask(server))
        change(bundle)
        answer = ask(server)
        assert (answer.status, answer.error) == (503, CHANGED)
        ready = server.request("/v2/health/ready")
        assert ready.status == 503 and CHANGED in ready.body.decode()
        eventually(lambda: not server.workers())
        assert ask(server).status == 503  # and no worker starts again
        assert not server.workers() and server.lines.count(f"error: {CHANGED}") == 1


def rename(path: Path) -> None:
    path.rename(path.with_name("elsewhere.pt2"))


def rename_another_over_it(path: Path) -> None:
    other = path.with_name("new.pt2")
    other.write_bytes(b"another bundle")
    other.rename(path)


def link(path: Path) -> None:
    path.with_name("linked.pt2").hardlink_to(path)


def make_read_only(path: Path) -> None:
    path.chmod(0o400)


@pytest.mark.parametrize("change", [rename, rename_another_over_it, link, make_read_only, Path.unlink])
def test_a_file_that_has_another_name_or_mode_is_served_on(bundle: Path, change: Callable[[Path], None]) -> None:
    with Server(bundle) as server:
        change(bundle)
        for _ in range(3):
            assert is_right(ask(server))


@pytest.mark.parametrize("change", CHANGES)
def test_a_copy_is_nobody_elses(bundle: Path, change: Callable[[Path], None]) -> None:
    with Server(bundle, "--bundle-memory", "copy") as server:
        change(bundle)
        for _ in range(3):
            assert is_right(ask(server))
        os.kill(server.workers()[0], 9)  # its successor loads the same copy
        eventually(lambda: ask(server).status == 200 and is_right(ask(server)))
