"""What compiling a variant's C++ shares with other compiles: the commands are g++'s own, the files small."""

import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from mctl.aoti.building import Builds, Kept, split
from mctl.aoti.cache import Cache
from mctl.bundle_format.errors import CompileError

HEADER = """
#pragma once
#include <string>
namespace torch::aot_inductor {
template <class Model> struct AOTInductorModelBase { int answer() { return 42; } };
struct AOTInductorModel : AOTInductorModelBase<AOTInductorModel> { int run(); };
int loop(int);
}
"""
INTERFACE = """
#include <base.h>

using torch::aot_inductor::AOTInductorModel;
extern "C" {
int AOTInductorModelContainerCreateWithDevice() { return AOTInductorModel().run(); }
} // extern "C"
"""
MODEL = """
namespace torch::aot_inductor {
int AOTInductorModel::run() { return answer() + loop(static_cast<int>(std::string("abc").size())); }
}
"""
LOOPS = """#include <vector>
namespace torch::aot_inductor {
int loop(int n) { return std::vector<int>(n, 7)[n - 1] * 6; }
}
"""

Commands = list[list[str]]


class Compiler:
    """g++, and what it was asked for."""

    def __init__(self) -> None:
        self.commands: Commands = []

    def __call__(self, command: Sequence[str]) -> None:
        self.commands.append(list(command))
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise CompileError(done.stderr)

    def headers(self) -> Commands:
        return [command for command in self.commands if "c++-header" in command]

    def sources(self) -> list[str]:
        return sorted(Path(command[1]).name for command in self.commands if command not in self.headers())


Make = Callable[[str, str], tuple[Compiler, list[Path]]]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """`make(folder, makers)` compiles the two files in a new folder, with the cache that all share."""

    def run(name: str, makers: str = "g++ 12") -> tuple[Compiler, list[Path]]:
        folder = tmp_path / name
        (folder / "own").mkdir(parents=True)
        (tmp_path / "base.h").write_text(HEADER)
        (folder / "model.wrapper.cpp").write_text(INTERFACE + MODEL)
        (folder / "model.kernel.cpp").write_text(LOOPS)
        compiler = Compiler()
        builds = Builds(Kept(Cache(tmp_path / "cache"), makers, folder / "own"), compiler)
        objects = [folder / f"model.{part}.o" for part in ("wrapper", "kernel")]
        for made, level in zip(objects, ("-O1", "-O3"), strict=True):
            builds.start(
                ["g++", str(made.with_suffix(".cpp")), level, f"-I{tmp_path}", "-Wl,--strip-all", "-c", "-o", str(made)]
            )
        return compiler, [*objects, *builds.finish()]

    return run


def test_the_objects_are_a_program(make: Make, tmp_path: Path) -> None:
    (tmp_path / "main.cc").write_text(
        'extern "C" int AOTInductorModelContainerCreateWithDevice();\n'
        "int main() { return AOTInductorModelContainerCreateWithDevice(); }\n"
    )
    for name in ("first", "second"):
        _, objects = make(name, "g++ 12")
        subprocess.run(["g++", tmp_path / "main.cc", *objects, "-o", tmp_path / f"{name}.bin"], check=True)
        assert subprocess.run([tmp_path / f"{name}.bin"]).returncode == 42 + 7 * 6


def test_the_second_compile_takes_what_the_first_kept(make: Make) -> None:
    first, objects = make("first", "g++ 12")
    assert len(first.headers()) == 2  # one for each level of optimisation
    assert first.sources() == ["interface.cpp", "model.kernel.cpp", "model.wrapper.cpp"]
    second, others = make("second", "g++ 12")
    assert second.headers() == [] and second.sources() == ["model.kernel.cpp", "model.wrapper.cpp"]
    assert all("-include" in command for command in second.commands)
    assert [path.read_bytes() for path in others] == [path.read_bytes() for path in objects]


@pytest.mark.parametrize("makers", ["g++ 13", "clang 14"])
def test_another_compiler_takes_nothing_of_it(make: Make, makers: str) -> None:
    make("first", "g++ 12")
    other, _ = make("other", makers)
    assert len(other.headers()) == (0 if "clang" in makers else 2)
    assert "interface.cpp" in other.sources()


def test_damaged_files_are_made_again(make: Make, tmp_path: Path) -> None:
    make("first", "g++ 12")
    for kept in (tmp_path / "cache").glob("*/*.*"):
        if kept.suffix in (".o", ".gch"):
            kept.write_bytes(kept.read_bytes()[:-1] + b"x")
    second, _ = make("second", "g++ 12")
    assert len(second.headers()) == 2 and "interface.cpp" in second.sources()


def test_what_the_compiler_refuses_is_told(tmp_path: Path) -> None:
    source = tmp_path / "model.kernel.cpp"
    source.write_text("#include <vector>\nint loop(int n) { return m; }\n")
    builds = Builds(None, Compiler())
    builds.start(["g++", str(source), "-c", "-o", str(tmp_path / "model.o")])
    with pytest.raises(CompileError, match="was not declared"):
        builds.finish()


def test_only_code_that_begins_with_the_interface_is_taken_apart() -> None:
    assert split(LOOPS) is None
    assert split(MODEL + INTERFACE) is None
    assert split(INTERFACE.replace("AOTInductorModelContainerCreateWithDevice", "Other") + MODEL) is None
