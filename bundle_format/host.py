"""Can this machine run a bundle? CPU features, C libraries and libtorch's symbols, compared before code is mapped."""

import importlib.util
import os
import platform
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .elf import Library
from .interface import is_name, operators
from .manifest import Manifest, Target

# The levels of the x86-64 psABI, section 3.1.1, by the names of /proc/cpuinfo; each holds those below it.
_V2 = ("cx16", "lahf_lm", "popcnt", "pni", "sse4_1", "sse4_2", "ssse3")
_V3 = (*_V2, "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave")
_V4 = (*_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
LEVELS: dict[str, tuple[str, ...]] = {"x86-64-v2": _V2, "x86-64-v3": _V3, "x86-64-v4": _V4}

SHIM = "libmctl_shim.so"
TORCH_TESTED = ("2.13", "2.14")  # what mctl was tried with; pyproject.toml ends there, and the shim says the same
_LIBSTDCXX = "libstdc++.so.6"


@dataclass(frozen=True, slots=True)
class Host:
    """What a verdict depends on. `missing` gives those of some symbols that libtorch lacks; None without a libtorch."""

    os: str
    arch: str
    features: frozenset[str]  # of /proc/cpuinfo
    glibc: str  # "2.36"; empty on another libc
    glibcxx: str  # newest symbol version of libstdc++, "3.4.30"; empty if it was not found
    torch: str = ""  # version of the libtorch at hand; empty if unknown
    missing: Callable[[Iterable[str]], list[str]] | None = None
    shim: bool = False  # mctl's own library stands in libtorch's place: `missing` is about that

    @property
    def isa(self) -> str:
        """The highest level whose features are all there: "x86-64-v3"."""
        if self.arch != "x86_64":
            return "aarch64" if self.arch == "arm64" else self.arch
        return next((level for level in reversed(LEVELS) if self.features >= {*LEVELS[level]}), "x86-64")


@dataclass(frozen=True, slots=True)
class Verdict:
    """`recompile` and `unsupported` mean that no code of the bundle may be loaded here."""

    kind: Literal["optimal", "runs", "recompile", "unsupported"]
    reason: str
    hint: str | None = None

    @property
    def ok(self) -> bool:
        return self.kind in ("optimal", "runs")


def host_verdict(manifest: Manifest, libtorch: Path | None = None, host: Host | None = None) -> Verdict:
    """Compares a bundle with this machine, or with `host`. `libtorch`: the file or its folder; else the installed
    torch's, and for a standalone bundle mctl's shim.

    Reads a few pages of that library's file and imports no torch.
    """
    if host is None:
        host = this_host(libtorch) if libtorch or not manifest.standalone else standalone_host()
    target = manifest.target
    if target is None:
        return Verdict("unsupported", "it is a program, not compiled code", "compile it with `mctl compile`")
    fault = _unsupported(target, host) or _lacking(manifest, target, host)
    if fault:
        return fault
    notes = []
    if host.isa != target.isa:
        notes.append(f"compiled for {target.isa}, this machine has {host.isa}")
    if host.torch and not host.shim and host.torch != manifest.producer.torch:
        notes.append(f"compiled with torch {manifest.producer.torch}, here is {host.torch}")
    if host.missing is None and any(variant.imports for variant in manifest.variants):
        library = "shim, which comes with `mctl-runner`," if host.shim else "libtorch"
        notes.append(f"found no {library} to look its symbols up in")
    if notes:
        return Verdict("runs", "; ".join(notes))
    return Verdict("optimal", f"compiled for this machine's {host.isa}")


def _unsupported(target: Target, host: Host) -> Verdict | None:
    """Nothing that is compiled here helps: another machine is needed."""
    way_out = "compile the program on a machine like this one"
    if (target.os, target.arch) != (host.os, host.arch):
        return Verdict("unsupported", f"it is for {target.os} {target.arch}, this is {host.os} {host.arch}", way_out)
    for library, needed, here in (("glibc", target.glibc, host.glibc), ("libstdc++", target.glibcxx, host.glibcxx)):
        if needed and _version(here) < _version(needed):
            found = f"this machine has {here}" if here else "this machine has none"
            return Verdict("unsupported", f"it needs {library} {needed} or newer, {found}", way_out)
    return None


def _lacking(manifest: Manifest, target: Target, host: Host) -> Verdict | None:
    """The same program, compiled here, would run."""
    features = [feature for feature in target.features if feature not in host.features]
    if features:
        reason = f"it is compiled for {target.isa}, and this CPU has no {_listed(features)}"
        level = f"--target {host.isa}" if host.isa in LEVELS else "--target native"
        return Verdict("recompile", reason, f"compile the program again with `{level}`")
    if host.missing is not None:
        symbols = host.missing(dict.fromkeys(name for variant in manifest.variants for name in variant.imports))
        if symbols and host.shim:
            hint = "name a libtorch with `--libtorch`, or serve it with a newer mctl"
            return Verdict("recompile", f"mctl's shim lacks {_listed(symbols)}", hint)
        if symbols:
            which = f"torch {host.torch}" if host.torch else "the libtorch at hand"
            hint = f"compile the program again with this torch, or install torch {manifest.producer.torch}"
            return Verdict("recompile", f"{which} lacks {_listed(symbols)}", hint)
    return None


def _listed(names: list[str]) -> str:
    shown = ", ".join(f"`{name}`" for name in names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text))


# --- this machine ------------------------------------------------------------------------------------------------


def this_host(libtorch: Path | None = None) -> Host:
    """The machine that runs this; with the torch at `libtorch` (file or folder), or the one that is installed."""
    folder = libtorch_folder(libtorch) if libtorch else find_libtorch()
    exports = None if folder is None else lambda names: _missing(folder, names)
    return Host(
        os=sys.platform,
        arch=platform.machine(),
        features=cpu_features(),
        glibc=_glibc(),
        glibcxx=_glibcxx(folder),
        torch=_torch_version(folder) if folder else "",
        missing=exports,
    )


def standalone_host() -> Host:
    """The machine that runs this, without libtorch."""
    shim = find_shim()
    return Host(
        os=sys.platform,
        arch=platform.machine(),
        features=cpu_features(),
        glibc=_glibc(),
        glibcxx=_glibcxx(None),
        missing=None if shim is None else lambda names: shim_lacks(shim, names),
        shim=True,
    )


def find_shim() -> Path | None:
    """mctl's own library of AOTI's C interface: a wheel carries it, a checkout builds it with `mctl-runner`."""
    package = Path(__file__).parents[1]
    places = (package / "runner" / "bin", package / "build" / "native")
    return next((place / SHIM for place in places if (place / SHIM).is_file()), None)


def shim_lacks(shim: Path, names: Iterable[str]) -> list[str]:
    """Those of the names that it does not define."""
    with Library(shim) as library:
        return library.missing(names)


def cpu_name() -> str:
    """As /proc/cpuinfo has it; empty where it does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def lacking_operators(imports: Iterable[str]) -> tuple[str, ...]:
    """The operators among the imports that mctl's shim has not; all of them where there is no shim."""
    shim = find_shim()
    return operators(imports if shim is None else shim_lacks(shim, imports))


def isa_level() -> str:
    """The level of this CPU: "x86-64-v3", or the architecture where there are no levels."""
    return Host(sys.platform, platform.machine(), cpu_features(), "", "").isa


def cpu_features() -> frozenset[str]:
    """The flags of /proc/cpuinfo; empty where there is no such file."""
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return frozenset()
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return frozenset(found[1].split()) if found else frozenset()


def find_libtorch() -> Path | None:
    """The folder of libtorch_cpu: $MCTL_LIBTORCH, else that of the installed torch (which is not imported)."""
    named = os.environ.get("MCTL_LIBTORCH")
    if named:
        return libtorch_folder(Path(named))
    try:
        spec = importlib.util.find_spec("torch")
    except (ImportError, ValueError):
        return None
    folders = [Path(place) / "lib" for place in (spec.submodule_search_locations or ())] if spec else []
    return next((folder for folder in folders if (folder / "libtorch_cpu.so").is_file()), None)


def libtorch_folder(path: Path) -> Path | None:
    """The folder with libtorch_cpu.so for a path to it or to the file itself; None if it is not there."""
    folder = path.parent if path.is_file() else path
    return folder if (folder / "libtorch_cpu.so").is_file() else None


def _missing(folder: Path, names: Iterable[str]) -> list[str]:
    """Names that neither libtorch_cpu nor a library beside it that it loads defines. Which operators it has by their
    names, only its code knows.
    """
    left, todo, seen = [name for name in names if not is_name(name)], ["libtorch_cpu.so"], set()
    while left and todo:
        name = todo.pop()
        path = folder / name
        if name in seen or not path.is_file():
            continue
        seen.add(name)
        try:
            with Library(path) as library:
                left = library.missing(left)
                todo += library.needed()
        except (OSError, ValueError):
            continue
    return left


def _torch_version(folder: Path) -> str:
    """From the wheel that the folder lies in: <torch>/version.py beside <torch>/lib."""
    try:
        found = re.search(r"^__version__ = '([^']+)'", (folder.parent / "version.py").read_text(), re.MULTILINE)
    except OSError:
        return ""
    return found[1] if found else ""


def _glibc() -> str:
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").removeprefix("glibc ")
    except (AttributeError, ValueError, OSError):
        return ""


def _glibcxx(libtorch: Path | None) -> str:
    """Of the libstdc++ that a process which loads the bundle would use."""
    arch = platform.machine()
    places = [Path(place) for place in os.environ.get("LD_LIBRARY_PATH", "").split(":") if place]
    places += [libtorch] if libtorch else []
    places += [Path(sys.base_prefix, "lib")]
    places += [
        Path(p) for p in (f"/lib/{arch}-linux-gnu", f"/usr/lib/{arch}-linux-gnu", "/lib64", "/usr/lib64", "/lib")
    ]
    for place in places:
        try:
            with Library(place / _LIBSTDCXX) as library:
                found = [v.removeprefix("GLIBCXX_") for v in library.versions() if v.startswith("GLIBCXX_3")]
                return max(found, key=_version, default="")
        except (OSError, ValueError):
            continue
    return ""
