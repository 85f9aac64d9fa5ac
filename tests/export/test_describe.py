"""The program is compared with what was declared: here they are made to differ."""

import pytest
import torch
from torch import nn
from torch.export import Dim as TorchDim
from torch.export import ExportedProgram

from mctl.bundle_format.contract import Dim
from mctl.bundle_format.errors import ExportError
from mctl.export.declare import Declared
from mctl.export.describe import Wishes, describe
from mctl.export.dims import Shape
from mctl.export.naming import Named


class Double(nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": x * 2}


def exported(**axes: TorchDim) -> ExportedProgram:
    """`Double` with these torch dims on `a0` and `a1`."""
    spec = {int(name[1]): dim for name, dim in axes.items()}
    return torch.export.export(Double(), (torch.ones(4, 6),), dynamic_shapes=(spec,))


def declared(shape: Shape, *dims: Dim) -> Declared:
    named = Named(Double().forward, (torch.ones(4, 6),), {})
    return Declared(named, {"x": shape}, dims, {}, {}, False)


BATCH = Dim(name="batch", min=1, max=64)


def test_the_program_that_was_declared() -> None:
    program = exported(a0=TorchDim("b", min=1, max=64))
    contract = describe(program, declared(("batch", 6), BATCH), ["y"], [], Wishes())
    assert contract.dims == (BATCH,) and contract.outputs[0].shape == ("batch", 6)


@pytest.mark.parametrize(
    ("axes", "shape", "why"),
    [
        ({}, ("batch", 6), "dimension `batch` became static: axis 0 of input `x` is 4"),
        ({"a0": TorchDim("b", min=1, max=32)}, ("batch", 6), "`batch` is not dynamic over its whole range at axis 0"),
        ({"a0": TorchDim("b", min=2, max=64)}, ("batch", 6), "`batch` is not dynamic over its whole range at axis 0"),
        (
            {"a0": TorchDim("b", min=1, max=64), "a1": TorchDim("s", min=1, max=9)},
            ("batch", 6),
            "axis 1 of input `x` became dynamic, though no dim is declared for it",
        ),
    ],
)
def test_another_program(axes: dict[str, TorchDim], shape: Shape, why: str) -> None:
    with pytest.raises(ExportError) as refused:
        describe(exported(**axes), declared(shape, BATCH), ["y"], [], Wishes())
    assert why in refused.value.message


def test_names_that_the_contract_does_not_allow() -> None:
    program = exported(a0=TorchDim("b", min=1, max=64))
    with pytest.raises(ExportError) as refused:
        describe(program, declared(("batch", 6), BATCH), ["not a name"], [], Wishes())
    assert "output name 'not a name' is not allowed" in refused.value.message
    assert "--output-name" in str(refused.value.hint)
