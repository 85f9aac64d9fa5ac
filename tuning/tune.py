"""Tuning: variants are compiled one after another and measured; those stay that win somewhere and are right."""

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from ..aoti import plan
from ..aoti.compiler import Built, Staged
from ..aoti.protocol import Recipe
from ..bundle_format import archive as archives
from ..bundle_format import host, tensors
from ..bundle_format.archive import Archive
from ..bundle_format.errors import CompileError, MctlError, UsageError
from ..bundle_format.layout import WEIGHTS
from ..bundle_format.manifest import Machine, Manifest, Tuning, Variant
from ..bundle_format.summary import human_bytes, own_bytes
from ..export import golden
from ..parity import cases
from ..runner import native
from ..runner.bench import Point
from ..runner.stopwatch import Stopwatch, runner_stopwatch
from .bench import point_at
from .selection import Budget, DuelError, Progress, Selection

SECONDS = {"none": 0.0, "fast": 180.0, "full": 3600.0}
MAX_PACKED_MB = 1024


@dataclass(frozen=True, slots=True)
class TuneOptions:
    """What `mctl compile` was asked for. `threads`: numbers to measure; `seconds`: None is the level's own."""

    level: plan.Level = "none"
    seconds: float | None = None
    threads: tuple[int, ...] = ()
    bf16: bool = False
    max_packed_mb: int = MAX_PACKED_MB

    @property
    def budget(self) -> float:
        return SECONDS[self.level] if self.seconds is None else self.seconds

    @property
    def measured_threads(self) -> tuple[int, ...]:
        cores = len(os.sched_getaffinity(0))
        return tuple(sorted(set(self.threads or (1, cores))))


Judge = Callable[[Sequence[Built]], str]  # of variants, the first of which is judged: why it is wrong, or ""


class _InexactError(Exception):
    """A variant in bfloat16 is not the eager model: nor are the others."""


def tune(staged: Staged, options: TuneOptions, judge: Judge, progress: Progress) -> None:
    """Adds to `staged` the variants that are worth it, and what was measured; the notes say what was dropped and why.

    It ends when the candidates or the budget do, or at Ctrl-C; what was measured until then counts.
    """
    budget = Budget(options.budget)
    threads = options.measured_threads
    most = _most_points(options.budget, len(threads))
    contract, buckets, base = staged.manifest.contract, staged.manifest.buckets, staged.base
    recipes = plan.candidates(
        contract,
        buckets,
        base.recipe,
        options.level,
        bf16=options.bf16,
        threads=max(threads),
        layers=base.done.layers > 0 or not base.recipe.packed,
        most=most,
    )
    if not recipes:
        staged.note("not tuned: a model with state keeps its one variant")
        return
    bench = Bench(staged.folder / "tuning", native.find_runner(progress), threads)
    bench.stage(staged, [base])
    selection = Selection(bench.points(plan.points(contract, buckets, most)), threads, base.name)
    contest = _Contest(staged, bench, selection, budget, judge, progress)
    stopped = False
    try:
        with bench.watches() as watches:
            selection.begin(watches, lambda text: progress(f"tuning: the noise, {text}"))
        contest.try_all(recipes)
    except KeyboardInterrupt:
        if not selection.begun:
            staged.note("tuning was stopped before anything was compared")
            return
        stopped = True
        staged.note("tuning was stopped: what was measured until then counts")
    selection.restrict(contest.kept)
    contest.drop_large(options.max_packed_mb << 20)
    contest.drop_wrong()
    used = [built for name, built in contest.kept.items() if name in selection.kept]
    if not stopped:
        bench.stage(staged, used, selection.tuning(this_machine()))
        with bench.watches() as watches:
            between = bench.between(selection.points)
            selection.compare_padding(
                bench.manifest, between, watches, lambda text: progress(f"tuning: padding, {text}")
            )
    tuning = msgspec.structs.replace(selection.tuning(this_machine()), total_ms=contest.total_ms)
    staged.choose(used, tuning)
    staged.manifest = msgspec.structs.replace(
        staged.manifest, curve=selection.curve(), variants=contest.with_costs(staged.manifest.variants)
    )


def _most_points(budget: float, threads: int) -> int:
    """Comparing at one takes up to a second for each number of threads, and at all of them a sixth of the budget."""
    return max(1, min(plan.MOST_POINTS, int(budget / 6) // threads))


@dataclass(slots=True)
class _Contest:
    """Candidates are compiled and measured; `kept` are those that won somewhere and were not dropped."""

    staged: Staged
    bench: "Bench"
    selection: Selection
    budget: Budget
    judge: Judge
    progress: Progress
    kept: dict[str, Built] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)  # that each took, also where it was compiled before
    before: float = 0.0  # seconds of compiling before, in all

    def __post_init__(self) -> None:
        self.kept[self.staged.base.name] = self.staged.base

    @property
    def total_ms(self) -> int:
        return round((self.budget.spent + self.before) * 1000)

    def with_costs(self, variants: tuple[Variant, ...]) -> tuple[Variant, ...]:
        return tuple(
            msgspec.structs.replace(variant, tuning_ms=round(self.seconds.get(variant.name, 0) * 1000))
            for variant in variants
        )

    def try_all(self, recipes: Sequence[Recipe]) -> None:
        exact_enough = True  # bfloat16 for this model
        for at, recipe in enumerate(recipes):
            if recipe.bf16 and not exact_enough:
                continue
            if not self.budget.allows():
                left = f"{len(recipes) - at} of {len(recipes)} candidates were not tried"
                self.staged.note(f"tuned within its budget: {left}")
                return
            try:
                with self.budget.timed():
                    self._attempt(recipe, f"tuning: {recipe.name} ({at + 1} of {len(recipes)})")
            except (MctlError, DuelError) as error:
                self.staged.note(f"variant `{recipe.name}` was left out: {error}")
            except _InexactError as error:
                exact_enough = False
                hint = "`--tolerance OUTPUT=RTOL,ATOL` allows more"
                self.staged.note(f"no more variants in bfloat16: {error}; {hint}")

    def _attempt(self, recipe: Recipe, title: str) -> None:
        begin = self.budget.spent
        built = self.staged.build(recipe, lambda text: self.progress(f"{title}: {text}"))
        if lacking := _lacking(self.staged, built):
            raise CompileError(f"it is not standalone: `{lacking[0]}`")
        if recipe.bf16 and (fault := self.judge([built, self.staged.base])):  # it would displace what is right
            raise _InexactError(fault)
        self.bench.stage(self.staged, [*self.kept.values(), built])
        with self.bench.watches() as watches:
            variant = self.bench.variant(built.name)
            won = self.selection.consider(variant, watches, lambda text: self.progress(f"{title}: {text}"))
        self.count(built, self.budget.spent - begin)
        if won:
            self.kept[built.name] = built
        for name in set(self.kept) - self.selection.kept:
            del self.kept[name]

    def count(self, built: Built, seconds: float) -> None:
        """`built` was compiled and measured in this time; what compiling took before counts where it was kept."""
        before = 0.0 if built.seconds else built.done.seconds
        self.before += before
        self.seconds[built.name] = seconds + before

    def drop_large(self, most: int) -> None:
        """Variants whose own tensors bring the least per byte go, until those of all fit."""
        while True:
            self.staged.choose(list(self.kept.values()))
            own = own_bytes(self.staged.manifest, _header(self.staged))
            extra = {name: size for name, size in own.items() if name != self.staged.base.name and size}
            if sum(extra.values()) <= most:
                return
            worst = min(extra, key=lambda name: self.selection.gain(name) / extra[name])
            gain = f"its {human_bytes(extra[worst])} bring {self.selection.gain(worst):.0%}"
            self._drop(worst, f"{gain}, and `--max-packed-mb` is {most >> 20}")

    def drop_wrong(self) -> None:
        """Variants that do not give what eager gives go. What takes their places was measured, and is judged too."""
        right = {self.staged.base.name, *(name for name, built in self.kept.items() if built.recipe.bf16)}  # judged
        while name := next((name for name in self.kept if name not in right), None):
            self.progress(f"parity of variant `{name}`")
            right.add(name)
            if fault := self.judge([self.kept[name], self.staged.base]):
                self._drop(name, fault)

    def _drop(self, name: str, why: str) -> None:
        del self.kept[name]
        self.selection.restrict(self.kept)
        self.staged.note(f"variant `{name}` was dropped: {why}")


def _lacking(staged: Staged, built: Built) -> list[str]:
    """What a variant of a standalone bundle needs of libtorch."""
    shim = host.find_shim() if staged.manifest.standalone else None
    return host.shim_lacks(shim, built.imports.torch) if shim else []


def _header(staged: Staged) -> dict[str, tensors.TensorEntry]:
    pieces = next(data for path, data in staged.members if path == WEIGHTS)
    return tensors.read_header(b"".join(map(bytes, pieces)))  # type: ignore[arg-type]


def this_machine() -> Machine:
    """The fingerprint of the machine that runs this."""
    return Machine(cpu=host.cpu_name(), cores=len(os.sched_getaffinity(0)), isa=host.isa_level())


class Bench:
    """A bundle beside the real one, which the runner measures."""

    def __init__(self, folder: Path, runner: Path, threads: Sequence[int], bundle: Path | None = None) -> None:
        folder.mkdir(exist_ok=True)
        self._folder = folder
        self._runner = runner
        self._threads = threads
        self._bundle = bundle or folder / "bundle.pt2"
        self.manifest: Manifest

    def stage(self, staged: Staged, variants: Sequence[Built], tuning: Tuning | None = None) -> None:
        """Writes the bundle with these variants."""
        before = staged.manifest, staged.members
        staged.choose(variants, tuning)
        self.manifest = staged.write(self._bundle)
        staged.manifest, staged.members = before

    def open(self) -> "Bench":
        """The bundle that is there already."""
        with archives.open_bundle(self._bundle) as archive:
            self.manifest = archive.manifest
        return self

    def variant(self, name: str) -> Variant:
        return next(variant for variant in self.manifest.variants if variant.name == name)

    @contextmanager
    def watches(self, named: Path | None = None) -> Iterator[list[Stopwatch]]:
        """One for each number of threads, as the bundle is served, or with the libtorch that is `named`."""
        libtorch = native.libtorch_for(self.manifest, named)
        with ExitStack() as stack:
            yield [
                stack.enter_context(runner_stopwatch(self._runner, self._bundle, libtorch, threads))
                for threads in self._threads
            ]

    def points(self, sizes: Sequence[dict[str, int]]) -> list[Point]:
        with archives.open_bundle(self._bundle) as archive:
            spans = cases.spans(self.manifest.contract, [case.inputs for case in golden.load_golden(archive)])
        paths = [self._folder / f"{'-'.join(map(str, dims.values())) or 'only'}.safetensors" for dims in sizes]
        return [point_at(self.manifest, dims, path, 0, spans) for dims, path in zip(sizes, paths, strict=True)]

    def between(self, points: Sequence[Point]) -> dict[int, Point]:
        """By the number of a point: sizes halfway between the bucket of the batch before it and it."""
        batch = self.manifest.contract.batch_dim
        buckets = self.manifest.buckets.get(batch or "", ())
        found = {}
        for at, point in enumerate(points):
            size = point.dims.get(batch or "", 0)
            before = max((bucket for bucket in buckets if bucket < size), default=size)
            if batch is not None and size - before > 1:
                found[at] = {**point.dims, batch: (before + size + 1) // 2}
        return dict(zip(found, self.points(list(found.values())), strict=True))


def reselect(path: Path, threads: tuple[int, ...], progress: Progress) -> Tuning:
    """Measures a bundle's variants anew on this machine and rewrites what is chosen, atomically; compiles nothing.

    UsageError where there is nothing to choose.
    """
    with archives.open_bundle(path) as archive:
        _require_variants(archive)
        digest = archive.digest
    with tempfile.TemporaryDirectory(prefix="mctl-reselect-") as work:
        known = archive.manifest.tuning
        numbers = threads or tuple(sorted({choice.threads for choice in known.choices} if known else {1}))
        bench = Bench(Path(work) / "points", native.find_runner(progress), numbers, path).open()
        manifest = bench.manifest
        base = manifest.variants[0]
        points = bench.points(plan.points(manifest.contract, manifest.buckets))
        selection = Selection(points, numbers, base.name)
        with bench.watches() as watches:
            selection.begin(watches, lambda text: progress(f"the noise, {text}"))
            for variant in manifest.variants[1:]:
                selection.consider(variant, watches, lambda text, name=variant.name: progress(f"{name}: {text}"))  # type: ignore[misc]
            tuning = selection.tuning(this_machine())
            chosen = msgspec.structs.replace(manifest, tuning=tuning)
            selection.compare_padding(chosen, bench.between(points), watches, lambda text: progress(f"padding, {text}"))
    tuning = msgspec.structs.replace(selection.tuning(this_machine()), total_ms=known.total_ms if known else 0)
    with archives.open_bundle(path) as archive:
        if archive.digest != digest:
            raise UsageError(f"`{path}` is another file by now", "measure it again")
        changed = msgspec.structs.replace(archive.manifest, tuning=tuning, curve=selection.curve())
        archives.rewrite(archive, path, changed, {})
    return tuning


def _require_variants(archive: Archive) -> None:
    if len(archive.manifest.variants) < 2:
        raise UsageError(
            f"`{archive.path}` has one variant: there is nothing to choose", "`mctl compile --tune fast` makes more"
        )
