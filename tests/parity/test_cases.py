"""The sweep: which sizes and values, always allowed by the contract, always the same."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mctl.bundle_format.contract import Contract, Dim, Dtype, Input, Output, TensorInfo, check
from mctl.parity.cases import Case, sizes_of, spans, sweep, tensors, volume


def contract(*inputs: Input, dims: tuple[Dim, ...]) -> Contract:
    return Contract(dims=dims, inputs=inputs, outputs=(Output(name="output", dtype="float32", shape=("batch", 10)),))


BATCH = Dim(name="batch", min=1, max=64)
SEQ = Dim(name="seq", min=1, max=512)
X = Input(name="x", dtype="float32", shape=("batch", "seq"))
IDS = Input(name="ids", dtype="int64", shape=("batch", "seq"), range=(5, 30))
MASK = Input(name="mask", dtype="bool", shape=("batch", "seq"))
FREE = Input(name="free", dtype="int32", shape=("batch",))


@pytest.mark.parametrize(
    ("dim", "example", "buckets", "sizes"),
    [
        (BATCH, 4, (), [1, 2, 4, 5, 31, 64]),
        (BATCH, 64, (1, 8, 64), [1, 2, 8, 31, 64]),
        (Dim(name="n", min=4, max=64, multiple=4), 12, (), [4, 8, 12, 16, 28, 64]),  # in steps of 4: 1 2 3 4 7 16
        (Dim(name="n", min=3, max=5), 3, (), [3, 4, 5]),
    ],
)
def test_sizes(dim: Dim, example: int, buckets: tuple[int, ...], sizes: list[int]) -> None:
    assert sizes_of(dim, example, buckets) == sizes


def test_the_sweep_of_two_dims_is_no_product() -> None:
    cases = sweep(contract(X, dims=(BATCH, SEQ)), {"batch": 4, "seq": 16}, {"batch": (1, 8, 64)})
    points = [(case.dims["batch"], case.dims["seq"]) for case in cases if case.values == "normal"]
    assert points[0] == (4, 16)
    assert set(points) == {
        *((4, 16), (1, 16), (2, 16), (5, 16), (8, 16), (31, 16), (64, 16)),
        *((4, 1), (4, 2), (4, 17), (4, 251), (4, 512)),
        *((1, 1), (64, 512), (64, 1), (1, 512)),
    }
    assert len({case.name for case in cases}) == len(cases)


def test_kinds_of_values_follow_the_inputs() -> None:
    def kinds(*inputs: Input) -> list[str]:
        return [case.values for case in sweep(contract(*inputs, dims=(BATCH, SEQ)), {}, {}) if case.values != "normal"]

    assert kinds(X) == ["zeros", "large"]
    assert kinds(IDS) == ["zeros", "low", "high"]
    assert kinds(X, FREE) == ["zeros", "large", "low", "high", "beside", "below", "above"]


def test_a_model_without_dims() -> None:
    fixed = Contract(
        dims=(),
        inputs=(Input(name="x", dtype="float32", shape=(2, 3)),),
        outputs=(Output(name="y", dtype="float32", shape=(2,)),),
    )
    assert [case.name for case in sweep(fixed, {}, {})] == ["fixed/normal", "fixed/zeros", "fixed/large"]


def test_values() -> None:
    model = contract(X, IDS, MASK, FREE, dims=(BATCH, SEQ))
    dims = {"batch": 64, "seq": 512}
    example = {"ids": torch.tensor([7]), "free": torch.tensor([3, 9])}

    def made(kind: str) -> dict[str, torch.Tensor]:
        return tensors(model, Case(dims, kind), 0, spans(model, [example]))  # type: ignore[arg-type]

    normal, large, high, low = made("normal"), made("large"), made("high"), made("low")
    assert normal["x"].std() == pytest.approx(1, abs=0.02) and large["x"].std() == pytest.approx(1e3, rel=0.02)
    assert (normal["ids"].min(), normal["ids"].max()) == (5, 30)
    assert set(normal["mask"].unique().tolist()) == {False, True}
    assert (normal["free"].min(), normal["free"].max()) == (3, 9)
    assert set(high["ids"].unique().tolist()) == {30} and set(low["ids"].unique().tolist()) == {5}
    assert high["mask"].all() and not low["mask"].any()
    assert set(made("zeros")["ids"].unique().tolist()) == {5}  # the closest that is allowed
    assert (made("below")["free"] == -1).all() and (made("above")["free"] == 2**31 - 1).all()
    assert made("above")["ids"].max() <= 30
    # examples have shown 3..9: the neighbours, and up to 64 times as far away as they are apart
    assert set(made("beside")["free"].unique().tolist()) == {16, -4, 10, 2, 37, -25, 457}
    assert made("beside")["ids"].max() <= 30


def test_a_small_input_is_taken_far_out_on_both_sides() -> None:
    free = Input(name="ids", dtype="int64", shape=("batch",))
    model = contract(free, dims=(BATCH,))  # of which no example has shown anything: 0..1
    made = tensors(model, Case({"batch": 2}, "beside"), 0, spans(model, []))  # type: ignore[arg-type]
    assert made["ids"].tolist() == [129, -8]


def test_indices_near_the_example_tell_what_the_far_ends_do_not() -> None:
    """`table[ids * 2 - 5]` of 64 rows: twice the largest int64, less 5, is -7 and so a row."""
    free = Input(name="ids", dtype="int64", shape=("batch", 4))
    model, seen = contract(free, dims=(BATCH,)), {"ids": torch.tensor([3, 29])}
    table = torch.zeros(64)

    def raises(kind: str) -> bool:
        ids = tensors(model, Case({"batch": 2}, kind), 0, spans(model, [seen]))["ids"]  # type: ignore[arg-type]
        try:
            table[ids * 2 - 5]
        except IndexError:
            return True
        return False

    assert [raises(kind) for kind in ("normal", "below", "above", "beside")] == [False, False, False, True]


def test_values_of_a_range_over_dims_follow_the_sizes() -> None:
    edges = Input(name="edges", dtype="int64", shape=(2, "seq"), range=(0, "batch-1"))
    model = contract(X, edges, dims=(BATCH, SEQ))
    for nodes in (1, 7, 64):
        made = {
            kind: tensors(model, Case({"batch": nodes, "seq": 500}, kind), 0, spans(model, []))["edges"]  # type: ignore[arg-type]
            for kind in ("normal", "low", "high")
        }
        assert (
            made["normal"].min() == made["low"].max() == 0 and made["normal"].max() == made["high"].min() == nodes - 1
        )


def test_the_same_seed_makes_the_same_inputs() -> None:
    model = contract(X, IDS, dims=(BATCH, SEQ))
    case, span = Case({"batch": 3, "seq": 7}, "normal"), spans(model, [])
    first, again, other = (tensors(model, case, seed, span) for seed in (1, 1, 2))
    assert torch.equal(first["x"], again["x"]) and torch.equal(first["ids"], again["ids"])
    assert not torch.equal(first["x"], other["x"]) and not torch.equal(first["ids"], other["ids"])


def test_volume_counts_inputs_and_outputs() -> None:
    assert volume(contract(X, MASK, dims=(BATCH, SEQ)), {"batch": 2, "seq": 3}) == 2 * 3 * 4 + 2 * 3 + 2 * 10 * 4


DTYPES: tuple[Dtype, ...] = (
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "bfloat16", "float32", "float64"),
)  # type: ignore[assignment]


@st.composite
def contracts(draw: st.DrawFn) -> Contract:
    multiple = draw(st.integers(1, 4))
    low = draw(st.integers(1, 5))
    dim = Dim(name="batch", min=low * multiple, max=(low + draw(st.integers(1, 30))) * multiple, multiple=multiple)
    inputs = []
    for at, dtype in enumerate(draw(st.lists(st.sampled_from(DTYPES), min_size=1, max_size=3))):
        limits = torch.iinfo(getattr(torch, dtype)) if dtype.startswith(("int", "uint")) else None
        ends = sorted(draw(st.tuples(*[st.integers(limits.min, limits.max)] * 2))) if limits else None
        span = (ends[0], ends[1]) if ends and draw(st.booleans()) else None
        inputs.append(Input(name=f"i{at}", dtype=dtype, shape=("batch", 2), range=span))
    return contract(*inputs, dims=(dim,))


@settings(deadline=None, max_examples=60)
@given(contracts(), st.integers(0, 3))
def test_every_case_is_allowed_by_the_contract(model: Contract, seed: int) -> None:
    for case in sweep(model, {}, {}):
        made = tensors(model, case, seed, spans(model, []))
        infos = {}
        for declared in model.inputs:
            tensor = made[declared.name]
            values = tensor.flatten().tolist()
            ends = (min(values), max(values)) if declared.range else (None, None)
            infos[declared.name] = TensorInfo(str(tensor.dtype)[6:], tuple(tensor.shape), *ends)
        assert check(model, infos) == case.dims
