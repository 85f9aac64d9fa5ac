"""The house: imports run downward, `import mctl` is light, and the wheel holds what it should."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from mctl.bundle_format.host import TORCH_TESTED
from mctl.cli.machine import OLDEST_TORCH

ROOT = Path(__file__).parents[1]
LEVELS = {
    "bundle_format": 0,
    "export": 1,
    "aoti": 2,
    "runner": 2,
    "generation": 3,
    "handlers": 3,
    "parity": 4,
    "tuning": 5,
    "cli": 6,
}
MODULES = sorted(path for folder in LEVELS for path in (ROOT / folder).rglob("*.py") if "cpp" not in path.parts)


def _room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0]


def _inner_imports(path: Path) -> list[str]:
    """The folders of the package that a module imports, at any depth of its code."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert not (node.module or "").startswith("mctl"), f"{path}: imports inside the package are relative"
            if node.level == len(path.relative_to(ROOT).parts):  # up to the package itself
                names = [node.module] if node.module else [alias.name for alias in node.names]
                found += [name.split(".")[0] for name in names if name]
        elif isinstance(node, ast.Import):
            assert not any(alias.name.split(".")[0] == "mctl" for alias in node.names), path
    return [name for name in found if name in LEVELS]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_imports_run_downward(path: Path) -> None:
    own = _room(path)
    for other in _inner_imports(path):
        assert LEVELS[other] < LEVELS[own], f"{own} imports {other}"


# The rooms of the runner, from the ground up: a file may include what lies in its own room or below it.
CPP = ROOT / "runner" / "cpp"
ROOMS = ["format", "generation", "model", "pool", "engine", "registry", "doors"]
CPP_FILES = sorted(path for room in ROOMS for path in (CPP / room).iterdir())


@pytest.mark.parametrize("path", CPP_FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_includes_run_downward(path: Path) -> None:
    for included in re.findall(r'#include "([^"]+)"', path.read_text()):
        room = Path(included).parent.name
        assert room in ROOMS, f"{path.name} includes {included}, which is in no room"
        assert ROOMS.index(room) <= ROOMS.index(path.parent.name), f"{path.parent.name} includes {included}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_module_says_what_it_is(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text()))


@pytest.mark.parametrize(
    "code",
    [
        "import mctl",
        "import mctl.cli.main",
        "import mctl.bundle_format.archive, mctl.bundle_format.kinds, mctl.bundle_format.host",
    ],
)
def test_imports_no_torch(code: str) -> None:
    check = f"{code}; import sys; print(sorted({{'torch', 'numpy', 'onnx'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_handler_s_process_has_torch_only_if_the_handler_wants_it() -> None:
    code = "import mctl.handlers.process, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_one_module_touches_the_private_parts_of_torch() -> None:
    command = ["git", "grep", "-lE", r"torch\._inductor|torch\._dynamo|torch\._functorch", "--", "*.py", ":!tests"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["aoti/torch_private.py"]


def test_one_table_of_torch_s_versions() -> None:
    """From the oldest that was tried to the newest: what pip installs, and what `doctor` takes."""
    oldest, newest = (tuple(map(int, TORCH_TESTED[at].split("."))) for at in (0, -1))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    bounds = f"torch>={oldest[0]}.{oldest[1]},<{newest[0]}.{newest[1] + 1}"
    assert [each for each in project["dependencies"] if each.startswith("torch")] == [bounds]
    assert oldest == OLDEST_TORCH


def test_no_machine_is_named() -> None:
    """No path of one machine, and nothing of how the project came about, in what is tracked."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    forbidden = re.compile(r"/(?:work|root|home/[a-z]+)/|/tmp/[a-z]")
    for name in tracked:
        path = ROOT / name
        if path.suffix in {".py", ".cc", ".h", ".md", ".sh", ".toml", ".txt", ".json"} and path != Path(__file__):
            found = forbidden.search(path.read_text())
            assert not found, f"{name}: {found and found[0]}"
