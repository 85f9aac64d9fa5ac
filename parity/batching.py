"""The inputs that show whether a batch's rows are apart and whether padding changes an answer."""

from collections.abc import Mapping

import torch
from torch import Tensor

from ..bundle_format.contract import Contract, Input, evaluate, rows_per_item

Tensors = Mapping[str, Tensor]


def places(size: int) -> list[int]:
    """First, middle and last row of a batch."""
    return sorted({0, size // 2, size - 1})


def row(contract: Contract, inputs: Tensors, index: int, copies: int = 1) -> dict[str, Tensor]:
    """Row `index` alone, `copies` times (for a model whose smallest batch is larger than 1)."""
    return {
        declared.name: inputs[declared.name][[index] * copies]
        if _batched(contract, declared)
        else inputs[declared.name]
        for declared in contract.inputs
    }


def with_row(contract: Contract, batch: Tensors, single: Tensors, at: list[int]) -> dict[str, Tensor]:
    """A copy of `batch` with the row of `single` at the places `at`, and its inputs that have no batch dim."""
    made = {declared.name: single[declared.name] for declared in contract.inputs}
    for declared in contract.inputs:
        if _batched(contract, declared):
            made[declared.name] = batch[declared.name].clone()
            made[declared.name][at] = single[declared.name][0]
    return made


def poisoned(contract: Contract, batch: Tensors) -> dict[str, Tensor]:
    """A copy of `batch` with every float of the batched inputs NaN; integers stay, for a range may bind them."""
    return {
        declared.name: torch.full_like(batch[declared.name], torch.nan)
        if _batched(contract, declared) and batch[declared.name].is_floating_point()
        else batch[declared.name]
        for declared in contract.inputs
    }


def output_row(contract: Contract, outputs: Tensors, index: int) -> dict[str, Tensor]:
    """What row `index` of the inputs owns of each output: k rows, where axis 0 is `k*batch`."""
    owned = {}
    for output in contract.outputs:
        count = rows_per_item(output, contract.batch_dim or "") or 1
        owned[output.name] = outputs[output.name][index * count : (index + 1) * count]
    return owned


def paddable(contract: Contract, dim: str) -> bool:
    """Whether every input that has the dim says what to pad it with."""
    return dim != contract.batch_dim and all(i.pad is not None for i in contract.inputs if dim in i.shape)


def pad(contract: Contract, inputs: Tensors, dim: str, size: int) -> dict[str, Tensor]:
    """The inputs with `dim` grown to `size` by each input's pad value."""
    padded = {}
    for declared in contract.inputs:
        tensor = inputs[declared.name]
        shape = [size if axis == dim else tensor.shape[at] for at, axis in enumerate(declared.shape)]
        grown = tensor.new_full(shape, declared.pad or 0)
        grown[tuple(slice(0, length) for length in tensor.shape)] = tensor
        padded[declared.name] = grown
    return padded


def cut(contract: Contract, outputs: Tensors, dims: Mapping[str, int]) -> dict[str, Tensor]:
    """The outputs cut back to the sizes that they have at `dims`."""
    return {
        output.name: outputs[output.name][tuple(slice(0, evaluate(axis, dims)) for axis in output.shape)]
        for output in contract.outputs
    }


def _batched(contract: Contract, declared: Input) -> bool:
    return bool(declared.shape) and declared.shape[0] == contract.batch_dim
