"""mctl's kernels, compiled for a variant's machine into an archive, of which each library takes what it uses."""

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ..bundle_format.errors import CompileError

ARCHIVE = "libmctl_kernels.a"
FOLDER = Path(__file__).parent / "kernels"
FLAGS = ("-std=c++20", "-O3", "-fopenmp", "-fPIC", "-fvisibility=hidden", "-ffunction-sections", "-fdata-sections")


def build(compiler: list[str], march: str, folder: Path) -> Path:
    """Compiles every source of `kernels/` with -march=`march`; the archive lies in `folder`. CompileError."""
    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(lambda source: _compile(compiler, march, source, folder), sorted(FOLDER.glob("*.cc"))))
    archive = folder / ARCHIVE
    _run(["ar", "rcs", str(archive), *map(str, objects)])
    return archive


def _compile(compiler: list[str], march: str, source: Path, folder: Path) -> Path:
    made = folder / f"{source.stem}.o"
    prefix = f"-ffile-prefix-map={FOLDER}=kernels"
    _run([*compiler, *FLAGS, f"-march={march}", "-g0", prefix, "-c", str(source), "-o", str(made)])
    return made


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        hint = "install binutils beside the compiler"
        raise CompileError(f"cannot run `{command[0]}`: {(error.strerror or str(error)).lower()}", hint) from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it said nothing"]
        line = next((line for line in lines if "error:" in line), lines[-1])
        hint = "g++ 11 or newer, or clang 14 or newer, is needed; name one in the variable CXX"
        raise CompileError(f"the C++ compiler refuses mctl's kernels: {line.strip()[:300]}", hint)
