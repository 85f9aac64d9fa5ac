"""What counts say for certain: one-sided bounds of a rate, and of a ratio of quantiles. Mirrors registry/bounds.h.

`level` is the chance to be wrong: 0.05 for a bound that holds with 95 %. tests/vectors/registry/bounds.json runs both.
"""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

_NEGLIGIBLE = 1e-17
_HALVINGS = 100

# Lower ends in nanoseconds: from 1 µs, each doubling is divided into 32 equal steps. The last bin has what is longer.
EDGES = (0, *((32 + step) << (exponent - 5) for exponent in range(10, 37) for step in range(32)), 1 << 37)


@dataclass
class Latencies:
    """A histogram whose steps are at most 3.2 %."""

    counts: Counter[int] = field(default_factory=Counter)  # by bin: an index of EDGES

    def add(self, ns: int, times: int = 1) -> None:
        self.counts[bisect_right(EDGES, ns) - 1] += times

    def ranked_ns(self, rank: int) -> int:
        """The upper end of the bin in which the rank-th smallest value is, counted from 1."""
        for index in sorted(self.counts):
            rank -= self.counts[index]
            if rank <= 0:
                return EDGES[min(index + 1, len(EDGES) - 1)]
        return 0

    def quantile_ns(self, q: float) -> int:
        """The smallest value that a share q of all does not exceed, to within a step."""
        total = self.counts.total()
        return self.ranked_ns(min(max(math.ceil(q * total), 1), total))


def binomial_tail(n: int, x: int, p: float) -> float:
    """P(X >= x) where X counts the successes among n tries of chance p."""
    if x <= 0:
        return 1.0
    if x > n or p <= 0:
        return 0.0
    if p >= 1:
        return 1.0
    if x > n * p:
        return min(_sum_outward(n, x, 1, p), 1.0)
    return max(1 - _sum_outward(n, x - 1, -1, p), 0.0)


def lower_bound_of_rate(x: int, n: int, level: float) -> float:
    """The largest rate that n tries with x successes exclude (Clopper and Pearson, Biometrika 26, 1934)."""
    if x <= 0 or n <= 0:
        return 0.0
    low, high = 0.0, x / n
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if binomial_tail(n, x, middle) < level:
            low = middle
        else:
            high = middle
    return low


def rate_is_above(x: int, n: int, limit: float, level: float) -> bool:
    """Whether that bound is above `limit`."""
    return x > 0 and binomial_tail(n, x, limit) < level


@dataclass(frozen=True, slots=True)
class QuantileRatio:
    estimate: float
    lower_bound: float
    compared: int  # values of `fresh`


def ratio_of_quantiles(
    fresh: Mapping[str, Latencies], old: Mapping[str, Latencies], q: float, level: float
) -> QuantileRatio | None:
    """How many times as long the q-quantile of `fresh` is as that of `old`, at equal buckets.

    None if there is no bucket where that can be said. registry/bounds.h says how it is found, and from what source.
    """
    both = [(values, old[bucket]) for bucket, values in sorted(fresh.items()) if values.counts and bucket in old]
    both = [(values, reference) for values, reference in both if reference.counts]
    bounded, estimated = [], []
    for values, reference in both:
        total = reference.counts.total()
        rank = _critical_count(total, q, level / 2 / len(both))
        if rank <= total:
            bound, point = reference.ranked_ns(rank), reference.quantile_ns(q)
            bounded += [(EDGES[index] / bound, times) for index, times in values.counts.items()]
            estimated += [
                (EDGES[min(index + 1, len(EDGES) - 1)] / point, times) for index, times in values.counts.items()
            ]
    if not bounded:
        return None
    compared = sum(times for _, times in bounded)
    rank = _critical_count(compared, 1 - q, level / 2)
    above = math.floor((1 - q) * compared)
    return QuantileRatio(_ranked_from_above(estimated, above + 1), _ranked_from_above(bounded, rank), compared)


def _binomial(n: int, k: int, p: float) -> float:
    return math.exp(
        math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) + k * math.log(p) + (n - k) * math.log1p(-p)
    )


def _sum_outward(n: int, start: int, step: int, p: float) -> float:
    """P(X = start) + P(X = start + step) + …, away from the mean, where terms only shrink."""
    odds = p / (1 - p)
    term, total, k = _binomial(n, start, p), 0.0, start
    while 0 <= k <= n and term > total * _NEGLIGIBLE:
        total += term
        term *= (n - k) / (k + 1) * odds if step > 0 else k / (n - k + 1) / odds
        k += step
    return total


def _critical_count(n: int, p: float, level: float) -> int:
    """The smallest x for which P(X >= x) <= level, at most n + 1."""
    low, high = 0, n + 1
    while high - low > 1:
        middle = (low + high) // 2
        if binomial_tail(n, middle, p) <= level:
            high = middle
        else:
            low = middle
    return high


def _ranked_from_above(values: list[tuple[float, int]], rank: int) -> float:
    for value, times in sorted(values, reverse=True):
        rank -= times
        if rank <= 0:
            return value
    return 0.0
