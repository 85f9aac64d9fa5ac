"""What every test may use: the samples as programs and bundles, made once a session by the public commands."""

import ast
import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache as cache_results
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SAMPLES = ROOT / "samples"


# Folders whose files take long come first, in this order; small ones are left for the end, when one process may have no
# more to do while another works on.
LONG = ("aoti", "tuning", "generation", "cli", "docs", "native", "serving")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {folder: at for at, folder in enumerate(LONG)}
    items.sort(key=lambda item: order.get(item.path.relative_to(ROOT / "tests").parts[0], len(LONG)))


def mctl(*arguments: str | Path, cwd: Path | None = None, **options: object) -> subprocess.CompletedProcess[str]:
    """One `mctl` command in a process of its own; stdout and stderr as text."""
    command = [sys.executable, "-m", "mctl.cli.main", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, text=True, capture_output=True, timeout=600, **options)  # type: ignore[call-overload, no-any-return]


def succeed(*arguments: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The same, and it has to end with 0."""
    done = mctl(*arguments, cwd=cwd)
    assert done.returncode == 0, f"mctl {shlex.join(map(str, arguments))}\n{done.stdout}\n{done.stderr}"
    return done


def export_command(sample: str) -> list[str]:
    """The arguments after `mctl` of the export command in a sample's docstring."""
    docstring = ast.get_docstring(ast.parse((SAMPLES / f"{sample}.py").read_text())) or ""
    lines = docstring.replace("\\\n", " ").splitlines()
    line = next(line for line in lines if line.strip().startswith("mctl export"))
    return shlex.split(line)[1:]


def _digest(sample: str) -> str:
    """Of all that a sample's bundle is made from."""
    folders = ("bundle_format", "export", "aoti")
    sources = sorted(path for folder in folders for path in (ROOT / folder).rglob("*"))
    files = [path for path in sources if path.suffix in (".py", ".cc", ".h")]
    digest = hashlib.sha256(sys.version.encode())
    for path in [SAMPLES / f"{sample}.py", *files]:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


Maker = Callable[[str], Path]


@pytest.fixture(scope="session")
def make_program(tmp_path_factory: pytest.TempPathFactory) -> Maker:
    """`make_program("mlp")` is the path of that sample's program.pt2, exported at the first call."""
    return _once(
        tmp_path_factory, "program", lambda sample, path: succeed(*export_command(sample), "-o", path, cwd=ROOT)
    )


@pytest.fixture(scope="session")
def make_bundle(tmp_path_factory: pytest.TempPathFactory, make_program: Maker) -> Maker:
    """`make_bundle("mlp")` is the path of that sample's bundle.pt2, compiled and checked at the first call."""
    return _once(
        tmp_path_factory,
        "bundle",
        lambda sample, path: succeed("compile", make_program(sample), "-o", path, "--name", sample),
    )


def _once(factory: pytest.TempPathFactory, kind: str, make: Callable[[str, Path], object]) -> Maker:
    """Makes each sample's file once: a session, or, where MCTL_TEST_CACHE names a folder, once for these sources."""
    cache = os.environ.get("MCTL_TEST_CACHE")

    @cache_results
    def path_of(sample: str) -> Path:
        folder = Path(cache) if cache else session_folder(factory)
        return make_once(folder / f"{sample}-{_digest(sample)}-{kind}.pt2", lambda path: make(sample, path))

    return path_of


@pytest.fixture(scope="session", autouse=True)
def compiled_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What `mctl compile` keeps for the next time, all tests of this run share, and those of the next if they may."""
    kept = os.environ.get("MCTL_TEST_CACHE")
    folder = Path(kept).resolve() if kept else session_folder(tmp_path_factory)
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")


def session_folder(factory: pytest.TempPathFactory) -> Path:
    """A folder that all processes of this run of the tests share."""
    folder = factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


def make_once(path: Path, make: Callable[[Path], object]) -> Path:
    """`path`, made by whoever needs it first; others wait."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            fresh = path.with_name(f"fresh-{path.name}")
            make(fresh)
            fresh.rename(path)
    return path


@pytest.fixture(scope="session")
def run_mctl() -> Callable[..., subprocess.CompletedProcess[str]]:
    """`run_mctl("inspect", path)`: one command in a process of its own."""
    return mctl


@pytest.fixture(scope="session")
def mctl_ok() -> Callable[..., subprocess.CompletedProcess[str]]:
    """The same, and it has to end with 0."""
    return succeed


@pytest.fixture
def writable(tmp_path: Path) -> Callable[[Path], Path]:
    """A copy of a file that a test may damage."""
    return lambda path: Path(shutil.copy(path, tmp_path / path.name))


def _sample_fixture(sample: str, kind: str) -> object:
    def program(make_program: Maker) -> Path:
        return make_program(sample)

    def bundle(make_bundle: Maker) -> Path:
        return make_bundle(sample)

    return pytest.fixture(scope="session", name=f"{sample}_{kind}")({"program": program, "bundle": bundle}[kind])


mlp_program, mlp_bundle = _sample_fixture("mlp", "program"), _sample_fixture("mlp", "bundle")
minilm_program, minilm_bundle = _sample_fixture("minilm", "program"), _sample_fixture("minilm", "bundle")
cnn_program, cnn_bundle = _sample_fixture("cnn", "program"), _sample_fixture("cnn", "bundle")
mixed_program, mixed_bundle = _sample_fixture("mixed", "program"), _sample_fixture("mixed", "bundle")
stateful_program, stateful_bundle = _sample_fixture("stateful", "program"), _sample_fixture("stateful", "bundle")
