"""Rows put in, rows cut out, and padding: small tensors, by hand."""

import torch

from mctl.bundle_format.contract import Input, Output
from mctl.parity import batching

from .fakes import BATCH, SEQ, contract

MODEL = contract(
    dims=(BATCH, SEQ),
    inputs=(
        Input(name="x", dtype="float32", shape=("batch", "seq"), pad=-1),
        Input(name="ids", dtype="int64", shape=("batch",)),
        Input(name="shared", dtype="float32", shape=(2,)),
    ),
    outputs=(Output(name="y", dtype="float32", shape=("2*batch", "seq+1")),),
)
BATCHED = {
    "x": torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]),
    "ids": torch.tensor([7, 8, 9]),
    "shared": torch.tensor([0.5, 0.5]),
}


def test_places() -> None:
    assert [batching.places(size) for size in (1, 2, 5)] == [[0], [0, 1], [0, 2, 4]]


def test_one_row_alone() -> None:
    row = batching.row(MODEL, BATCHED, 1, copies=2)
    assert row["x"].tolist() == [[3, 4], [3, 4]] and row["ids"].tolist() == [8, 8]
    assert row["shared"] is BATCHED["shared"]


def test_a_row_among_others() -> None:
    single = {"x": torch.tensor([[0.0, 9.0]]), "ids": torch.tensor([4]), "shared": torch.zeros(2)}
    made = batching.with_row(MODEL, BATCHED, single, [0, 2])
    assert made["x"].tolist() == [[0, 9], [3, 4], [0, 9]] and made["ids"].tolist() == [4, 8, 4]
    assert made["shared"] is single["shared"]
    assert BATCHED["x"].tolist() == [[1, 2], [3, 4], [5, 6]]


def test_poison_is_in_the_floats_of_batched_inputs_only() -> None:
    made = batching.poisoned(MODEL, BATCHED)
    assert made["x"].isnan().all() and made["ids"] is BATCHED["ids"] and made["shared"] is BATCHED["shared"]


def test_an_output_may_have_several_rows_for_one() -> None:
    y = torch.arange(18.0).reshape(6, 3)
    assert batching.output_row(MODEL, {"y": y}, 1)["y"].equal(y[2:4])


def test_padding_and_cutting() -> None:
    padded = batching.pad(MODEL, BATCHED, "seq", 4)
    assert padded["x"].tolist() == [[1, 2, -1, -1], [3, 4, -1, -1], [5, 6, -1, -1]]
    assert padded["ids"].equal(BATCHED["ids"])
    cut = batching.cut(MODEL, {"y": torch.ones(6, 5)}, {"batch": 3, "seq": 2})
    assert cut["y"].shape == (6, 3)


def test_what_can_be_padded() -> None:
    assert batching.paddable(MODEL, "seq") and not batching.paddable(MODEL, "batch")
    without = contract(dims=(BATCH, SEQ), inputs=(Input(name="x", dtype="float32", shape=("batch", "seq")),))
    assert not batching.paddable(without, "seq")
