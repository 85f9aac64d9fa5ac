"""The judgement of a rollout and the bounds that it uses, against the vectors that mctl-runner runs too."""

import json
from pathlib import Path
from typing import Any

import pytest

from mctl.runner.bounds import (
    EDGES,
    Latencies,
    binomial_tail,
    lower_bound_of_rate,
    rate_is_above,
    ratio_of_quantiles,
)
from mctl.runner.rollout import Gates, Rollout, VersionCounts, Watched, advanced, judge

VECTORS = Path(__file__).parents[1] / "vectors" / "registry"
BOUNDS = json.loads((VECTORS / "bounds.json").read_text(encoding="utf-8"))
ROLLOUTS = json.loads((VECTORS / "rollouts.json").read_text(encoding="utf-8"))


def latencies(values: list[list[int]]) -> Latencies:
    made = Latencies()
    for ns, times in values:
        made.add(ns, times)
    return made


def by_bucket(compute: dict[str, list[list[int]]]) -> dict[str, Latencies]:
    return {bucket: latencies(values) for bucket, values in compute.items()}


def counted(given: dict[str, Any]) -> VersionCounts:
    return VersionCounts(given["requests"], given["errors"], by_bucket(given["compute"]))


def rollout_of(document: dict[str, Any]) -> Rollout:
    known = {key: value for key, value in document.items() if key not in ("from", "gates", "steps")}
    gates = Gates(**document["gates"])
    return Rollout(from_version=document["from"], steps=tuple(document["steps"]), gates=gates, **known)


def watched_of(document: dict[str, Any]) -> Watched:
    both = {name: counted(document[name]) for name in ("fresh", "old") if name in document}
    return Watched(**{**document, **both})


@pytest.mark.parametrize("case", ROLLOUTS, ids=lambda case: case["name"])
def test_judge(case: dict[str, Any]) -> None:
    rollout, expect = rollout_of(case["rollout"]), case["expect"]
    verdict = judge(rollout, watched_of(case["watched"]))
    assert (verdict.move, verdict.gate, verdict.text) == (expect["move"], expect["gate"], expect["text"])
    after = advanced(rollout, verdict)
    change = expect.get("patch", {}).get("rollout", {})
    if verdict.move == "take_back":
        change = {"phase": "taken_back"}
    assert {"phase": after.phase, "step": after.step} == {"phase": rollout.phase, "step": rollout.step} | change


def test_bins() -> None:
    for ns, lower, upper in BOUNDS["bins"]:
        made = latencies([[ns, 1]])
        assert [EDGES[index] for index in made.counts] == [lower]
        assert made.quantile_ns(0.5) == upper


def test_bounds() -> None:
    for case in BOUNDS["tails"]:
        assert binomial_tail(case["n"], case["x"], case["p"]) == pytest.approx(case["tail"], rel=1e-7, abs=1e-12)
    for case in BOUNDS["rates"]:
        x, n, level, bound = case["x"], case["n"], case["level"], case["bound"]
        assert lower_bound_of_rate(x, n, level) == pytest.approx(bound, rel=1e-7)
        if x:
            assert rate_is_above(x, n, bound * 0.999, level)
            assert not rate_is_above(x, n, bound * 1.001, level)


@pytest.mark.parametrize("case", BOUNDS["ratios"], ids=lambda case: f"{case['name']}, {case['level']}")
def test_ratio(case: dict[str, Any]) -> None:
    ratio = ratio_of_quantiles(by_bucket(case["fresh"]), by_bucket(case["old"]), 0.99, case["level"])
    expect = case["expect"]
    if expect is None:
        assert ratio is None
        return
    assert ratio is not None
    assert ratio.compared == expect["compared"]
    assert ratio.lower_bound == pytest.approx(expect["lower_bound"], rel=1e-12)
    assert ratio.estimate == pytest.approx(expect["estimate"], rel=1e-12)
