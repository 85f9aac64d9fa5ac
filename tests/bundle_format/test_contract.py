"""The contract's check, its expressions and its own soundness: the vectors that C++ runs too, and properties."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mctl.bundle_format import contract as contracts
from mctl.bundle_format.contract import Contract, ContractError, TensorInfo

VECTORS = Path(__file__).parents[1] / "vectors" / "contract"


def _cases(file: str) -> list[Any]:
    return json.loads((VECTORS / file).read_text(encoding="utf-8"))


CHECKS = [(group, case) for group in _cases("check.json") for case in group["cases"]]


@pytest.mark.parametrize(("group", "case"), CHECKS, ids=[f"{g['name']}: {c['name']}" for g, c in CHECKS])
def test_check(group: dict[str, Any], case: dict[str, Any]) -> None:
    contract = msgspec.convert(group["contract"], Contract)
    contracts.validate(contract)
    tensors = {
        name: TensorInfo(t["dtype"], tuple(t["shape"]), t.get("low"), t.get("high"))
        for name, t in case["inputs"].items()
    }
    expect = case["expect"]
    if "error" in expect:
        with pytest.raises(ContractError) as caught:
            contracts.check(contract, tensors, case.get("constants"), max_rows=case.get("max_rows"))
        assert str(caught.value) == expect["error"]
        return
    dims = contracts.check(contract, tensors, case.get("constants"), max_rows=case.get("max_rows"))
    assert dims == expect["dims"]
    outputs = {o.name: o for o in contract.outputs}
    for name, shape in expect.get("outputs", {}).items():
        assert list(contracts.shape_of(outputs[name], dims)) == shape
    for name, message in expect.get("output_errors", {}).items():
        with pytest.raises(ContractError) as caught:
            contracts.shape_of(outputs[name], dims)
        assert str(caught.value) == message


@pytest.mark.parametrize("case", _cases("expressions.json"), ids=lambda case: repr(case["text"][:40]))
def test_expression(case: dict[str, Any]) -> None:
    if "error" in case:
        with pytest.raises(ContractError) as caught:
            contracts.evaluate(case["text"], case["dims"])
        assert str(caught.value) == case["error"]
    else:
        assert contracts.evaluate(case["text"], case["dims"]) == case["value"]
