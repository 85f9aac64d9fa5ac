"""What ELF files need, by binutils and by libraries that are compiled here."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from mctl.bundle_format.dependencies import Dependencies, oldest_glibc, read_dependencies


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """libuser.so needs libold.so and `one@VERSION_1.5` of it, and looks for it beside itself."""
    folder = tmp_path_factory.mktemp("built")
    (folder / "old.c").write_text("int one(void) { return 1; }")
    (folder / "old.map").write_text("VERSION_1.5 { global: one; local: *; };")
    (folder / "user.c").write_text("int one(void); int two(void) { return 2 * one(); }")
    for words in (
        ["-o", "libold.so", "old.c", "-Wl,--version-script=old.map,-soname,libold.so"],
        ["-o", "libuser.so", "user.c", "-L.", "-lold", "-Wl,-rpath,$ORIGIN:$ORIGIN/more"],
    ):
        subprocess.run(["gcc", "-shared", "-fPIC", *words], cwd=folder, check=True)
    return folder


def test_what_a_library_needs(built: Path) -> None:
    user, old = read_dependencies(built / "libuser.so"), read_dependencies(built / "libold.so")
    assert user.libraries[0] == "libold.so"
    assert user.folders == ("$ORIGIN", "$ORIGIN/more")
    assert dict(user.versions)["libold.so"] == ("VERSION_1.5",)
    assert "VERSION_1.5" in old.defines
    assert old.compilers[0].startswith("GCC:")
    assert read_dependencies(memoryview((built / "libuser.so").read_bytes())) == user


def test_other_files(built: Path, tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("hello")
    assert read_dependencies(tmp_path / "notes") == Dependencies()
    (tmp_path / "cut").write_bytes((built / "libuser.so").read_bytes()[:40])
    with pytest.raises(ValueError, match="damaged"):
        read_dependencies(tmp_path / "cut")


def test_the_oldest_glibc_by_readelf() -> None:
    for name in ("sh", "gcc"):
        path = Path(str(shutil.which(name)))
        told = subprocess.run(["readelf", "-VW", path], capture_output=True, text=True, check=True).stdout
        versions = [tuple(map(int, found.split("."))) for found in re.findall(r"Name: GLIBC_([\d.]+)", told)]
        assert oldest_glibc([read_dependencies(path)]) == ".".join(map(str, max(versions)))


@pytest.mark.parametrize(
    ("versions", "oldest"),
    [
        ((("libc.so.6", ("GLIBC_2.4", "GLIBC_2.34")), ("libm.so.6", ("GLIBC_2.29",))), "2.34"),
        ((("libc.so.6", ("GLIBC_2.17", "GLIBC_ABI_DT_RELR")),), "2.36"),  # glibc 2.36 has relative relocations
        ((("libstdc++.so.6", ("GLIBCXX_3.4.30",)), ("libother.so", ("GLIBC_9.9",))), ""),
    ],
)
def test_the_oldest_glibc(versions: tuple[tuple[str, tuple[str, ...]], ...], oldest: str) -> None:
    assert oldest_glibc([Dependencies(versions=versions)]) == oldest
