"""A program that is not the model is found, whatever differs: here programs are functions."""

from collections.abc import Callable

import msgspec
import pytest
import torch

from mctl.bundle_format.contract import Contract, Dim, Input, Output
from mctl.bundle_format.errors import ExportError
from mctl.export.golden import Case
from mctl.export.proof import prove_case, rows_apart, tolerance_of

CONTRACT = Contract(
    dims=(Dim(name="batch", min=1, max=8),),
    inputs=(Input(name="x", dtype="float32", shape=("batch", 2)),),
    outputs=(Output(name="y", dtype="float32", shape=("batch", 2)),),
)


def case(wanted: torch.Tensor) -> Case:
    return Case("batch=3", {"batch": 3}, {"x": torch.ones(3, 2)}, {"y": wanted})


def program(result: torch.Tensor) -> Callable[[object], dict[str, torch.Tensor]]:
    return lambda inputs: {"y": result}


def test_the_error_of_a_program_that_is_close() -> None:
    wanted = torch.full((3, 2), 2.0)
    assert prove_case(case(wanted), program(wanted + 1e-4), CONTRACT) == pytest.approx(1e-4, rel=0.1)
    assert prove_case(case(wanted * float("nan")), program(wanted * float("nan")), CONTRACT) == 0
    assert prove_case(case(wanted * float("inf")), program(wanted * float("inf")), CONTRACT) == 0


@pytest.mark.parametrize(
    ("got", "why"),
    [
        (torch.full((3, 2), 2.01), "output `y` is off by 0.01"),
        (torch.full((3, 2), float("nan")), "output `y` is off by nan"),
        (torch.full((3, 2), float("inf")), "output `y` is off by inf"),
        (torch.full((2, 2), 2.0), "has the shape [2, 2], eager gives [3, 2]"),
        (torch.full((3, 2), 2.0).double(), "is float64, eager gives float32"),
    ],
)
def test_what_differs(got: torch.Tensor, why: str) -> None:
    with pytest.raises(ExportError) as found:
        prove_case(case(torch.full((3, 2), 2.0)), program(got), CONTRACT)
    assert found.value.message.startswith("the exported program is not the model: at batch=3, ")
    assert why in found.value.message


@pytest.mark.parametrize(
    ("model", "apart"),
    [
        (lambda x: x * 2 + 1, True),
        (lambda x: x * (1 + 1e-6 * len(x)), True),  # a rounding
        (lambda x: x - x.mean(0), False),
        (lambda x: x.softmax(0), False),
        (lambda x: x.cumsum(0), False),
    ],
)
def test_rows_that_depend_on_each_other(model: Callable[[torch.Tensor], torch.Tensor], apart: bool) -> None:
    contract = msgspec.structs.replace(CONTRACT, batch_dim="batch")
    x = torch.randn(3, 2, generator=torch.Generator().manual_seed(3))
    found = rows_apart(
        lambda inputs: {"y": model(inputs["x"])}, contract, Case("", {"batch": 3}, {"x": x}, {"y": model(x)})
    )
    assert found is apart


def test_a_shape_that_is_not_the_contracts() -> None:
    wanted = torch.ones(4, 2)
    with pytest.raises(ExportError, match=r"has the shape \[3, 2\], eager gives \[4, 2\]"):
        prove_case(case(wanted), program(wanted), CONTRACT)


def test_a_program_that_raises() -> None:
    def raises(inputs: object) -> dict[str, torch.Tensor]:
        raise RuntimeError("no\nsuch thing")

    with pytest.raises(ExportError, match="the exported program fails at batch=3: no such thing"):
        prove_case(case(torch.ones(3, 2)), raises, CONTRACT)


def test_integers_have_to_be_equal() -> None:
    contract = Contract(
        dims=CONTRACT.dims, inputs=CONTRACT.inputs, outputs=(Output(name="y", dtype="int64", shape=("batch", 2)),)
    )
    wanted = torch.full((3, 2), 10**9)
    assert prove_case(case(wanted), program(wanted), contract) == 0
    with pytest.raises(ExportError, match="off by 1"):
        prove_case(case(wanted), program(wanted + 1), contract)


@pytest.mark.parametrize(("dtype", "rtol"), [("float32", 1e-4), ("float16", 1e-3), ("bfloat16", 1e-2), ("int64", 0)])
def test_tolerances(dtype: str, rtol: float) -> None:
    assert tolerance_of(dtype).rtol == rtol
