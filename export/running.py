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


def call_model(model: nn.Module, named: Named, inputs: Mapping[str, torch.Tensor]) -> tuple[Tensors, list[str]]:
    """Named outputs of one call with copies of the inputs, and the names of outputs that are None.

    Under no_grad, and with `torch.compile` off: eager is eager. ModelError where the model raises.
    """
    args, kwargs = named.call({name: value.clone() for name, value in inputs.items()})
    eager = torch.compiler.set_stance("force_eager")
    with torch.no_grad(), eager, user_code("the model failed", ModelError):
        return name_outputs(model(*args, **kwargs))


def run_model(model: nn.Module, named: Named, output_names: Sequence[str] | None = None) -> Run:
    """The model as a function. ModelError where it raises."""

    def run(inputs: Mapping[str, torch.Tensor]) -> Tensors:
        outputs, _ = call_model(model, named, inputs)
        return dict(zip(output_names or outputs, outputs.values(), strict=True))

    return run


def run_program(exported: ExportedProgram, contract: Contract, *, double: bool = False) -> Run:
    """Calls the exported program, in a fresh state of its own, with copies of tensors in the contract's order."""
    module: Any = exported.module(check_guards=False)  # the contract is the guard
    if double:
        widen(module)
    state = {each.name for each in contract.state}
    _replace_tensors(module, lambda name, value: value.clone() if name in state else value)
    inputs = [declared.name for declared in contract.inputs]
    outputs = [output.name for output in contract.outputs]

    def run(given: Mapping[str, torch.Tensor]) -> Tensors:
        with torch.no_grad():
            result = module(*(given[name].clone() for name in inputs))
        return dict(zip(outputs, result.values(), strict=True))

    return run


def widen(module: nn.Module) -> None:
    """Gives the module of a program its floating tensors in float64."""
    _replace_tensors(module, lambda _, value: value.double() if value.is_floating_point() else value)


def _replace_tensors(module: nn.Module, change: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
    """Gives the module tensors of its own where `change` makes them: those it has are shared with the program."""
    for path, owner in module.named_modules():
        for registry in (owner._parameters, owner._buffers, vars(owner)):
            for leaf, value in registry.items():
                if isinstance(value, torch.Tensor):
                    fresh = change(f"{path}.{leaf}".lstrip("."), value)
                    if fresh is not value:
                        kept = isinstance(value, nn.Parameter)
                        registry[leaf] = nn.Parameter(fresh, requires_grad=False) if kept else fresh
