"""`mctl pack`: the server, what it needs and a bundle, in a folder or tar file that runs where there is a C library."""

import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from ...bundle_format import contents, host
from ...bundle_format.archive import Archive, open_bundle
from ...bundle_format.dependencies import oldest_glibc, read_dependencies
from ...bundle_format.errors import HostError, PackError, UsageError
from ...bundle_format.manifest import Manifest, Target
from .. import native
from . import check, image, libraries, licenses, sbom
from . import output as output_files
from .check import Trial
from .libraries import Packed
from .licenses import Work

RUNNER, MODEL, SCRIPT = "mctl-runner", "model.pt2", "serve.sh"
LIBTORCH = "libtorch_cpu.so"

_SCRIPT = """\
#!/bin/sh
# Serves the model of this folder: serve.sh [OPTION VALUE]..., as `mctl-runner serve --help` lists them.
self=$(readlink -f -- "$0") || exit
here=${self%/*}
unset LD_LIBRARY_PATH MCTL_LIBTORCH
exec "$here/mctl-runner" serve "$here/model.pt2" "$@"
"""

Say = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class PackOptions:
    with_libtorch: bool = False
    dockerfile: bool = False
    check: bool = True
    force: bool = False


@dataclass(frozen=True, slots=True)
class Pack:
    """What was packed. `sizes`: bytes by what they are for; `glibc`: the oldest that it runs with."""

    path: Path
    model: str
    version: str
    digest: str
    libtorch: bool
    glibc: str
    libraries: tuple[str, ...]
    files: dict[str, str]  # path -> SHA-256
    sizes: dict[str, int]
    bytes: int  # of the folder, or of the tar file
    trial: Trial | None  # if it was tried


def pack(bundle: Path, output: Path, options: PackOptions, say: Say) -> Pack:
    """Errors as `contents.verify`; PackError, HostError, UsageError. Nothing half-written is left."""
    form = output_files.form_of(output)
    if form == "folder":
        output_files.check_place(output, bundle, options.force)
    native.check_platform()
    say(f"verifying {bundle}")
    digest = contents.verify(bundle).digest
    with open_bundle(bundle) as archive, output_files.staged(output) as folder:
        say("gathering the server and its libraries")
        content = _Content(archive, options, say)
        made = content.write(folder, bundle)
        trial = None
        if options.check:
            say("trying the packed server")
            trial = check.try_folder(folder, SCRIPT, archive)
        if form == "folder":
            output_files.place_folder(folder, output)
        else:
            say(f"writing {output}")
            output_files.place_archive(folder, output, form, content.moment)
    whole = output.stat().st_size if form != "folder" else sum(made.sizes.values())
    return replace(made, path=output, digest=digest, bytes=whole, trial=trial)


class _Content:
    """What goes into the folder of one bundle."""

    def __init__(self, archive: Archive, options: PackOptions, say: Say) -> None:
        self.options = options
        self.manifest = archive.manifest
        self.moment = _moment(self.manifest)
        self.libtorch = not self.manifest.standalone
        if self.libtorch and not options.with_libtorch:
            raise _needs_libtorch(archive.path, self.manifest)
        if options.with_libtorch and not self.libtorch:
            say(f"`{archive.path}` needs no libtorch: none is packed")
        self.runner = native.find_runner(say)  # a checkout builds the shim with it
        library = native.find_libtorch() / LIBTORCH if self.libtorch else self.runner.with_name(host.SHIM)
        _check_host(archive.path, self.manifest, library if self.libtorch else None, tried=options.check)
        self.code = {
            f"{MODEL}: {name}": read_dependencies(archive.view(member))
            for name, member in (
                *((Path(library.member).name, library.member) for library in self.manifest.libraries),
                *((variant.name, variant.library) for variant in self.manifest.variants),
            )
        }
        self.roots = (self.runner, library)
        self.packed = libraries.gather(self.roots, self.code.values())
        self.needs = {name: packed.dependencies for name, packed in self.packed.items()}
        libraries.check(self.needs | self.code, self.needs)
        self.glibc = oldest_glibc([*self.needs.values(), *self.code.values()])

    def write(self, folder: Path, bundle: Path) -> Pack:
        for name, packed in self.packed.items():
            _copy_code(packed.source, folder / name, ours=name in (RUNNER, host.SHIM))
        shutil.copyfile(bundle, folder / MODEL)
        output_files.finish(folder / MODEL)
        output_files.write(folder / SCRIPT, _SCRIPT.encode(), program=True)
        libraries.check_by_loader(folder, [path.name for path in self.roots])
        components = self._components(folder)
        _write_licenses(folder / "licenses", [part.work for part in components])
        moment = datetime.fromtimestamp(self.moment, UTC).isoformat()
        described = sbom.document(
            self.manifest.name, self.manifest.version, moment, components, {"oldest-glibc": self.glibc}
        )
        output_files.write(folder / sbom.NAME, described)
        if self.options.dockerfile:
            output_files.write(folder / "Dockerfile", image.dockerfile(self.manifest.name, self.glibc).encode())
        files = output_files.write_sums(folder)
        names = tuple(sorted(name for name in self.packed if name != RUNNER))
        return Pack(
            path=folder,
            model=self.manifest.name,
            version=self.manifest.version,
            digest="",
            libtorch=self.libtorch,
            glibc=self.glibc,
            libraries=names,
            files=files,
            sizes=_sizes(folder, names),
            bytes=0,
            trial=None,
        )

    def _components(self, folder: Path) -> list[sbom.Component]:
        """Each file of code, what others' is compiled into them, and the model."""

        def component(name: str, packed: Packed) -> sbom.Component:
            kind = "application" if name == RUNNER else "library"
            work = licenses.work_of(packed.source, packed.dependencies)
            needs = tuple(other for other in packed.dependencies.libraries if other in self.packed)
            return sbom.Component(kind, work, name, output_files.sha256_of(folder / name), needs=needs)  # type: ignore[arg-type]

        manifest, compilers = self.manifest, self.needs[RUNNER].compilers
        model = Work(manifest.name, manifest.version, "", "")  # whose licence is for its makers to say
        properties = (("model", manifest.name), ("compiled-with-torch", manifest.producer.torch))
        needs = {other for code in self.code.values() for other in code.libraries if other in self.packed}
        needs.add(LIBTORCH if self.libtorch else host.SHIM)
        return [
            *(component(name, packed) for name, packed in sorted(self.packed.items())),
            sbom.Component("library", licenses.boost(), inside=RUNNER),
            sbom.Component("library", licenses.gcc(compilers), inside=RUNNER),
            sbom.Component(
                "machine-learning-model",
                model,
                MODEL,
                output_files.sha256_of(folder / MODEL),
                needs=tuple(needs),
                properties=properties,
            ),
            sbom.Component("library", licenses.mctl(), inside=MODEL),
            sbom.Component("library", licenses.pytorch_headers(manifest.producer.torch), inside=MODEL),
        ]


def _needs_libtorch(path: Path, manifest: Manifest) -> PackError:
    called = host.lacking_operators(name for variant in manifest.variants for name in variant.imports)
    named = ", ".join(f"`{name}`" for name in called)
    what = f"it needs libtorch for {named}" if called else "it was not compiled to run without libtorch"
    hint = "compile it with `mctl compile --standalone`, or pack libtorch too with `--with-libtorch`"
    return PackError(f"cannot pack `{path}`: {what}", hint)


def _check_host(path: Path, manifest: Manifest, libtorch: Path | None, *, tried: bool) -> None:
    """HostError where the libraries at hand cannot run the bundle, or this CPU cannot, if it is to be `tried`."""
    here = host.this_host(libtorch) if libtorch else host.standalone_host()
    if not tried and isinstance(manifest.target, Target):
        here = replace(here, features=frozenset(manifest.target.features))
    verdict = host.host_verdict(manifest, host=here)
    if not verdict.ok:
        raise HostError(f"this machine cannot run `{path}`: {verdict.reason}", verdict.hint)


def _copy_code(source: Path, place: Path, *, ours: bool) -> None:
    """What mctl built, without debugger's data, where `strip` is there; what others built, as they did."""
    strip = shutil.which("strip") if ours else None
    if strip is None:
        shutil.copyfile(source, place)
    else:
        done = subprocess.run([strip, "-o", str(place), str(source)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise PackError(f"cannot strip `{source}`: {done.stderr.strip()}")
    output_files.finish(place, program=place.name == RUNNER)


def _write_licenses(folder: Path, works: list[Work]) -> None:
    """Texts below a folder for each work, and a list of all that names those of which there is no text here."""
    unique = {f"{work.name} {work.version}".strip(): work for work in works if work.expression or work.texts}
    lines = []
    for title, work in sorted(unique.items()):
        for name, text in work.texts.items():
            output_files.write(folder / (work.folder or work.name) / name, text)
        where = f"{work.folder or work.name}/" if work.texts else work.url
        lines.append(f"{title}: {work.expression or 'see its texts'}: {where}\n")
    output_files.write(folder / "LIST", "".join(lines).encode())


def _moment(manifest: Manifest) -> int:
    """Seconds since 1970 that stand for the time of packing: SOURCE_DATE_EPOCH, else when the bundle was made."""
    named = os.environ.get("SOURCE_DATE_EPOCH")
    if named is None:
        return int(datetime.fromisoformat(manifest.created).timestamp())
    if not named.isdecimal() or int(named) >= 2**33:
        raise UsageError(f"SOURCE_DATE_EPOCH is `{named}`, which is no number of seconds")
    return int(named)


def _sizes(folder: Path, libraries: tuple[str, ...]) -> dict[str, int]:
    def size(names: tuple[str, ...]) -> int:
        return sum((folder / name).stat().st_size for name in names)

    whole = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    others = tuple(name for name in libraries if name != host.SHIM)
    sizes = {
        "runner": size((RUNNER,)),
        "shim": size((host.SHIM,) if host.SHIM in libraries else ()),
        "libraries": size(others),
        "bundle": size((MODEL,)),
    }
    return {**sizes, "other": whole - sum(sizes.values())}
