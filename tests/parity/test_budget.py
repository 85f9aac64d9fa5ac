"""What a call is guessed to cost, worked out by hand."""

import pytest

from mctl.bundle_format.contract import Dim, Input
from mctl.parity.budget import Budget, size

from .fakes import contract

SEQ = Dim(name="seq", min=1, max=4096)
MODEL = contract(
    dims=(Dim(name="batch", min=1, max=4096), SEQ), inputs=(Input(name="x", dtype="float32", shape=("batch", "seq")),)
)


def sizes(batch: int, seq: int) -> dict[str, int]:
    return {"batch": batch, "seq": seq}


def test_the_first_call_is_free() -> None:
    assert Budget(MODEL, 1.0).refuse(sizes(64, 4096)) == ""


def test_cost_grows_with_rows_and_faster_with_other_dims() -> None:
    budget = Budget(MODEL, 100.0)
    budget.record(sizes(1, 1), 0.0, 0)
    budget.record(sizes(2, 4), 0.5, 0)
    assert budget.refuse(sizes(80, 4)) == ""  # 40 x 0.5 = 20 s
    assert budget.refuse(sizes(84, 4)) == "about 21 s, allowed 20 s a case"
    assert budget.refuse(sizes(2, 36)) == ""  # 9 ** 1.5 = 27 times: 13.5 s
    assert budget.refuse(sizes(2, 64)) == "about 32 s, allowed 20 s a case"  # 64 times


def test_what_every_call_costs_does_not_grow() -> None:
    budget = Budget(MODEL, 100.0)
    budget.record(sizes(1, 1), 1.0, 0)
    budget.record(sizes(2, 1), 1.01, 0)
    assert budget.refuse(sizes(1000, 1)) == ""  # 1 + 500 * 0.01 = 6 s
    assert budget.refuse(sizes(4000, 1)) == "about 21 s, allowed 20 s a case"


def test_the_total_is_kept() -> None:
    budget = Budget(MODEL, 10.0)
    budget.record(sizes(4, 4), 6.0, 0)
    assert budget.refuse(sizes(4, 4)) == "about 6.0 s, and 6 of 10 s are used"


def test_memory() -> None:
    budget = Budget(MODEL, 100.0, memory=1_000_000)
    budget.record(sizes(4, 4), 0.001, 100_000)
    budget.record(sizes(1, 1), 0.001, 500_000)  # the largest counts
    assert budget.refuse(sizes(40, 4)) == ""
    assert budget.refuse(sizes(41, 4)) == "about 1.02 MB of memory, allowed 1 MB"


@pytest.mark.parametrize(("count", "text"), [(12, "12 bytes"), (2_300_000, "2.3 MB"), (5e12, "5e+03 GB")])
def test_size(count: float, text: str) -> None:
    assert size(count) == text
