"""mctl doctor: each thing that can be missing is named with the way out, and torch is not imported."""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mctl.cli import machine

Run = Callable[..., subprocess.CompletedProcess[str]]


def by_name(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, str]]:
    return {check["name"]: check for check in json.loads(done.stdout)["checks"]}


def test_this_machine_has_all_it_needs(mctl_ok: Run) -> None:
    checks = by_name(mctl_ok("doctor", "--json"))
    assert list(checks) == [
        "python",
        "torch",
        "compiler",
        "headers",
        "instructions",
        "memory",
        "work folder",
        "mctl-runner",
        "libtorch",
    ]
    assert checks["python"]["found"] == platform.python_version()
    assert all(check["state"] == "ok" for name, check in checks.items() if name not in ("memory", "work folder"))


def test_one_line_a_check(mctl_ok: Run) -> None:
    lines = mctl_ok("doctor").stdout.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("ok")][:3] == ["python", "torch", "compiler"]


def test_no_compiler(run_mctl: Run) -> None:
    done = run_mctl("doctor", "--json", env=os.environ | {"CXX": "no-such-compiler"})
    assert done.returncode == 1
    checks = by_name(done)
    assert checks["compiler"]["state"] == checks["headers"]["state"] == "missing"
    assert "no-such-compiler" in checks["compiler"]["found"]
    assert checks["compiler"]["hint"]


def test_a_compiler_without_headers(tmp_path: Path, run_mctl: Run) -> None:
    """Here it looks for them in an empty root."""
    bare = tmp_path / "bare-g++"
    bare.write_text('#!/bin/sh\nexec g++ -nostdinc -nostdinc++ "$@"\n')
    bare.chmod(0o755)
    done = run_mctl("doctor", "--json", env=os.environ | {"CXX": str(bare)})
    assert done.returncode == 1
    assert by_name(done)["compiler"]["state"] == "ok"
    headers = by_name(done)["headers"]
    assert headers["state"] == "missing"
    assert "error" in headers["found"]


def test_a_work_folder_that_cannot_be_written(run_mctl: Run, tmp_path: Path) -> None:
    done = run_mctl("doctor", "--json", "--work-dir", tmp_path / "absent")
    assert done.returncode == 1
    assert "absent" in by_name(done)["work folder"]["found"]


@pytest.mark.parametrize(("version", "state"), [("2.12.1", "missing"), ("2.13.0+cpu", "ok"), ("3.0.0a0+git1", "ok")])
def test_versions_of_torch(version: str, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    assert {check.name: check.state for check in machine.examine()}["torch"] == state


def test_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    def absent(name: str) -> str:
        raise machine.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", absent)
    monkeypatch.delenv("MCTL_LIBTORCH", raising=False)
    states = {check.name: check.state for check in machine.examine()}
    assert states["torch"] == states["libtorch"] == "limited"


def test_torch_is_not_imported() -> None:
    code = "from mctl.cli import machine; machine.examine(); import sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
