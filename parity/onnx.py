"""The ONNX twin as a session: named tensors in, named tensors out, by onnxruntime or by ONNX's own reference."""

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ..bundle_format.archive import open_bundle
from ..bundle_format.errors import BundleError, UsageError
from ..bundle_format.layout import ONNX
from ..export.onnx import record

Runtime = Literal["onnxruntime", "onnx-reference"]
Runs = Literal["compiled", "onnxruntime", "onnx-reference"]
Bind = Callable[[list[str], Mapping[str, Tensor]], Callable[[], list[Tensor]]]  # outputs, inputs -> a call
PACKAGES: dict[Runtime, str] = {"onnxruntime": "onnxruntime", "onnx-reference": "onnx"}


def twin_notes(bundle: Path, runs: Runs, file: Path | None) -> tuple[str, ...]:
    """What is odd about the ONNX model that is to be judged, if one is. UsageError where it, or `runs`, is not here."""
    if runs == "compiled":
        if file:
            raise UsageError("`--onnx` names a model that nothing runs", "add `--runs onnxruntime`")
        return ()
    missing = [name for name in ("onnx", PACKAGES[runs]) if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"the package `{missing[0]}` is not installed", "install it: `pip install 'mctl[onnx]'`")
    return twin(bundle, file)[1]


def twin(bundle: Path, file: Path | None) -> tuple[bytes, tuple[str, ...]]:
    """The bytes of the ONNX model in `file`, in the bundle, or beside it, and what is odd about them.

    UsageError where there is none, BundleError where the file is no ONNX model.
    """
    import onnx

    with open_bundle(bundle) as archive:
        source = archive.manifest.source
        if file is None and ONNX in archive.members:
            data = bytes(archive.view(ONNX))
        else:
            data = _bytes_of(file or _beside(bundle, record(source)))
    try:
        model = onnx.load_model_from_string(data)
        onnx.checker.check_model(model)
    except Exception as error:
        raise BundleError(
            f"`{file or bundle}` holds no sound ONNX model: {' '.join(str(error).split())[:200]}"
        ) from error
    known = {prop.key: prop.value for prop in model.metadata_props}
    alike = known == known | record(source)
    return data, () if alike else ("the ONNX model was exported from another model file, or with other weights",)


def _beside(bundle: Path, wanted: Mapping[str, str]) -> Path:
    """The ONNX model of the same export in the bundle's folder; else one that is named as if it were."""
    folder = bundle.resolve().parent
    usual = [folder / "program.onnx", bundle.resolve().with_suffix(".onnx")]
    found = [path for path in dict.fromkeys([*usual, *sorted(folder.glob("*.onnx"))]) if path.is_file()]
    same = (path for path in found if _properties(path).items() >= wanted.items())
    if path := next(same, next((path for path in found if path in usual), None)):
        return path
    hint = "make it with `mctl export --onnx`, or say where it is with `--onnx FILE`"
    raise UsageError(f"there is no ONNX model of this export in `{bundle}`, and none in `{folder}`", hint)


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"there is no ONNX model in `{path}`: {(error.strerror or str(error)).lower()}") from error


def _properties(path: Path) -> dict[str, str]:
    import onnx

    try:
        model = onnx.load(path, load_external_data=False)
    except Exception:  # whatever it is, it is no ONNX model
        return {}
    return {prop.key: prop.value for prop in model.metadata_props}


class OnnxSession:
    """Runs an ONNX model; tensors pass without a copy where the runtime allows it."""

    def __init__(self, model: bytes, runtime: Runtime, outputs: tuple[str, ...], threads: int | None = None) -> None:
        self.outputs = list(outputs)
        self._bind = _reference(model) if runtime == "onnx-reference" else _onnxruntime(model, threads)

    def call(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(zip(self.outputs, self.bind(inputs)(), strict=True))

    def bind(self, inputs: Mapping[str, Tensor]) -> Callable[[], list[Tensor]]:
        """A call with these inputs, which may be made again and again."""
        return self._bind(self.outputs, inputs)

    def reset_state(self) -> None:
        """An ONNX model has none."""


def _onnxruntime(model: bytes, threads: int | None) -> Bind:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    if threads:
        options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])

    def bind(outputs: list[str], inputs: Mapping[str, Tensor]) -> Callable[[], list[Tensor]]:
        binding = session.io_binding()
        for each in session.get_inputs():
            binding.bind_ortvalue_input(each.name, onnxruntime.OrtValue.from_dlpack(inputs[each.name].contiguous()))
        for name in outputs:
            binding.bind_output(name)

        def run() -> list[Tensor]:
            session.run_with_iobinding(binding)
            return [torch.from_dlpack(value) for value in binding.get_outputs()]

        return run

    return bind


def _reference(model: bytes) -> Bind:
    from onnx.reference import ReferenceEvaluator

    evaluator = ReferenceEvaluator(model)

    def bind(outputs: list[str], inputs: Mapping[str, Tensor]) -> Callable[[], list[Tensor]]:
        given = {name: _to_numpy(tensor) for name, tensor in inputs.items()}
        return lambda: [_from_numpy(array) for array in evaluator.run(outputs, given)]

    return bind


def _to_numpy(tensor: Tensor) -> Any:
    if tensor.dtype is not torch.bfloat16:
        return tensor.numpy()
    import ml_dtypes

    return tensor.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)


def _from_numpy(array: Any) -> Tensor:
    if array.dtype.name != "bfloat16":
        return torch.from_numpy(array.copy())
    return torch.from_numpy(array.view("uint16").copy()).view(torch.bfloat16)
