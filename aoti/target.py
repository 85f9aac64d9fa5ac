"""What code is compiled for: `--target` as compiler settings, and as what the manifest says of it."""

import platform
import re
import subprocess
import sys
from dataclasses import dataclass
from typing import Literal, cast, get_args

from ..bundle_format.errors import CompileError, HostError, UsageError
from ..bundle_format.host import LEVELS, cpu_features, isa_level
from ..bundle_format.manifest import Isa, Target

Choice = Literal["native", "x86-64-v2", "x86-64-v3", "x86-64-v4"]
CHOICES: tuple[str, ...] = get_args(Choice)

# What a compiler may use by itself, or torch's code asks for: its macro and the flag of /proc/cpuinfo. Instructions
# that only intrinsics for cryptography, random numbers or the kernel give are left out: no generated code holds them.
_MACROS = {
    "__SSE3__": "pni",
    "__SSSE3__": "ssse3",
    "__SSE4_1__": "sse4_1",
    "__SSE4_2__": "sse4_2",
    "__POPCNT__": "popcnt",
    "__AVX__": "avx",
    "__AVX2__": "avx2",
    "__BMI__": "bmi1",
    "__BMI2__": "bmi2",
    "__F16C__": "f16c",
    "__FMA__": "fma",
    "__LZCNT__": "abm",
    "__MOVBE__": "movbe",
    "__AVX512F__": "avx512f",
    "__AVX512BW__": "avx512bw",
    "__AVX512CD__": "avx512cd",
    "__AVX512DQ__": "avx512dq",
    "__AVX512VL__": "avx512vl",
    "__AVX512IFMA__": "avx512ifma",
    "__AVX512VBMI__": "avx512vbmi",
    "__AVX512VBMI2__": "avx512_vbmi2",
    "__AVX512VNNI__": "avx512_vnni",
    "__AVX512BITALG__": "avx512_bitalg",
    "__AVX512VPOPCNTDQ__": "avx512_vpopcntdq",
    "__AVX512BF16__": "avx512_bf16",
    "__AVX512FP16__": "avx512_fp16",
    "__AVXVNNI__": "avx_vnni",
    "__GFNI__": "gfni",
    "__AMX_TILE__": "amx_tile",
    "__AMX_BF16__": "amx_bf16",
    "__AMX_INT8__": "amx_int8",
    "__AMX_FP16__": "amx_fp16",
    "__ARM_NEON": "asimd",
    "__ARM_FEATURE_ATOMICS": "atomics",
    "__ARM_FEATURE_DOTPROD": "asimddp",
    "__ARM_FEATURE_FP16_VECTOR_ARITHMETIC": "asimdhp",
    "__ARM_FEATURE_BF16": "bf16",
    "__ARM_FEATURE_MATMUL_INT8": "i8mm",
    "__ARM_FEATURE_SVE": "sve",
    "__ARM_FEATURE_SVE2": "sve2",
}


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine that code is compiled for. `march` is the compiler's name of it; None leaves that to torch."""

    isa: Isa
    march: str | None
    features: tuple[str, ...]  # of /proc/cpuinfo, sorted

    def manifest(self, glibc: str, glibcxx: str) -> Target:
        """As the bundle records it; `glibc` and `glibcxx` are the versions that its libraries need."""
        system = cast(Literal["linux", "darwin", "windows"], sys.platform)
        arch = cast(Literal["x86_64", "aarch64", "arm64"], platform.machine())
        return Target(os=system, arch=arch, isa=self.isa, features=self.features, glibc=glibc, glibcxx=glibcxx)


def machine_for(choice: str, compiler: list[str]) -> Machine:
    """The machine of `--target`. `native` is this one, with the features that `compiler` may use on it."""
    if choice not in CHOICES:
        raise UsageError(f"unknown target `{choice}`", f"choose one of {', '.join(CHOICES)}")
    if choice != "native":
        if platform.machine() != "x86_64":
            raise UsageError(f"target `{choice}` is not for {platform.machine()}", "use `--target native`")
        return Machine(cast(Isa, choice), choice, tuple(sorted(LEVELS[choice])))
    level = isa_level()
    if level not in get_args(Isa):
        raise CompileError(f"this machine's instruction set `{level}` is not supported", "x86-64-v2 is the least")
    used = _native_features(compiler)
    return Machine(cast(Isa, level), None, tuple(sorted({*LEVELS.get(level, ()), *used})))


def require_runs_here(choice: str) -> None:
    """HostError if this machine cannot run what is compiled for `--target` (an unknown one passes)."""
    lacking = [feature for feature in LEVELS.get(choice, ()) if feature not in cpu_features()]
    if lacking and sys.platform == "linux":
        raise HostError(
            f"this CPU cannot run {choice} code, so the bundle could not be checked: it has no {', '.join(lacking)}",
            "compile with `--no-parity`, and check the bundle with `mctl parity` on a machine that can run it",
        )


def _native_features(compiler: list[str]) -> set[str]:
    """CPU flags that `-march=native` lets the compiler use here."""
    command = [*compiler, "-march=native", "-dM", "-E", "-x", "c++", "/dev/null"]
    done = subprocess.run(command, capture_output=True, text=True)
    defined = set(re.findall(r"^#define (\w+) ", done.stdout, re.MULTILINE))
    return {flag for macro, flag in _MACROS.items() if macro in defined} & cpu_features()
