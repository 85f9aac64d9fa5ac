"""Which variant is kept where, by times that are made up."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from mctl.bundle_format.manifest import Machine, Variant
from mctl.runner.bench import Point, Ratio
from mctl.runner.stopwatch import Ask, Failed
from mctl.tuning import selection
from mctl.tuning.selection import Budget, Selection

HERE = Machine(cpu="a test", cores=2)
POINTS = [Point({"batch": rows}, rows, Path("x"), "") for rows in (1, 8)]


class Quiet:
    """A machine on which nothing else runs."""

    def warnings(self) -> list[str]:
        return []


class Noisy(Quiet):
    def warnings(self) -> list[str]:
        return ["the machine's host took 7% of the time for others"]


@dataclass
class Watch:
    """Says how long a call takes, by variant and rows; each call takes a little longer or less in turn."""

    ns: dict[tuple[str, int], int]
    threads: int = 1
    jitter: float = 0.0
    asked: list[str] = field(default_factory=list)
    slower: float = 1.0

    def time(self, ask: Ask) -> tuple[int, ...]:
        if (ask.variant, ask.dims["batch"]) not in self.ns:
            raise Failed(f"{ask.variant} crashed")
        self.asked.append(ask.variant)
        sign = 1 if len(self.asked) % 2 else -1
        return (round(self.ns[ask.variant, ask.dims["batch"]] * self.slower * (1 + sign * self.jitter)),) * 3


def variant(name: str, low: int = 1, high: int = 8) -> Variant:
    return Variant(name=name, library=name, covers={"batch": (low, high)}, constants={}, imports=())


def quiet(text: str) -> None:
    pass


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection.timing, "Machine", Quiet)
    monkeypatch.setattr(selection.duel, "__defaults__", (Quiet,))


def begun(watch: Watch) -> Selection:
    made = Selection(POINTS, [watch.threads], "dynamic")
    made.begin([watch], quiet)
    return made


def test_a_variant_runs_where_it_wins_by_more_than_the_noise() -> None:
    watch = Watch({("dynamic", 1): 1000, ("dynamic", 8): 5000, ("b1", 1): 700, ("all", 1): 600, ("all", 8): 4990})
    found = begun(watch)
    assert found.consider(variant("b1", 1, 1), [watch], quiet) == 1
    assert found.best == {(0, 1): "b1", (1, 1): "dynamic"}
    assert found.consider(variant("all"), [watch], quiet) == 1, "at 8 it is faster by less than the noise"
    assert found.best == {(0, 1): "all", (1, 1): "dynamic"} and found.kept == {"dynamic", "all"}
    tuning = found.tuning(HERE)
    assert [(c.dims, c.variant) for c in tuning.choices] == [({"batch": 1}, "all"), ({"batch": 8}, "dynamic")]
    assert [(t.dims["batch"], t.variant, t.median_ns) for t in tuning.timings] == [
        *((1, "all", 600), (1, "dynamic", 1000), (8, "all", 4990), (8, "dynamic", 5000))
    ]
    assert [point.median_us for point in found.curve()] == [1, 5]


def test_what_equal_things_differ_by_is_the_noise() -> None:
    watch = Watch({("dynamic", 1): 100_000, ("dynamic", 8): 100_000, ("b", 1): 97_000, ("b", 8): 90_000}, jitter=0.02)
    found = begun(watch)
    assert 0.03 < found.noise < 0.05  # 2 % up against 2 % down
    watch.jitter = 0.0
    found.consider(variant("b"), [watch], quiet)
    assert found.best == {(0, 1): "dynamic", (1, 1): "b"}


def test_a_slower_machine_does_not_make_a_variant_look_slow() -> None:
    watch = Watch({("dynamic", 1): 1000, ("dynamic", 8): 5000, ("b1", 1): 900})
    found = begun(watch)
    watch.slower = 1.5
    found.consider(variant("b1", 1, 1), [watch], quiet)
    assert found.best[0, 1] == "b1" and found.timings[0, 1]["b1"] == pytest.approx(900, rel=0.01)


def test_a_disturbed_run_is_repeated_and_has_to_be_won_in_every_round() -> None:
    watch = Watch({("dynamic", 1): 1000, ("dynamic", 8): 1000})
    first, second = (selection.Fixed(name, watch, "dynamic", POINTS[0]) for name in ("first", "second"))
    once = selection.duel(first, second, quiet, Quiet)  # type: ignore[arg-type]
    calls = len(watch.asked)
    again = selection.duel(first, second, quiet, Noisy)  # type: ignore[arg-type]
    assert once.steady and not again.steady
    assert len(watch.asked) - calls == selection.ATTEMPTS * calls
    ratio = Ratio(0.8, 0.7, 0.98)
    assert selection.Duel(1, 1, ratio, steady=True).won(0.05)
    assert not selection.Duel(1, 1, ratio, steady=False).won(0.05)


def test_a_duel_is_lost_by_more_than_what_is_allowed_and_the_noise() -> None:
    ratio = Ratio(1.2, 1.07, 1.5)
    steady, disturbed = (selection.Duel(1, 1, ratio, steady=steady) for steady in (True, False))
    assert (steady.slowdown, disturbed.slowdown) == (1.2, 1.07)
    assert steady.lost(1.05, 0.1) and not steady.lost(1.05, 0.15) and not steady.lost(1.2, 0.0)
    assert disturbed.lost(1.05, 0.01) and not disturbed.lost(1.05, 0.02)


def test_a_variant_for_two_threads_is_no_match_for_one() -> None:
    one, two = (
        Watch({("dynamic", 1): 1000, ("dynamic", 8): 5000, ("b", 1): 500, ("b", 8): 2500}, threads=n) for n in (1, 2)
    )
    found = selection.Selection(POINTS, (1, 2), "dynamic")
    found.begin([one, two], quiet)
    won = found.consider(msgspec.structs.replace(variant("b"), threads=2), [one, two], quiet)
    assert (won, "b" in one.asked, "b" in two.asked) == (2, False, True)


def test_a_variant_that_fails_is_an_error() -> None:
    watch = Watch({("dynamic", 1): 1000, ("dynamic", 8): 1000})
    with pytest.raises(selection.DuelError, match="b crashed"):
        begun(watch).consider(variant("b"), [watch], quiet)


@pytest.mark.parametrize(("loose_ns", "pad"), [(4000, False), (4990, True), (6000, True)])
def test_sizes_between_run_as_they_are_where_that_is_faster(loose_ns: int, pad: bool) -> None:
    """5 rows on the variant that covers all, beside 8 rows on the one of the bucket."""
    watch = Watch({("dynamic", 1): 1000, ("dynamic", 8): 9000, ("b8", 8): 5000, ("dynamic", 5): loose_ns})
    found = begun(watch)
    found.consider(variant("b8", 8, 8), [watch], quiet)
    variants = (variant("dynamic"), variant("b8", 8, 8))
    manifest = SimpleNamespace(variants=variants, tuning=found.tuning(HERE))
    found.compare_padding(manifest, {1: Point({"batch": 5}, 5, Path("y"), "")}, [watch], quiet)  # type: ignore[arg-type]
    assert [choice.pad for choice in found.tuning(HERE).choices] == [True, pad]


def test_where_a_variant_is_taken_out_the_next_one_runs() -> None:
    watch = Watch(
        {("dynamic", 1): 1000, ("dynamic", 8): 5000, ("a", 1): 900, ("a", 8): 4000, ("b", 1): 600, ("b", 8): 5500}
    )
    found = begun(watch)
    for name in ("a", "b"):
        found.consider(variant(name), [watch], quiet)
    assert found.best == {(0, 1): "b", (1, 1): "a"}
    assert found.gain("b") == pytest.approx(900 / 600 - 1) and found.gain("a") == pytest.approx(5000 / 4000 - 1)
    found.restrict({"dynamic", "a"})
    assert found.best == {(0, 1): "a", (1, 1): "a"}


def test_the_threads_that_are_fastest_at_the_largest_sizes() -> None:
    one = Watch({("dynamic", 1): 1000, ("dynamic", 8): 5000})
    for at_8, best in ((4000, 2), (4990, 1)):
        two = Watch({("dynamic", 1): 2000, ("dynamic", 8): at_8}, threads=2)
        found = Selection(POINTS, [1, 2], "dynamic")
        found.begin([one, two], quiet)
        assert found.tuning(HERE).threads == best


def clocked(*times: float) -> Callable[[], float]:
    left = list(times)
    return lambda: left.pop(0)


def test_a_budget_allows_what_fits_by_the_longest_so_far() -> None:
    #                      begin, timed 10..40, allows at 50, timed 50..55, allows at 60 and 75
    budget = Budget(100, clocked(0, 10, 40, 50, 50, 55, 60, 75))
    with budget.timed():
        pass
    assert budget.allows()
    with budget.timed():
        pass
    assert budget.allows()
    assert not budget.allows(), "30 more seconds would end at 105"
