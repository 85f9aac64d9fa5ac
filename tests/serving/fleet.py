"""Folders of models whose versions tell by their numbers who answered."""

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from . import faulty
from .server import Answer, Server, infer_json, outputs_of

VALUE = 7


class Shelf:
    """Bundles of the faulty model, standalone: a worker of one is ready in milliseconds."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._made = itertools.count()
        self._libraries: dict[tuple[int, str], Path] = {}

    def bundle(self, factor: int, path: Path | None = None, beyond: str = "answer", **options: Any) -> Path:
        """One that answers `factor * value + 1`, put in its place at once. `golden_factor`: what its cases expect.

        `beyond` is what it does with values above 1000.
        """
        if (factor, beyond) not in self._libraries:
            self._libraries[factor, beyond] = faulty.library(self.folder, factor, beyond)
        path = path or self.folder / f"bundle{next(self._made)}.pt2"
        path.parent.mkdir(parents=True, exist_ok=True)
        golden = options.pop("golden_factor", factor)
        faulty.bundle(self._libraries[factor, beyond], path, factor=golden, standalone=True, **options)
        return path


def infer(server: Server, path: str, value: int = VALUE, **headers: str) -> Answer:
    """One request for one row; `path` is what comes after `/v2/models/`."""
    body = json.dumps(infer_json(x=faulty.rows((1, value)))).encode()
    return server.request(f"/v2/models/{path}/infer", body, {k.replace("_", "-"): v for k, v in headers.items()})


def factor_of(answer: Answer, value: int = VALUE) -> int:
    """Of the version that answered, by its numbers."""
    y = int(next(iter(outputs_of(answer).values()))[0, 0])
    assert (y - 1) % value == 0, y
    return (y - 1) // value


def eventually(holds: Callable[[], bool], seconds: float = 60) -> None:
    """Waits until it does."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.02)


@contextmanager
def clients(server: Server, path: str, count: int = 4) -> Iterator[list[tuple[int, str]]]:
    """Clients that ask all the time; each answer is checked to be 200, and noted: its factor and its version's name."""
    noted: list[tuple[int, str]] = []
    failed: list[object] = []
    over = threading.Event()

    def ask(seed: int) -> None:
        values = np.random.default_rng(seed)
        while not over.is_set():
            value = int(values.integers(1, 1_000_000))
            try:
                answer = infer(server, path, value)
                noted.append((factor_of(answer, value), answer.headers["x-mctl-version"]))
            except Exception as error:
                failed.append(error)
                return

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield noted
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert not failed, failed[:3]
