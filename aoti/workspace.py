"""The folder that one compile works in, its C++ compiler, and the space that it needs."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

from ..bundle_format.errors import CompileError

# torch builds the compiler's command line without quoting its own paths.
_PLAIN = re.compile(r"[A-Za-z0-9_./+@=:,-]+\Z")
_SPARE = 64 << 20  # bytes beside the constants: sources, objects, the library
_SAFE_PLACES = ("/tmp", "/var/tmp", "/dev/shm")


class Workspace:
    """A temporary folder; gone when the block ends. `path` has no character that torch would have to quote."""

    def __init__(self, parent: Path | None) -> None:
        try:
            self._folder = Path(tempfile.mkdtemp(prefix="mctl-compile-", dir=parent)).resolve()
        except OSError as error:
            where = f"`{parent}`" if parent else "the folder for temporary files"
            reason = (error.strerror or str(error)).lower()
            raise CompileError(f"cannot work in {where}: {reason}", "choose a folder with `--work-dir`") from error
        self._link: Path | None = None
        try:
            self.path = self._folder if _PLAIN.match(str(self._folder)) else self._plain_link()
        except BaseException:
            self.remove()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.remove()

    @property
    def folders(self) -> tuple[str, ...]:
        """All that `remove` removes."""
        return tuple(str(place) for place in (self._link and self._link.parent, self._folder) if place)

    def subfolder(self, name: str, kind: str = "variants") -> Path:
        """An empty folder of its own, with the places that a compiling process writes to."""
        folder = self.path / kind / name
        shutil.rmtree(folder, ignore_errors=True)
        for place in ("cache", "tmp"):
            (folder / place).mkdir(parents=True)
        return folder

    def clear(self, folder: Path) -> None:
        """Takes away what only the compiling process needed."""
        for place in ("cache", "tmp"):
            shutil.rmtree(folder / place, ignore_errors=True)

    def remove(self) -> None:
        for place in self.folders:
            shutil.rmtree(place, ignore_errors=True)

    def _plain_link(self) -> Path:
        """Another name of the folder, without blanks and non-ASCII letters."""
        for place in (tempfile.gettempdir(), *_SAFE_PLACES):
            if _PLAIN.match(place) and os.access(place, os.W_OK):
                self._link = Path(tempfile.mkdtemp(prefix="mctl-link-", dir=place)) / "work"
                self._link.symlink_to(self._folder)
                return self._link
        raise CompileError(
            f"torch cannot compile in `{self._folder}`, whose name has blanks or non-ASCII letters",
            "choose another folder with `--work-dir`",
        )

    def require_space(self, needed: int) -> None:
        """CompileError if the folder's disk has less room than `needed` bytes of constants, and a spare."""
        require_space(self._folder, needed + _SPARE, "free some space, or choose another folder with `--work-dir`")


def require_space(folder: Path, needed: int, hint: str) -> None:
    """CompileError if the disk of `folder` has less than `needed` bytes left."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise CompileError(f"`{folder}` has {free >> 20} MiB left, about {(needed >> 20) + 1} MiB are needed", hint)


def find_compiler() -> list[str]:
    """The command of the C++ compiler: $CXX, else g++. CompileError if there is none."""
    named = os.environ.get("CXX", "")
    command = shlex.split(named) or ["g++"]
    if shutil.which(command[0]):
        return command
    if named:
        raise CompileError(
            f"the C++ compiler `{command[0]}` of the variable CXX is not there", "unset CXX, or install it"
        )
    raise CompileError(
        "there is no C++ compiler: `g++` is not there",
        "install it (Debian, Ubuntu: `sudo apt-get install g++`), or name another one in the variable CXX",
    )


def compiler_version(command: list[str]) -> str:
    """The first line that the compiler says of itself."""
    done = subprocess.run([*command, "--version"], capture_output=True, text=True)
    return done.stdout.partition("\n")[0]


def _linked(archive: Path) -> list[str]:
    return [str(archive), "-Wl,--gc-sections", f"-Wl,--exclude-libs,{archive.name}"]


def wrap_compiler(command: list[str], work: Path, hidden: dict[str, str], kernels: Path | None = None) -> Path:
    """An executable that calls the compiler with settings that inductor has no option for.

    The library gets no debug information, and no path of this machine: `hidden` maps folders to what is written.
    What it uses of the archive `kernels` becomes part of it, and is not seen from outside.
    """
    extra = ["-g0", *(f"-ffile-prefix-map={path}={name}" for path, name in hidden.items())]
    if sys.platform == "linux":
        # torch's assembler file with the constants asks for an executable stack, with which glibc 2.41 loads no library
        extra.append("-Wl,--strip-all,-z,noexecstack")
    # torch tells compilers apart by their names: that of `ccache g++` is g++
    names = [Path(word).name for word in command]
    script = work / next((name for name in names if "++" in name or "clang" in name or "gcc" in name), names[0])
    call = f'exec {shlex.join(command)} "$@" {shlex.join(extra)}'
    linking = f'case " $* " in *" -shared "*) {call} {shlex.join(_linked(kernels))};; esac\n' if kernels else ""
    script.write_text(f"#!/bin/sh\n{linking}{call}\n")
    script.chmod(0o700)
    try:
        subprocess.run([script, "--version"], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        hint = "choose a folder that programs may run in with `--work-dir`"
        raise CompileError(f"cannot run the C++ compiler from `{work}`: {error}", hint) from error
    return script
