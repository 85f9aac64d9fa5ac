"""What a server tells in /metrics and its statistics: read, and what happened between two readings."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from ..bundle_format.errors import ServeError, printable

_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)")
_LABEL = re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"')
_ESCAPED = re.compile(r"\\(.)")

Labels = frozenset[tuple[str, str]]
Samples = Mapping[str, Mapping[Labels, float]]  # by name, then by labels
Cumulative = Sequence[tuple[float, float]]  # upper bound, ascending to infinity -> how many were not above it


@dataclass(frozen=True, slots=True)
class Reading:
    """What a server told at one time. `statistics` are those of the models, as in Triton's extension."""

    at: float  # seconds of a monotonic clock
    epoch: float  # seconds since 1970
    samples: Samples
    statistics: Sequence[Mapping[str, object]] = ()
    why_not: str | None = None  # why it is not ready

    def value(self, name: str, **labels: str) -> float:
        """The sum of the samples that have these labels."""
        wanted = labels.items()
        return math.fsum(v for found, v in self.samples.get(name, {}).items() if wanted <= dict(found).items())

    def by(self, name: str, label: str) -> dict[str, float]:
        """The samples summed by a label's values, in the server's order."""
        sums: dict[str, float] = {}
        for labels, value in self.samples.get(name, {}).items():
            key = _shown(dict(labels).get(label, ""))
            sums[key] = sums.get(key, 0.0) + value
        return sums

    def versions(self) -> list[tuple[str, str]]:
        """Model and version of all that are in memory, in the server's order."""
        infos = map(dict, self.samples.get("mctl_bundle_info", {}))
        return [(info.get("model", ""), info.get("version", "")) for info in infos]

    def only(self, model: str, version: str) -> "Reading":
        """What it told of one version, and of itself."""
        samples = {
            name: {labels: value for labels, value in values.items() if _is_of(labels, model, version)}
            for name, values in self.samples.items()
        }
        statistics = [one for one in self.statistics if (one.get("name"), one.get("version")) == (model, version)]
        return replace(self, samples=samples, statistics=statistics)

    def info(self) -> dict[str, str]:
        """Labels of mctl_bundle_info: model, version, digest, torch, target. Empty: none is in memory."""
        infos = iter(self.samples.get("mctl_bundle_info", {}))
        return {name: _shown(value) for name, value in next(infos, frozenset())}


class Times(msgspec.Struct, frozen=True):
    """Seconds; None where nothing was counted. Percentiles are interpolated as Prometheus' histogram_quantile does."""

    count: int
    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None


class BatchSizes(msgspec.Struct, frozen=True):
    """The batches that had more rows than the entry before, and at most these."""

    at_most: int | None  # None: any
    batches: int
    share: float


class Stages(msgspec.Struct, frozen=True):
    """Mean seconds of a request between its arrival and its answer, as the statistics tell."""

    queue: float
    input: float
    compute: float
    output: float


class Snapshot(msgspec.Struct, frozen=True):
    """A server over some seconds. Rates are per second, shares are parts of 1."""

    model: str
    version: str
    digest: str
    torch: str
    target: str
    ready: bool
    why_not: str | None
    uptime: float
    seconds: float
    since_start: bool  # there is no earlier reading of this server to compare with
    requests: dict[str, float]  # by outcome
    total_requests: dict[str, int]  # since the start
    latency: Times
    queue: Times
    queue_rows: int
    queue_capacity: int
    inflight_batches: int
    batches: float
    rows: float
    mean_rows: float | None
    batch_sizes: list[BatchSizes]
    batch_reasons: dict[str, float]  # share of the batches by why they started
    pad_waste: float | None  # share of the rows that ran
    compute: dict[str, Times]  # by bucket
    stages: Stages | None
    workers: dict[str, int]  # by state
    restarts: dict[str, int]  # by reason, since the start
    memory: int  # bytes, front and workers
    cpu: float  # cores


class Overview(msgspec.Struct, frozen=True):
    """A server of several versions over some seconds: each, and its processes together."""

    models: list[Snapshot]
    ready: bool
    why_not: str | None
    uptime: float
    memory: int  # bytes, front and workers
    cpu: float  # cores


def parse(text: str) -> Samples:
    """Prometheus' text format. ServeError for a line that is none."""
    samples: dict[str, dict[Labels, float]] = {}
    for line in filter(None, text.split("\n")):
        if line.startswith("#"):
            continue
        found = _SAMPLE.fullmatch(line)
        try:
            name, labels, value = found.groups() if found else ("", "", "")
            samples.setdefault(name, {})[frozenset(_labels(labels or ""))] = float(value)
        except ValueError:
            raise ServeError(f"this is no line of Prometheus' text format: `{line[:128]}`") from None
    return samples


def _is_of(labels: Labels, model: str, version: str) -> bool:
    """Of this version, or of none."""
    found = dict(labels)
    return "model" not in found or (found["model"], found.get("version", "")) == (model, version)


def _labels(text: str) -> Iterator[tuple[str, str]]:
    for name, value in _LABEL.findall(text):
        yield name, _ESCAPED.sub(lambda found: "\n" if found[1] == "n" else found[1], value)


def quantile(q: float, buckets: Cumulative) -> float | None:
    """Prometheus' histogram_quantile for 0 < q < 1: linear within a bucket, the last bound above it; None if empty."""
    if not buckets or buckets[-1][1] <= 0:
        return None
    rank = q * buckets[-1][1]
    lower, below = 0.0, 0.0
    for upper, count in buckets:
        if count >= rank:
            return lower if math.isinf(upper) else lower + (upper - lower) * (rank - below) / (count - below)
        lower, below = upper, count
    return lower


def same_server(before: Reading, after: Reading) -> bool:
    """Whether counters went on: not so after a restart, or where another server answers at the address."""
    if before.info() and before.info() != after.info():
        return False
    if not same_process(before, after):
        return False
    counters = ("mctl_requests_total", "mctl_batches_total", "mctl_batch_rows_count")
    return all(before.value(name) <= after.value(name) for name in counters)


def same_process(before: Reading, after: Reading) -> bool:
    start = "process_start_time_seconds"
    return before.value(start) == after.value(start)


def snapshot(before: Reading | None, after: Reading) -> Snapshot:
    """What happened between two readings; since the server's start where `before` is none of the same server."""
    if before is not None and not same_server(before, after):
        before = None
    uptime = _uptime(after)
    change = _Change(before, after, after.at - before.at if before else max(uptime, 1.0))
    rows, padded = change.of("mctl_batch_rows_sum"), change.of("mctl_padded_rows_total")
    batches = change.of("mctl_batch_rows_count")
    info = after.info()
    return Snapshot(
        **{name: info.get(name, "unknown") for name in ("model", "version", "digest", "torch", "target")},
        ready=after.value("mctl_model_ready") == 1,
        why_not=after.why_not,
        uptime=uptime,
        seconds=change.seconds,
        since_start=before is None,
        requests={code: count / change.seconds for code, count in change.by("mctl_requests_total", "code").items()},
        total_requests={code: int(count) for code, count in after.by("mctl_requests_total", "code").items()},
        latency=change.times("mctl_request_duration_seconds"),
        queue=change.times("mctl_queue_duration_seconds"),
        queue_rows=int(after.value("mctl_queue_rows")),
        queue_capacity=int(after.value("mctl_queue_capacity_rows")),
        inflight_batches=int(after.value("mctl_inflight_batches")),
        batches=batches / change.seconds,
        rows=rows / change.seconds,
        mean_rows=rows / batches if batches else None,
        batch_sizes=change.batch_sizes(),
        batch_reasons=_shares(change.by("mctl_batches_total", "reason")),
        pad_waste=padded / (rows + padded) if rows + padded else None,
        compute=change.compute(),
        stages=change.stages(),
        workers={state: int(count) for state, count in after.by("mctl_workers", "state").items()},
        restarts={reason: int(count) for reason, count in after.by("mctl_worker_restarts_total", "reason").items()},
        memory=int(after.value("process_resident_memory_bytes")),
        cpu=change.of("process_cpu_seconds_total") / change.seconds,
    )


def overview(before: Reading | None, after: Reading) -> Overview:
    """What happened to each version between two readings."""
    models = [snapshot(before.only(*which) if before else None, after.only(*which)) for which in after.versions()]
    if before is not None and not same_process(before, after):
        before = None
    uptime = _uptime(after)
    change = _Change(before, after, after.at - before.at if before else max(uptime, 1.0))
    return Overview(
        models=models,
        ready=after.why_not is None,
        why_not=after.why_not,
        uptime=uptime,
        memory=int(after.value("process_resident_memory_bytes")),
        cpu=change.of("process_cpu_seconds_total") / change.seconds,
    )


def _uptime(reading: Reading) -> float:
    return max(0.0, reading.epoch - reading.value("process_start_time_seconds"))


@dataclass(frozen=True, slots=True)
class _Change:
    """How counters grew."""

    before: Reading | None
    after: Reading
    seconds: float

    def of(self, name: str, **labels: str) -> float:
        return self.after.value(name, **labels) - (self.before.value(name, **labels) if self.before else 0.0)

    def by(self, name: str, label: str) -> dict[str, float]:
        earlier = self.before.by(name, label) if self.before else {}
        return {key: value - earlier.get(key, 0.0) for key, value in self.after.by(name, label).items()}

    def buckets(self, name: str, **labels: str) -> Cumulative:
        bounds = self.after.by(f"{name}_bucket", "le")
        counts = [(float(bound), self.of(f"{name}_bucket", le=bound, **labels)) for bound in bounds]
        return sorted(counts)

    def times(self, name: str, **labels: str) -> Times:
        buckets = self.buckets(name, **labels)
        count = self.of(f"{name}_count", **labels)
        mean = self.of(f"{name}_sum", **labels) / count if count else None
        return Times(int(count), mean, *(quantile(q, buckets) for q in (0.5, 0.9, 0.99)))

    def compute(self) -> dict[str, Times]:
        name = "mctl_compute_duration_seconds"
        buckets = sorted(self.after.by(f"{name}_count", "bucket"), key=_natural)
        times = {bucket: self.times(name, bucket=bucket) for bucket in buckets}
        return {bucket: found for bucket, found in times.items() if found.count}

    def batch_sizes(self) -> list[BatchSizes]:
        buckets = self.buckets("mctl_batch_rows")
        total, below, sizes = buckets[-1][1] if buckets else 0.0, 0.0, []
        for bound, count in buckets:
            if count > below:
                at_most = None if math.isinf(bound) else int(bound)
                sizes.append(BatchSizes(at_most, int(count - below), (count - below) / total))
            below = count
        return sizes

    def stages(self) -> Stages | None:
        if not self.stage("queue", "count"):
            return None
        names = ("queue", "compute_input", "compute_infer", "compute_output")
        return Stages(*(1e-9 * self.stage(name, "ns") / max(1.0, self.stage(name, "count")) for name in names))

    def stage(self, name: str, key: str) -> float:
        earlier = _number(self.before.statistics, name, key) if self.before else 0.0
        return _number(self.after.statistics, name, key) - earlier


def _number(statistics: Sequence[Mapping[str, object]], stage: str, key: str) -> float:
    """A number of the first one's `inference_stats`; 0 where the server does not tell it."""
    found: object = next(iter(statistics), None)
    for step in ("inference_stats", stage, key):
        found = found.get(step) if isinstance(found, Mapping) else None
    return float(found) if isinstance(found, int | float) else 0.0


def _shown(label: str) -> str:
    """In one line, and without what moves a terminal's cursor."""
    return printable(label).replace("\n", r"\n")


def _natural(bucket: str) -> list[tuple[int, str]]:
    """`batch=8` comes before `batch=16`."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", bucket)]


def _shares(counts: Mapping[str, float]) -> dict[str, float]:
    total = math.fsum(counts.values())
    return {key: count / total for key, count in counts.items() if count} if total else {}
