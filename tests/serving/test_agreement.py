"""One contract, three doors: Session, HTTP with JSON, HTTP with binary tensors. Verdicts, messages and bits agree."""

import json
import runpy
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

import numpy as np
import pytest
import torch

from mctl.bundle_format.errors import ContractError
from mctl.runner.session import Session, load

from .conftest import SAMPLES
from .server import Answer, Server, infer_binary, infer_json, outputs_of

Arrays = dict[str, np.ndarray]


class Door(Protocol):
    """Inputs and constants to outputs, or the text of a refusal."""

    def __call__(self, inputs: Arrays, constants: Mapping[str, object] = {}) -> Arrays | str: ...


class Doors:
    """The three doors to one bundle."""

    def __init__(self, sample: str, server: Server, session: Session) -> None:
        self.path, self.server, self.session = f"/v2/models/{sample}/infer", server, session
        self.all: dict[str, Door] = {"session": self.by_session, "json": self.by_json, "binary": self.by_binary}

    def by_session(self, inputs: Arrays, constants: Mapping[str, object] = {}) -> Arrays | str:
        try:
            return self.session.call({**inputs, **constants})
        except ContractError as error:
            return error.message

    def by_json(self, inputs: Arrays, constants: Mapping[str, object] = {}) -> Arrays | str:
        request = infer_json(**inputs) | {"parameters": constants}
        return self._verdict(self.server.request(self.path, json.dumps(request).encode()))

    def by_binary(self, inputs: Arrays, constants: Mapping[str, object] = {}) -> Arrays | str:
        return self._verdict(self.server.request(self.path, *infer_binary(constants, **inputs)))

    def _verdict(self, answer: Answer) -> Arrays | str:
        return answer.error if answer.status == 400 else outputs_of(answer)


MakeDoors = Callable[[str], Doors]


@pytest.fixture(scope="module")
def doors(make_bundle: Callable[[str], Path]) -> Iterator[MakeDoors]:
    """`doors("mlp")`: without padding and with one thread on both sides, so that the same code runs the same shapes."""
    made: dict[str, Doors] = {}

    def make(sample: str) -> Doors:
        if sample not in made:
            bundle = make_bundle(sample)
            most = {"mlp": "64", "mixed": "16", "cnn": "8", "minilm": "32"}.get(sample)
            rows = ["--max-request-rows", most] if most else []
            made[sample] = Doors(sample, Server(bundle, "--threads", "1", *rows), load(bundle, threads=1))
        return made[sample]

    yield make
    for door in made.values():
        with door.server:
            door.session.close()


def eager(sample: str) -> Callable[..., object]:
    torch.manual_seed(0)  # the default of `mctl export --seed`
    return runpy.run_path(str(SAMPLES / f"{sample}.py"))["model"]().eval().requires_grad_(False)  # type: ignore[no-any-return]


def zeros(*shape: int, dtype: str = "float32") -> Arrays:
    return {"x": np.zeros(shape, dtype)}


REFUSED: dict[str, tuple[Arrays, str]] = {
    "more rows than declared": (zeros(65, 128), "input 'x': axis 0 is 65, allowed 1..64 (batch)"),
    "many more rows": (zeros(5000, 128), "input 'x': axis 0 is 5000, allowed 1..64 (batch)"),
    "no rows": (zeros(0, 128), "input 'x': axis 0 is 0, allowed 1..64 (batch)"),
    "float64": (zeros(2, 128, dtype="float64"), "input 'x': dtype is float64, allowed float32"),
    "float16": (zeros(2, 128, dtype="float16"), "input 'x': dtype is float16, allowed float32"),
    "int64": (zeros(2, 128, dtype="int64"), "input 'x': dtype is int64, allowed float32"),
    "short last axis": (zeros(2, 64), "input 'x': axis 1 is 64, allowed 128"),
    "rank 1": (zeros(128), "input 'x': rank is 1, allowed 2 (float32[batch,128])"),
    "rank 3": (zeros(1, 2, 128), "input 'x': rank is 3, allowed 2 (float32[batch,128])"),
    "missing": ({}, "missing input 'x': float32[batch,128]"),
    "unknown": ({"y": np.zeros((1, 128), "float32")}, "unknown input 'y': the model takes x"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("door", ["session", "json", "binary"])
def test_what_a_compiled_package_takes_silently_is_refused_alike(doors: MakeDoors, door: str, case: str) -> None:
    inputs, message = REFUSED[case]
    assert doors("mlp").all[door](inputs) == message


@pytest.mark.parametrize("rows", [1, 2, 4, 64])
def test_the_same_batch_gives_the_same_bits(doors: MakeDoors, rows: int) -> None:
    x = np.random.default_rng(rows).standard_normal((rows, 128), np.float32)
    answers = [door({"x": x})["output"] for door in doors("mlp").all.values()]  # type: ignore[index]
    assert len({answer.tobytes() for answer in answers}) == 1
    np.testing.assert_allclose(answers[0], eager("mlp")(torch.from_numpy(x)), rtol=1e-4, atol=1e-6)


def mixed_inputs(rows: int = 4, seq: int = 5) -> Arrays:
    random = np.random.default_rng(seq)
    return {
        "batch.ids": random.integers(0, 100, (rows, seq)),
        "batch.mask": random.random((rows, seq), np.float32),
        "scale": random.random(rows, np.float32),
    }


def test_mixed_inputs_constants_and_disagreement(doors: MakeDoors) -> None:
    inputs = mixed_inputs()
    tensors = {name: torch.from_numpy(value) for name, value in inputs.items()}
    nested = {"ids": tensors["batch.ids"], "mask": tensors["batch.mask"]}
    wanted = eager("mixed")(nested, scale=tensors["scale"], repeats=2)
    refusals: dict[str, list[object]] = {"constant": [], "dims": [], "range": [], "seq": []}
    bits = set()
    for door in doors("mixed").all.values():
        for given in (inputs, dict(reversed(inputs.items()))):
            answer = door(given, {"repeats": 2})
            assert not isinstance(answer, str), answer
            for got, want in zip(answer.values(), wanted, strict=True):
                np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
            bits.add(b"".join(np.ascontiguousarray(got).tobytes() for got in answer.values()))
        refusals["constant"].append(door(inputs, {"repeats": 5}))
        refusals["dims"].append(door(inputs | {"scale": np.ones(3, np.float32)}))
        refusals["range"].append(door(inputs | {"batch.ids": np.full((4, 5), 100)}))
        refusals["seq"].append(door(mixed_inputs(seq=65)))
    assert len(bits) == 1
    assert refusals["constant"] == ["constant 'repeats': is 5, compiled in as 2"] * 3
    assert refusals["dims"] == ["input 'scale': axis 0 is 3, but batch is 4 (input 'batch.ids', axis 0)"] * 3
    assert refusals["range"] == ["input 'batch.ids': value 100, allowed 0..99"] * 3
    assert refusals["seq"] == ["input 'batch.ids': axis 1 is 65, allowed 2..64 (seq)"] * 3


def test_images_of_any_size(doors: MakeDoors) -> None:
    image = np.random.default_rng(0).random((2, 3, 24, 33), np.float32)
    wanted = eager("cnn")(torch.from_numpy(image))
    answers = [door({"image": image}) for door in doors("cnn").all.values()]
    for answer in answers:
        assert not isinstance(answer, str), answer
        for name, want in wanted.items():  # type: ignore[attr-defined]
            np.testing.assert_allclose(answer[name], want, rtol=1e-3, atol=1e-5)
            assert answer[name].tobytes() == answers[0][name].tobytes()  # type: ignore[index]


def test_state_is_kept_and_requests_are_not_joined(doors: MakeDoors) -> None:
    both = doors("stateful")
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    counts = {name: [float(door({"x": x})["count"][0]) for _ in range(3)] for name, door in both.all.items()}  # type: ignore[index]
    assert counts == {"session": [2, 4, 6], "json": [2, 4, 6], "binary": [8, 10, 12]}  # one server, one state
    assert both.by_json({"x": np.zeros((9, 4), np.float32)}) == "input 'x': axis 0 is 9, allowed 1..8 (batch)"
