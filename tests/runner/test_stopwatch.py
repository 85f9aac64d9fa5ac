"""Timing processes: what they say, and how they end."""

import sys
from pathlib import Path

import pytest

from mctl.bundle_format.errors import HostError
from mctl.export import golden
from mctl.parity import cases
from mctl.parity.cases import Case
from mctl.runner import native
from mctl.runner.session import load
from mctl.runner.stopwatch import Ask, Failed, Stopwatch, runner_stopwatch

READY = "print('{\"ready\":true}', flush=True)"
ASK = Ask("f", {}, "dynamic", 0.01)


def watch(script: str) -> Stopwatch:
    return Stopwatch("fake", (sys.executable, "-c", script), 1)


def test_lines_go_both_ways() -> None:
    with watch(f"{READY}\nfor line in iter(input, ''): print('{{\"ns\":[1,2]}}', flush=True)") as fake:
        assert fake.time(ASK) == (1, 2)
        assert fake.time(ASK) == (1, 2)


def test_ends_are_told() -> None:
    with watch("import sys; sys.exit('no such thing')") as fake, pytest.raises(Failed, match="ended with 1: no such"):
        fake.wait()
    with watch(f"{READY}\nimport os; os.kill(os.getpid(), 9)") as fake, pytest.raises(Failed, match="ended with -9"):
        fake.time(ASK)
    with watch('print(\'{"error":"not here"}\')') as fake, pytest.raises(Failed, match="not here"):
        fake.wait()


def test_it_is_gone_after_the_context() -> None:
    with watch(f"{READY}\ninput()") as fake:
        fake.wait()
    assert not Path(f"/proc/{fake.pid}").exists()


@pytest.fixture
def measured(mlp_bundle: Path) -> Stopwatch:
    return runner_stopwatch(native.find_runner(), mlp_bundle, native.find_libtorch(), 1)


def tensors(bundle: Path, path: Path, rows: int) -> Path:
    with load(bundle) as session:
        inputs = cases.tensors(session.contract, Case({"batch": rows}, "normal"), 0, {})
    path.write_bytes(b"".join(bytes(piece) for piece in golden.dump_case(golden.Case("", {}, inputs, {}))))
    return path


def test_the_runners_own_calls(measured: Stopwatch, mlp_bundle: Path, tmp_path: Path) -> None:
    small = str(tensors(mlp_bundle, tmp_path / "1", 1))
    large = str(tensors(mlp_bundle, tmp_path / "64", 64))
    with measured:
        assert len(measured.time(Ask(small, {"batch": 1}, "dynamic", 10.0, calls=7))) == 7
        assert len(measured.time(Ask(small, {"batch": 1}, "dynamic", 0.0))) == 1
        one = min(measured.time(Ask(small, {"batch": 1}, "dynamic", 0.1)))
        assert 0 < one < min(measured.time(Ask(large, {"batch": 64}, "dynamic", 0.1)))  # 64 times the work


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"variant": "other"}, "no variant `other` covers these sizes"),
        ({"dims": {}}, "no size of dim `batch`"),
        ({"dims": {"batch": 65}}, "no size of dim `batch`"),
        ({"dims": {"batch": 2}}, "no tensor for input `x` at these sizes"),
        ({"tensors": "/nowhere"}, "cannot open `/nowhere`"),
    ],
)
def test_what_cannot_be_measured(
    measured: Stopwatch, mlp_bundle: Path, tmp_path: Path, change: dict[str, object], message: str
) -> None:
    ask = {"tensors": str(tensors(mlp_bundle, tmp_path / "1", 1)), "dims": {"batch": 1}, "variant": "dynamic"}
    with measured:
        with pytest.raises(Failed, match=message):
            measured.time(Ask(**{**ask, **change}, seconds=0.0))  # type: ignore[arg-type]
        assert measured.time(Ask(**ask, seconds=0.0))  # type: ignore[arg-type]  # it lives


def test_what_is_no_bundle(tmp_path: Path) -> None:
    (tmp_path / "junk.pt2").write_bytes(b"junk")
    with pytest.raises(HostError, match="the runner cannot load"):
        runner_stopwatch(native.find_runner(), tmp_path / "junk.pt2", native.find_libtorch(), 1)
