"""The contract's check, its expressions and its own soundness: the vectors that C++ runs too, and properties."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mctl.bundle_format import contract as contracts
from mctl.bundle_format.contract import Contract, ContractError, Dim, Input, Output, TensorInfo

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


# --- properties --------------------------------------------------------------------------------------------------

NUMBERS = st.integers(0, 999).map(str)
DIMS = {"n": 7, "seq_len": 12, "B": 3}
SPACES = st.sampled_from(["", " ", "  "])


def _compound(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    signs = st.sampled_from(["+", "-", "*", "//"])
    return st.one_of(
        st.tuples(inner, SPACES, signs, SPACES, inner).map("".join),
        inner.map(lambda text: f"({text})"),
        inner.map(lambda text: f"-({text})"),
    )


EXPRESSIONS = st.recursive(NUMBERS | st.sampled_from(list(DIMS)), _compound, max_leaves=8)


@given(EXPRESSIONS)
def test_expressions_mean_what_they_mean_in_python(text: str) -> None:
    assume(len(text) <= contracts.MAX_EXPRESSION and text.count("(") <= contracts.MAX_EXPRESSION_DEPTH // 2)
    try:
        # numbers with leading zeros are no Python, but they are not made here: `str` of an integer has none
        wanted = eval(text, {}, dict(DIMS))
    except ZeroDivisionError:
        with pytest.raises(ContractError, match="divides by zero"):
            contracts.evaluate(text, DIMS)
        return
    assume(abs(wanted) < 2**40)
    assert contracts.evaluate(text, DIMS) == wanted
    assert contracts.names_in(text) <= set(DIMS)


@given(st.text(st.sampled_from("n1 +-*/()._,é٣\n\t"), max_size=12))
def test_any_text_is_an_expression_or_refused(text: str) -> None:
    try:
        value = contracts.evaluate(text, {"n": 5, "n1": 6, "nn": 7})
    except KeyError:
        return  # a name that is not bound: validate() refuses it
    except ContractError:
        return
    assert value == eval(text.strip(" "), {}, {"n": 5, "n1": 6, "nn": 7})


SIZES = st.integers(1, 6)


@st.composite
def contract_and_sizes(draw: st.DrawFn) -> tuple[Contract, dict[str, int]]:
    """A sound contract, and sizes inside its ranges."""
    names = draw(st.lists(st.sampled_from(["batch", "seq", "n", "h"]), min_size=1, max_size=3, unique=True))
    dims, sizes = [], {}
    for name in names:
        multiple = draw(SIZES)
        low = draw(SIZES)
        high = low + draw(SIZES)
        dims.append(Dim(name=name, min=low * multiple, max=high * multiple, multiple=multiple))
        sizes[name] = draw(st.integers(low, high)) * multiple
    axes = st.one_of(SIZES, st.sampled_from(names))
    inputs = [Input(name="all", dtype="float32", shape=tuple(names))]
    for number in range(draw(st.integers(0, 2))):
        shape = tuple(draw(st.lists(axes, max_size=3)))
        inputs.append(Input(name=f"x.{number}", dtype=draw(st.sampled_from(["int64", "bool"])), shape=shape))
    return Contract(
        dims=tuple(dims), inputs=tuple(inputs), outputs=(Output(name="y", dtype="float32", shape=()),)
    ), sizes


def _given(contract: Contract, sizes: dict[str, int]) -> dict[str, TensorInfo]:
    return {i.name: TensorInfo(i.dtype, tuple(sizes.get(str(a), a) for a in i.shape)) for i in contract.inputs}  # type: ignore[misc]


@given(contract_and_sizes(), st.randoms(use_true_random=False))
def test_what_is_inside_the_contract_is_bound(made: tuple[Contract, dict[str, int]], order: Any) -> None:
    contract, sizes = made
    contracts.validate(contract)
    tensors = list(_given(contract, sizes).items())
    order.shuffle(tensors)
    assert contracts.check(contract, dict(tensors)) == sizes


@given(contract_and_sizes(), st.data())
def test_what_is_outside_is_refused_by_name(made: tuple[Contract, dict[str, int]], data: st.DataObject) -> None:
    contract, sizes = made
    tensors = _given(contract, sizes)
    victim = data.draw(st.sampled_from(contract.inputs))
    dtype, shape, *_ = tensors[victim.name]
    change = data.draw(st.sampled_from(["dtype", "rank", "size"]))
    if change == "dtype":
        dtype = "float64"
    elif change == "rank":
        shape = (*shape, 1)
    else:
        assume(shape)
        axis = data.draw(st.integers(0, len(shape) - 1))
        wrong = data.draw(st.integers(0, 100).filter(lambda size: size != shape[axis]))
        name = victim.shape[axis]
        if name in sizes and not any(str(name) in i.shape for i in contract.inputs if i is not victim):
            declared = contract.dim(str(name))
            assume(not (declared.min <= wrong <= declared.max and wrong % declared.multiple == 0))
        shape = (*shape[:axis], wrong, *shape[axis + 1 :])
    with pytest.raises(ContractError) as caught:
        contracts.check(contract, tensors | {victim.name: TensorInfo(dtype, shape)})
    # two inputs that disagree about a dim: the later one is named
    assert f"'{victim.name}'" in str(caught.value) or change == "size"


@given(contract_and_sizes())
def test_the_contract_survives_json(made: tuple[Contract, dict[str, int]]) -> None:
    contract, _ = made
    assert msgspec.json.decode(msgspec.json.encode(contract), type=Contract) == contract
