"""The process in which compiled code runs for parity: whatever it does, mctl lives and says so.

Started as `python -m mctl.parity.child BUNDLE [RUNTIME [ONNX]]`. It loads the bundle, or its ONNX twin, answers
(frames.py) that it did, and then obeys.
"""

import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch

from ..bundle_format.archive import open_bundle
from ..bundle_format.errors import MctlError
from ..generation.engine import Model, load_model
from ..runner.session import Session, load
from .frames import Answer, Ask, Tensors, pack, tensors_in, unpack
from .onnx import OnnxSession, Runs, Runtime, twin
from .standalone import StandaloneSession


def main(bundle: str, runtime: Runs = "compiled", onnx: str = "") -> None:
    """Answers on what was stdout; the model's own prints go to stderr."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    served = _Served()
    answers.write(served.answer(lambda: served.open(Path(bundle), runtime, onnx)))
    answers.flush()
    while served.loaded and (frame := unpack(sys.stdin.buffer.read)) is not None:
        ask = msgspec.json.decode(frame.head, type=Ask)
        answers.write(served.answer(lambda ask=ask, frame=frame: served.obey(ask, tensors_in(frame))))  # type: ignore[misc]
        answers.flush()


class _Served:
    """One session and the outputs that it was asked to keep."""

    def __init__(self) -> None:
        self.loaded = False
        self.kept: Tensors = {}

    def open(self, bundle: Path, runtime: Runs, onnx: str) -> Tensors:
        self.session: Any = compiled(bundle) if runtime == "compiled" else _twin(bundle, runtime, onnx)
        self.loaded = True
        return {}

    def obey(self, ask: Ask, inputs: Tensors) -> Tensors:
        if ask.do == "reset":
            self.session.reset_state()
            return {}
        if ask.do == "kept":
            return self.kept
        if ask.seed is not None:
            torch.manual_seed(ask.seed)
        outputs: Tensors = self.session.call(inputs)
        if ask.keep:
            self.kept = outputs
        return outputs

    def answer(self, work: Callable[[], Tensors]) -> bytes:
        start = time.perf_counter()
        outputs: Tensors = {}
        try:
            outputs = work()
            answer = Answer(ok=True)
        except MctlError as error:
            answer = Answer(ok=False, error=error.message, hint=error.hint, kind=type(error).__name__)
        except Exception as error:  # the model's own
            answer = Answer(ok=False, error=f"{type(error).__name__}: {error}")
        seconds = time.perf_counter() - start
        alone = isinstance(getattr(self, "session", None), StandaloneSession)
        peak = self.session.peak if alone else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return pack(msgspec.structs.replace(answer, seconds=seconds, peak=peak), outputs)


def compiled(bundle: Path) -> Session | StandaloneSession | Model:
    """As it is served: without libtorch where the manifest says so; with caches where it continues text."""
    with open_bundle(bundle) as archive:
        manifest = archive.manifest
    if manifest.generation is not None:
        return load_model(bundle)
    return StandaloneSession(bundle, manifest) if manifest.standalone else load(bundle)


def _twin(bundle: Path, runtime: Runtime, file: str) -> OnnxSession:
    with open_bundle(bundle) as archive:
        outputs = tuple(output.name for output in archive.manifest.contract.outputs)
    model, _ = twin(bundle, Path(file) if file else None)
    return OnnxSession(model, runtime, outputs)


if __name__ == "__main__":
    main(*sys.argv[1:])  # type: ignore[arg-type]
