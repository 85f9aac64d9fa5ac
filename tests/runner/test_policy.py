"""The batching policy: the vectors that C++ runs too, the settings, laws that hold for any trace, steps in load."""

import random
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mctl.bundle_format.errors import UsageError
from mctl.runner.pace import Pace
from mctl.runner.policy import Request, Settings, chunks, decide
from mctl.runner.simulator import Arrival, Cost, Outcome, simulate

VECTORS = sorted((Path(__file__).parents[1] / "vectors" / "batching").glob("*.json"))


class Vector(msgspec.Struct, forbid_unknown_fields=True):
    """One file of tests/vectors/batching; `why` is for a reader."""

    name: str
    why: str
    settings: Settings
    costs: tuple[Cost, ...]
    instances: int
    arrivals: tuple[Arrival, ...]
    expect: Outcome
    drain_at_us: int | None = None
    seeds: tuple[tuple[str, int, int], ...] = ()  # kind, padded rows, microseconds


@pytest.mark.parametrize("path", VECTORS, ids=lambda p: p.stem)
def test_vector(path: Path) -> None:
    vector = msgspec.json.decode(path.read_bytes(), type=Vector)
    got = simulate(
        vector.settings,
        vector.costs,
        vector.arrivals,
        instances=vector.instances,
        drain_at_us=vector.drain_at_us,
        seeds={(kind, padded): us for kind, padded, us in vector.seeds},
    )
    assert vector.name == path.stem
    assert got.batches == vector.expect.batches
    assert got.completions == vector.expect.completions
    assert got.limits == vector.expect.limits


def test_there_are_vectors() -> None:
    assert len(VECTORS) >= 60


def mean_ms(outcome: Outcome, arrivals: list[Arrival]) -> float:
    return sum(c.at_us - arrivals[c.request].at_us for c in outcome.completions) / len(arrivals) / 1000


def test_the_example_of_the_design() -> None:
    arrivals = [Arrival(1450 * i) for i in range(16)]
    cost = Cost(5000, 1000)
    single = simulate(Settings(max_batch_size=1, max_queue_size=64), cost, arrivals)
    batched = simulate(Settings(max_batch_size=16, max_queue_size=64), cost, arrivals)
    assert single.completions[-1].at_us == 96_000
    assert mean_ms(single, arrivals) == pytest.approx(40, abs=0.5)
    assert mean_ms(batched, arrivals) == pytest.approx(15, abs=1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_batch_size": 0}, "`max_batch_size` is 0, allowed 1 or more"),
        ({"max_queue_size": 0}, "`max_queue_size` is 0, allowed 1 or more"),
        ({"max_queue_delay_us": -1}, "`max_queue_delay_us` is -1, allowed 0 or more"),
        ({"default_timeout_us": 0}, "the default timeout is not positive"),
        ({"percentile": 49}, "`percentile` is 49, allowed 50..99"),
        ({"percentile": 100}, "`percentile` is 100, allowed 50..99"),
        (
            {"latency_target_us": 500, "max_queue_delay_us": 500},
            "the latency target is not longer than the queue delay: no request could keep it",
        ),
        ({"allowed_batch_sizes": (4, 2)}, "the allowed batch sizes are not ascending: 4, 2"),
        ({"allowed_batch_sizes": (0, 2)}, "the allowed batch sizes are not ascending: 0, 2"),
    ],
)
def test_senseless_settings(fields: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        Settings(**({"max_batch_size": 8, "max_queue_size": 8} | fields))
    assert caught.value.message == message


def test_without_a_free_instance_only_deadlines_wake() -> None:
    settings = Settings(max_batch_size=2, max_queue_size=8, max_queue_delay_us=10)
    queue = [Request(0, 0, 50, 1, ""), Request(1, 0, 40, 1, "")]
    assert decide(settings, 2, queue, 20, free=0).wake_us == 40
    assert decide(settings, 2, [], 20, free=1).wake_us is None


def test_the_first_seed_stays() -> None:
    pace = Pace(Settings(max_batch_size=4, max_queue_size=8), {("a", 2): 700})
    pace.seed({("a", 2): 900, ("b", 2): 800})
    assert [pace.cost("a", 2), pace.cost("a", 1), pace.cost("b", 4)] == [700, 0, 800]


arrival_lists = st.lists(
    st.builds(
        Arrival,
        at_us=st.integers(0, 3000),
        rows=st.integers(1, 9),
        key=st.sampled_from("ab"),
        timeout_us=st.none() | st.integers(0, 3000),
    ),
    max_size=30,
).map(lambda arrivals: sorted(arrivals, key=lambda a: a.at_us))
settings_of_any_kind = st.builds(
    Settings,
    max_batch_size=st.integers(1, 10),
    max_queue_size=st.integers(1, 40),
    max_queue_delay_us=st.sampled_from([0, 1, 500]),
    allowed_batch_sizes=st.sampled_from([(), (1, 2, 4, 8), (3,)]),
    default_timeout_us=st.sampled_from([700, 10**9]),
    latency_target_us=st.sampled_from([None, 600, 3000]),
    percentile=st.sampled_from([50, 99]),
)


@given(settings_of_any_kind, arrival_lists, st.integers(1, 3), st.integers(0, 300))
def test_laws(settings: Settings, arrivals: list[Arrival], instances: int, per_row: int) -> None:
    outcome = simulate(settings, Cost(100, per_row), arrivals, instances=instances)
    assert [c.request for c in outcome.completions] == list(range(len(arrivals)))
    served = [0] * len(arrivals)
    order: dict[str, list[int]] = {"a": [], "b": []}
    for batch in outcome.batches:
        assert len({arrivals[i].key for i in batch.requests}) == 1
        assert batch.rows <= batch.padded and batch.rows <= settings.limit
        assert all(arrivals[i].at_us <= batch.start_us for i in batch.requests)
        order[arrivals[batch.requests[0]].key] += batch.requests
        for i in batch.requests:
            served[i] += 1
    for indices in order.values():
        assert indices == sorted(indices), "within a key nothing overtakes"
    for completion, times in zip(outcome.completions, served, strict=True):
        rows = arrivals[completion.request].rows
        parts = len(chunks(settings.limit, rows))
        if settings.latency_target_us is None:
            assert times == parts if completion.status == "ok" else times <= parts
        else:
            assert parts <= times <= rows if completion.status == "ok" else times <= rows
        assert times == 0 or completion.status != "rejected"


# --- steps in load -----------------------------------------------------------------------------------------------

TARGET = 20_000
SIZES = (1, 2, 4, 8, 16, 32, 64)
# Two batches of 32 take 16.8 ms, two of 64 take 29.6 ms: 32 is the largest size that keeps the target.
COST = Cost(2000, 200)
CAPACITY = 32 / 8.4e-3  # rows a second in batches of 32


def poisson(*phases: tuple[float, float]) -> list[Arrival]:
    """Single rows; phases are rows a second, and seconds."""
    choose, now, end, arrivals = random.Random(1), 0.0, 0.0, []
    for rate, seconds in phases:
        end += seconds * 1e6
        while (now := now + choose.expovariate(rate / 1e6)) < end:
            arrivals.append(Arrival(int(now)))
        now = end
    return arrivals


def times_ms(outcome: Outcome, arrivals: list[Arrival], since_s: float, until_s: float) -> list[float]:
    """How long answers took to those that arrived then."""
    done = [(arrivals[c.request].at_us, c.at_us) for c in outcome.completions if c.status == "ok"]
    return [(end - begin) / 1000 for begin, end in done if since_s * 1e6 <= begin < until_s * 1e6]


def late(times: list[float]) -> float:
    return sum(time > TARGET / 1000 for time in times) / len(times)


def settings_to_a_target(percentile: int) -> Settings:
    return Settings(64, 256, allowed_batch_sizes=SIZES, latency_target_us=TARGET, percentile=percentile)


@pytest.mark.parametrize("percentile", [90, 99])
@pytest.mark.parametrize("seeded", [True, False])
def test_a_step_in_load(percentile: int, seeded: bool) -> None:
    seeds = {("", size): COST.fixed_us + COST.per_row_us * size for size in SIZES}
    arrivals = poisson((CAPACITY / 2, 1), (2 * CAPACITY, 1.5), (CAPACITY / 2, 1))
    outcome = simulate(settings_to_a_target(percentile), COST, arrivals, seeds=seeds if seeded else None)
    for since, until in [(0, 1), (1.1, 2.5), (2.5, 3.5)]:
        assert late(times_ms(outcome, arrivals, since, until)) <= (100 - percentile) / 100
    overload = times_ms(outcome, arrivals, 1, 2.5)
    assert len(overload) >= 0.9 * CAPACITY * 1.5
    calm = times_ms(outcome, arrivals, 2.6, 3.5)
    assert len(calm) > 0.99 * sum(2.6e6 <= a.at_us < 3.5e6 for a in arrivals), "nobody is refused any more"
    assert min(change.limit for change in outcome.limits) == 32, "overload alone does not lower the limit further"


def test_without_a_target_the_same_load_is_late() -> None:
    arrivals = poisson((CAPACITY / 2, 1), (2 * CAPACITY, 1.5), (CAPACITY / 2, 1))
    outcome = simulate(Settings(64, 256, allowed_batch_sizes=SIZES), COST, arrivals)
    assert late(times_ms(outcome, arrivals, 1.1, 2.5)) > 0.9


def test_the_limit_follows_a_slow_machine_and_recovers() -> None:
    slow = [COST, Cost(6000, 600, 1_000_000), Cost(2000, 200, 2_500_000)]  # two batches of 2 take 14.4 ms, of 4 16.8 ms
    arrivals = poisson((2500, 5))
    outcome = simulate(settings_to_a_target(95), slow, arrivals)
    limits = [(0, 64), *((change.at_us, change.limit) for change in outcome.limits), (5_000_000, 0)]
    held = [0] * 65
    for (begin, limit), (end, _) in pairwise(limits):
        held[limit] += max(0, min(end, 2_500_000) - max(begin, 1_300_000))
    assert held[4] > 0.8 * 1_200_000, "4 is the largest size that keeps the target then"
    assert limits[-2][1] >= 16, "2500 rows a second need batches of 16 again"
    assert late(times_ms(outcome, arrivals, 1.3, 2.5)) <= 0.05
    assert len(times_ms(outcome, arrivals, 4, 5)) > 0.95 * 2500


def test_a_model_that_cannot_keep_the_target_keeps_its_batches() -> None:
    """What no limit mends must not lower the limit: batches of one row would only make it worse."""
    arrivals = poisson((1500, 2))
    cost = Cost(19_000, 10)
    outcome = simulate(Settings(64, 256, allowed_batch_sizes=SIZES, latency_target_us=TARGET), cost, arrivals)
    assert outcome.limits == ()
