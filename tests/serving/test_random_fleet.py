"""Management calls, traffic and kills in random order, beside a model of what must hold."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from .fleet import Shelf, eventually, factor_of, infer
from .test_management import Managed

FACTORS = {"1": 3, "2": 5, "3": 7}
CALLS = 40


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("random")
    shelf = Shelf(folder)
    for version, factor in FACTORS.items():
        shelf.bundle(factor, folder / f"{version}.pt2")
    return folder


@dataclass
class History:
    """Which versions may answer: from when a change is asked for, and those before until it was acknowledged."""

    asked: list[float] = field(default_factory=list)
    done: list[float] = field(default_factory=list)
    allowed: list[set[str]] = field(default_factory=list)

    def allow(self, versions: set[str]) -> None:
        self.asked.append(time.monotonic())
        self.done.append(float("inf"))
        self.allowed.append(versions)

    def acknowledged(self) -> None:
        self.done[-1] = time.monotonic()

    def between(self, begin: float, end: float) -> set[str]:
        """Versions that may have answered a request of this time."""
        found: set[str] = set()
        for number, versions in enumerate(self.allowed):
            until = self.done[number + 1] if number + 1 < len(self.done) else float("inf")
            if self.asked[number] <= end and until >= begin:
                found |= versions
        return found


@dataclass
class Asker:
    """Clients that ask all the time and check every answer."""

    server: Managed
    history: History
    answered: int = 0
    wrong: list[object] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def ask(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        while not self.over.is_set() and not self.wrong:
            value, begin = int(random.integers(1, 1000)), time.monotonic()
            answer = infer(self.server, "m", value)
            may = self.history.between(begin, time.monotonic())
            self.answered += 1
            if answer.status == 500 and "ended while it ran this request, twice" in answer.error:
                continue
            version = answer.headers.get("x-mctl-version", "")
            if answer.status != 200 or factor_of(answer, value) != FACTORS[version] or version not in may:
                self.wrong.append((answer, version, may))

    @contextlib.contextmanager
    def asking(self, count: int) -> Iterator[None]:
        threads = [threading.Thread(target=self.ask, args=(seed,)) for seed in range(count)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self.over.set()
            for thread in threads:
                thread.join()


def kill_a_worker(server: Managed, random: np.random.Generator) -> None:
    """Of a version that answers: one that is killed while it loads for the first time has failed to load."""

    def loads() -> bool:
        versions = server.manage("/admin/v1/models").json()["models"]["m"]["versions"]
        return any(version["phase"] == "loading" for version in versions.values())

    eventually(lambda: not loads())
    with contextlib.suppress(ProcessLookupError):
        os.kill(int(random.choice(server.workers())), signal.SIGKILL)


def a_change(random: np.random.Generator, present: set[str]) -> tuple[dict[str, object], set[str], set[str]]:
    """A patch of the model, the versions that may answer after it, and those that are there."""
    have = sorted(present)
    kind = random.integers(4)
    if kind == 0 and len(have) > 1:
        one, other = random.choice(have, 2, replace=False)
        share = int(random.integers(1, 100))
        traffic = {**dict.fromkeys(FACTORS), "stable": None, one: share, other: 100 - share}
        return {"traffic": traffic}, {one, other}, present
    if kind == 1:
        label = str(random.choice(have))
        return {"labels": {"stable": label}, "traffic": {**dict.fromkeys(FACTORS), "stable": 100}}, {label}, present
    if kind == 2 and len(have) > 1:
        gone, left = random.choice(have, 2, replace=False)
        traffic = {**dict.fromkeys(FACTORS), "stable": 100}
        return {"versions": {gone: None}, "labels": {"stable": left}, "traffic": traffic}, {left}, present - {gone}
    every = {version: {"bundle": f"{version}.pt2"} for version in FACTORS}
    return {"versions": every, "traffic": {**dict.fromkeys(FACTORS), "stable": 100}}, set(), set(FACTORS)


@pytest.mark.parametrize("seed", range(2))
def test_every_request_is_answered_by_a_version_that_had_traffic(store: Path, tmp_path: Path, seed: int) -> None:
    random = np.random.default_rng(seed)
    with Managed("--model-store", str(store), "--state", str(tmp_path / "state.json")) as server:
        versions = {version: {"bundle": f"{version}.pt2"} for version in FACTORS}
        first = {"versions": versions, "labels": {"stable": "1"}, "traffic": {"stable": 100}}
        assert server.patch({"models": {"m": first}}).status == 200
        server.wait_for("m/versions/1")
        history, present, stable = History(), set(FACTORS), "1"
        # While what has traffic is not ready, those that answered before go on: they may answer after a change too.
        history.allow(set(FACTORS))
        history.acknowledged()
        asker = Asker(server, history)
        with asker.asking(4):
            for _ in range(CALLS):
                if random.integers(6) == 0:
                    kill_a_worker(server, random)
                patch, allowed, present = a_change(random, present)
                labels = patch.get("labels")
                stable = labels["stable"] if isinstance(labels, dict) else stable
                if stable not in present:
                    stable = min(present)
                    patch["labels"] = {"stable": stable}
                history.allow(allowed or {stable})
                told = server.patch({"models": {"m": patch}})
                assert told.status == 200, told.body
                for version in allowed or {stable}:
                    server.wait_for(f"m/versions/{version}")
                history.acknowledged()
                before = asker.answered
                while asker.answered < before + 5 and not asker.wrong:
                    time.sleep(0.01)
        assert not asker.wrong, asker.wrong[:2]
        assert asker.answered >= 5 * CALLS
