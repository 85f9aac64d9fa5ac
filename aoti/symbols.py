"""What a compiled library imports: what it needs of libtorch and of others, and how old its C libraries may be."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..bundle_format.errors import CompileError
from ..bundle_format.interface import operators


@dataclass(frozen=True, slots=True)
class Imports:
    """Undefined symbols of a library, by who has to provide them; versions as "2.34" and "3.4.30"."""

    needed: tuple[str, ...]  # libraries that it names itself
    # sorted: AOTI's C interface, SLEEF, which libtorch has inside, and names of operators: "aten::linalg_solve_ex"
    torch: tuple[str, ...]
    glibc: str
    glibcxx: str
    openmp: tuple[str, ...] = ()

    @property
    def operators(self) -> tuple[str, ...]:
        """Operators that were not compiled: "convolution"."""
        return operators(self.torch)


def read_imports(path: Path, by_name: Iterable[str] = ()) -> Imports:
    """Reads the dynamic symbols of an ELF library; a library of another format tells nothing. `by_name`: the operators
    that it calls by their names, which no symbol tells.

    What libc, libstdc++, libgcc and OpenMP provide carries a symbol version; the C interface of torch and SLEEF do not.
    """
    from elftools.elf.elffile import ELFFile

    with path.open("rb") as file:
        if file.read(4) != b"\x7fELF":
            return Imports((), tuple(sorted(by_name)), "", "")
        elf = ELFFile(file)
        symbols = elf.get_section_by_name(".dynsym")
        indices = elf.get_section_by_name(".gnu.version")
        torch = [
            symbol.name
            for number, symbol in enumerate(symbols.iter_symbols())
            if symbol["st_shndx"] == "SHN_UNDEF"
            and symbol["st_info"]["bind"] == "STB_GLOBAL"
            and (indices is None or indices.get_symbol(number)["ndx"] == "VER_NDX_GLOBAL")
        ]
        openmp = sorted(
            symbol.name
            for symbol in symbols.iter_symbols()
            if symbol["st_shndx"] == "SHN_UNDEF" and symbol.name.startswith(("GOMP_", "omp_"))
        )
        versions = _versions(elf.get_section_by_name(".gnu.version_r"))
        needed = tuple(tag.needed for tag in elf.get_section_by_name(".dynamic").iter_tags("DT_NEEDED"))
    newest = {library: _newest(versions, library) for library in ("GLIBC", "GLIBCXX")}
    return Imports(needed, tuple(sorted([*torch, *by_name])), newest["GLIBC"], newest["GLIBCXX"], tuple(openmp))


def check_needed(imports: Imports) -> None:
    """A library that names libtorch itself would run with one torch only: CompileError."""
    named = [name for name in imports.needed if "torch" in name or name.startswith("libc10")]
    if named:
        raise CompileError(
            f"the compiled library links to {', '.join(named)}",
            "remove `aot_inductor.link_libtorch` from the options of inductor",
        )


def _versions(section) -> list[str]:  # type: ignore[no-untyped-def]
    if section is None:
        return []
    return [auxiliary.name for _, auxiliaries in section.iter_versions() for auxiliary in auxiliaries]


def _newest(versions: list[str], library: str) -> str:
    """The newest `<library>_<version>` of them; empty if there is none."""
    numbers = [v.removeprefix(f"{library}_") for v in versions if re.fullmatch(rf"{library}_[\d.]+", v)]
    return max(numbers, key=lambda number: [int(part) for part in number.split(".")], default="")
