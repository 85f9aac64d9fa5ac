"""Other ways to run the model of a bundle, each in a process of its own, to be timed beside it (runner/stopwatch.py).

Started as `python -m mctl.tuning.peers`, with a `Peer` as JSON for its argument.
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ..aoti import torch_private
from ..bundle_format.archive import open_bundle
from ..bundle_format.contract import Contract
from ..bundle_format.errors import MctlError
from ..bundle_format.manifest import Manifest
from ..export.capture import capture
from ..export.example import make_inputs, tracing_sizes
from ..export.golden import load_golden
from ..parity.onnx import OnnxSession, twin
from ..parity.truth import recorded_source
from ..runner.stopwatch import Answer, Ask

Name = Literal["eager", "compile", "aoti", "onnxruntime", "openvino", "eager-cuda", "compile-cuda"]
NAMES: tuple[Name, ...] = get_args(Name)

Tensors = dict[str, Tensor]
Bound = Callable[[], object]  # one call with inputs that are at hand


class Peer(msgspec.Struct, frozen=True):
    """What to run: `model` and `weights` for torch, `onnx` for the others ("": what the bundle knows)."""

    name: Name
    bundle: str
    threads: int
    model: str = ""
    weights: str = ""
    onnx: str = ""
    device: str = ""  # torch's, to which the model goes; "": it stays where it is


def main(peer: Peer) -> None:
    """Answers on what was stdout; the model's own prints go to stderr."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)

    def answer(made: Answer) -> None:
        answers.write(msgspec.json.encode(made) + b"\n")
        answers.flush()

    torch.set_num_threads(peer.threads)
    try:
        bind = _BINDERS[peer.name](peer)
        answer(Answer(ready=True))
    except Exception as error:
        answer(Answer(error=_told(error)))
        return
    for line in sys.stdin.buffer:
        ask = msgspec.json.decode(line, type=Ask)
        try:
            with torch.no_grad():
                answer(Answer(ns=_timed(bind(_inputs(ask)), ask)))
        except Exception as error:
            answer(Answer(error=_told(error)))


def in_words(error: MctlError) -> str:
    """In one line."""
    return f"{error.message} ({error.hint})" if error.hint else error.message


def _told(error: Exception) -> str:
    if isinstance(error, MctlError):
        return in_words(error)
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _inputs(ask: Ask) -> Tensors:
    found = load_file(ask.tensors)
    return {name.removeprefix("input."): value for name, value in found.items() if name.startswith("input.")}


def _timed(call: Bound, ask: Ask) -> tuple[int, ...]:
    taken: list[int] = []
    until = time.perf_counter() + ask.seconds
    while not taken or (len(taken) < ask.calls and time.perf_counter() < until):
        begin = time.perf_counter_ns()
        call()
        taken.append(time.perf_counter_ns() - begin)
    return tuple(taken)


# --- the peers ---------------------------------------------------------------------------------------------------


def _contract(peer: Peer) -> tuple[Contract, Manifest]:
    with open_bundle(Path(peer.bundle)) as archive:
        return archive.manifest.contract, archive.manifest


def _torch(peer: Peer, *, compiled: bool) -> Callable[[Tensors], Bound]:
    """Where it goes to a device, a call takes the inputs there and the outputs back, as a server has to."""
    contract, manifest = _contract(peer)
    source = recorded_source(peer.model, Path(peer.weights) if peer.weights else None, manifest)
    model = source.fresh()
    if peer.device:
        model = model.to(peer.device)
    if compiled:
        model = torch.compile(model, dynamic=bool(contract.dims))
    named = source.named({declared.name: torch.empty(0) for declared in contract.inputs})

    def bind(inputs: Tensors) -> Bound:
        args, kwargs = named.call(inputs)
        if peer.device:
            return lambda: _there_and_back(model, args, kwargs, peer.device)
        return lambda: model(*args, **kwargs)

    return bind


def _there_and_back(model: Callable[..., object], args: Sequence[Any], kwargs: dict[str, Any], device: str) -> object:
    """A call of the model on a device, with everything in the memory of the CPU before and after it."""
    args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.to(device), (args, kwargs))
    outputs = tree_map_only(Tensor, lambda tensor: tensor.cpu(), model(*args, **kwargs))
    torch.get_device_module(device).synchronize()
    return outputs


def _aoti(peer: Peer) -> Callable[[Tensors], Bound]:
    """The model as torch alone compiles it ahead of time: with torch's settings, called from Python."""
    with open_bundle(Path(peer.bundle)) as archive:
        manifest, example = archive.manifest, load_golden(archive)[0]
    contract = manifest.contract
    source = recorded_source(peer.model, Path(peer.weights) if peer.weights else None, manifest)
    shapes = {declared.name: declared.shape for declared in contract.inputs}
    ranges = {declared.name: declared.range for declared in contract.inputs}
    inputs = make_inputs(example.inputs, shapes, tracing_sizes(contract.dims, example.dims), ranges, 0)
    captured = capture(source.fresh(), source.named(inputs), inputs, shapes, contract.dims)
    with tempfile.TemporaryDirectory(prefix="mctl-bench-") as folder:
        model = torch_private.stock_model(captured.exported, Path(folder, "model.pt2"))

    def bind(inputs: Tensors) -> Bound:
        ordered = [inputs[name] for name in shapes]
        return lambda: model(*ordered)

    return bind


def _onnxruntime(peer: Peer) -> Callable[[Tensors], Bound]:
    contract, _ = _contract(peer)
    model, _ = twin(Path(peer.bundle), Path(peer.onnx) if peer.onnx else None)
    session = OnnxSession(model, "onnxruntime", tuple(output.name for output in contract.outputs), peer.threads)
    return session.bind


def _openvino(peer: Peer) -> Callable[[Tensors], Bound]:
    import openvino

    model, _ = twin(Path(peer.bundle), Path(peer.onnx) if peer.onnx else None)
    options = {"INFERENCE_NUM_THREADS": peer.threads, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}
    request = openvino.compile_model(openvino.Core().read_model(model), "CPU", options).create_infer_request()

    def bind(inputs: Tensors) -> Bound:
        arrays = {name: value.numpy() for name, value in inputs.items()}
        return lambda: request.infer(arrays, share_inputs=True, share_outputs=True)

    return bind


_BINDERS: dict[Name, Callable[[Peer], Callable[[Tensors], Bound]]] = {
    "eager": lambda peer: _torch(peer, compiled=False),
    "compile": lambda peer: _torch(peer, compiled=True),
    "aoti": _aoti,
    "onnxruntime": _onnxruntime,
    "openvino": _openvino,
    "eager-cuda": lambda peer: _torch(peer, compiled=False),
    "compile-cuda": lambda peer: _torch(peer, compiled=True),
}


if __name__ == "__main__":
    main(msgspec.json.decode(sys.argv[1], type=Peer))
