"""Sizes to trace with, and inputs of any size."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mctl.bundle_format.contract import Dim
from mctl.export.example import make_inputs, tracing_sizes


@st.composite
def dims(draw: st.DrawFn) -> list[Dim]:
    made = []
    for name in draw(st.lists(st.sampled_from("abcd"), min_size=1, max_size=4, unique=True)):
        multiple, low, steps = draw(st.integers(1, 4)), draw(st.integers(1, 50)), draw(st.integers(1, 50))
        made.append(Dim(name=name, min=low * multiple, max=(low + steps) * multiple, multiple=multiple))
    return made


@given(dims(), st.dictionaries(st.sampled_from("abcd"), st.integers(0, 300)))
def test_tracing_sizes_are_allowed_and_never_what_torch_specialises(declared: list[Dim], given: dict[str, int]) -> None:
    sizes = tracing_sizes(declared, given)
    assert list(sizes) == [dim.name for dim in declared]
    for dim in declared:
        assert dim.allows(sizes[dim.name]) and sizes[dim.name] >= 2 * dim.multiple
        if len(declared) == 1 and dim.allows(given.get(dim.name, 0)) and given[dim.name] >= 2 * dim.multiple:
            assert sizes[dim.name] == given[dim.name]
    if all(dim.max - dim.min >= 8 * dim.multiple for dim in declared):
        assert len(set(sizes.values())) == len(sizes)


def test_two_dims_of_one_size_are_told_apart() -> None:
    declared = [Dim(name="batch", min=1, max=64), Dim(name="seq", min=1, max=512)]
    assert tracing_sizes(declared, {"batch": 8, "seq": 8}) == {"batch": 8, "seq": 2}
    assert tracing_sizes(declared, {"batch": 1, "seq": 128}) == {"batch": 2, "seq": 128}


IDS = torch.tensor([[5, 9, 17, 0], [99, 3, 0, 0]])


def made(example: torch.Tensor, batch: int, seq: int, limits: tuple[int, int] | None = None) -> torch.Tensor:
    return make_inputs({"x": example}, {"x": ("b", "s")}, {"b": batch, "s": seq}, {"x": limits}, seed=3)["x"]


@pytest.mark.parametrize(("batch", "seq"), [(1, 1), (2, 4), (3, 9), (64, 512)])
def test_integers_are_the_examples_own(batch: int, seq: int) -> None:
    x = made(IDS, batch, seq)
    assert x.shape == (batch, seq) and x.dtype == torch.int64 and x.is_contiguous()
    assert set(x.flatten().tolist()) <= set(IDS.flatten().tolist())
    assert x[:2, :4].equal(IDS[:batch, :seq])


def test_a_constant_example_is_drawn_from_the_range() -> None:
    x = made(torch.zeros(1, 1, dtype=torch.int64), 8, 16, (3, 30))
    assert x.min() >= 3 and x.max() <= 30 and len(set(x.flatten().tolist())) > 5
    assert made(torch.ones(1, 1, dtype=torch.int64), 8, 16).eq(1).all()


def test_floats_keep_signs_and_bounds_and_vary() -> None:
    example = torch.tensor([[-1.0, 0.25], [0.5, 1.0]])
    x = made(example, 6, 2)
    assert x.shape == (6, 2) and x.abs().max() <= 1 and x.sign().equal(example.sign().repeat(3, 1))
    assert len(set(x.flatten().tolist())) == 12


def test_a_float_mask_stays_a_mask_and_a_stand_in_does_not() -> None:
    mask = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    assert made(mask, 4, 2).equal(mask.repeat(2, 1))
    drawn = made(torch.zeros(2, 2), 4, 8)
    assert drawn.min() >= 0 and drawn.max() <= 1 and len(set(drawn.flatten().tolist())) > 20


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.uint8, torch.bool])
def test_dtypes_are_kept(dtype: torch.dtype) -> None:
    assert made(torch.ones(2, 2).to(dtype), 3, 5).dtype == dtype


def test_the_same_seed_and_sizes_give_the_same_inputs() -> None:
    example = {"x": torch.randn(2, 3)}
    first, again = (make_inputs(example, {"x": ("b", 3)}, {"b": 5}, {}, seed=1)["x"] for _ in range(2))
    other = make_inputs(example, {"x": ("b", 3)}, {"b": 5}, {}, seed=2)["x"]
    assert first.equal(again) and not first.equal(other)


def test_an_empty_example_gives_zeros() -> None:
    assert made(torch.empty(0, 4), 2, 4).shape == (2, 4)
