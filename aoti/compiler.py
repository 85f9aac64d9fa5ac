"""One program to the parts of a bundle: compiled in a child process, its constants taken out."""

import importlib.util
import os
import platform
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import msgspec

from .. import __version__
from ..bundle_format import archive as archives
from ..bundle_format.archive import Archive
from ..bundle_format.errors import CompileError, UsageError
from ..bundle_format.layout import BUNDLE_SCHEMA, ONNX, VARIANTS, WEIGHTS
from ..bundle_format.manifest import Manifest, Producer, Variant
from . import kernel_library, plan, protocol
from .process import run_child
from .protocol import Done, Recipe, Request
from .symbols import Imports, check_needed, read_imports
from .target import Machine, machine_for
from .workspace import Workspace, compiler_version, find_compiler, wrap_compiler

Progress = Callable[[str], None]
Standalone = Literal["", "yes", "auto"]  # a bundle that needs no libtorch: not asked for, an error, a note otherwise

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z")


@dataclass(frozen=True, slots=True)
class CompileOptions:
    """What `mctl compile` was asked for; a name or version of None is the program's."""

    name: str | None = None
    version: str | None = None
    target: str = "native"
    buckets: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # beside the batch dim's powers of two
    inductor: tuple[str, ...] = ()  # KEY=VALUE
    packed: bool = True  # layers by mctl's own kernels
    standalone: Standalone = ""
    timeout: float | None = None  # seconds
    work_dir: Path | None = None  # where the temporary folder is made


@dataclass(frozen=True, slots=True)
class Stats:
    """What a compile took."""

    seconds: dict[str, float]  # by phase
    peak_bytes: int  # resident memory of the largest process
    library_bytes: int
    weights_bytes: int
    imports: Imports
    callers: dict[str, tuple[str, ...]]  # operator that was not compiled -> paths of the modules that it comes from

    @property
    def total_seconds(self) -> float:
        return sum(self.seconds.values())


class Staged:
    """The parts of a bundle, in a temporary folder that is gone when the block ends.

    `members` and `manifest` (with `parity=None`) are what archive.write takes.
    """

    def __init__(self, workspace: Workspace, program: Archive) -> None:
        self._workspace = workspace
        self._program = program
        self.manifest: Manifest
        self.members: list[tuple[str, archives.Data]] = []
        self.stats: Stats

    @property
    def top(self) -> str:
        """The archive's top folder."""
        return self.manifest.name

    def write(self, path: Path) -> Manifest:
        """Writes the bundle; returns its manifest, completed."""
        return archives.write(path, self.top, self.members, self.manifest)

    def cleanup(self) -> None:
        self.members = []  # they may be views of the program
        self._program.close()
        self._workspace.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.cleanup()


def compile_program(program_path: Path, options: CompileOptions, progress: Progress) -> Staged:
    """Compiles program.pt2. UsageError for options that do not fit it, CompileError with the cause where it fails.

    The program is unpickled by torch in the child process: it is trusted as much as the model's source. What mctl did
    not write, or what was changed since, is refused.
    """
    if options.timeout is not None and not options.timeout > 0:
        raise UsageError(f"`--timeout {options.timeout:g}` leaves no time", "give it the seconds that it may take")
    compiler = find_compiler()
    machine = machine_for(options.target, compiler)
    program = archives.open_program(program_path)
    try:
        name = _checked_name(options.name or program.manifest.name)
        buckets = plan.choose_buckets(program.manifest.contract, options.buckets)
        staged = Staged(Workspace(options.work_dir), program)
    except BaseException:
        program.close()
        raise
    try:
        done, seconds = _run(staged._workspace, program, options, machine, compiler, progress)
        staged.stats = _stats(staged._workspace.path, done, seconds)
        base = msgspec.structs.replace(
            program.manifest,
            schema=BUNDLE_SCHEMA,
            name=name,
            version=options.version or program.manifest.version,
            created=_now(),
            producer=_producer(options, compiler, machine, done),
            exporter=program.manifest.producer,
            buckets=buckets,
            members={},
        )
        _fill(staged, base, done, machine)
    except BaseException:
        staged.cleanup()
        raise
    return staged


def _run(
    workspace: Workspace,
    program: Archive,
    options: CompileOptions,
    machine: Machine,
    compiler: list[str],
    progress: Progress,
) -> tuple[Done, dict[str, float]]:
    workspace.require_space(sum(entry.size for entry in program.members.values()))
    hidden = {str(workspace.path): "build", _torch_folder(): "torch"}
    recipe = Recipe(plan.DYNAMIC, packed=options.packed, options=options.inductor)
    kernels = kernel_library.build(compiler, machine.march or "native", workspace.path) if recipe.packed else None
    request = Request(
        program=str(program.path.resolve()),
        work=str(workspace.path),
        remove=workspace.folders,
        compiler=str(wrap_compiler(compiler, workspace.path, hidden, kernels)),
        march=machine.march,
        features=machine.features,
        recipe=recipe,
    )
    return run_child(request, options.timeout, progress)


def _torch_folder() -> str:
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise CompileError("torch is not installed", "install it: `pip install torch`")
    return spec.submodule_search_locations[0]


def _stats(work: Path, done: Done, seconds: dict[str, float]) -> Stats:
    library, weights = work / protocol.LIBRARY, work / protocol.WEIGHTS
    sizes = library.stat().st_size, weights.stat().st_size
    return Stats(seconds, done.peak_bytes, *sizes, read_imports(library), done.callers)


def _fill(staged: Staged, base: Manifest, done: Done, machine: Machine) -> None:
    imports = staged.stats.imports
    check_needed(imports)
    work = staged._workspace.path
    stem = f"{VARIANTS}{plan.DYNAMIC}/{plan.DYNAMIC}.wrapper"  # names that torch's own loader looks for
    library = f"{stem}.so"
    variant = Variant(
        name=plan.DYNAMIC,
        library=library,
        covers=plan.covers(base.contract),
        constants=done.constants,
        imports=imports.torch,
    )
    staged.manifest = msgspec.structs.replace(
        base, target=machine.manifest(imports.glibc, imports.glibcxx), variants=(variant,)
    )
    golden = [(case.member, staged._program.view(case.member)) for case in base.golden]
    twin = [(ONNX, staged._program.view(ONNX))] if ONNX in staged._program.members else []
    staged.members = [
        (library, work / protocol.LIBRARY),
        (f"{stem}_metadata.json", _stock_metadata(staged.manifest)),
        (WEIGHTS, work / protocol.WEIGHTS),
        *golden,
        *twin,
    ]


def _stock_metadata(manifest: Manifest) -> bytes:
    """What torch's loader wants to know; without AOTI_CPU_ISA, which it compiles probes to compare."""
    assert manifest.target is not None
    return msgspec.json.encode(
        {
            "AOTI_DEVICE_KEY": manifest.target.device,
            "AOTI_MACHINE": manifest.target.arch,
            "AOTI_PLATFORM": manifest.target.os,
        }
    )


def _producer(options: CompileOptions, compiler: list[str], machine: Machine, done: Done) -> Producer:
    return Producer(
        mctl=__version__,
        torch=done.torch,
        torch_git=done.torch_git,
        python=platform.python_version(),
        compiler=compiler_version(compiler),
        flags=(
            f"-march={machine.march or 'native'}",
            f"kernels={'mctl' if options.packed else 'torch'}",
            *options.inductor,
        ),
    )


def _checked_name(name: str) -> str:
    if not _NAME.match(name):
        raise UsageError(
            f"`{name}` cannot be the name of a model", "use letters, digits, `.`, `_` and `-`, at most 128 of them"
        )
    return name


def _now() -> str:
    """SOURCE_DATE_EPOCH, where it is set, makes builds repeatable: https://reproducible-builds.org/specs/source-date-epoch/"""
    seconds = os.environ.get("SOURCE_DATE_EPOCH", "")
    when = datetime.fromtimestamp(int(seconds), UTC) if seconds.isdecimal() else datetime.now(UTC)
    return when.isoformat(timespec="seconds")
