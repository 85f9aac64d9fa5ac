"""Finds mctl-runner, which a checkout builds on first use, and the libtorch that a bundle needs; then becomes it."""

import os
import platform
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, NoReturn

from ..bundle_format import host
from ..bundle_format.archive import open_bundle
from ..bundle_format.errors import HostError, UsageError
from ..bundle_format.host import Verdict
from ..bundle_format.manifest import Manifest

INSTALLED = Path(__file__).parent / "bin" / "mctl-runner"
SOURCES = Path(__file__).parent / "cpp"
CHECKOUT = Path(__file__).parents[1]

Say = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class Start:
    """What will serve models: the host verdict (of several bundles, the least good; None: they are not known yet), the
    program with its arguments, and what it has in its environment beside this process's own."""

    verdict: Verdict | None
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


def prepare(bundles: Sequence[Path], libtorch: Path | None, options: Mapping[str, object], say: Say) -> Start:
    """All that can be known before the server starts. HostError where a bundle cannot be served here.

    `bundles` may be one folder of models, or none where a file in `options` says what is served. `options` are those of
    `mctl-runner serve` by their names in Python; None and False: not given; a list: given as often.
    """
    check_platform()
    verdict: Verdict | None = None
    if bundles and not any(bundle.is_dir() for bundle in bundles):
        verdict, told = _check_bundles(bundles, libtorch, say)
    else:
        told = _told_of_any(libtorch)
    if told.handler or options.get("handler") or options.get("allow_handler"):
        options = {**options, "handler_python": options.get("handler_python") or sys.executable}
    words = ["serve", *map(str, bundles), *told.words]
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        for each in value if isinstance(value, list | tuple) else [value]:
            if each is not None and each is not False:
                words.append(flag if each is True else f"{flag}={each}")
    return Start(verdict, (str(find_runner(say)), *words), told.environment)


@dataclass(frozen=True, slots=True)
class _Told:
    """What the runner is told of libtorch: in its words, for every bundle, or in its environment, for those that need
    it."""

    words: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    handler: bool = False  # a bundle brings one, or names one of mctl's


def _check_bundles(bundles: Sequence[Path], libtorch: Path | None, say: Say) -> tuple[Verdict, _Told]:
    checked = [_check_bundle(bundle, libtorch, say) for bundle in bundles]
    verdict = max((each.verdict for each in checked), key=lambda verdict: verdict.kind != "optimal")
    folders = [each.libtorch for each in checked]
    handler = any(each.handler for each in checked)
    found = next((folder for folder in folders if folder), None)
    if found and all(folders):
        return verdict, _Told((f"--libtorch={found}",), handler=handler)
    return verdict, _Told(handler=handler, environment={"MCTL_LIBTORCH": str(found)} if found else {})


def _told_of_any(libtorch: Path | None) -> _Told:
    """For bundles that are not known yet."""
    if libtorch:
        return _Told((f"--libtorch={find_libtorch(libtorch)}",))
    found = host.find_libtorch()
    return _Told(environment={"MCTL_LIBTORCH": str(found)} if found else {})


class _Checked(NamedTuple):
    verdict: Verdict  # whether this machine runs it
    libtorch: Path | None  # the folder that it takes
    handler: bool  # it brings one, or names one of mctl's


def _check_bundle(bundle: Path, libtorch: Path | None, say: Say) -> _Checked:
    with open_bundle(bundle) as archive:
        handler = archive.manifest.handler is not None
        folder = libtorch_for(archive.manifest, libtorch)
        if not folder:
            find_runner(say)  # a checkout builds the shim with it
        verdict = host.host_verdict(archive.manifest, folder)
    if not verdict.ok:
        raise HostError(f"this machine cannot run `{bundle}`: {verdict.reason}", verdict.hint)
    return _Checked(verdict, folder, handler)


def become(start: Start) -> NoReturn:
    """Replaces this process: signals and the exit code are the runner's own, and no Python stays in memory."""
    sys.stdout.flush()
    sys.stderr.flush()
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and exec would hand that on
        signal.signal(number, signal.SIG_DFL)
    os.execve(start.command[0], start.command, os.environ | start.environment)


def find_runner(say: Say = lambda _: None) -> Path:
    """The binary: a wheel carries it, a checkout builds it when it is missing or older than its sources. HostError."""
    if ready := current_runner():
        return ready
    if not is_checkout():
        raise HostError("this installation of mctl has no `mctl-runner`", "install a wheel of mctl for Linux")
    import fcntl  # there is none on Windows

    built = CHECKOUT / "build" / "native" / "mctl-runner"
    built.parent.mkdir(parents=True, exist_ok=True)
    with (built.parent.parent / "native.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _is_current(built):  # another process may have built it meanwhile
            _build(built, say)
    return built


def current_runner() -> Path | None:
    """The binary, if it is there and not older than its sources."""
    built = CHECKOUT / "build" / "native" / "mctl-runner"
    if INSTALLED.is_file():
        return INSTALLED
    return built if is_checkout() and _is_current(built) else None


def is_checkout() -> bool:
    """Whether the runner can be built from the sources beside this file."""
    return (CHECKOUT / "pyproject.toml").is_file() and SOURCES.is_dir()


def libtorch_for(manifest: Manifest, named: Path | None) -> Path | None:
    """The folder as `find_libtorch` finds it; None: the bundle is served through the shim beside the runner."""
    return None if manifest.standalone and named is None else find_libtorch(named)


def find_libtorch(named: Path | None = None) -> Path:
    """The folder of libtorch_cpu.so: `named` (or a file in it), $MCTL_LIBTORCH, or torch's, which is not imported."""
    folder = host.libtorch_folder(named) if named else host.find_libtorch()
    if folder is None and named is not None:
        raise UsageError(f"there is no libtorch_cpu.so in `{named}`")
    if folder is None:
        raise HostError("found no libtorch", "install torch, or name the folder of libtorch_cpu.so with `--libtorch`")
    return folder


def check_platform() -> None:
    """HostError where mctl-runner cannot run."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        here = f"{platform.system()} on {platform.machine()}"
        raise HostError(f"serving needs Linux on x86-64 or aarch64, this is {here}", "`mctl run` works here")


def _is_current(built: Path) -> bool:
    if not built.is_file() or not (built.parent / host.SHIM).is_file():
        return False
    files = (path for path in SOURCES.rglob("*.*") if path.parent.name not in ("tests", "fuzz"))
    sources = (path for path in files if path.suffix in (".cc", ".h", ".txt", ".json"))
    return all(path.stat().st_mtime <= built.stat().st_mtime for path in sources)


def _build(built: Path, say: Say) -> None:
    scripts = sysconfig.get_path("scripts")
    path = os.pathsep.join([scripts, os.environ.get("PATH", os.defpath)])
    for tool, package in (("cmake", "pip install cmake"), ("ninja", "pip install ninja"), ("c++", "apt install g++")):
        if shutil.which(tool, path=path) is None and not (tool == "c++" and os.environ.get("CXX")):
            raise HostError(f"cannot build `mctl-runner`: there is no `{tool}`", f"`{package}`, or install a wheel")
    say("building mctl-runner, once: about a minute")
    environment = os.environ | {"PATH": path}
    for words in (
        ["cmake", "--preset", "native", f"-DPYTHON={sys.executable}"],
        ["cmake", "--build", "--preset", "native", "--target", "mctl-runner"],
    ):
        done = subprocess.run(words, cwd=SOURCES, env=environment, text=True, capture_output=True, check=False)
        if done.returncode:
            log = built.parent / "build.log"
            log.write_text(done.stdout + done.stderr)
            raise HostError(f"cannot build `mctl-runner`: `{' '.join(words[:4])}` failed", f"its output is in `{log}`")
    built.touch()  # nothing to do for the build tool still means that it is current
