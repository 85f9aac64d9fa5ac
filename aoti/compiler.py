"""One program to the parts of a bundle: compiled in a child process, its constants taken out."""

import importlib.metadata
import importlib.util
import mmap
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import msgspec

from .. import __version__
from ..bundle_format import archive as archives
from ..bundle_format import tensors
from ..bundle_format.archive import Archive
from ..bundle_format.dependencies import oldest_glibc, oldest_glibcxx, read_dependencies, version_numbers
from ..bundle_format.errors import CompileError, UsageError
from ..bundle_format.handler_files import HandlerFiles, handler_of, with_handler
from ..bundle_format.interface import operators
from ..bundle_format.layout import BUNDLE_SCHEMA, ONNX, TOKENIZER, VARIANTS, WEIGHTS
from ..bundle_format.manifest import (
    GENERATE,
    ConstantRef,
    Manifest,
    Producer,
    Tuning,
    Variant,
    checked_name,
    needing,
    with_needs,
)
from . import kernel_library, plan, protocol
from .cache import Cache, default_folder, key_of
from .process import run_child
from .protocol import Done, Recipe, Request
from .symbols import Imports, check_needed, read_imports
from .target import Machine, machine_for
from .workspace import Workspace, compiler_version, find_compiler, wrap_compiler

Progress = Callable[[str], None]
Precision = Literal["f32", "bf16", "auto"]
Standalone = Literal["", "yes", "auto"]  # a bundle that needs no libtorch: not asked for, an error, a note otherwise


@dataclass(frozen=True, slots=True)
class CompileOptions:
    """What `mctl compile` was asked for; a name or version of None is the program's."""

    name: str | None = None
    version: str | None = None
    target: str = "native"
    buckets: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # beside the batch dim's powers of two
    inductor: tuple[str, ...] = ()  # KEY=VALUE
    packed: bool = True  # layers by mctl's own kernels
    precision: Precision = "f32"
    tune: plan.Level = "none"
    standalone: Standalone = ""
    standalone_slowdown: float | None = None  # how many times libtorch's time it may take; None: see parity/slowdown.py
    timeout: float | None = None  # seconds
    work_dir: Path | None = None  # where the temporary folder is made
    handler: HandlerFiles | None = None  # None: the program's


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


@dataclass(frozen=True, slots=True)
class Built:
    """One compiled variant: its two files, and what was found out about it."""

    recipe: Recipe
    library: Path
    weights: Path
    done: Done
    seconds: dict[str, float]  # by phase; empty if it was compiled before
    imports: Imports

    @property
    def name(self) -> str:
        return self.recipe.name


class Staged:
    """The parts of a bundle, in a temporary folder that is gone when the block ends.

    `members` and `manifest` (with `parity=None`) are what archive.write takes. They hold `base`, the variant that
    covers all, until others are chosen to be beside it.
    """

    def __init__(self, builder: "_Builder", base: Built, manifest: Manifest) -> None:
        self.base = base
        self._builder = builder
        self.manifest = manifest
        self.members: list[tuple[str, archives.Data]] = []
        self.stats = _stats(base)
        self.choose([base])

    def note(self, text: str) -> None:
        """Adds to what the manifest keeps for people."""
        self.manifest = msgspec.structs.replace(self.manifest, notes=(*self.manifest.notes, text))

    @property
    def top(self) -> str:
        """The archive's top folder."""
        return self.manifest.name

    @property
    def machine(self) -> Machine:
        return self._builder.machine

    @property
    def folder(self) -> Path:
        """For temporary files."""
        return self._builder.workspace.path

    def build(self, recipe: Recipe, progress: Progress) -> Built:
        """Compiles one more variant, or finds it among those compiled before. CompileError."""
        return self._builder.build(recipe, progress)

    def choose(self, variants: Sequence[Built], tuning: Tuning | None = None) -> None:
        """These variants are the bundle's. Without a tuning, the first one that covers a size runs there."""
        stored, references = merge(variants)
        program = self._builder.program
        operators = [read_dependencies(program.view(library.member)) for library in self.manifest.libraries]
        glibc = max([oldest_glibc(operators), *(v.imports.glibc for v in variants)], key=version_numbers)
        glibcxx = max([oldest_glibcxx(operators), *(v.imports.glibcxx for v in variants)], key=version_numbers)
        self.manifest = msgspec.structs.replace(
            self.manifest,
            target=self.machine.manifest(glibc, glibcxx),
            notes=tuple(dict.fromkeys([*self.manifest.notes, *(note for v in variants for note in v.done.notes)])),
            variants=tuple(
                Variant(
                    name=variant.name,
                    library=f"{_stem(variant.name)}.so",
                    covers=plan.covers(self.manifest.contract, variant.recipe.dims),
                    constants=constants,
                    imports=variant.imports.torch,
                    threads=plan.threads_of(variant.recipe),
                    bf16=variant.recipe.bf16,
                    callers=_callers(variant),
                )
                for variant, constants in zip(variants, references, strict=True)
            ),
            tuning=tuning,
        )
        handler = self._builder.handler
        carried = [case.member for case in self.manifest.golden]
        carried += [member for member in (ONNX, TOKENIZER) if member in program.members]
        carried += [library.member for library in self.manifest.libraries]
        self.members = [
            *((f"{_stem(variant.name)}.so", variant.library) for variant in variants),
            *((f"{_stem(variant.name)}_metadata.json", _stock_metadata(self.manifest)) for variant in variants),
            (WEIGHTS, tensors.dump(stored)),
            *((member, program.view(member)) for member in carried),
            *(handler.members if handler else ()),
        ]

    def write(self, path: Path) -> Manifest:
        """Writes the bundle; returns its manifest, completed."""
        return archives.write(path, self.top, self.members, self.manifest)

    def cleanup(self) -> None:
        self.members = []  # they may be views of the program
        self._builder.close()

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
        name = checked_name(options.name or program.manifest.name)
        if program.manifest.generation is not None:
            _refuse_for_generation(options)
        buckets = plan.choose_buckets(program.manifest.contract, options.buckets)
        builder = _Builder(program, options, machine, compiler, Workspace(options.work_dir))
    except BaseException:
        program.close()
        raise
    try:
        base = builder.build(_base_recipe(options), progress)
        manifest = msgspec.structs.replace(
            program.manifest,
            schema=BUNDLE_SCHEMA,
            name=name,
            version=options.version or program.manifest.version,
            created=_now(),
            producer=_producer(options, compiler, machine, base.done),
            exporter=program.manifest.producer,
            buckets=buckets,
            members={},
        )
        for need, needed in (("libraries", manifest.libraries), (GENERATE, manifest.generation)):
            manifest = needing(manifest, need) if needed else manifest
        return Staged(builder, base, with_handler(with_needs(manifest), builder.handler))
    except BaseException:
        builder.close()
        raise


def _refuse_for_generation(options: CompileOptions) -> None:
    """What a program that continues text cannot be compiled with."""
    if not options.packed:
        raise UsageError("a program that continues text needs mctl's kernels", "leave `--kernels torch` out")
    if options.tune != "none":
        raise UsageError("a program that continues text is one step of any size: there is nothing to tune for yet")
    if options.standalone:
        raise UsageError("a bundle that continues text needs libtorch so far", "leave `--standalone` out")


def _base_recipe(options: CompileOptions) -> Recipe:
    bf16 = options.precision == "bf16"
    if bf16 and not options.packed:
        raise UsageError("`--precision bf16` is that of mctl's own kernels", "leave `--kernels torch` out")
    return Recipe(plan.DYNAMIC, packed=options.packed, bf16=bf16, options=options.inductor)


class _Builder:
    """Compiles variants of one program, one child process after another."""

    def __init__(
        self, program: Archive, options: CompileOptions, machine: Machine, compiler: list[str], workspace: Workspace
    ) -> None:
        self.program = program
        self.handler = options.handler or handler_of(program)
        self.options = options
        self.machine = machine
        self.workspace = workspace
        self._compiler = compiler
        self._wrapped: dict[bool, Path] = {}  # by whether the kernels are linked
        kept = options.work_dir / "mctl-variants" if options.work_dir else default_folder()
        self._cache = Cache(kept if options.tune != "none" else None)

    def build(self, recipe: Recipe, progress: Progress) -> Built:
        work = self.workspace.subfolder(recipe.name)
        key = self._key(recipe)
        seconds: dict[str, float] = {}
        kept = self._cache.get(key, work)
        if kept is not None:
            done = msgspec.json.decode(kept, type=Done)
        else:
            request = Request(
                program=str(self.program.path.resolve()),
                work=str(work),
                remove=self.workspace.folders,
                compiler=str(self._compiler_for(recipe)),
                march=self.machine.march,
                features=self.machine.features,
                recipe=recipe,
                kept=str(default_folder() or ""),
                makers=f"{compiler_version(self._compiler)}, torch {importlib.metadata.version('torch')}",
            )
            self.workspace.require_space(sum(entry.size for entry in self.program.members.values()))
            done, seconds = run_child(request, self.options.timeout, progress)
            done = msgspec.structs.replace(done, seconds=sum(seconds.values()))
            self.workspace.clear(work)
            self._cache.put(key, (work / protocol.LIBRARY, work / protocol.WEIGHTS), msgspec.json.encode(done))
        imports = read_imports(work / protocol.LIBRARY, done.by_name)
        check_needed(imports)
        return Built(recipe, work / protocol.LIBRARY, work / protocol.WEIGHTS, done, seconds, imports)

    def close(self) -> None:
        self.program.close()
        self.workspace.remove()

    def _compiler_for(self, recipe: Recipe) -> Path:
        if recipe.packed not in self._wrapped:
            hidden = {str(self.workspace.path): "build", _torch_folder(): "torch"}
            kernels = kernels_for(self.machine, self._compiler, self.workspace.path) if recipe.packed else None
            folder = self.workspace.subfolder("packed" if recipe.packed else "plain", "compilers")
            self._wrapped[recipe.packed] = wrap_compiler(self._compiler, folder, hidden, kernels)
        return self._wrapped[recipe.packed]

    def _key(self, recipe: Recipe) -> str:
        """All that the code depends on; a variant's name is no part of it."""
        recipe = msgspec.structs.replace(recipe, name="")
        makers = _makers(self.machine, self._compiler)
        return key_of(self.program.digest, recipe, importlib.metadata.version("torch"), *makers)


def kernels_for(machine: Machine, compiler: list[str], folder: Path) -> Path:
    """The archive of mctl's kernels, in the folder: kept from an earlier compile, or made now. CompileError."""
    cache, key = Cache(default_folder()), key_of("kernels", *_makers(machine, compiler))
    if cache.get(key, folder) is not None:
        return folder / kernel_library.ARCHIVE
    archive = kernel_library.build(compiler, machine.march or "native", folder)
    cache.put(key, [archive])
    return archive


def _makers(machine: Machine, compiler: list[str]) -> tuple[object, ...]:
    """Whom code is for, and by what it is made."""
    machine_parts = (machine.isa, machine.march, machine.features)
    return machine_parts, compiler, compiler_version(compiler), _sources_digest()


@cache
def _sources_digest() -> str:
    """Of mctl's own compiling: another version makes other code."""
    folder = Path(__file__).parent
    files = sorted(path for path in folder.rglob("*") if path.suffix in (".py", ".cc", ".h"))
    return key_of(*(path.read_text(encoding="utf-8") for path in files))


def merge(
    variants: Sequence[Built],
) -> tuple[dict[str, tensors.Tensor], list[dict[str, ConstantRef]]]:
    """The tensors of all variants, equal ones once, and each variant's constants among them.

    The tensors are views of the files.
    """
    found: dict[str, tensors.Tensor] = {}
    names: list[dict[str, str]] = []  # of each variant: its own name of a tensor -> that in `found`
    for variant in variants:
        mine = {}
        for name, tensor in _stored(variant.weights).items():
            mine[name] = name if name not in found else f"{variant.name}.{name}"
            found[mine[name]] = tensor
        names.append(mine)
    unique, stands_for = tensors.deduplicate(found)
    return unique, [
        {
            constant: msgspec.structs.replace(ref, tensor=stands_for[mine[ref.tensor]])
            for constant, ref in variant.done.constants.items()
        }
        for variant, mine in zip(variants, names, strict=True)
    ]


def _stored(path: Path) -> dict[str, tensors.Tensor]:
    with path.open("rb") as file:
        view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    return {
        name: (entry.dtype, entry.shape, view[entry.begin : entry.end])
        for name, entry in tensors.read_header(view).items()
    }


def _torch_folder() -> str:
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise CompileError("torch is not installed", "install it: `pip install torch`")
    return spec.submodule_search_locations[0]


def _callers(variant: Built) -> dict[str, tuple[str, ...]]:
    """Of the operators that its library imports."""
    called = {name: variant.done.callers.get(name, ()) for name in operators(variant.imports.torch)}
    return {name: modules for name, modules in called.items() if modules}


def _stem(name: str) -> str:
    """Names that torch's own loader looks for."""
    return f"{VARIANTS}{name}/{name}.wrapper"


def _stats(built: Built) -> Stats:
    sizes = built.library.stat().st_size, built.weights.stat().st_size
    return Stats(built.seconds, built.done.peak_bytes, *sizes, built.imports, built.done.callers)


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


def _now() -> str:
    """SOURCE_DATE_EPOCH, where it is set, makes builds repeatable: https://reproducible-builds.org/specs/source-date-epoch/"""
    seconds = os.environ.get("SOURCE_DATE_EPOCH", "")
    when = datetime.fromtimestamp(int(seconds), UTC) if seconds.isdecimal() else datetime.now(UTC)
    return when.isoformat(timespec="seconds")
