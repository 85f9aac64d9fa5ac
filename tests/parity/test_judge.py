"""Error measures and the rules, against numbers worked out by hand."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mctl.bundle_format.manifest import Tolerance
from mctl.parity.judge import compare, direct_tolerance

NAN, INF = math.nan, math.inf


def f32(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def test_measures_of_one_wrong_element() -> None:
    found = compare("y", f32(1, 2.5, -4), f32(1, 2, -4), tolerance=Tolerance(rtol=0.1, atol=0.05))
    assert not found.ok and found.rule == "direct"
    assert found.max_abs == 0.5
    assert found.mean_abs == pytest.approx(0.5 / 3)
    assert found.worst == (1,) and (found.got, found.wanted) == (2.5, 2.0)
    # 1 + 5 + 16 = 22, over sqrt(1 + 6.25 + 16) * sqrt(1 + 4 + 16)
    assert found.cosine == pytest.approx(22 / math.sqrt(23.25 * 21))
    # allowed at [1]: 0.05 + 0.1 * 2 = 0.25, half of the error: twice the tolerance would have been needed
    assert found.needed is not None
    assert (found.needed.rtol, found.needed.atol) == pytest.approx((0.2, 0.1))
    assert found.fault == "off by 0.5 at [1]"


def test_worst_is_where_the_largest_tolerance_is_needed_not_the_largest_error() -> None:
    found = compare("y", f32(1000.5, 0.2), f32(1000, 0.1), tolerance=Tolerance(rtol=1e-3, atol=0))
    assert found.max_abs == 0.5 and found.worst == (1,)


def test_index_of_more_axes() -> None:
    wanted = torch.zeros(2, 3, 4)
    got = wanted.clone()
    got[1, 2, 3] = 1
    assert compare("y", got, wanted).worst == (1, 2, 3)


def test_a_direct_tolerance_scales_with_the_output() -> None:
    # root mean square of 3, 4, 0, 0 is sqrt(25 / 4) = 2.5
    assert direct_tolerance(f32(3, 4, 0, 0)) == Tolerance(rtol=1e-4, atol=pytest.approx(2.5e-4))
    assert direct_tolerance(f32(3e-6, 4e-6, 0, NAN)).atol == pytest.approx(1e-4 * math.sqrt(25e-12 / 3))


@pytest.mark.parametrize(
    ("dtype", "factor", "passes"),
    [
        (torch.float32, 1 + 9e-5, True),
        (torch.float32, 1 + 4e-4, False),
        (torch.float16, 1 + 1e-3, True),
        (torch.float16, 1 + 5e-3, False),
        (torch.bfloat16, 1 + 1e-2, True),
        (torch.bfloat16, 1 + 4e-2, False),
        (torch.float64, 1 + 1e-10, True),
        (torch.float64, 1 + 1e-8, False),
    ],
)
def test_default_by_dtype(dtype: torch.dtype, factor: float, passes: bool) -> None:
    wanted = torch.linspace(1, 2, 7, dtype=torch.float64)
    assert compare("y", (wanted * factor).to(dtype), wanted.to(dtype)).ok is passes


@pytest.mark.parametrize(
    ("got", "wanted", "fault"),
    [
        (f32(1, NAN), f32(1, 0.5), "NaN at [1] where eager has 0.5"),
        (f32(1, 2), f32(NAN, 2), "1 at [0] where eager has NaN"),
        (f32(INF, 2), f32(-INF, 2), "Inf at [0] where eager has -Inf"),
        (f32(NAN, NAN, INF), f32(INF, 1, INF), "NaN at [0] where eager has Inf (and at 1 more)"),
    ],
)
def test_special_values_are_at_the_same_places(got: torch.Tensor, wanted: torch.Tensor, fault: str) -> None:
    found = compare("y", got, wanted, tolerance=Tolerance(rtol=INF, atol=INF))
    assert not found.ok and found.fault == fault and found.needed is None


def test_equal_special_values_are_no_error() -> None:
    found = compare("y", f32(NAN, INF, -INF, 1.5), f32(NAN, INF, -INF, 1))
    assert found.max_abs == 0.5 and found.mean_abs == 0.5 and found.worst == (3,)
    assert compare("y", f32(NAN, INF, -INF), f32(NAN, INF, -INF)).ok


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.uint8, torch.uint16, torch.uint64, torch.bool])
def test_integers_and_bools_are_exact(dtype: torch.dtype) -> None:
    wanted = torch.tensor([0, 1, 1]).to(dtype)
    assert compare("y", wanted.clone(), wanted).ok
    found = compare("y", torch.tensor([0, 1, 0]).to(dtype), wanted, tolerance=Tolerance(rtol=9, atol=0))
    assert not found.ok and found.rule == "exact" and found.worst == (2,)


def test_a_step_of_integers_that_was_found_fair_before() -> None:
    """The manifest's tolerance of an output of integers is the largest step at an edge that parity has seen."""
    wanted, step = torch.tensor([7, 8, 9]), Tolerance(rtol=0.0, atol=1.0)
    found = compare("y", torch.tensor([7, 9, 9]), wanted, tolerance=step)
    assert found.ok and found.rule == "edge" and found.needed == step
    assert not compare("y", torch.tensor([7, 10, 9]), wanted, tolerance=step).ok


def test_integers_that_a_few_roundings_change() -> None:
    wanted, shaken = torch.tensor([7, 8, 9]), [torch.tensor([7, 9, 9]), torch.tensor([7, 8, 5])]
    assert compare("y", torch.tensor([7, 9, 5]), wanted, shaken=shaken).rule == "edge"
    assert not compare("y", torch.tensor([6, 8, 9]), wanted, shaken=shaken).ok
    assert compare("y", wanted, wanted, shaken=shaken).needed == Tolerance(rtol=0.0, atol=4.0)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.uint16])
def test_integers_may_differ_by_what_the_user_says(dtype: torch.dtype) -> None:
    got, wanted = torch.tensor([3, 200]).to(dtype), torch.tensor([4, 200]).to(dtype)
    assert compare("y", got, wanted, tolerance=Tolerance(rtol=0, atol=1), strict=True).ok
    found = compare("y", got, wanted, tolerance=Tolerance(rtol=0, atol=0.5), strict=True)
    assert not found.ok and found.rule == "direct" and found.fault == "off by 1 at [0]"


def test_integers_beyond_what_a_double_tells_apart() -> None:
    found = compare("y", torch.tensor([0, 2**53 + 1]), torch.tensor([0, 2**53]))
    assert not found.ok
    assert found.fault == "1 of 2 values differ: 9007199254740993 at [1], eager gives 9007199254740992"


def test_another_shape_or_dtype() -> None:
    assert compare("y", torch.ones(2, 3), torch.ones(3, 2)).fault == "shape is [2, 3], eager gives [3, 2]"
    assert compare("y", torch.ones(2).double(), torch.ones(2)).fault == "dtype is float64, eager gives float32"


def test_empty_and_scalar() -> None:
    assert compare("y", torch.ones(0, 3), torch.ones(0, 3)).ok
    assert compare("y", torch.ones(0, dtype=torch.int32), torch.ones(0, dtype=torch.int32)).ok
    found = compare("y", torch.tensor(2.0), torch.tensor(1.0))
    assert not found.ok and found.worst == () and found.max_abs == 1


# --- fairness ----------------------------------------------------------------------------------------------------

EXACT = torch.ones(4, dtype=torch.float64)


@pytest.mark.parametrize(("error", "passes"), [(0.03, True), (0.0400, True), (0.05, False)])
def test_compiled_may_err_four_times_as_much_as_eager(error: float, passes: bool) -> None:
    eager = f32(1.01, 1, 1, 1)  # E = 0.01; allowed 4 E + 1e-5 * (1 + 1)
    found = compare("y", f32(1, 1, 1 + error, 1), eager, reference=EXACT)
    assert found.rule == "fp64" and found.ok is passes
    assert found.eager64 == pytest.approx(0.01, rel=1e-4) and found.error64 == pytest.approx(error, rel=1e-4)


def test_a_perfect_eager_leaves_the_floor() -> None:
    eager = f32(1, 1, 1, 1)
    assert compare("y", f32(1 + 1.5e-5, 1, 1, 1), eager, reference=EXACT).rule == "floor"
    assert not compare("y", f32(1 + 5e-5, 1, 1, 1), eager, reference=EXACT).ok
    assert compare("y", f32(1 + 5e-5, 1, 1, 1), eager).ok  # the direct tolerance is wider


def test_a_given_tolerance_decides_alone() -> None:
    narrow, wide = Tolerance(rtol=1e-6, atol=0), Tolerance(rtol=1e-3, atol=0)
    got = f32(1 + 5e-5, 1, 1, 1)
    assert compare("y", got, f32(1, 1, 1, 1), tolerance=wide, strict=True, reference=EXACT).ok
    found = compare("y", got, f32(1.01, 1, 1, 1), tolerance=narrow, strict=True, reference=EXACT)
    assert not found.ok and found.rule == "direct" and found.eager64 is not None


def test_a_compiled_model_that_does_not_overflow_where_eager_does() -> None:
    exact = torch.tensor([70000.0, 1.0], dtype=torch.float64)  # float16 ends at 65504
    eager = torch.tensor([INF, 1.0], dtype=torch.float32)
    assert compare("y", f32(70000, 1), eager, reference=exact).ok
    assert not compare("y", f32(60000, 1), eager, reference=exact).ok
    assert not compare("y", f32(NAN, 1), eager, reference=exact).ok
    assert not compare("y", f32(70000, 1), eager).ok  # nobody says that it is right


def test_bf16_that_is_fine_and_that_is_not() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(64, 256), torch.randn(256, 256) / 16
    narrow = (x.bfloat16(), w.bfloat16())
    exact = narrow[0].double() @ narrow[1].double() @ narrow[1].double()
    eager = narrow[0] @ narrow[1] @ narrow[1]  # rounds in between
    fused = (narrow[0].float() @ narrow[1].float() @ narrow[1].float()).bfloat16()  # rounds at the end
    assert compare("y", fused, eager, reference=exact).ok
    truncated = (narrow[0] @ narrow[1]).float().mul(16).trunc().div(16).bfloat16() @ narrow[1]
    assert not compare("y", truncated, eager, reference=exact).ok


# --- properties --------------------------------------------------------------------------------------------------

numbers = st.floats(-1e6, 1e6, width=32)
vectors = st.lists(st.tuples(numbers, numbers), min_size=1, max_size=8)


@given(vectors)
def test_equal_is_equal(pairs: list[tuple[float, float]]) -> None:
    tensor = f32(*(a for a, _ in pairs))
    found = compare("y", tensor.clone(), tensor)
    assert found.ok and found.max_abs == 0 and found.cosine == pytest.approx(1, abs=1e-6)


@settings(deadline=None)
@given(vectors)
def test_the_needed_tolerance_is_just_enough(pairs: list[tuple[float, float]]) -> None:
    got = torch.tensor([a for a, _ in pairs], dtype=torch.float64)
    wanted = torch.tensor([b for _, b in pairs], dtype=torch.float64)
    needed = compare("y", got, wanted, tolerance=Tolerance(rtol=1e-3, atol=1e-3)).needed
    assert needed is not None
    for factor, passes in ((1 + 1e-9, True), (0.99, needed.rtol == 0)):
        tolerance = Tolerance(rtol=needed.rtol * factor, atol=needed.atol * factor)
        allowed = all(abs(a - b) <= tolerance.atol + tolerance.rtol * abs(b) for a, b in pairs)
        assert compare("y", got, wanted, tolerance=tolerance).ok is allowed is passes
