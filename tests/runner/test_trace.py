"""Traces for the simulator, and what comes of them; the textbook case of the batcher."""

import itertools
import json
from pathlib import Path

import msgspec
import pytest

from mctl.bundle_format.archive import open_bundle, rewrite
from mctl.bundle_format.errors import UsageError
from mctl.bundle_format.manifest import Choice, Machine, Measured, Tuning
from mctl.runner.policy import Settings
from mctl.runner.simulator import Arrival, Cost, simulate
from mctl.runner.trace import poisson, read_arrivals, result_of


def test_lines_of_numbers(tmp_path: Path) -> None:
    file = tmp_path / "trace"
    file.write_text("# ms rows timeout\n\n20.5\n10 3\n11.25,2,50\n")
    assert read_arrivals(file) == [Arrival(0, 3), Arrival(1250, 2, timeout_us=50_000), Arrival(10_500, 1)]


def test_an_access_log(tmp_path: Path) -> None:
    lines = [
        {"time": "2026-01-01T00:00:00.500Z", "status": 200, "rows": 2, "total_us": 100_000},
        {"time": "2026-01-01T00:00:00.450Z", "status": 200, "rows": 1, "total_us": 80_000, "bucket": "batch=1"},
        {"time": "2026-01-01T00:00:00.460Z", "status": 200, "path": "/metrics", "total_us": 5},
    ]
    (tmp_path / "log").write_text("\n".join(map(json.dumps, lines)))
    assert read_arrivals(tmp_path / "log") == [Arrival(0, 1), Arrival(30_000, 2)]


def test_clients_of_an_access_log(tmp_path: Path) -> None:
    """An address of IPv4 is a client, a network of IPv6 too, whatever the ports are."""
    peers = ("10.0.0.1:41", "10.0.0.2:41", "10.0.0.1:42", "[2001:db8::1]:41", "[2001:db8::2]:41", "[2001:db8:1::]:41")
    line = '{"time":"2026-01-02T03:04:05Z","client":"%s","total_us":0,"rows":1}'
    (tmp_path / "log").write_text("\n".join(line % peer for peer in peers))
    assert [arrival.client for arrival in read_arrivals(tmp_path / "log")] == [0, 1, 0, 2, 2, 3]


@pytest.mark.parametrize("text", ["soon", "1 0", "1 2 0", "1 2 3 4", "{}", "", "# nothing", "nan", "inf", "1 2 inf"])
def test_what_is_no_trace(tmp_path: Path, text: str) -> None:
    (tmp_path / "trace").write_text(text)
    with pytest.raises(UsageError):
        read_arrivals(tmp_path / "trace")


def test_a_poisson_stream() -> None:
    found = poisson(1000, 10, 1, seed=1)
    assert found == poisson(1000, 10, 1, seed=1) != poisson(1000, 10, 1, seed=2)
    assert abs(len(found) - 10_000) < 4 * 100  # four standard deviations
    gaps = [b.at_us - a.at_us for a, b in itertools.pairwise(found)]
    mean = sum(gaps) / len(gaps)
    assert abs((sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 / mean - 1) < 0.05  # exponential: they agree
    bursts = poisson(1000, 10, 4, seed=1)
    assert len(bursts) % 4 == 0 and len({arrival.at_us for arrival in bursts}) == len(bursts) // 4
    with pytest.raises(UsageError, match="allowed 200,000"):
        poisson(1e6, 1, 1, seed=0)


def test_the_textbook_case() -> None:
    """Sixteen requests within 22 ms at 5 ms + 1 ms a row: one by one the last answer comes at 96 ms = 16 * 6."""
    arrivals = [Arrival(round(at * 22_000 / 15)) for at in range(16)]
    cost = Cost(5000, 1000)
    alone = Settings(max_batch_size=1, max_queue_size=16)
    one_by_one = result_of(simulate(alone, cost, arrivals), arrivals, cost, 1)
    assert (one_by_one.last_ms, one_by_one.rows_per_batch, one_by_one.served) == (96.0, 1.0, 16)
    assert one_by_one.mean_ms == pytest.approx(sum(6 * (at + 1) - at * 22 / 15 for at in range(16)) / 16, abs=1e-3)
    assert one_by_one.utilisation == 1.0
    together = Settings(max_batch_size=16, max_queue_size=64)
    batched = result_of(simulate(together, cost, arrivals), arrivals, cost, 1)
    assert batched.mean_ms < 15 and batched.last_ms < 40


def test_what_was_not_served_is_not_timed() -> None:
    arrivals = [Arrival(0), Arrival(0), Arrival(0, timeout_us=1500)]
    cost = Cost(1000, 0)
    outcome = simulate(Settings(max_batch_size=1, max_queue_size=3), cost, arrivals)
    result = result_of(outcome, arrivals, cost, 1)
    assert (result.served, result.rejected + result.expired) == (2, 1)
    assert (result.p50_ms, result.p99_ms, result.last_ms) == (1.0, 2.0, 2.0)


def test_a_model_of_few_microseconds() -> None:
    """Rows of a quarter of a microsecond: 64 of them take 16, and 3 us for the batch."""
    arrivals, cost = [Arrival(0, 64)], Cost(3.1, 0.25)
    outcome = simulate(Settings(max_batch_size=64, max_queue_size=64), cost, arrivals)
    assert result_of(outcome, arrivals, cost, 1).last_ms == 0.019


def test_padding_counts() -> None:
    arrivals, cost = [Arrival(0, 3)], Cost(0, 1000)
    settings = Settings(max_batch_size=4, max_queue_size=9, allowed_batch_sizes=(4,))
    result = result_of(simulate(settings, cost, arrivals), arrivals, cost, 1)
    assert (result.padding, result.last_ms, result.rows_per_batch) == (0.25, 4.0, 3.0)


# --- the command -------------------------------------------------------------------------------------------------


def test_a_grid(tmp_path: Path, run_mctl) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "trace").write_text("\n".join(str(at * 22 / 15) for at in range(16)))
    costs = ["--c-fixed-ms", "5", "--c-item-ms", "1", "--arrivals", tmp_path / "trace", "--max-queue-size", "16"]
    done = run_mctl("simulate", *costs, "--max-batch-size", "1,16", "--max-queue-delay-us", "0,5000", "--json")
    assert done.returncode == 0, done.stderr
    runs = json.loads(done.stdout)["runs"]
    assert [(r["settings"]["max_batch_size"], r["settings"]["max_queue_delay_us"]) for r in runs] == [
        (1, 0),
        (1, 5000),
        (16, 0),
        (16, 5000),
    ]
    assert next(round(r["result"]["last_ms"]) for r in runs) == 96
    table = run_mctl("simulate", *costs, "--max-batch-size", "1,16")
    assert table.returncode == 0 and "96 ms" in table.stdout.splitlines()[1]


def test_the_curve_of_a_bundle(mlp_bundle: Path, tmp_path: Path, run_mctl) -> None:  # type: ignore[no-untyped-def]
    none = run_mctl("simulate", mlp_bundle, "--rate", "10")
    assert none.returncode == 2 and "has no curve" in none.stderr and "mctl bench --save" in none.stderr
    with open_bundle(mlp_bundle) as archive:
        curve = tuple(Measured(dims={"batch": rows}, threads=1, median_us=5000 + 1000 * rows) for rows in (1, 8, 64))
        rewrite(archive, tmp_path / "b.pt2", msgspec.structs.replace(archive.manifest, curve=curve), {})
    done = run_mctl("simulate", tmp_path / "b.pt2", "--rate", "10", "--seconds", "1", "--json")
    made = json.loads(done.stdout)
    assert made["cost"] == {"fixed_us": 5000, "per_row_us": 1000, "from_us": 0}
    assert made["runs"][0]["settings"]["max_batch_size"] == 64
    assert made["runs"][0]["settings"]["allowed_batch_sizes"] == [1, 2, 4, 8, 16, 32, 64]
    assert made["runs"][0]["settings"]["unpadded_sizes"] == []


def test_a_bundle_of_one_bucket(mlp_bundle: Path, tmp_path: Path, run_mctl) -> None:  # type: ignore[no-untyped-def]
    with open_bundle(mlp_bundle) as archive:
        curve = (Measured(dims={"batch": 64}, threads=1, median_us=7),)
        manifest = msgspec.structs.replace(archive.manifest, buckets={"batch": (64,)}, curve=curve)
        rewrite(archive, tmp_path / "b.pt2", manifest, {})
    done = run_mctl("simulate", tmp_path / "b.pt2", "--rate", "10", "--seconds", "1", "--json")
    assert json.loads(done.stdout)["cost"] == {"fixed_us": 7, "per_row_us": 0, "from_us": 0}


def test_buckets_that_are_not_padded_to(mlp_bundle: Path, tmp_path: Path, run_mctl) -> None:  # type: ignore[no-untyped-def]
    with open_bundle(mlp_bundle) as archive:
        variant = archive.manifest.variants[0].name
        choices = tuple(Choice(dims={"batch": n}, threads=1, variant=variant, pad=n != 64) for n in (1, 64))
        tuning = Tuning(machine=Machine(cpu="", cores=1), noise=0.01, choices=choices)
        rewrite(archive, tmp_path / "b.pt2", msgspec.structs.replace(archive.manifest, tuning=tuning), {})
    (tmp_path / "came").write_text("0 33\n")
    command = ["simulate", tmp_path / "b.pt2", "--c-fixed-ms", "5", "--c-item-ms", "1", "--arrivals", tmp_path / "came"]
    for options, last_ms in ([], 38), (["--allowed-batch-sizes", "64"], 69):
        done = run_mctl(*command, *options, "--json")
        assert json.loads(done.stdout)["runs"][0]["result"]["last_ms"] == last_ms


def test_wrong_usage_is_said(run_mctl) -> None:  # type: ignore[no-untyped-def]
    for options, text in (
        ([], "say what a batch costs"),
        (["--c-fixed-ms", "1"], "say when requests come"),
        (["--c-fixed-ms", "1", "--rate", "1", "--max-batch-size", "many"], "`--max-batch-size many` is not understood"),
        (["--c-fixed-ms", "1", "--rate", "1", "--max-batch-size", "0"], "`max_batch_size` is 0"),
        (["--c-fixed-ms", "inf", "--rate", "1"], "a batch that never ends"),
        (["--c-fixed-ms", "1", "--rate", "1", "--latency-target-ms", "inf"], "`--latency-target-ms inf` is not"),
    ):
        done = run_mctl("simulate", *options)
        assert done.returncode == 2 and text in done.stderr
