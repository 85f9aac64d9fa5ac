"""The libraries that a packed folder needs: found as the loader would find them, checked by their symbol versions."""

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ...bundle_format.dependencies import C_LIBRARY, Dependencies, read_dependencies
from ...bundle_format.errors import HostError, PackError


@dataclass(frozen=True, slots=True)
class Packed:
    """A file of machine code that is packed: where it comes from, and what it needs."""

    source: Path
    dependencies: Dependencies


def gather(roots: Sequence[Path], others: Iterable[Dependencies]) -> dict[str, Packed]:
    """The roots and every library that they and `others` need, but the C library: by the name in the folder.

    What a library names is looked for in the folders that it names itself, then in those of the system. HostError
    where it isn't found. `others` are loaded last, by processes that have the roots, and beside these.
    """
    packed = {root.name: _read(root) for root in roots}
    beside = tuple(str(root.parent) for root in roots)
    waiting = [
        *packed.values(),
        *(Packed(Path(), replace(other, folders=(*other.folders, *beside))) for other in others),
    ]
    while waiting:
        user = waiting.pop(0)
        for name in user.dependencies.libraries:
            if name not in packed and name not in C_LIBRARY:
                packed[name] = _read(_find(name, user))
                waiting.append(packed[name])
    return packed


def check(files: Mapping[str, Dependencies], packed: Mapping[str, Dependencies]) -> None:
    """PackError where one of the files would need what neither `packed` nor the C library has."""
    for file, dependencies in files.items():
        for name in dependencies.libraries:
            if name not in packed and name not in C_LIBRARY:
                raise PackError(f"`{file}` needs `{name}`, which is not packed")
        for name, versions in dependencies.versions:
            lacking = [version for version in versions if name in packed and version not in packed[name].defines]
            if lacking:
                hint = "pack on the machine that compiled it, or install a newer compiler's libraries"
                raise PackError(f"`{file}` needs {lacking[0]} of `{name}`, the one at hand is older", hint)


def check_by_loader(folder: Path, names: Iterable[str]) -> None:
    """The same by the system's loader, where there is `ldd`: each library is found in the folder, or is the C's."""
    ldd = shutil.which("ldd")
    for name in names if ldd else ():
        done = subprocess.run([str(ldd), str(folder / name)], capture_output=True, text=True, env={}, check=False)
        for library, place in re.findall(r"^\s*(\S+) => (\S.*?)(?: \(0x[0-9a-f]+\))?$", done.stdout, re.MULTILINE):
            if library not in C_LIBRARY and Path(place).parent != folder:
                raise PackError(f"the loader takes `{library}`, which `{name}` needs, from elsewhere: {place}")


def _read(path: Path) -> Packed:
    try:
        return Packed(path, read_dependencies(path))
    except (OSError, ValueError) as error:
        raise HostError(f"cannot read `{path}`: {error}") from error


def _find(name: str, user: Packed) -> Path:
    folder = user.source.parent
    own = [Path(named.replace("$ORIGIN", str(folder))) for named in user.dependencies.folders]
    found = next((place / name for place in [*own, *_system_folders()] if (place / name).is_file()), None)
    if found is None:
        needed_by = f"`{user.source.name}`" if user.source.name else "the bundle's code"
        raise HostError(
            f"found no `{name}`, which {needed_by} needs", "install it, or name its folder in LD_LIBRARY_PATH"
        )
    return found


def _system_folders() -> list[Path]:
    arch = platform.machine()
    named = [place for place in os.environ.get("LD_LIBRARY_PATH", "").split(":") if place]
    usual = (f"/lib/{arch}-linux-gnu", f"/usr/lib/{arch}-linux-gnu", "/lib64", "/usr/lib64", "/lib", "/usr/lib")
    return [Path(place) for place in (*named, f"{sys.base_prefix}/lib", *usual)]
