"""How a rollout goes: the judgement of mctl-runner, to be played before it is run.

Mirrors registry/rollout.h, which numbers the rules; tests/vectors/registry/rollouts.json runs both.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from .bounds import Latencies, QuantileRatio, lower_bound_of_rate, rate_is_above, ratio_of_quantiles

Phase = Literal["loading", "shadow", "step", "promoted", "taken_back"]
Move = Literal["wait", "go_on", "promote", "take_back"]

_AT_THE_END, _ON_THE_WAY = 0.05, 0.001
_QUANTILE = 0.99


@dataclass(frozen=True, slots=True)
class Gates:
    """What the new version must not do; None: not looked at."""

    errors: float | None = None  # the share of its requests that fail
    p99: float | None = None  # its compute time as a multiple of the old version's
    mismatch: float | None = None  # the share of shadowed requests whose outputs differ


@dataclass(frozen=True, slots=True)
class Rollout:
    version: str
    from_version: str
    steps: tuple[int, ...] = (1, 10, 50, 100)  # percent
    hold_s: int = 60
    min_requests: int = 200
    gates: Gates = Gates()
    phase: Phase = "loading"
    step: int = 0

    @property
    def runs(self) -> bool:
        return self.phase in ("loading", "shadow", "step")

    @property
    def last_step(self) -> bool:
        return self.step + 1 == len(self.steps)


@dataclass(frozen=True, slots=True)
class VersionCounts:
    """What one version did since the step began; errors are among the requests, compute is of batches by bucket."""

    requests: int = 0
    errors: int = 0
    compute: Mapping[str, Latencies] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Watched:
    """`old`: in a step of 100 %, of the step before it. Shadowed requests count since the rollout began."""

    can_answer: bool = True
    failed: str = ""
    fresh: VersionCounts = VersionCounts()
    old: VersionCounts = VersionCounts()
    compared: int = 0
    differed: int = 0
    held_ms: int = 0


@dataclass(frozen=True, slots=True)
class Verdict:
    move: Move
    text: str
    gate: str = ""


def judge(rollout: Rollout, watched: Watched) -> Verdict:
    """What comes next, and why."""
    if not rollout.runs:
        return Verdict("wait", rollout.phase)
    if watched.failed:
        return _failed("load", watched.failed)
    if rollout.phase != "loading":
        return _judge_phase(rollout, watched)
    if watched.can_answer:
        return Verdict("go_on", f"version `{rollout.version}` is ready")
    return Verdict("wait", f"version `{rollout.version}` is not ready yet")


def advanced(rollout: Rollout, verdict: Verdict) -> Rollout:
    """The rollout after the verdict."""
    if verdict.move == "wait":
        return rollout
    if verdict.move != "go_on":
        return replace(rollout, phase="promoted" if verdict.move == "promote" else "taken_back")
    if rollout.phase == "loading" and rollout.gates.mismatch is not None:
        return replace(rollout, phase="shadow")
    return replace(rollout, phase="step", step=rollout.step + 1 if rollout.phase == "step" else 0)


def _seen(rollout: Rollout, watched: Watched) -> int:
    return watched.compared if rollout.phase == "shadow" else watched.fresh.requests


def _judge_phase(rollout: Rollout, watched: Watched) -> Verdict:
    gates, steps = rollout.gates, rollout.phase == "step"
    final = _seen(rollout, watched) >= rollout.min_requests and watched.held_ms >= rollout.hold_s * 1000
    fresh = watched.fresh
    bad = _judge_rate("errors", "requests failed", gates.errors, fresh.errors, fresh.requests, final) if steps else None
    bad = bad or _judge_rate(
        "mismatch", "compared requests differed", gates.mismatch, watched.differed, watched.compared, final
    )
    if bad:
        return bad
    ratio = None
    if steps and gates.p99 is not None:
        ratio = ratio_of_quantiles(fresh.compute, watched.old.compute, _QUANTILE, _level(final))
        if ratio and ratio.lower_bound > gates.p99:
            return _too_slow(ratio, gates.p99, final)
    where = _progress(rollout, watched)
    if not final:
        return Verdict("wait", where)
    last = steps and rollout.last_step
    if last and gates.p99 is not None and ratio is None:
        what = f"version `{rollout.from_version}` ran often enough to compare"
        return Verdict("wait", f"{where}; no bucket of its batches is one that {what}")
    return Verdict("promote" if last else "go_on", where)


def _judge_rate(gate: str, what: str, limit: float | None, count: int, total: int, final: bool) -> Verdict | None:
    if limit is None or not rate_is_above(count, total, limit, _level(final)):
        return None
    bound = _percent(lower_bound_of_rate(count, total, _level(final)))
    sure = f"at least {bound} with a confidence of {_confidence(final)}"
    return _failed(gate, f"{count} of {total} {what}, {sure}; allowed is {_percent(limit)}")


def _too_slow(ratio: QuantileRatio, limit: float, final: bool) -> Verdict:
    sure = f"at least {ratio.lower_bound:.3g} times with a confidence of {_confidence(final)}"
    slow = f"its batches take {ratio.estimate:.3g} times as long at equal buckets"
    return _failed("p99", f"{slow}, {sure}; allowed is {limit:.3g}")


def _failed(gate: str, text: str) -> Verdict:
    return Verdict("take_back", f"{gate}: {text}", gate)


def _progress(rollout: Rollout, watched: Watched) -> str:
    shadow = rollout.phase == "shadow"
    step = f"step {rollout.step + 1} of {len(rollout.steps)}, {rollout.steps[rollout.step]} %"
    what = "compared requests" if shadow else "requests"
    text = f"{'shadow' if shadow else step}: {watched.held_ms // 1000} of {rollout.hold_s} s"
    text += f", {_seen(rollout, watched)} of {rollout.min_requests} {what}"
    return text if watched.can_answer else f"{text}; version `{rollout.version}` cannot answer now"


def _level(final: bool) -> float:
    return _AT_THE_END if final else _ON_THE_WAY


def _confidence(final: bool) -> str:
    return "95 %" if final else "99.9 %"


def _percent(rate: float) -> str:
    return f"{100 * rate:.3g} %"
