"""The ONNX twin of a program: the same computation, dims and names, for runtimes that are not torch."""

import importlib.util
import re
from typing import TYPE_CHECKING, Any

import torch
from torch.export import ExportedProgram

from ..bundle_format.contract import Contract
from ..bundle_format.errors import ExportError, UsageError
from ..bundle_format.manifest import Source
from .usercode import quiet

if TYPE_CHECKING:
    from onnx import ModelProto

_MOST = (1 << 31) - 1  # bytes of a protobuf message
_WITHOUT = "leave out `--onnx` and `--embed-onnx`"


def require_onnx() -> None:
    """UsageError where the packages that write ONNX are not installed."""
    missing = [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"ONNX needs the package `{missing[0]}`", "install it: `pip install 'mctl[onnx]'`")


def refuse_state(contract: Contract) -> None:
    """ExportError for a model that changes buffers: an ONNX model keeps nothing between calls."""
    if contract.state:
        names = ", ".join(f"`{state.name}`" for state in contract.state)
        raise ExportError(f"the model keeps state between calls ({names}), which an ONNX model cannot", _WITHOUT)


def to_onnx(exported: ExportedProgram, contract: Contract, source: Source) -> bytes:
    """A checked ONNX model with the contract's names; its metadata tell which `source` it is the twin of.

    ExportError for an operator that ONNX has not, and for weights beyond the 2 GiB of one protobuf message.
    """
    import onnx

    size = sum(
        tensor.nbytes for tensor in {**exported.state_dict, **exported.constants}.values() if hasattr(tensor, "nbytes")
    )
    if size > _MOST:
        raise ExportError(f"the weights have {size / 1e9:.1f} GB, and an ONNX file holds no more than 2.1 GB", _WITHOUT)
    try:
        with quiet():
            converted: Any = torch.onnx.export(
                exported,
                dynamo=True,
                verbose=False,
                input_names=[declared.name for declared in contract.inputs],
                output_names=[output.name for output in contract.outputs],
            )
        model: ModelProto = converted.model_proto
    except Exception as error:
        raise _explained(error) from error
    _name_dims(model, contract)
    for key, value in record(source).items():
        model.metadata_props.add(key=key, value=value)
    onnx.checker.check_model(model, full_check=True)
    return bytes(model.SerializeToString(deterministic=True))


def record(source: Source) -> dict[str, str]:
    """What the twin's metadata say of the model that it was made from."""
    return {"mctl.source_sha256": source.sha256, "mctl.weights_sha256": source.weights_sha256 or ""}


def _name_dims(model: "ModelProto", contract: Contract) -> None:
    """Gives inputs and outputs the contract's dims (`batch`, `2*seq+1`) where torch wrote symbols of its own."""
    declared = {tensor.name: tensor.shape for tensor in contract.inputs}
    declared |= {output.name: output.shape for output in contract.outputs}
    for value in (*model.graph.input, *model.graph.output):
        for axis, size in zip(value.type.tensor_type.shape.dim, declared[value.name], strict=True):
            if isinstance(size, str):
                axis.dim_param = size
            else:
                axis.dim_value = size
    del model.graph.value_info[:]  # of what lies between, in torch's symbols: runtimes find it by themselves


def _explained(error: Exception) -> ExportError:
    chain: list[str] = []
    link: BaseException | None = error
    while link is not None:
        chain.append(str(link))
        link = link.__cause__
    if found := re.search(r"No ONNX function found for <OpOverload\(op='([^']+)'", "\n".join(chain)):
        return ExportError(f"ONNX has no operator for torch's `{found[1]}`", _WITHOUT)
    first = " ".join(chain[-1].split())[:300]
    return ExportError(f"torch cannot write the program as ONNX: {type(error).__name__}: {first}", _WITHOUT)
