"""What a library imports, compared with what binutils say of it."""

import re
import subprocess
from pathlib import Path

import pytest

from mctl.aoti.symbols import check_needed, read_imports
from mctl.bundle_format.archive import open_bundle
from mctl.bundle_format.elf import Library
from mctl.bundle_format.errors import CompileError


@pytest.fixture(scope="module")
def library(mlp_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("library") / "mlp.so"
    with open_bundle(mlp_bundle) as bundle:
        path.write_bytes(bundle.read(bundle.manifest.variants[0].library))
    return path


def readelf(option: str, path: Path) -> str:
    return subprocess.run(["readelf", "-W", option, path], capture_output=True, text=True, check=True).stdout


def test_functions_of_torch_carry_no_version(library: Path) -> None:
    listed = subprocess.run(["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True)
    undefined = [line.split()[-1] for line in listed.stdout.splitlines() if line.split()[0] == "U"]
    imports = read_imports(library)
    assert list(imports.torch) == sorted(name for name in undefined if "@" not in name)
    assert "aoti_torch_empty_strided" in imports.torch


def test_the_oldest_c_libraries(library: Path) -> None:
    versions = re.findall(r"Name: (\w+)_([\d.]+) ", readelf("-V", library))
    newest = {
        name: max((v for n, v in versions if n == name), key=lambda v: [int(part) for part in v.split(".")])
        for name in ("GLIBC", "GLIBCXX")
    }
    imports = read_imports(library)
    assert (imports.glibc, imports.glibcxx) == (newest["GLIBC"], newest["GLIBCXX"])


def test_the_libraries_that_it_names(library: Path) -> None:
    named = re.findall(r"Shared library: \[(.+)\]", readelf("-d", library))
    assert list(read_imports(library).needed) == named
    with Library(library) as elf:
        assert elf.needed() == named


def test_the_symbols_that_it_defines(library: Path) -> None:
    """Each one by the hash table, and none that it only imports."""
    listed = subprocess.run(["nm", "-D", library], capture_output=True, text=True, check=True).stdout.splitlines()
    kinds = {line.split()[-1].partition("@")[0]: line.split()[-2] for line in listed}
    defined = [name for name, kind in kinds.items() if kind not in "Uw"]
    undefined = [name for name, kind in kinds.items() if kind in "Uw"]
    assert "AOTInductorModelContainerRun" in defined
    with Library(library) as elf:
        assert elf.missing(defined) == []
        assert elf.missing(undefined) == undefined


def test_versions_that_a_library_defines(tmp_path: Path) -> None:
    (tmp_path / "map").write_text("OLD_1.0 { global: f; };\nNEW_2.10 { global: g; } OLD_1.0;\n")
    (tmp_path / "a.c").write_text("int f(void) { return 1; }\nint g(void) { return 2; }\n")
    command = ["gcc", "-shared", "-fPIC", "a.c", "-Wl,--version-script=map", "-o", "liba.so"]
    subprocess.run(command, cwd=tmp_path, check=True)
    with Library(tmp_path / "liba.so") as elf:
        assert {"OLD_1.0", "NEW_2.10"} <= set(elf.versions())
        assert elf.missing(["f", "g", "h"]) == ["h"]


@pytest.mark.parametrize("content", [b"text", b"\x7fELF\x02\x01" + bytes(20), b"\x7fELF\x01\x01" + bytes(80)])
def test_what_is_no_library(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.so"
    path.write_bytes(content)
    with pytest.raises(ValueError):
        Library(path)


def test_a_library_that_links_to_torch(tmp_path: Path) -> None:
    (tmp_path / "t.c").write_text("int t(void) { return 1; }\n")
    (tmp_path / "m.c").write_text("int t(void);\nint m(void) { return t(); }\n")
    for command in (["t.c", "-o", "libtorch_cpu.so"], ["m.c", "-L.", "-ltorch_cpu", "-o", "m.so"]):
        subprocess.run(["gcc", "-shared", "-fPIC", *command], cwd=tmp_path, check=True)
    with pytest.raises(CompileError, match=r"links to libtorch_cpu\.so"):
        check_needed(read_imports(tmp_path / "m.so"))
