"""Named inputs to named outputs: eager, in fp64, exported, and compiled in a process of its own."""

import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from ..bundle_format import errors
from .frames import Answer, Ask, pack, tensors_in, unpack
from .onnx import Runs

Tensors = Mapping[str, Tensor]
Call = Callable[[Tensors], dict[str, Tensor]]  # named inputs to named outputs; raises what the model raises

CHILD = (sys.executable, "-P", "-m", "mctl.parity.child")  # -P: no module of the current folder in its way
LOAD_SECONDS = 300.0
CALL_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Returned:
    outputs: dict[str, Tensor]
    seconds: float


@dataclass(frozen=True, slots=True)
class Raised:
    message: str


@dataclass(frozen=True, slots=True)
class Crashed:
    message: str


Outcome = Returned | Raised | Crashed


class CrashError(Exception):
    """The process that ran compiled code ended, or did not answer in time."""


class RaisedError(Exception):
    """The compiled model raised, or the runner refused the inputs."""


def attempt(run: Call, inputs: Tensors) -> Outcome:
    """What became of one call; only an interrupt gets through."""
    start = time.perf_counter()
    try:
        outputs = run(inputs)
    except CrashError as error:
        return Crashed(str(error))
    except Exception as error:  # the model's own errors are an answer here
        return Raised(str(error) if isinstance(error, RaisedError) else f"{type(error).__name__}: {error}")
    return Returned(outputs, time.perf_counter() - start)


class Reference:
    """The model run by torch itself. `make` gives a callable in a fresh state: live eager, or an exported program."""

    def __init__(self, make: Callable[[], Call]) -> None:
        self._make = make
        self._made: Call | None = None

    def __call__(self, inputs: Tensors) -> dict[str, Tensor]:
        return self._run(self._ready(), inputs)

    def reset(self) -> None:
        self._made = None

    def _ready(self) -> Call:
        self._made = self._made or self._make()
        return self._made

    def _run(self, call: Call, inputs: Tensors) -> dict[str, Tensor]:
        copies = {name: tensor.clone() for name, tensor in inputs.items()}  # a model may write to its inputs
        with torch.no_grad():
            return {name: tensor.detach().clone() for name, tensor in call(copies).items()}


class Double(Reference):
    """A reference in fp64: inputs and every narrower tensor are cast on the way."""

    def shaken(self, inputs: Tensors, roundings: float, seed: int) -> dict[str, Tensor]:
        """The outputs with each result of an operator off by up to this part of it, drawn from the seed."""
        return self._in(_Shake(roundings, seed), self._ready(), inputs)

    def _run(self, call: Call, inputs: Tensors) -> dict[str, Tensor]:
        return self._in(_Widen(), call, inputs)

    def _in(self, mode: "_Widen", call: Call, inputs: Tensors) -> dict[str, Tensor]:
        with in_float64(mode):
            return super()._run(call, {name: _wide(tensor) for name, tensor in inputs.items()})


@contextmanager
def in_float64(mode: "_Widen | None" = None) -> Iterator[None]:
    """Whatever narrower dtype a program names is float64 inside the block."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with mode or _Widen():
            yield
    finally:
        torch.set_default_dtype(default)


class _Widen(TorchDispatchMode):  # type: ignore[misc]
    """Every floating dtype that an operator is asked for becomes float64, and every tensor that it only reads."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(torch.dtype, _wide_dtype, (args, kwargs or {}))
        if not func._schema.is_mutable:
            args, kwargs = tree_map_only(Tensor, _wide, (args, kwargs))
        return func(*args, **kwargs)


class _Shake(_Widen):
    """In fp64 as well, and every result that float32 would have rounded is off a little.

    What float32 holds exactly (values that are copied or chosen, whole numbers) stays as it is.
    """

    def __init__(self, roundings: float, seed: int) -> None:
        super().__init__()
        self._roundings = roundings
        self._draw = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func.is_view:
            return result
        return tree_map_only(Tensor, self._written if func._schema.is_mutable else self._shaken, result)

    def _written(self, tensor: Tensor) -> Tensor:
        return tensor.copy_(self._shaken(tensor)) if tensor.is_floating_point() else tensor

    def _shaken(self, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        off = 1 + self._roundings * (2 * torch.rand(tensor.shape, generator=self._draw, dtype=torch.float64) - 1)
        return torch.where(tensor.float().double() == tensor, tensor, tensor * off)


def _wide_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype.is_floating_point else dtype


def _wide(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


class Compiled:
    """A bundle in a child process, started at once and again after a crash; the process ends with the context.

    `runs` says what runs it there; an ONNX runtime takes the model of the file `onnx`, or the one in the bundle.
    """

    def __init__(
        self, bundle: Path, runs: Runs = "compiled", onnx: Path | None = None, *, call_seconds: float = CALL_SECONDS
    ) -> None:
        self.runs = runs
        self.command = (*CHILD, str(bundle), runs, *([str(onnx)] if onnx else []))
        self.call_seconds = call_seconds
        self.seconds = 0.0  # of the last call, in the child
        self.peak = 0  # largest resident size of the child, bytes
        self._process: subprocess.Popen[bytes] | None = None
        self._ready = False
        self._start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def __call__(self, inputs: Tensors) -> dict[str, Tensor]:
        return self.ask(Ask("call"), inputs)

    def wait(self) -> None:
        """Until the bundle is loaded; MctlError of the runner where it cannot be, CrashError where loading kills."""
        if self._process is None:
            self._start()
        if not self._ready:
            self._answer(LOAD_SECONDS)
            self._ready = True

    def ask(self, ask: Ask, inputs: Tensors = {}) -> dict[str, Tensor]:  # noqa: B006
        """One request to the child. RaisedError, CrashError."""
        self.wait()
        assert self._process is not None and self._process.stdin is not None
        with suppress(BrokenPipeError):  # it died: the answer says how
            self._process.stdin.write(pack(ask, dict(inputs)))
            self._process.stdin.flush()
        return self._answer(self.call_seconds)

    def _start(self) -> None:
        self._chatter = tempfile.TemporaryFile()  # noqa: SIM115
        environment = os.environ | {"OMP_WAIT_POLICY": "passive"}  # spinning threads would starve eager beside it
        self._process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._chatter,
            env=environment,
        )
        self._ready = False

    def _answer(self, seconds: float) -> dict[str, Tensor]:
        assert self._process is not None and self._process.stdout is not None
        deadline = time.monotonic() + seconds
        handle = self._process.stdout.fileno()
        try:
            frame = unpack(lambda count: _read(handle, count, deadline))
        except TimeoutError:
            self._stop()
            raise CrashError(f"no answer within {seconds:g} s") from None
        if frame is None:
            raise CrashError(self._last_words())
        answer = msgspec.json.decode(frame.head, type=Answer)
        self.seconds, self.peak = answer.seconds, answer.peak
        if answer.ok:
            return tensors_in(frame)
        if not self._ready:
            self._stop()
            raise _load_error(answer)
        raise RaisedError(answer.error)

    def _last_words(self) -> str:
        """How the child ended, with what it said: an exception's text, or its last line."""
        assert self._process is not None
        try:
            code = self._process.wait(10)
        except subprocess.TimeoutExpired:  # it closed the pipe and lives
            self._process.kill()
            code = self._process.wait()
        self._chatter.seek(0)
        lines = [line.strip() for line in self._chatter.read().decode(errors="replace").splitlines() if line.strip()]
        self._stop()
        ended = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        said = next((line.partition("what():")[2].strip() for line in lines if "what():" in line), lines and lines[-1])
        return f"the process {ended}" + (f": {said[:300]}" if said else "")

    def _stop(self) -> None:
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            with suppress(BrokenPipeError):
                stream.close()  # type: ignore[union-attr]
        self._chatter.close()
        self._process = None


def _load_error(answer: Answer) -> Exception:
    kind = getattr(errors, answer.kind, None)
    if isinstance(kind, type) and issubclass(kind, errors.MctlError):
        return kind(answer.error, answer.hint)
    return RaisedError(f"the bundle cannot be loaded: {answer.error}")


def _read(handle: int, count: int, deadline: float) -> bytes:
    """`count` bytes, fewer at the end of the stream; TimeoutError after the deadline."""
    pieces = bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(handle, selectors.EVENT_READ)
        while len(pieces) < count:
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise TimeoutError
            piece = os.read(handle, min(count - len(pieces), 1 << 20))
            if not piece:
                break
            pieces += piece
    return bytes(pieces)
