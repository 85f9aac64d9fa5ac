"""`mctl admin` at a running server."""

import json
import subprocess
from collections.abc import Callable, Iterator

import pytest

from mctl.bundle_format.errors import UsageError
from mctl.runner import operate

from .fleet import Shelf, factor_of, infer
from .test_management import Managed

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def managed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Managed]:
    folder = tmp_path_factory.mktemp("admin")
    shelf = Shelf(folder)
    for factor in (3, 5):
        shelf.bundle(factor, folder / "store" / f"{factor}.pt2")
    shelf.bundle(7, folder / "store" / "wrong.pt2", golden_factor=3)
    with Managed("--model-store", str(folder / "store")) as server:
        yield server


def test_what_a_person_types(managed: Managed, run_mctl: Run) -> None:
    def admin(*words: str) -> subprocess.CompletedProcess[str]:
        return run_mctl("admin", managed.admin, *words)

    loaded = admin("load", "scorer", "1", "3.pt2")
    assert (loaded.returncode, loaded.stderr) == (0, "")
    assert loaded.stdout.splitlines()[1].split() == ["scorer", "1", "ready", "100", "%", "1"]
    assert admin("label", "scorer", "stable", "1").returncode == 0
    assert admin("traffic", "scorer", "stable=100").returncode == 0
    assert admin("load", "scorer", "2", "5.pt2").returncode == 0
    assert factor_of(infer(managed, "scorer")) == 3
    assert admin("traffic", "scorer", "stable=50", "2=50").returncode == 0
    assert {factor_of(infer(managed, "scorer")) for _ in range(4)} == {3, 5}
    wrong = admin("load", "scorer", "3", "wrong.pt2")
    assert wrong.returncode == 1 and "version `3` of `scorer` is not served: golden case" in wrong.stderr
    assert admin("unload", "scorer", "3").returncode == 0
    assert admin("traffic", "scorer", "2=100").returncode == 0
    assert admin("label", "scorer", "stable", "2").returncode == 0
    assert admin("rollback", "scorer").returncode == 0
    assert factor_of(infer(managed, "scorer")) == 3
    listed = json.loads(admin("ls", "--json").stdout)
    assert listed["schema"] == "mctl.admin/1" and set(listed["ls"]["scorer"]["versions"]) == {"1", "2"}
    refused = admin("traffic", "scorer", "1=60")
    assert refused.returncode == 1 and "adds up to 60, not to 100" in refused.stderr
    events = admin("events").stdout.splitlines()
    assert events[0].split()[0] == "1" and any("failed" in line and "golden case" in line for line in events)
    unknown = admin("label", "scorer")
    assert unknown.returncode == 2 and "takes MODEL LABEL VERSION" in unknown.stderr


def test_nobody_is_there(run_mctl: Run) -> None:
    done = run_mctl("admin", "http://127.0.0.1:9", "ls")
    assert done.returncode == 1 and "cannot reach `http://127.0.0.1:9`" in done.stderr
    assert "--admin-port" in done.stderr


def test_gates_and_shares() -> None:
    assert operate.gates_from(["errors=0.1%", "p99=1.2x", "mismatch=1%"]) == {
        "errors": 0.001,
        "p99": 1.2,
        "mismatch": 0.01,
    }
    for wrong in (lambda: operate.gates_from(["errors"]), lambda: operate.traffic_from(["a=-1"])):
        with pytest.raises(UsageError):
            wrong()
