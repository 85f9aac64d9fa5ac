"""Who is measured when, which numbers count, and what is concluded from them."""

from itertools import cycle
from pathlib import Path

import pytest

from mctl.runner import bench
from mctl.runner.bench import Curve, Point
from mctl.runner.stopwatch import Ask, Failed

POINT = Point({"batch": 4}, 4, Path("tensors"), "dynamic")


class Fake:
    """Takes the given ns in turn, a window each; None: it fails."""

    def __init__(self, name: str, *windows: int | None, threads: int = 1, log: list[str] | None = None) -> None:
        self.name, self.threads, self.windows = name, threads, cycle(windows)
        self.log = [] if log is None else log

    def time(self, ask: Ask) -> tuple[int, ...]:
        self.log.append(self.name)
        self.asked = ask
        ns = next(self.windows)
        if ns is None:
            raise Failed("it is gone")
        return (ns, ns, ns, 2 * ns)


def quiet(text: str) -> None:
    pass


def test_numbers_that_stand_still_count() -> None:
    a, b = Fake("mctl", 1000), Fake("peer", 3000)
    (mine, peer), failed = bench.measure([a, b], POINT, quiet)
    assert not failed and mine.stable and peer.stable
    assert (mine.median_us, mine.p90_us, mine.p99_us, mine.calls) == (1.0, 2.0, 2.0, 4 * bench.STILL)
    assert mine.rows_per_second == 4e6
    assert mine.ratio is None and peer.ratio == (3.0, 3.0, 3.0)
    assert len(a.log) == bench.LEAST_ROUNDS + 1  # one to warm up
    assert a.asked == Ask("tensors", {"batch": 4}, "dynamic", bench.WINDOW)


def test_the_order_changes_from_round_to_round() -> None:
    log: list[str] = []
    bench.measure([Fake("a", 1, log=log), Fake("b", 1, log=log)], POINT, quiet)
    assert log[:6] == ["b", "a", "a", "b", "b", "a"]


def test_numbers_that_do_not_are_unstable() -> None:
    log: list[str] = []
    (found,), _ = bench.measure([Fake("mctl", 1000, 1200, log=log)], POINT, quiet)
    assert not found.stable and found.spread == pytest.approx(0.2)
    assert len(log) == bench.MOST_ROUNDS + 1


def test_a_slow_call_gets_a_longer_window() -> None:
    slow = Fake("mctl", 10**9)
    bench.measure([slow], POINT, quiet)
    assert slow.asked.seconds == 3.0


def test_who_fails_is_left_out_and_the_others_go_on() -> None:
    found, failed = bench.measure([Fake("mctl", 1000), Fake("peer", 1000, 1000, None)], POINT, quiet)
    assert [each.name for each in found] == ["mctl"]
    assert failed == {"peer": "it is gone"}
    assert bench.measure([Fake("mctl", None)], POINT, quiet) == ([], {"mctl": "it is gone"})


def test_ratios_are_among_the_same_threads() -> None:
    one, two = Fake("mctl", 1000), Fake("mctl", 500, threads=2)
    found, _ = bench.measure([one, two, Fake("peer", 1000, threads=2)], POINT, quiet)
    assert [each.ratio and each.ratio.middle for each in found] == [None, None, 2.0]


def test_ratios_are_taken_round_by_round() -> None:
    base, other = Fake("mctl", 1000, 2000), Fake("peer", 2000, 4000)  # both disturbed in the same rounds
    (_, peer), _ = bench.measure([base, other], POINT, quiet)
    assert peer.ratio == (2.0, 2.0, 2.0)


# nearest rank: https://en.wikipedia.org/wiki/Percentile#The_nearest-rank_method
@pytest.mark.parametrize(("share", "value"), [(0.05, 15), (0.3, 20), (0.4, 20), (0.5, 35), (1.0, 50)])
def test_quantiles(share: float, value: int) -> None:
    assert bench.quantile([15, 20, 35, 40, 50], share) == value


def test_a_line_is_found() -> None:
    curve = bench.fit([(1, 6.0), (8, 13.0), (64, 69.0)])
    assert curve is not None
    assert (curve.fixed_us, curve.row_us) == (pytest.approx(5), pytest.approx(1)) and curve.worst < 1e-9
    assert curve.rows_per_second == pytest.approx(1e6)
    assert curve.rows_for(0.9) == pytest.approx(45)  # 45 / (5 + 45) = 0.9


def test_a_batch_has_at_least_one_row() -> None:
    assert bench.Curve(fixed_us=0.0, row_us=3.0, worst=0.0).rows_for(0.9) == 1


def test_a_line_through_scattered_points_weighs_relative_errors() -> None:
    curve = bench.fit([(1, 10.0), (2, 10.0), (100, 200.0)])
    assert curve is not None
    # numpy.linalg.lstsq([[1/10, 1/10], [1/10, 2/10], [1/200, 100/200]], [1, 1, 1])
    assert (curve.fixed_us, curve.row_us) == (pytest.approx(7.16990659), pytest.approx(1.88992679))


def test_a_line_never_starts_below_nothing() -> None:
    assert bench.fit([(1, 1.0), (10, 20.0)]) == Curve(0.0, pytest.approx(1.2), pytest.approx(0.4))
    flat = bench.fit([(1, 20.0), (10, 10.0)])
    assert flat is not None and flat.row_us == 0 and flat.rows_per_second == float("inf")
    assert bench.fit([(4, 1.0)]) is None


def test_a_target_holds_for_two_batches_in_a_row() -> None:
    points = [(1, 100.0), (8, 400.0), (16, 900.0)]
    assert bench.largest_within(points, 800.0) == 8
    assert bench.largest_within(points, 199.0) is None


def test_what_padding_costs() -> None:
    # between 8 rows at 10 and 16 rows at 18, 9 rows are at 11: padded they cost 18
    assert bench.padding_waste([(1, 9.0), (2, 9.5), (8, 10.0), (16, 18.0)])[-1] == (9, pytest.approx(18 / 11 - 1))
