"""What an ELF file needs of others: libraries by name, and versions of their symbols."""

import io
import re
from collections.abc import Container, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

# Parts of the GNU C library: the one thing that every machine brings itself.
C_LIBRARY = frozenset(
    f"lib{name}" for name in ("c.so.6", "m.so.6", "mvec.so.1", "pthread.so.0", "dl.so.2", "rt.so.1", "util.so.1")
) | {"ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}

_FEATURES = {"GLIBC_ABI_DT_RELR": "GLIBC_2.36"}  # a version that is a feature of the loader, and since when it is there


@dataclass(frozen=True, slots=True)
class Dependencies:
    """Of one file: names of libraries, where it says that they lie, and versions of symbols that each has to define."""

    libraries: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()  # of DT_RUNPATH or DT_RPATH: "$ORIGIN/../lib"
    versions: tuple[tuple[str, tuple[str, ...]], ...] = ()  # library -> "GLIBCXX_3.4.30", …
    defines: tuple[str, ...] = ()  # versions of its own symbols
    compilers: tuple[str, ...] = ()  # "GCC: (Debian 12.2.0-14+deb12u1) 12.2.0"


def read_dependencies(file: Path | memoryview) -> Dependencies:
    """Of an ELF file or its bytes; of a file of another format, none. ValueError if it is damaged."""
    from elftools.common.exceptions import ELFError

    try:
        if isinstance(file, memoryview):
            return _read(io.BytesIO(file))
        with file.open("rb") as stream:
            return _read(stream)
    except ELFError as error:
        raise ValueError(f"a damaged library: {error}") from error


def oldest_glibc(files: Iterable[Dependencies]) -> str:
    """The oldest version of the C library that has what all the files need of it: "2.34"; empty: any."""
    return _oldest("GLIBC", files, C_LIBRARY)


def oldest_glibcxx(files: Iterable[Dependencies]) -> str:
    """The same of libstdc++: "3.4.29"."""
    return _oldest("GLIBCXX", files, {"libstdc++.so.6"})


def _oldest(name: str, files: Iterable[Dependencies], of: Container[str]) -> str:
    wanted = [
        _FEATURES.get(version, version)
        for file in files
        for library, versions in file.versions
        if library in of
        for version in versions
    ]
    found = [version.removeprefix(f"{name}_") for version in wanted if re.fullmatch(rf"{name}_[\d.]+", version)]
    return max(found, key=version_numbers, default="")


def version_numbers(text: str) -> tuple[int, ...]:
    """To compare by: "2.4" is older than "2.34"."""
    return tuple(int(part) for part in re.findall(r"\d+", text))


def _read(stream: BinaryIO) -> Dependencies:
    from elftools.elf.elffile import ELFFile

    if stream.read(4) != b"\x7fELF":
        return Dependencies()
    elf = ELFFile(stream)
    dynamic = elf.get_section_by_name(".dynamic")
    tags = list(dynamic.iter_tags()) if dynamic else []
    paths = [tag.runpath if tag.entry.d_tag == "DT_RUNPATH" else tag.rpath for tag in tags if _is_path(tag)]
    comment = elf.get_section_by_name(".comment")
    return Dependencies(
        tuple(tag.needed for tag in tags if tag.entry.d_tag == "DT_NEEDED"),
        tuple(folder for path in paths for folder in path.split(":") if folder),
        tuple((need.name, tuple(part.name for part in parts)) for need, parts in _entries(elf, ".gnu.version_r")),
        tuple(next(parts).name for _, parts in _entries(elf, ".gnu.version_d")),
        tuple(sorted({text.decode(errors="replace") for text in comment.data().split(b"\0") if text}))
        if comment
        else (),
    )


def _is_path(tag: Any) -> bool:
    return tag.entry.d_tag in ("DT_RUNPATH", "DT_RPATH")


def _entries(elf: Any, section: str) -> list[Any]:
    """Pairs of an entry and its parts, of a section of symbol versions; empty where there is none."""
    found = elf.get_section_by_name(section)
    return list(found.iter_versions()) if found else []
