"""What a bundle may cost without libtorch: what is decided by given times, and how they are taken."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mctl.aoti.compiler import CompileOptions
from mctl.bundle_format.errors import CompileError, UsageError
from mctl.cli.compile import allowed_slowdown
from mctl.tuning import selection, slowdown
from mctl.tuning.slowdown import Place

from ..parity import fakes
from .test_selection import POINTS, Quiet, Watch, quiet

FINE = Place({"batch": 1}, 1, 1.02, False)
SLOW, SLOWER = Place({"batch": 8}, 1, 1.5, True), Place({"batch": 4, "seq": 7}, 2, 1.812, True)
CALLED = "`bmm_out` (attn)"


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection.timing, "Machine", Quiet)
    monkeypatch.setattr(selection.duel, "__defaults__", (Quiet,))


# --- what is decided ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [None, 1.05])
@pytest.mark.parametrize("auto", [False, True])
def test_no_slower_than_allowed(limit: float | None, auto: bool) -> None:
    text = "standalone: without libtorch a call takes at most 1.02 times as long at batch 1 (1 thread)"
    assert slowdown.decide([FINE], 0, limit, auto=auto, names=CALLED) == (True, text)
    left = f"{text}; 3 more were not measured within 10 s"
    assert slowdown.decide([FINE], 3, limit, auto=auto, names=CALLED) == (True, left)


def test_slower() -> None:
    """With auto it is no longer standalone; who asked for it gets it; who also gave a limit is refused."""
    places = [FINE, SLOW, SLOWER]
    told = "without libtorch a call takes 1.81 times as long at batch 4, seq 7 (2 threads),"
    told += " 1.5 times as long at batch 8 (1 thread), allowed {}; it calls `bmm_out` (attn)"
    for limit, shown in ((None, "1.05"), (1.2, "1.2")):
        assert slowdown.decide(places, 0, limit, auto=True, names=CALLED) == (
            False,
            f"not standalone: {told.format(shown)}",
        )
    text = f"standalone, but slower: {told.format('1.05')}"
    assert slowdown.decide(places, 0, None, auto=False, names=CALLED) == (True, text)
    with pytest.raises(CompileError) as refused:
        slowdown.decide(places, 0, 1.2, auto=False, names=CALLED)
    assert str(refused.value).startswith(told.format("1.2"))
    assert "--standalone=auto" in (refused.value.hint or "")


def test_many_places_are_counted() -> None:
    places = [Place({}, 1, 2 + ratio, True) for ratio in range(5)]
    text = slowdown.decide(places, 0, None, auto=True, names=CALLED)[1]
    assert text.count("times as long at its only size") == 3 and " and at 2 more, allowed" in text and "6 times" in text


# --- how it is measured ------------------------------------------------------------------------------------------


def watch(small: int, large: int, **more: Any) -> Watch:
    return Watch({("dynamic", 1): small, ("dynamic", 8): large}, **more)


def compared(ways: list[tuple[Watch, Watch]], clock: Any = lambda: 0.0) -> tuple[list[Place], int]:
    return slowdown.compare(POINTS, "dynamic", ways, 1.05, quiet, clock)


def test_every_size_on_each_number_of_threads() -> None:
    ways = [(watch(1000, 5000), watch(900, 9000)), (watch(1000, 1000, threads=2), watch(1000, 1055, threads=2))]
    found, untried = compared(ways)
    assert untried == 0
    assert found == [
        Place({"batch": 1}, 1, 0.9, False),
        Place({"batch": 1}, 2, 1.0, False),
        Place({"batch": 8}, 1, 1.8, True),
        Place({"batch": 8}, 2, 1.055, False),  # by less than the noise
    ]


def test_what_equal_things_differ_by_is_allowed_too() -> None:
    for jitter in (0.0, 0.02):
        (_, place), _ = compared([(watch(100_000, 100_000, jitter=jitter), watch(100_000, 106_500))])
        assert place.slower == (jitter == 0)


class Once(Watch):
    """Slow the first time that it is measured, as where something else disturbed it."""

    def time(self, ask: Any) -> tuple[int, ...]:
        taken = super().time(ask)
        return tuple(ns * 3 for ns in taken) if len(self.asked) <= 6 else taken


def test_what_is_slow_once_is_measured_again() -> None:
    (place, _), _ = compared([(watch(1000, 1000), Once({("dynamic", 1): 1000, ("dynamic", 8): 1000}))])
    assert place == Place({"batch": 1}, 1, 1.0, False)


def test_the_time_is_bounded() -> None:
    """Small sizes come first, and what would take too long is left; one place is measured in any case."""
    slow = watch(1000, 1_000_000_000)
    assert compared([(slow, slow)])[1] == 1
    seconds: Iterator[float] = iter([0.0, *([slowdown.SECONDS] * 9)])
    found, untried = compared([(watch(1000, 1000), watch(1000, 1000))], lambda: next(seconds))
    assert (len(found), untried) == (1, 1)


def test_turns_of_a_slow_model_are_single_calls() -> None:
    asked: list[float] = []

    class Slow(Watch):
        def time(self, ask: Any) -> tuple[int, ...]:
            asked.append(ask.seconds)
            return super().time(ask)

    slow = Slow({("dynamic", 1): 400_000_000, ("dynamic", 8): 400_000_000})
    compared([(slow, slow)])
    assert max(asked) == selection.WINDOW


# --- the bundle --------------------------------------------------------------------------------------------------


class FakeBench:
    """Of a bundle that takes 100 us with libtorch, and `ns` without."""

    ns = 100_000

    def __init__(self, folder: Path, runner: Path, threads: Sequence[int]) -> None:
        self.threads = threads

    def stage(self, staged: object, variants: Sequence[object]) -> None: ...

    def points(self, sizes: Sequence[dict[str, int]]) -> list[Any]:
        assert sizes == [{"batch": 1}, {"batch": 4}, {"batch": 8}]
        return POINTS

    @contextmanager
    def watches(self, named: Path | None = None) -> Iterator[list[Watch]]:
        ns = 100_000 if named else self.ns
        yield [watch(ns, ns, threads=threads) for threads in self.threads]


def settled(
    monkeypatch: pytest.MonkeyPatch,
    standalone: Any,
    limit: float | None,
    ns: int,
    called: tuple[str, ...] = ("mm_out",),
) -> Any:
    manifest = msgspec.structs.replace(fakes.subject(lambda x: x).manifest, standalone=True)
    operators = tuple(f"aoti_torch_cpu_{name}" for name in called)
    staged = fakes.staged(manifest, operators, {"mm_out": ("head",)})
    monkeypatch.setattr(slowdown, "Bench", FakeBench)
    monkeypatch.setattr(FakeBench, "ns", ns)
    monkeypatch.setattr(slowdown.native, "find_runner", lambda _: Path())
    options = CompileOptions(standalone=standalone, standalone_slowdown=limit)
    slowdown.settle(staged, options, (1, 2), quiet)
    return staged.manifest


def test_auto_keeps_libtorch_where_the_shim_is_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settled(monkeypatch, "auto", None, 104_000).standalone
    assert settled(monkeypatch, "auto", 1.9, 180_000).standalone
    slow = settled(monkeypatch, "auto", None, 180_000)
    assert not slow.standalone
    assert slow.notes[-1].startswith(
        "not standalone: without libtorch a call takes 1.8 times as long at batch 1 (1 thread)"
    )
    assert slow.notes[-1].endswith("it calls `mm_out` (head)")


def test_who_asked_for_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = settled(monkeypatch, "yes", None, 180_000)
    assert slow.standalone and slow.notes[-1].startswith("standalone, but slower:")
    with pytest.raises(CompileError, match=r"takes 1\.8 times as long .* it calls `mm_out` \(head\)$"):
        settled(monkeypatch, "yes", 1.5, 180_000)
    assert settled(monkeypatch, "yes", 1.9, 180_000).notes[-1].startswith("standalone: without libtorch")


def test_what_calls_no_operator_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = settled(monkeypatch, "auto", None, 180_000, called=())
    assert manifest.standalone and manifest.notes == ()


def test_what_cannot_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A note; an error for who gave a limit."""

    def lost(*_: object) -> Any:
        raise selection.DuelError("with: its process ended with -6")

    monkeypatch.setattr(slowdown, "compare", lost)
    manifest = settled(monkeypatch, "yes", None, 1)
    assert manifest.standalone and "was not measured: with: its process ended with -6" in manifest.notes[-1]
    with pytest.raises(CompileError, match="cannot be measured: with: its process"):
        settled(monkeypatch, "yes", 1.05, 1)


def test_a_limit_needs_something_to_limit() -> None:
    assert allowed_slowdown("auto", 1.5) == 1.5 and allowed_slowdown(None, None) is None
    for standalone, ratio in ((None, 1.5), ("yes", 0.9), ("auto", float("nan"))):
        with pytest.raises(UsageError, match="--standalone-slowdown"):
            allowed_slowdown(standalone, ratio)  # type: ignore[arg-type]
