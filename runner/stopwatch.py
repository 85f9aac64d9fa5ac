"""Processes that call a model and say how long each call took. One for each way to run it: they share nothing.

They speak lines of JSON: `{"ready":true}` on stdout, then an `Answer` there to each `Ask` on stdin. One of them is
`mctl-runner measure` (runner/cpp/model/measure.h), the others are in tuning/peers.py.
"""

import os
import selectors
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import msgspec

from ..bundle_format.errors import HostError

SPIN_COUNT = "3000"  # of idle OpenMP threads; runner/cpp/model/host_library.cc says why, and has the same
_LOAD_SECONDS = 600.0  # torch.compile may have to compile
_CALL_SECONDS = 600.0


class Ask(msgspec.Struct, frozen=True):
    """At most `calls` calls within about `seconds`, at least one, with the `input.NAME` of a safetensors file.

    Of the runner's own process: `outputs` is a file that gets what the last call gave; an empty `variant`, the one
    that a server would choose; "kept", that the model's state goes on.
    """

    tensors: str
    dims: dict[str, int]
    variant: str
    seconds: float
    calls: int = 20_000
    outputs: str = ""
    state: Literal["", "kept"] = ""


class Answer(msgspec.Struct, frozen=True):
    """`ns`: how long each call took; `error`: why none was made."""

    ns: tuple[int, ...] = ()
    error: str = ""
    ready: bool = False


class Failed(Exception):
    """The process cannot go on; the message says why."""


class Ended(Failed):
    """The process is no more; `code` is its exit code, or minus the signal that killed it."""

    def __init__(self, code: int, said: str) -> None:
        super().__init__(f"its process ended with {code}" + (f": {said}" if said else ""))
        self.code = code


class Stopwatch:
    """One such process. It ends with the context."""

    def __init__(self, name: str, command: Sequence[str], threads: int) -> None:
        self.name, self.threads = name, threads
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        if "OMP_WAIT_POLICY" not in environment:  # as in the server; who is not measured now must not spin for long
            environment.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
        )
        self._rest = b""
        self._ready = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            with suppress(BrokenPipeError):
                stream.close()  # type: ignore[union-attr]

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self) -> None:
        """Until it is ready. Failed."""
        if not self._ready:
            self._answer(_LOAD_SECONDS)
            self._ready = True

    def time(self, ask: Ask) -> tuple[int, ...]:
        """How long each call took, in ns. Failed."""
        self.wait()
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it died: its end says how
            self._process.stdin.write(msgspec.json.encode(ask) + b"\n")
            self._process.stdin.flush()
        return self._answer(_CALL_SECONDS).ns

    def _answer(self, seconds: float) -> Answer:
        answer = msgspec.json.decode(self._line(time.monotonic() + seconds), type=Answer)
        if answer.error:
            raise Failed(answer.error)
        return answer

    def _line(self, deadline: float) -> bytes:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._rest:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise Failed("no answer in time")
                piece = os.read(self._process.stdout.fileno(), 1 << 20)
                if not piece:
                    raise self._ended()
                self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _ended(self) -> Ended:
        assert self._process.stderr is not None
        said = [line for line in self._process.stderr.read().decode(errors="replace").splitlines() if line.strip()]
        return Ended(self._process.wait(), said[-1].strip()[:300] if said else "")


def runner_stopwatch(runner: Path, bundle: Path, libtorch: Path | None, threads: int) -> Stopwatch:
    """The runner's own call path; without libtorch through mctl's shim. HostError where it cannot run the bundle."""
    watch = Stopwatch("mctl", (str(runner), "measure", str(bundle), str(libtorch or ""), str(threads)), threads)
    try:
        watch.wait()
    except Failed as failed:
        watch.__exit__(None, None, None)
        raise HostError(f"the runner cannot load `{bundle}`: {failed}") from None
    return watch
