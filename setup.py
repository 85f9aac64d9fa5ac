"""The wheel's one part that is not Python: mctl-runner, built by CMake. Editable installs build it on first use."""

import re
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

from setuptools import Command, Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent
SERVES = sys.platform == "linux"  # elsewhere there is nothing to build


class BuildRunner(Command):
    """Builds and strips runner/bin/mctl-runner and the shim beside it."""

    description = "build mctl-runner with CMake"
    user_options: ClassVar[list[tuple[str, str | None, str]]] = []
    editable_mode = False
    build_lib: str | None
    build_temp: str | None

    def initialize_options(self) -> None:
        self.build_lib = self.build_temp = None

    def finalize_options(self) -> None:
        self.set_undefined_options("build", ("build_lib", "build_lib"), ("build_temp", "build_temp"))

    def run(self) -> None:
        if self.editable_mode or not SERVES:
            return
        folder = Path(self.build_temp or "build", "runner")
        settings = ["-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", f"-DPYTHON={sys.executable}"]
        # afresh: pip puts the tools of each build in a folder of its own, which the cache of the last one still names
        _run("cmake", "--fresh", "-S", HERE / "runner" / "cpp", "-B", folder, *settings)
        _run("cmake", "--build", folder, "--target", "mctl-runner")  # and the shim, which it depends on
        _run("cmake", "--install", folder, "--strip", "--prefix", self._binaries()[0].parent)

    def get_source_files(self) -> list[str]:
        return [str(path.relative_to(HERE)) for path in sorted((HERE / "runner" / "cpp").rglob("*.*"))]

    def get_outputs(self) -> list[str]:
        return [] if self.editable_mode or not SERVES else [str(path) for path in self._binaries()]

    def get_output_mapping(self) -> dict[str, str]:
        return {}

    def _binaries(self) -> tuple[Path, Path]:
        folder = Path(self.build_lib or "build", "mctl", "runner", "bin")
        return folder / "mctl-runner", folder / "libmctl_shim.so"


class Modules(build_py):
    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        """The modules of a package; this file lies beside those of the root, and is none."""
        modules = super().find_package_modules(package, package_dir)
        return [module for module in modules if Path(module[2]).resolve() != Path(__file__).resolve()]


class Build(build):
    sub_commands: ClassVar = [*build.sub_commands, ("build_runner", None)]


class PlatformWheel(bdist_wheel):
    """One wheel for every Python of a platform: the binary links neither Python nor torch."""

    def get_tag(self) -> tuple[str, str, str]:
        tag = super().get_tag()
        return ("py3", "none", self._platform(tag[2])) if SERVES else tag

    def _platform(self, plain: str) -> str:
        """`manylinux_2_34_x86_64` (PEP 600) for the newest C library that a binary names."""
        binaries = Path(self.bdist_dir or "build").rglob("bin/*")
        versions = [int(found) for path in binaries for found in re.findall(rb"GLIBC_2\.(\d+)", path.read_bytes())]
        return plain.replace("linux_", f"manylinux_2_{max(versions)}_", 1) if versions else plain


class PlatformDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        return SERVES


def _run(*words: str | Path) -> None:
    subprocess.run([str(word) for word in words], check=True)


setup(
    distclass=PlatformDistribution,
    cmdclass={"build": Build, "build_py": Modules, "build_runner": BuildRunner, "bdist_wheel": PlatformWheel},
)
