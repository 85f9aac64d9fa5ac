"""Whose work a packed file is: name, version, licence and its texts, as this machine has them."""

import platform
import shutil
import subprocess
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from urllib.parse import quote

from ... import __version__
from ...bundle_format.dependencies import Dependencies, version_numbers
from ...bundle_format.host import SHIM

_GCC = {"libgomp": "GOMP_", "libstdc++": "GLIBCXX_", "libgcc_s": "GCC_"}  # and the versions of their symbols
_GCC_LICENSE = "GPL-3.0-or-later WITH GCC-exception-3.1"
_GCC_URL = "https://www.gnu.org/licenses/gcc-exception-3.1.html"
_TORCH = "https://github.com/pytorch/pytorch/blob/main/LICENSE"
_DEBIAN = Path("/usr/share/doc")
_COMMON = Path("/usr/share/common-licenses")


@dataclass(frozen=True, slots=True)
class Work:
    """What one party published as a whole. `expression`: of SPDX identifiers; empty where nobody says."""

    name: str
    version: str
    expression: str
    url: str
    purl: str = ""
    texts: dict[str, bytes] = field(default_factory=dict)  # licence texts by the names of their files
    folder: str = ""  # for the texts, where several share them; else the name


def work_of(source: Path, dependencies: Dependencies) -> Work:
    """Of a library or program that was found at `source`."""
    name = source.name
    if name in ("mctl-runner", SHIM):
        return mctl()
    short = name.partition(".so")[0]
    if short in _GCC:
        return _as_installed(replace(gcc(), name=short), source, dependencies)
    torch = pytorch(source.parent)
    if torch.texts or "torch" in name:
        return torch
    return _as_installed(Work(short, "", "", ""), source, dependencies)


def mctl() -> Work:
    text = Path(__file__).parents[1] / "LICENSE"
    texts = {"LICENSE": text.read_bytes()} if text.is_file() else _texts_of("mctl")
    return Work("mctl", __version__, "MIT", "https://spdx.org/licenses/MIT.html", "", texts)


def boost() -> Work:
    """Its headers are compiled into mctl-runner."""
    try:
        version = metadata.version("boost_headers").partition(".post")[0]
    except metadata.PackageNotFoundError:
        version = ""
    return Work("Boost", version, "BSL-1.0", "https://www.boost.org/LICENSE_1_0.txt", "", _texts_of("boost_headers"))


def gcc(compilers: tuple[str, ...] = ()) -> Work:
    """The run-time libraries of GCC; a part of them is compiled into mctl-runner by one of `compilers`."""
    versions = [text.split()[-1] for text in compilers if text.startswith("GCC:")]
    texts = _debian_texts("libstdc++6")
    if "copyright" in texts and (_COMMON / "GPL-3").is_file():
        texts["GPL-3"] = (_COMMON / "GPL-3").read_bytes()
    version = max(versions, key=version_numbers, default="")
    return Work("GCC run-time libraries", version, _GCC_LICENSE, _GCC_URL, "", texts, "GCC")


def pytorch(folder: Path) -> Work:
    """The wheel whose libraries lie in `folder`, which is <site>/torch/lib; with all that it has inside."""
    found = next(iter(metadata.distributions(name="torch", path=[str(folder.parents[1])])), None)
    if found is None:
        return Work("PyTorch", "", "BSD-3-Clause", _TORCH)
    expression = (found.metadata.get_all("License-Expression") or ["BSD-3-Clause"])[0]
    purl = f"pkg:pypi/torch@{quote(found.version)}"
    return Work("PyTorch", found.version, expression, _TORCH, purl, _licence_files(found))


def pytorch_headers(version: str) -> Work:
    """What is compiled into every model, of the torch that its manifest names."""
    texts = {name: text for name, text in _texts_of("torch").items() if name == "LICENSE"}
    return Work("PyTorch headers", version, "BSD-3-Clause", _TORCH, "", texts)


def _texts_of(distribution: str) -> dict[str, bytes]:
    try:
        return _licence_files(metadata.distribution(distribution))
    except metadata.PackageNotFoundError:
        return {}


def _licence_files(distribution: metadata.Distribution) -> dict[str, bytes]:
    """Below the folder `licenses` of its dist-info."""
    found = {}
    for file in distribution.files or ():
        folder, _, name = str(file).partition(".dist-info/licenses/")
        path = Path(str(distribution.locate_file(file)))
        if name and "/" not in folder and path.is_file():
            found[name] = path.read_bytes()
    return found


def _as_installed(work: Work, source: Path, dependencies: Dependencies) -> Work:
    """With what the system's packages know of its file; else its newest symbol version says how new it is."""
    name, version = _debian_package(str(source.resolve())) or ("", "")
    if not name:
        versions = [version for version in dependencies.defines if version.startswith(_GCC.get(work.name, ""))]
        return replace(work, version=max(versions, key=version_numbers, default=""))
    purl = f"pkg:deb/{_distribution()}/{quote(name)}@{quote(version)}?arch={_debian_arch()}"
    return replace(work, name=name, version=version, purl=purl, texts=work.texts or _debian_texts(name))


def _debian_package(path: str) -> tuple[str, str] | None:
    """Name and version of the package that brought a file."""
    query = shutil.which("dpkg-query")
    for place in (path, path.removeprefix("/usr")) if query else ():
        owner = _output(str(query), "--search", place).partition(":")[0]
        if owner:
            return owner, _output(str(query), "--show", "--showformat=${Version}", f"{owner}:{_debian_arch()}")
    return None


def _output(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()


def _debian_arch() -> str:
    return {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())


def _debian_texts(package: str) -> dict[str, bytes]:
    path = _DEBIAN / package / "copyright"
    return {"copyright": path.read_bytes()} if path.is_file() else {}


def _distribution() -> str:
    try:
        return platform.freedesktop_os_release().get("ID", "debian")
    except OSError:
        return "debian"
