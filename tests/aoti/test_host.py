"""The host verdict on machines that are not this one, and the reading of this one."""

import platform
import re
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import pytest

from mctl.bundle_format import host
from mctl.bundle_format.archive import open_bundle
from mctl.bundle_format.host import LEVELS, Host, host_verdict
from mctl.bundle_format.manifest import Manifest, Target

V3 = frozenset(LEVELS["x86-64-v3"])
V4 = frozenset(LEVELS["x86-64-v4"])


@pytest.fixture(scope="module")
def manifest(mlp_bundle: Path) -> Manifest:
    """Of the MLP, as if compiled for x86-64-v3 on Debian 12 with torch 2.13.0."""
    target = Target(
        os="linux", arch="x86_64", isa="x86-64-v3", features=tuple(sorted(V3)), glibc="2.34", glibcxx="3.4.29"
    )
    with open_bundle(mlp_bundle) as bundle:
        producer = msgspec.structs.replace(bundle.manifest.producer, torch="2.13.0")
        return msgspec.structs.replace(bundle.manifest, target=target, producer=producer)


def machine(**changes: object) -> Host:
    known = {"os": "linux", "arch": "x86_64", "features": V3, "glibc": "2.36", "glibcxx": "3.4.30", "torch": "2.13.0"}
    return Host(**(known | {"missing": lambda names: []} | changes))  # type: ignore[arg-type]


def lacking(*symbols: str) -> Callable[[Iterable[str]], list[str]]:
    return lambda names: [name for name in names if name in symbols]


@pytest.mark.parametrize(
    ("here", "kind", "words"),
    [
        (machine(), "optimal", []),
        (machine(glibc="2.34", glibcxx="3.4.29"), "optimal", []),
        (machine(features=V4), "runs", ["x86-64-v3", "x86-64-v4"]),
        (machine(torch="2.14.1"), "runs", ["2.13.0", "2.14.1"]),
        (machine(missing=None, torch=""), "runs", ["found no libtorch"]),
        (machine(features=V3 - {"fma", "avx2"}), "recompile", ["x86-64-v3", "`avx2`", "`fma`"]),
        (machine(missing=lacking("aoti_torch_clone"), torch="2.20.0"), "recompile", ["2.20.0", "`aoti_torch_clone`"]),
        (machine(glibc="2.31"), "unsupported", ["glibc 2.34", "2.31"]),
        (machine(glibc=""), "unsupported", ["glibc 2.34", "none"]),
        (machine(glibcxx="3.4.9"), "unsupported", ["libstdc++ 3.4.29", "3.4.9"]),
        (machine(arch="aarch64"), "unsupported", ["x86_64", "aarch64"]),
        (machine(os="darwin"), "unsupported", ["linux", "darwin"]),
    ],
)
def test_verdicts(manifest: Manifest, here: Host, kind: str, words: list[str]) -> None:
    verdict = host_verdict(manifest, host=here)
    assert verdict.kind == kind
    assert verdict.ok == (kind in ("optimal", "runs"))
    assert (verdict.hint is None) == verdict.ok
    assert all(word in verdict.reason for word in words), verdict.reason


def test_what_to_compile_for_instead(manifest: Manifest) -> None:
    older = machine(features=frozenset(LEVELS["x86-64-v2"]))
    assert "--target x86-64-v2" in (host_verdict(manifest, host=older).hint or "")


def test_this_machine_by_other_programs() -> None:
    here = host.this_host()
    assert here.arch == platform.machine()
    libc = subprocess.run(["getconf", "GNU_LIBC_VERSION"], capture_output=True, text=True, check=True).stdout
    assert here.glibc == libc.split()[1]
    flags = re.search(r"^(?:flags|Features)\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    assert flags is not None and here.features == set(flags[1].split())


def test_symbols_by_nm(mlp_bundle: Path) -> None:
    """What the bundle imports is in libtorch; what is not there is found missing."""
    folder = host.find_libtorch()
    assert folder is not None
    listed = subprocess.run(["nm", "-D", "--defined-only", folder / "libtorch_cpu.so"], capture_output=True, text=True)
    defined = {line.split()[-1].split("@")[0] for line in listed.stdout.splitlines() if line}
    with open_bundle(mlp_bundle) as bundle:
        imports = bundle.manifest.variants[0].imports
    missing = host.this_host().missing
    assert missing is not None
    assert {name for name in imports if name.startswith("aoti_torch")} <= defined
    assert missing(imports) == []
    assert missing(["aoti_torch_no_such_thing", *imports]) == ["aoti_torch_no_such_thing"]
