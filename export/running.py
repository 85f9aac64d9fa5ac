"""An exported program, and the model itself, as functions from named inputs to named outputs."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from ..bundle_format.contract import Contract
from ..bundle_format.errors import ModelError
from .naming import Named, Tensors, name_outputs
from .usercode import user_code

Run = Callable[[Mapping[str, torch.Tensor]], Tensors]


def run_model(model: nn.Module, named: Named, output_names: Sequence[str] | None = None) -> Run:
    """Calls `model` with copies of the inputs, under no_grad. ModelError where it raises."""

    def run(inputs: Mapping[str, torch.Tensor]) -> Tensors:
        args, kwargs = named.call({name: value.clone() for name, value in inputs.items()})
        with torch.no_grad(), user_code("the model failed", ModelError):
            outputs, _ = name_outputs(model(*args, **kwargs))
        return dict(zip(output_names or outputs, outputs.values(), strict=True))

    return run


def run_program(exported: ExportedProgram, contract: Contract) -> Run:
    """Calls the exported program, in a fresh state of its own, with tensors in the contract's order."""
    module: Any = exported.module()
    for state in contract.state:
        _own(module, state.name)
    inputs = [declared.name for declared in contract.inputs]
    outputs = [output.name for output in contract.outputs]

    def run(given: Mapping[str, torch.Tensor]) -> Tensors:
        with torch.no_grad():
            result = module(*(given[name].clone() for name in inputs))
        return dict(zip(outputs, result.values(), strict=True))

    return run


def _own(module: nn.Module, name: str) -> None:
    """Gives the module a copy of a tensor that it shares with the program, and changes."""
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    tensor = getattr(owner, leaf).clone()
    if leaf in owner._buffers:
        owner._buffers[leaf] = tensor
    elif leaf in owner._parameters:
        owner._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
    else:
        setattr(owner, leaf, tensor)
