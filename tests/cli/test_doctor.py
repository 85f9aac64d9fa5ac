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
from mctl.runner import native

# A process in which torch is not installed.
WITHOUT_TORCH = """
import importlib.metadata as metadata, importlib.util as util, sys
version, find = metadata.version, util.find_spec
def absent(name):
    if name == "torch":
        raise metadata.PackageNotFoundError(name)
    return version(name)
metadata.version = absent
util.find_spec = lambda name, *rest: None if name == "torch" else find(name, *rest)
sys.modules["torch"] = None
from mctl.cli.main import main
main()
"""
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


def test_what_this_machine_can_do(mctl_ok: Run) -> None:
    able = json.loads(mctl_ok("doctor", "--json").stdout)["abilities"]
    assert len(able) == 5 and not any(each["lacks"] for each in able)


def test_a_machine_that_only_serves() -> None:
    """Neither torch nor a compiler is a fault there: standalone bundles are served."""
    native.find_runner()
    environment = {name: value for name, value in os.environ.items() if name != "MCTL_LIBTORCH"} | {"CXX": "none"}
    command = [sys.executable, "-c", WITHOUT_TORCH, "doctor"]
    done = subprocess.run([*command, "--json"], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    states = {name: check["state"] for name, check in by_name(done).items()}
    limited = {"torch", "compiler", "headers", "libtorch"}
    assert {name for name, state in states.items() if state != "ok"} - {"memory", "work folder"} == limited
    assert "standalone bundles are served without" in by_name(done)["libtorch"]["hint"]
    assert {each["does"]: each["lacks"] for each in json.loads(done.stdout)["abilities"]} == {
        "inspect, verify": [],
        "export, parity": ["torch"],
        "compile": ["torch", "compiler", "headers"],
        "serve a standalone bundle": [],
        "serve any bundle": ["libtorch"],
    }
    text = subprocess.run(command, env=environment, capture_output=True, text=True).stdout
    assert text.endswith("\nserve a standalone bundle  works\nserve any bundle           lacks libtorch\n")


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
    checks = machine.examine()
    states = {check.name: check.state for check in checks}
    assert states["torch"] == states["libtorch"] == "limited"
    assert {each.does for each in machine.abilities(checks) if not each.lacks} == {
        "inspect, verify",
        "serve a standalone bundle",
    }


def test_torch_is_not_imported() -> None:
    code = "from mctl.cli import machine; machine.examine(); import sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
