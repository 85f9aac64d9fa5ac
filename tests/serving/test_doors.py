"""One contract behind every door: Session, HTTP with JSON and HTTP with binary tensors agree in verdicts and bits."""

import json
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from mctl.bundle_format.contract import Contract
from mctl.bundle_format.errors import ContractError
from mctl.export.golden import Case, load_golden
from mctl.runner.session import Session, load

from .server import Answer, Server, infer_binary, infer_json, outputs_of

Arrays = dict[str, np.ndarray]

MOST_ELEMENTS = 40_000  # of one case: the larger ones were replayed when the server started


class Doors(NamedTuple):
    session: Session
    server: Server
    cases: list[Case]

    @property
    def contract(self) -> Contract:
        return self.session.contract

    @property
    def path(self) -> str:
        return f"/v2/models/{self.session.manifest.name}/infer"

    def json(self, inputs: Arrays, **parameters: object) -> Answer:
        body = infer_json(**inputs) | ({"parameters": parameters} if parameters else {})
        return self.server.request(self.path, json.dumps(body).encode())

    def binary(self, inputs: Arrays) -> Answer:
        body, headers = infer_binary(**inputs)
        return self.server.request(self.path, body, headers)


@pytest.fixture(scope="module", params=["mlp", "minilm", "cnn", "mixed", "stateful"])
def doors(request: pytest.FixtureRequest) -> Iterator[Doors]:
    bundle: Path = request.getfixturevalue(f"{request.param}_bundle")
    with load(bundle, threads=1) as session:
        batch = session.contract.batch_dim
        rows = session.contract.dim(batch).max if batch else 1
        with Server(bundle, "--threads", "1", "--max-request-rows", str(rows)) as server:
            yield Doors(session, server, [c for c in load_golden(session._archive) if elements(c) <= MOST_ELEMENTS])


def elements(case: Case) -> int:
    return sum(prod(tensor.shape) for tensor in case.inputs.values())


def arrays_of(case: Case) -> Arrays:
    return {name: tensor.numpy() for name, tensor in case.inputs.items()}


def same_bits(got: Arrays, wanted: Arrays) -> bool:
    return got.keys() == wanted.keys() and all(
        got[name].dtype == wanted[name].dtype
        and got[name].shape == wanted[name].shape
        and got[name].tobytes() == wanted[name].tobytes()
        for name in wanted
    )


def test_the_same_bits_for_the_same_batch_shape(doors: Doors) -> None:
    """Every door pads to the same buckets; a state is the same after the same calls."""
    assert len(doors.cases) >= 3
    doors.session.reset_state()
    by_session = [doors.session.call(arrays_of(case), pad=True) for case in doors.cases]
    by_json = [outputs_of(doors.json(arrays_of(case))) for case in doors.cases]
    assert all(map(same_bits, by_json, by_session))
    if not doors.contract.state:  # the next calls would start from another one
        by_binary = [outputs_of(doors.binary(arrays_of(case))) for case in doors.cases]
        assert all(map(same_bits, by_binary, by_session))


def test_eager_within_tolerance(doors: Doors) -> None:
    """The stored numbers of eager, whatever padding did."""
    if doors.contract.state:
        doors.session.reset_state()
    for case in doors.cases:
        if doors.contract.state:  # each case starts from the state at export
            doors.session.reset_state()
            got = doors.session.call(arrays_of(case))
        else:
            got = outputs_of(doors.binary(arrays_of(case)))
        for name, wanted in case.outputs.items():
            allowed = doors.session.manifest.tolerances[name]
            np.testing.assert_allclose(got[name], wanted.numpy(), rtol=allowed.rtol, atol=allowed.atol)


def broken_inputs(contract: Contract, good: Arrays) -> Iterator[Arrays]:
    """One breach of the contract each."""
    for declared in contract.inputs:
        name, value = declared.name, good[declared.name]
        yield {other: array for other, array in good.items() if other != name}
        yield good | {name: value.astype(np.float64)}
        yield good | {name: value[..., None]}
        yield good | {name: value.reshape(-1)[:1].reshape(())}
        for axis, wanted in enumerate(declared.shape):
            if isinstance(wanted, int) and wanted > 1:
                yield good | {name: np.delete(value, 0, axis)}
            elif isinstance(wanted, str):
                yield good | {name: np.take(value, [], axis)}
            if isinstance(wanted, str) and wanted != contract.batch_dim:
                over = contract.dim(wanted).max + 1
                yield good | {name: np.take(value, [0] * over, axis)}
            if sum(wanted in other.shape for other in contract.inputs) > 1:
                yield good | {name: np.concatenate([value, np.take(value, [0], axis)], axis)}
        if declared.range is not None:
            for outside in (declared.range[0] - 1, declared.range[1] + 1):
                yield good | {name: np.full_like(value, outside)}
    yield good | {"no_such_input": np.zeros(1, np.float32)}


def test_the_same_refusals_in_the_same_words(doors: Doors) -> None:
    good = arrays_of(min(doors.cases, key=elements))
    count = 0
    for inputs in broken_inputs(doors.contract, good):
        with pytest.raises(ContractError) as refused:
            doors.session.call(inputs)
        for answer in (doors.json(inputs), doors.binary(inputs)):
            assert answer.status == 400, (refused.value.message, answer.body)
            assert answer.error == refused.value.message
        count += 1
    assert count >= 6


def test_constants_are_what_was_compiled_in(doors: Doors) -> None:
    good = arrays_of(min(doors.cases, key=elements))
    for constant in doors.contract.constants:
        assert isinstance(constant.value, int)
        assert doors.json(good, **{constant.name: constant.value}).status == 200
        with pytest.raises(ContractError) as refused:
            doors.session.call(good | {constant.name: constant.value + 1})
        answer = doors.json(good, **{constant.name: constant.value + 1})
        assert (answer.status, answer.error) == (400, refused.value.message)
    if doors.session.manifest.name == "mixed":
        assert [c.name for c in doors.contract.constants] == ["repeats"]
