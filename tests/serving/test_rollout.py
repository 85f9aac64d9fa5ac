"""A new version takes over step by step, and is taken back when it is worse."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from .fleet import Shelf, eventually, factor_of, infer
from .server import Answer
from .test_management import Managed

BAD = {"fails": "fail", "crashes": "crash", "is slow": "slow"}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rollout")
    shelf = Shelf(folder)
    shelf.bundle(3, folder / "3.pt2")
    shelf.bundle(5, folder / "5.pt2")
    shelf.bundle(7, folder / "wrong.pt2", golden_factor=3)
    for beyond in BAD.values():
        shelf.bundle(5, folder / f"{beyond}.pt2", beyond=beyond)
    return folder


@pytest.fixture
def managed(store: Path, tmp_path: Path) -> Iterator[Managed]:
    with Managed("--model-store", str(store), "--state", str(tmp_path / "state.json")) as server:
        assert server.patch({"models": {"m": {"versions": {"1": {"bundle": "3.pt2"}}}}}).status == 200
        server.wait_for("m")
        yield server


def roll_out(server: Managed, bundle: str, **rollout: object) -> Answer:
    asked = {"version": "2", "hold_s": 0, "min_requests": 20, "gates": {"errors": 0.05}, **rollout}
    return server.patch({"models": {"m": {"versions": {"2": {"bundle": bundle}}, "rollout": asked}}})


def rollout_of(server: Managed) -> dict:  # type: ignore[type-arg]
    return server.state()["models"]["m"]["rollout"]


def ask(server: Managed, seed: int, count: int = 10) -> list[Answer]:
    """Requests that bring out what a bad version does."""
    values = np.random.default_rng(seed).integers(2000, 1_000_000, count)
    return [infer(server, "m", int(value)) for value in values]


def test_a_sound_version_takes_over(managed: Managed) -> None:
    assert roll_out(managed, "5.pt2", steps=[10, 50, 100]).status == 200
    assert rollout_of(managed)["from"] == "1"
    seen, seed = set(), 0
    while rollout_of(managed)["phase"] != "promoted":
        seed += 1
        answers = ask(managed, seed)
        assert all(answer.status == 200 for answer in answers)
        seen |= {answer.headers["x-mctl-version"] for answer in answers}
        assert seed < 2000
    assert seen == {"1", "2"}
    model = managed.state()["models"]["m"]
    assert (model["labels"], model["traffic"], model["previous"]) == ({"stable": "2"}, {"stable": 100}, "1")
    assert {factor_of(infer(managed, "m")) for _ in range(10)} == {5}
    assert managed.manage("/admin/v1/models/m/rollback", {}).status == 200  # `keep`: version 1 is still warm
    assert {factor_of(infer(managed, "m")) for _ in range(10)} == {3}
    did = [event["did"] for event in managed.manage("/admin/v1/events").json()["events"] if event["kind"] == "rollout"]
    assert did == ["went on", "went on", "went on", "promoted"]


@pytest.mark.parametrize(
    ("bundle", "gates", "gate"),
    [
        ("fail", {"errors": 0.05}, "errors"),
        ("crash", {"errors": 0.02}, "errors"),
        ("slow", {"p99": 2.0}, "p99"),
        ("wrong", {"errors": 0.05}, "load"),
    ],
)
def test_a_bad_version_is_taken_back(managed: Managed, bundle: str, gates: dict[str, float], gate: str) -> None:
    assert roll_out(managed, f"{bundle}.pt2", steps=[20, 100], gates=gates, hold_s=1000, min_requests=50).status == 200
    asked = wrong = 0
    while rollout_of(managed)["phase"] != "taken_back":
        answers = ask(managed, asked)
        asked += len(answers)
        wrong += sum(answer.status != 200 for answer in answers)
        assert asked < 20_000
    assert wrong <= asked * 0.2 + 1  # no more than its step's share
    rollout = rollout_of(managed)
    assert rollout["evidence"]["gate"] == gate and rollout["reason"].startswith(f"{gate}: ")
    assert all(answer.headers["x-mctl-version"] == "1" for answer in ask(managed, 1))
    assert managed.state()["models"]["m"]["labels"] == {"stable": "1"}
    if gate != "load":  # it stays for inspection
        eventually(lambda: infer(managed, "m/versions/2").status == 200)


def test_a_version_with_other_numbers_is_taken_back_before_it_gets_a_request(managed: Managed) -> None:
    assert roll_out(managed, "5.pt2", gates={"mismatch": 0.001}, hold_s=1000).status == 200
    asked = 0
    while rollout_of(managed)["phase"] != "taken_back":
        answers = ask(managed, asked)
        asked += len(answers)
        assert {answer.headers["x-mctl-version"] for answer in answers} == {"1"}
        assert asked < 20_000
    evidence = rollout_of(managed)["evidence"]
    assert (evidence["gate"], evidence["at"]) == ("mismatch", "shadow") and evidence["differed"] > 0
    assert evidence["requests"]


def test_the_same_numbers_pass_the_shadow(managed: Managed, store: Path) -> None:
    (store / "again.pt2").write_bytes((store / "3.pt2").read_bytes())
    assert roll_out(managed, "again.pt2", gates={"mismatch": 0.001}, steps=[50, 100]).status == 200
    phases, asked = set(), 0
    while "promoted" not in phases:
        ask(managed, asked)
        phases.add(rollout_of(managed)["phase"])
        asked += 1
        assert asked < 2000
    assert "shadow" in phases


def test_a_shadow_is_counted_and_answers_nobody(managed: Managed) -> None:
    patch = {"versions": {"2": {"bundle": "5.pt2"}}, "labels": {"stable": "1"}, "traffic": {"stable": 100}}
    managed.patch({"models": {"m": {**patch, "shadow": {"version": "2", "percent": 25}}}})
    managed.wait_for("m/versions/2")
    for seed in range(10):
        assert {answer.headers["x-mctl-version"] for answer in ask(managed, seed)} == {"1"}
    counted = 'mctl_shadow_requests_total{model="m",version="2",result="differs"} 25'
    eventually(lambda: counted in managed.request("/metrics").body.decode())
    shown = managed.manage("/admin/v1/models").json()["models"]["m"]["versions"]["2"]["shadow"]
    assert (shown["compared"], shown["differed"], shown["dropped"]) == (25, 25, 0)
    assert "output 'y'" in shown["last"] and len(shown["requests"]) == 5


def test_it_waits_for_requests_and_says_so(managed: Managed) -> None:
    roll_out(managed, "5.pt2", steps=[10, 100])
    eventually(lambda: rollout_of(managed)["phase"] == "step")

    def told() -> str:
        return managed.manage("/admin/v1/models").json()["models"]["m"].get("rollout", "")  # type: ignore[no-any-return]

    eventually(lambda: told().startswith("step 1 of 2, 10 %:"))
    assert "0 of 20 requests" in told()
    second = roll_out(managed, "5.pt2", steps=[50, 100])
    assert second.status == 409 and "a rollout from version `1` to `2` runs" in second.error
    assert managed.patch({"models": {"m": {"traffic": {"2": 100}}}}).status == 409
    assert managed.patch({"models": {"m": {"rollout": None}}}).status == 200
    assert {factor_of(infer(managed, "m")) for _ in range(20)} == {3}


def test_it_goes_on_after_kill_9(store: Path, tmp_path: Path) -> None:
    words = ("--model-store", str(store), "--state", str(tmp_path / "state.json"))
    with Managed(*words) as server:
        server.patch({"models": {"m": {"versions": {"1": {"bundle": "3.pt2"}}}}})
        server.wait_for("m")
        roll_out(server, "5.pt2", steps=[50, 100])
        eventually(lambda: rollout_of(server)["phase"] == "step")
        server.kill()
    with Managed(*words) as server:
        server.wait_for("m/versions/1")
        server.wait_for("m/versions/2")
        assert (rollout_of(server)["phase"], rollout_of(server)["step"]) == ("step", 0)
        assert {factor_of(infer(server, "m")) for _ in range(10)} == {3, 5}
        for seed in range(2000):
            if rollout_of(server)["phase"] == "promoted":
                break
            ask(server, seed)
        assert rollout_of(server)["phase"] == "promoted"


def test_what_is_not_done_yet_is_refused(managed: Managed) -> None:
    for settings in ({"priority": "high"}, {"instances": {"min": 1, "max": 2}}):
        told = managed.patch({"models": {"m": {"settings": settings}}})
        assert told.status == 501 and told.error.startswith("models.m.settings: this server does not do")
    assert "rollout" not in managed.state()["models"]["m"]
