"""Functions in the place of compiled code, so that each fault of a model can be made at will."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from mctl.aoti.compiler import Staged
from mctl.aoti.symbols import Imports
from mctl.bundle_format.contract import Contract, Dim, Input, Output
from mctl.bundle_format.manifest import Manifest, Producer, Source, Tolerance
from mctl.export.golden import Case
from mctl.parity.frames import Ask
from mctl.parity.report import Result
from mctl.parity.runs import Double, RaisedError, Reference
from mctl.parity.subject import Subject
from mctl.parity.truth import Truth

Tensors = dict[str, torch.Tensor]
Model = Callable[[Tensors], Tensors]

BATCH, SEQ = Dim(name="batch", min=1, max=8), Dim(name="seq", min=1, max=16)


def contract(**changes: object) -> Contract:
    """float32 x[batch,4] to float32 y[batch,4], batched; or what `changes` say."""
    fields: dict[str, object] = {
        "dims": (BATCH,),
        "inputs": (Input(name="x", dtype="float32", shape=("batch", 4)),),
        "outputs": (Output(name="y", dtype="float32", shape=("batch", 4)),),
        "batch_dim": "batch",
    }
    return Contract(**{**fields, **changes})  # type: ignore[arg-type]


class Compiled:
    """Does what the child process does, in this one."""

    def __init__(self, model: Model, reset: Callable[[], None] = lambda: None) -> None:
        self.model, self.reset = model, reset
        self.peak = 0
        self.kept: Tensors = {}

    def ask(self, ask: Ask, inputs: Tensors) -> Tensors:
        if ask.do == "reset":
            self.reset()
            return {}
        if ask.do == "kept":
            return _sent(self.kept)
        if ask.seed is not None:
            torch.manual_seed(ask.seed)
        try:
            outputs = self.model({name: tensor.clone() for name, tensor in inputs.items()})
        except RuntimeError as error:
            raise RaisedError(str(error)) from error
        if ask.keep:
            self.kept = outputs
        return _sent(outputs)


def _sent(outputs: Tensors) -> Tensors:
    """As they come out of a pipe: in memory of their own."""
    return {name: tensor.clone() for name, tensor in outputs.items()}


def subject(
    compiled: Model | Compiled,
    eager: Callable[[], Model] | None = None,
    *,
    model: Contract | None = None,
    golden: tuple[Case, ...] = (),
    buckets: dict[str, tuple[int, ...]] | None = None,
    **more: object,
) -> Subject:
    """`compiled` beside `eager()`, which makes a model in a fresh state."""
    model = model or contract()
    manifest = Manifest(
        schema="mctl.bundle/1",
        name="m",
        version="1",
        created="",
        producer=Producer(mctl="", torch=""),
        source=Source(file="m.py", sha256="", model="model", seed=0),
        contract=model,
        golden=(),
        tolerances={output.name: Tolerance(rtol=1e-4, atol=1e-5) for output in model.outputs},
        members={},
        buckets={"batch": (1, 4, 8)} if buckets is None and model.batch_dim else buckets or {},
    )
    truth = Truth(Reference(eager), Double(eager), "eager") if eager else None
    run = compiled if isinstance(compiled, Compiled) else Compiled(compiled)
    return Subject(manifest, run, truth, list(golden), {}, 0, **more)  # type: ignore[arg-type]


def verdicts(results: list[Result]) -> dict[str, set[str]]:
    """The verdicts of each kind of check."""
    found: dict[str, set[str]] = {}
    for result in results:
        found.setdefault(result.check, set()).add(result.verdict)
    return found


def staged(manifest: Manifest, operators: tuple[str, ...], callers: Mapping[str, tuple[str, ...]]) -> Staged:
    """A bundle being made whose one variant imports `operators`, with nothing compiled."""
    made: Any = Staged.__new__(Staged)
    made.manifest = manifest
    made.stats = SimpleNamespace(imports=Imports((), ("aoti_torch_clone", *operators), "", ""), callers=callers)
    made.base = SimpleNamespace(name="dynamic")
    made._builder = SimpleNamespace(workspace=SimpleNamespace(path=Path()))
    return made  # type: ignore[no-any-return]
