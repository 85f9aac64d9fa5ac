"""Runs the child process that compiles: its messages, its end, its time, and that nothing of it stays behind."""

import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import msgspec

from ..bundle_format import errors
from ..bundle_format.errors import CompileError, MctlError
from .protocol import Done, Failed, Message, Phase, Request

CHILD = (sys.executable, "-m", "mctl.aoti.child")
# Variables that would change what is compiled without being recorded.
_DROPPED = ("TORCHINDUCTOR_", "AOT_INDUCTOR_", "AOTINDUCTOR_", "TORCH_COMPILE_", "ATEN_CPU_CAPABILITY")


def run_child(
    request: Request, timeout: float | None, progress: Callable[[str], None]
) -> tuple[Done, dict[str, float]]:
    """What the child made, and the seconds of its phases. CompileError when it fails, crashes or takes too long.

    Whatever happens, when this returns or raises, no process of the child's group is left.
    """
    clock = _Clock(progress)
    log = Path(request.work) / "log"
    reader, writer = os.pipe()
    try:
        with log.open("wb") as output:
            child = _start(request, writer, output.fileno())
        os.close(writer)
        try:
            result = _listen(reader, child, clock, timeout)
        finally:
            _end(child)
    finally:
        os.close(reader)
    if result is None:
        raise _crash(child.returncode, log)
    if isinstance(result, Failed):
        raise _error(result)
    return result, clock.seconds()


def _start(request: Request, writer: int, output: int) -> "subprocess.Popen[bytes]":
    """In a session of its own: Ctrl-C reaches only the parent, which ends the whole group."""
    child = subprocess.Popen(
        [*CHILD, str(writer)],
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=output,
        cwd=request.work,
        env=_environment(Path(request.work)),
        pass_fds=(writer,),
        start_new_session=True,
    )
    assert child.stdin is not None
    with suppress(BrokenPipeError):
        child.stdin.write(msgspec.json.encode(request) + b"\n")
        child.stdin.flush()
    return child


def _end(child: "subprocess.Popen[bytes]") -> None:
    """Kills the child's group and waits until it is gone: what still writes would spoil the removal of the folder."""
    patience = time.monotonic() + 2  # zombies that nobody reaps stay members of the group
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        while time.monotonic() < patience:
            os.killpg(child.pid, 0)
            time.sleep(0.002)
    child.wait()
    if child.stdin:
        child.stdin.close()


def _environment(work: Path) -> dict[str, str]:
    """Every cache and temporary file goes to the work folder; no home and no user's name is needed."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_DROPPED)}
    return kept | {
        "TORCHINDUCTOR_CACHE_DIR": str(work / "cache"),
        "TMPDIR": str(work / "tmp"),
        "HOME": str(work),
        "USER": "mctl",
        "LOGNAME": "mctl",
        "LC_ALL": "C.UTF-8",
        "PYTHONHASHSEED": "0",
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


class _Clock:
    """Tells and times the phases."""

    def __init__(self, progress: Callable[[str], None]) -> None:
        self._progress = progress
        self._starts: list[tuple[str, float]] = []

    def start(self, name: str) -> None:
        self._starts.append((name, time.monotonic()))
        self._progress(name)

    def seconds(self) -> dict[str, float]:
        marks = [*self._starts, ("", time.monotonic())]
        return {name: end - start for (name, start), (_, end) in pairwise(marks)}


def _listen(
    reader: int, child: "subprocess.Popen[bytes]", clock: _Clock, timeout: float | None
) -> Done | Failed | None:
    """The child's last word; None if it ended without one."""
    for line in _lines(reader, child, timeout):
        message = msgspec.json.decode(line, type=Message)
        if not isinstance(message, Phase):
            return message
        clock.start(message.name)
    child.wait()
    return None


def _lines(reader: int, child: "subprocess.Popen[bytes]", timeout: float | None) -> Iterator[bytes]:
    """Lines from the pipe until all who hold its other end are gone, or the child is."""
    end = None if timeout is None else time.monotonic() + timeout
    pending = b""
    with selectors.DefaultSelector() as selector:
        selector.register(reader, selectors.EVENT_READ)
        while True:
            if end is not None and time.monotonic() > end:
                raise CompileError(f"compiling took more than {timeout:g} seconds", "give it more with `--timeout`")
            if not selector.select(0.2):
                if child.poll() is not None:
                    return
                continue
            chunk = os.read(reader, 1 << 16)
            if not chunk:
                return
            *lines, pending = (pending + chunk).split(b"\n")
            yield from lines


def _error(failed: Failed) -> Exception:
    kind: type[MctlError] | None = getattr(errors, failed.kind, None)
    if kind is None:
        return RuntimeError(f"the compiling process failed\n{failed.message}")
    return kind(failed.message, failed.hint)


def _crash(code: int, log: Path) -> CompileError:
    """The child ended without a word."""
    if code == -signal.SIGKILL:
        return CompileError(
            "the compiling process was killed: most likely the machine ran out of memory",
            "close other programs, use a machine with more memory, or make the model smaller",
        )
    how = f"crashed with {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    lines = log.read_text(errors="replace").strip().splitlines() if log.is_file() else []
    last = f": {lines[-1][:300]}" if lines else ""
    hint = "this is a fault of torch or of the C++ compiler: try another version, or other `--inductor` options"
    return CompileError(f"the compiling process {how}{last}", hint)
