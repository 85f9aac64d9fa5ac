"""What `mctl doctor` looks at, one function each; none of them imports torch."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from ..aoti.workspace import compiler_version, find_compiler
from ..bundle_format import host
from ..bundle_format.errors import MctlError
from ..runner import native

OLDEST_PYTHON = (3, 11)
OLDEST_TORCH = (2, 13)
LITTLE_MEMORY = 4 << 30  # bytes; a compile of a model of 100 MB takes about 2 GiB
LITTLE_DISK = 2 << 30  # bytes


class Check(msgspec.Struct, frozen=True):
    """One line: `ok`; `limited`, some of mctl works without; or `missing`, with what to do."""

    name: str
    state: Literal["ok", "limited", "missing"]
    found: str
    hint: str = ""


class Ability(msgspec.Struct, frozen=True):
    """What this machine can do with a model, or which of the checks stand in the way."""

    does: str
    lacks: tuple[str, ...]


_SCARCE = ("memory", "work folder")  # limited: there is some; of the others: there is none
_NEEDS = {
    "inspect, verify": ("python",),
    "export, parity": ("python", "torch"),
    "compile": ("python", "torch", "compiler", "headers", "instructions", "work folder"),
    "serve a standalone bundle": ("instructions", "mctl-runner"),
    "serve any bundle": ("instructions", "mctl-runner", "libtorch"),
}


def examine(work_dir: Path | None = None) -> list[Check]:
    """Every check, in the order in which a model meets what they look at.

    A machine without torch is one that serves: a compiler that it lacks is no fault.
    """
    looks: list[Callable[[], Check]] = [_python, _torch, _compiler, _headers, _isa, _memory]
    checks = [*(look() for look in looks), _work_folder(work_dir)]
    compiles = any(check.name == "torch" and check.state != "limited" for check in checks)
    if not compiles:
        checks = [_only_limits(check) if check.name in ("compiler", "headers") else check for check in checks]
    has_compiler = all(check.state == "ok" for check in checks if check.name in ("compiler", "headers"))
    return [*checks, _runner(has_compiler), _libtorch()]


def abilities(checks: list[Check]) -> list[Ability]:
    """What follows from the checks."""
    fit = {
        check.name for check in checks if check.state == "ok" or (check.state == "limited" and check.name in _SCARCE)
    }
    return [Ability(does, tuple(name for name in needs if name not in fit)) for does, needs in _NEEDS.items()]


def _only_limits(check: Check) -> Check:
    if check.state != "missing":
        return check
    return Check(check.name, "limited", check.found, f"compile needs it, with torch: {check.hint}".removesuffix(": "))


def _python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info >= OLDEST_PYTHON:
        return Check("python", "ok", version)
    return Check("python", "missing", version, "mctl needs Python 3.11 or newer")


def _torch() -> Check:
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return Check("torch", "limited", "not installed", "export, compile and parity need it: `pip install torch`")
    if tuple(map(int, re.findall(r"\d+", version)[:2])) >= OLDEST_TORCH:
        return Check("torch", "ok", version)
    return Check("torch", "missing", version, "mctl needs torch 2.13 or newer: `pip install -U torch`")


def _compiler() -> Check:
    try:
        return Check("compiler", "ok", compiler_version(find_compiler()))
    except MctlError as error:
        return Check("compiler", "missing", error.message, error.hint or "")


def _headers() -> Check:
    """Compiles a file that includes what torch's generated code does, beside torch's own headers."""
    try:
        compiler = find_compiler()
    except MctlError:
        return Check("headers", "missing", "no compiler to look for them", "install a C++ compiler first")
    source = "#include <algorithm>\n#include <omp.h>\n"
    command = [*compiler, "-std=c++20", "-fopenmp", "-fsyntax-only", "-x", "c++", "-"]
    done = subprocess.run(command, input=source, capture_output=True, text=True)
    if done.returncode == 0:
        return Check("headers", "ok", "C++ and OpenMP")
    lacking = next((line for line in done.stderr.splitlines() if "error" in line), "a test file does not compile")
    hint = "install them (Debian, Ubuntu: `sudo apt-get install g++`)"
    return Check("headers", "missing", lacking, hint)


def _isa() -> Check:
    level = host.isa_level()
    if level == "x86-64":
        hint = "compiled code needs x86-64-v2 (SSE 4.2) at least"
        return Check("instructions", "missing", level, hint)
    return Check("instructions", "ok", level)


def _memory() -> Check:
    try:
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not on every system
        return Check("memory", "ok", "unknown")
    found = f"{size / 2**30:.1f} GiB"
    if size >= LITTLE_MEMORY:
        return Check("memory", "ok", found)
    return Check("memory", "limited", found, "large models may not compile: the compiler takes gigabytes")


def _work_folder(named: Path | None) -> Check:
    folder = named or Path(tempfile.gettempdir())
    try:
        with tempfile.TemporaryDirectory(prefix="mctl-doctor-", dir=folder):
            free = shutil.disk_usage(folder).free
    except OSError as error:
        why = f"`{folder}`: {(error.strerror or str(error)).lower()}"
        return Check("work folder", "missing", why, "choose another with `--work-dir`, or with the variable TMPDIR")
    found = f"{folder}, {free / 2**30:.1f} GiB free"
    if free >= LITTLE_DISK:
        return Check("work folder", "ok", found)
    return Check("work folder", "limited", found, "large models may not fit: choose another with `--work-dir`")


def _runner(has_compiler: bool) -> Check:
    if ready := native.current_runner():
        return Check("mctl-runner", "ok", str(ready))
    if native.is_checkout() and not has_compiler:
        hint = "install a compiler, or a wheel of mctl, which has it"
        return Check("mctl-runner", "limited", "not built yet, and there is no compiler to build it with", hint)
    if native.is_checkout():
        return Check("mctl-runner", "ok", "not built yet: the first `mctl serve` builds it")
    return Check("mctl-runner", "limited", "not in this installation", "`mctl serve` needs a wheel for Linux")


def _libtorch() -> Check:
    try:
        return Check("libtorch", "ok", str(native.find_libtorch()))
    except MctlError as error:
        hint = f"standalone bundles are served without; for others {error.hint}"
        return Check("libtorch", "limited", error.message, hint)
