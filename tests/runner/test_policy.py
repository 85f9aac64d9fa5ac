"""The batching policy: the vectors that C++ runs too, the settings, and laws that hold for any trace."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mctl.bundle_format.errors import UsageError
from mctl.runner.policy import Arrival, Cost, Outcome, Request, Settings, decide, simulate

VECTORS = sorted((Path(__file__).parents[1] / "vectors" / "batching").glob("*.json"))


class Vector(msgspec.Struct, forbid_unknown_fields=True):
    """One file of tests/vectors/batching; `why` is for a reader."""

    name: str
    why: str
    settings: Settings
    cost: Cost
    instances: int
    arrivals: tuple[Arrival, ...]
    expect: Outcome
    drain_at_us: int | None = None


@pytest.mark.parametrize("path", VECTORS, ids=lambda p: p.stem)
def test_vector(path: Path) -> None:
    vector = msgspec.json.decode(path.read_bytes(), type=Vector)
    got = simulate(
        vector.settings, vector.cost, vector.arrivals, instances=vector.instances, drain_at_us=vector.drain_at_us
    )
    assert vector.name == path.stem
    assert got.batches == vector.expect.batches
    assert got.completions == vector.expect.completions


def test_there_are_vectors() -> None:
    assert len(VECTORS) >= 28


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
    assert decide(settings, queue, 20, free=0).wake_us == 40
    assert decide(settings, [], 20, free=1).wake_us is None


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
        chunks = len(settings.chunks(arrivals[completion.request].rows))
        assert times == chunks if completion.status == "ok" else times <= chunks
        assert times == 0 or completion.status != "rejected"
