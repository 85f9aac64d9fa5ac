"""Readings of /metrics, and what happened between two, against Prometheus' own rules."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from mctl.bundle_format.errors import ServeError
from mctl.runner.telemetry import Reading, parse, quantile, snapshot

# Cumulative counts and quantiles from Prometheus' test of histogram_quantile (promqltest/testdata/histograms.test).
FIRST = [(0.1, 50), (0.2, 70), (1.0, 110), (math.inf, 120)]
SECOND = [(0.0, 0), (2.0, 1), (4.0, 2), (6.0, 3), (math.inf, 3)]


@pytest.mark.parametrize(("buckets", "q", "expected"), [
    (FIRST, 0.2, 0.048), (FIRST, 0.5, 0.15), (FIRST, 0.8, 0.72), (FIRST, 0.99, 1.0),
    (SECOND, 1 / 6, 1), (SECOND, 0.5, 3), (SECOND, 5 / 6, 5),
])  # fmt: skip
def test_quantiles_are_those_of_prometheus(buckets: list[tuple[float, float]], q: float, expected: float) -> None:
    assert quantile(q, buckets) == pytest.approx(expected)


def test_quantiles_of_nothing() -> None:
    assert quantile(0.5, []) is None
    assert quantile(0.5, [(1.0, 0), (math.inf, 0)]) is None


@given(st.dictionaries(st.text(max_size=5), st.floats(0, 1e9), max_size=4))
def test_every_label_is_read_as_prometheus_reads_it(values: dict[str, float]) -> None:
    registry = CollectorRegistry()
    gauge = Gauge("g", "Help.", ["name"], registry=registry)
    for name, value in values.items():
        gauge.labels(name).set(value)
    text = generate_latest(registry).decode()
    [family] = text_string_to_metric_families(text)
    theirs = {frozenset(sample.labels.items()): sample.value for sample in family.samples}
    assert parse(text).get("g", {}) == theirs


@pytest.mark.parametrize("text", ["<html>", "{}", "name", "name{} x", "SSH-2.0-x"])
def test_text_that_is_something_else(text: str) -> None:
    with pytest.raises(ServeError, match="no line of Prometheus"):
        parse(text)


class Source:
    """A server's metrics, made by Prometheus' client."""

    def __init__(self, start: float = 1000.0, digest: str = "d") -> None:
        self.registry = CollectorRegistry()

        def make(kind, name, *labels, **options):  # type: ignore[no-untyped-def]
            names = ["model", "version", *labels]
            return kind(name, "Help.", names, registry=self.registry, **options)

        info = {"digest": digest, "torch": "2", "target": "t"}
        make(Gauge, "mctl_bundle_info", *info).labels("m", "1", *info.values()).set(1)
        make(Gauge, "mctl_model_ready").labels("m", "1").set(1)
        Gauge("process_start_time_seconds", "Help.", registry=self.registry).set(start)
        self.requests = make(Counter, "mctl_requests_total", "code")
        self.latency = make(Histogram, "mctl_request_duration_seconds", buckets=(0.1, 0.2, 1.0)).labels("m", "1")
        self.rows = make(Histogram, "mctl_batch_rows", buckets=(1, 2, 4)).labels("m", "1")
        self.padded = make(Counter, "mctl_padded_rows_total").labels("m", "1")

    def ended(self, code: str, times: int) -> None:
        self.requests.labels("m", "1", code).inc(times)

    def reading(self, at: float) -> Reading:
        return Reading(at, 2000.0 + at, parse(generate_latest(self.registry).decode()))


def test_the_first_reading_tells_of_all_the_time_since_the_start() -> None:
    source = Source(start=1000.0)
    source.ended("ok", 500)
    found = snapshot(None, source.reading(0.0))
    assert found.since_start and found.seconds == found.uptime == 1000
    assert found.requests["ok"] == 0.5 and found.total_requests["ok"] == 500
    assert found.mean_rows is found.pad_waste is found.latency.p50 is found.stages is None


def test_only_what_came_between_counts() -> None:
    source = Source()
    for value in (0.05, 0.15, 5.0):
        source.latency.observe(value)
    source.rows.observe(4)
    source.ended("ok", 100)
    before = source.reading(10.0)
    for value in (0.15, 0.15, 0.5, 0.5):
        source.latency.observe(value)
    for rows in (1, 3, 3, 7):
        source.rows.observe(rows)
    source.padded.inc(2)
    source.ended("ok", 30)
    source.ended("rejected", 10)
    found = snapshot(before, source.reading(14.0))
    assert not found.since_start and found.seconds == 4
    assert found.requests == {"ok": 7.5, "rejected": 2.5}
    assert (found.latency.count, found.latency.p50, found.latency.mean) == (4, pytest.approx(0.2), pytest.approx(0.325))
    assert found.batches == 1 and found.mean_rows == 3.5 and found.pad_waste == 2 / 16
    assert [(size.at_most, size.batches, size.share) for size in found.batch_sizes] == [
        (1, 1, 0.25),
        (4, 2, 0.5),
        (None, 1, 0.25),
    ]


def test_after_a_restart_it_counts_from_the_new_start() -> None:
    old, new = Source(start=1000.0), Source(start=2004.0)
    old.ended("ok", 1000)
    new.ended("ok", 12)
    found = snapshot(old.reading(4.0), new.reading(10.0))
    assert found.since_start and found.seconds == 6 and found.requests == {"ok": 2}
    assert snapshot(old.reading(0.0), Source(start=1000.0, digest="other").reading(1.0)).since_start
    assert snapshot(old.reading(0.0), Source(start=1000.0).reading(1.0)).since_start  # counters went back
