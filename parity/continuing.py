"""Parity of a bundle that continues text: its logits, its tokens, and that neither depends on how steps are made up.

1. Logits of given prompts beside the model's own, in fp64 too where it can run in that.
2. Tokens: what the model continues greedily, token after token. Where its two best ones are closer than the tolerance,
   another choice is a tie, and the check goes on with the model's.
3. Invariance, to the bit: in chunks, beside others, in other blocks, on a cached prefix, computed again.
4. The golden script of steps that export stored, from empty caches.
"""

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from ..bundle_format.archive import Archive
from ..bundle_format.manifest import Generation, Manifest, Tolerance
from ..export.golden import load_golden
from ..export.program import Program
from ..generation import source
from ..generation.adapt import Model, adapted
from ..generation.blocks import BLOCK
from ..generation.export import ProgramSteps
from ..generation.script import Blocks, Request, chunks_of, in_chunks, next_part, random_tokens
from ..generation.step import LOGITS, Part, step_inputs
from . import judge
from .frames import Ask
from .report import SCHEMA, Check, Report, Result, Verdict, overall
from .runs import Compiled, CrashError, RaisedError, in_float64

Progress = Callable[[str], None]

LENGTHS = (1, 15, 16, 17, 33)
LONGEST = 1024  # tokens of a prompt that is tried
PROMPTS, TOKENS = 4, 64  # of the greedy check
OTHERS = (3, 64)
INVARIANT = 50  # tokens of the request that is looked at


class Truth(Protocol):
    """The model that a bundle was made from."""

    label: str
    notes: tuple[str, ...]

    def whole(self, tokens: Sequence[int]) -> Tensor:
        """Logits [tokens, vocabulary] of one sequence."""

    def whole64(self, tokens: Sequence[int]) -> Tensor | None:
        """The same in float64; None where the model does not run in it."""

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """The next tokens."""


@dataclass(slots=True)
class Exported:
    """The exported program, run by torch."""

    program: Program
    label: str = "the exported program, run by torch"
    notes: tuple[str, ...] = ()
    _made: dict[bool, ProgramSteps] = field(default_factory=dict)  # in float64 or not

    def whole(self, tokens: Sequence[int]) -> Tensor:
        return self._run(tokens, double=False)

    def whole64(self, tokens: Sequence[int]) -> Tensor | None:
        try:
            with in_float64():
                return self._run(tokens, double=True)
        except RuntimeError:  # of torch: an operator that has no float64
            return None

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        run = self._steps(double=False)
        blocks = run.forget(-(-(len(prompt) + count) // BLOCK))
        request = Request(list(prompt))
        for _ in range(count):
            logits = run([next_part(request, request.left, blocks, every=False)])
            request.tokens.append(int(logits[-1].argmax()))
        return request.tokens[len(prompt) :]

    def _run(self, tokens: Sequence[int], *, double: bool) -> Tensor:
        run = self._steps(double=double)
        chunks = chunks_of(len(tokens), self.program.manifest.contract.dim("tokens").max)
        return in_chunks(run, tokens, chunks, run.forget(-(-len(tokens) // BLOCK)))

    def _steps(self, *, double: bool) -> ProgramSteps:
        generation = self.program.manifest.generation
        assert generation is not None
        if double not in self._made:
            self._made[double] = ProgramSteps(self.program.exported, generation, 1, double=double)
        return self._made[double]


@dataclass(slots=True)
class Live:
    """The eager model itself."""

    model: Model
    label: str
    notes: tuple[str, ...] = ()
    _double: "torch.nn.Module | None" = None

    def whole(self, tokens: Sequence[int]) -> Tensor:
        with torch.no_grad():
            return self.model.whole(torch.tensor(tokens))

    def whole64(self, tokens: Sequence[int]) -> Tensor | None:
        from ..export.fresh import Fresh

        try:
            self._double = self._double or Fresh(self.model.module).double()
            with torch.no_grad():
                made = self.model.whole(torch.tensor(tokens), self._double)
        except Exception:  # whatever the model raises: it does not run in float64
            return None
        return made if made.dtype == torch.float64 else None

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        generate = getattr(self.model.module, "generate", None)
        if generate is None or not hasattr(self.model.module, "generation_config"):
            return _greedy(self.whole, prompt, count)
        given = torch.tensor([list(prompt)])
        options = {"do_sample": False, "max_new_tokens": count, "min_new_tokens": count, "eos_token_id": None}
        with torch.no_grad():
            made = generate(given, attention_mask=torch.ones_like(given), pad_token_id=0, **options)
        return [int(token) for token in made[0, len(prompt) :]]


def _greedy(whole: Callable[[Sequence[int]], Tensor], prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(whole(tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def live(spec: str, weights: Path | None, manifest: Manifest) -> Live:
    """The model of a folder or file, made as the manifest records."""
    found = source.load(spec, weights=weights, seed=manifest.source.seed)
    notes = []
    if found.record.weights_sha256 != manifest.source.weights_sha256 or found.record.sha256 != manifest.source.sha256:
        notes.append(f"`{found.record.file}` is not what was exported: its SHA-256 differs")
    return Live(adapted(found.module), f"live eager of {found.record.file}", tuple(notes))


# --- the checks --------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Subject:
    """The compiled model in its process, and what it is held against."""

    manifest: Manifest
    generation: Generation
    compiled: Compiled
    truth: Truth | None
    tolerance: Tolerance | None  # the user's
    seed: int
    seconds: float = 0.0  # of compiled calls
    left_out: list[str] = field(default_factory=list)
    fp64: str = ""

    def __call__(self, parts: Sequence[Part]) -> Tensor:
        logits = self.compiled.ask(Ask("call"), step_inputs(parts))[LOGITS]
        self.seconds += self.compiled.seconds
        return logits

    @property
    def most_tokens(self) -> int:
        return self.manifest.contract.dim("tokens").max

    def compare(self, got: Tensor, wanted: Tensor, exact: Tensor | None = None) -> judge.Comparison:
        tolerance = self.tolerance or self.manifest.tolerances.get(LOGITS)
        return judge.compare(
            LOGITS, got, wanted, tolerance=tolerance, strict=self.tolerance is not None, reference=exact
        )


def examine(
    archive: Archive,
    compiled: Compiled,
    truth: Truth | None,
    *,
    tolerance: Mapping[str, Tolerance],
    seed: int,
    progress: Progress,
    find_invariance: bool = False,
) -> Report:
    """All checks. With `find_invariance`, bits that depend on how steps are made up are a finding and no failure."""
    start = time.monotonic()
    manifest = archive.manifest
    assert manifest.generation is not None
    subject = _Subject(manifest, manifest.generation, compiled, truth, tolerance.get(LOGITS), seed)
    results = []
    try:
        compiled.wait()
        for result in _checks(subject, archive, progress):
            counts = result.check != "invariance" or not find_invariance
            results.append(result if counts else msgspec.structs.replace(result, counts=False))
    except CrashError as error:
        results.append(Result(check="load", case="the process", verdict="crash", detail=str(error)))
    except RaisedError as error:
        results.append(Result(check="load", case="a step", verdict="compiled-raises", detail=str(error)))
    verdict = overall(results)
    return Report(
        schema=SCHEMA,
        ok=verdict == "pass",
        verdict=verdict,
        model=f"{manifest.name} {manifest.version}",
        file=archive.path.name,
        digest=archive.digest,
        reference=truth.label if truth else "eager's stored steps",
        fp64=subject.fp64 or "not used: no model at hand that could run in fp64",
        seed=seed,
        seconds=time.monotonic() - start,
        results=tuple(results),
        left_out=tuple(subject.left_out),
        notes=truth.notes if truth else (),
    )


def is_invariant(report: Report) -> bool:
    """Whether no bit depended on how steps were made up, in any of several ways."""
    tried = [result for result in report.results if result.check == "invariance"]
    return bool(tried) and all(result.verdict == "pass" for result in tried)


def _checks(subject: _Subject, archive: Archive, progress: Progress) -> Iterator[Result]:
    progress("the stored script of steps")
    yield from _golden(subject, archive)
    if subject.truth is not None:
        progress("logits of prompts")
        yield from _logits(subject, subject.truth)
        progress("tokens")
        yield from _tokens(subject, subject.truth)
    progress("invariance")
    yield from _invariance(subject)


def _golden(subject: _Subject, archive: Archive) -> Iterator[Result]:
    _forget(subject)
    for case in load_golden(archive):
        logits = subject.compiled.ask(Ask("call"), case.inputs)[LOGITS]
        found = subject.compare(logits, case.outputs[LOGITS])
        yield _judged("golden", case.name, found, subject.compiled.seconds)


def _logits(subject: _Subject, truth: Truth) -> Iterator[Result]:
    context = subject.generation.context
    lengths = sorted({min(length, context) for length in (*LENGTHS, max(context - 1, 1))})
    for length in lengths:
        if length > LONGEST:
            subject.left_out.append(f"a prompt of {length} tokens: more than {LONGEST}")
            continue
        tokens = random_tokens(subject.generation.vocabulary, length, subject.seed + length)
        wanted, before = truth.whole(tokens), subject.seconds
        got = _alone(subject, tokens, chunks_of(length, subject.most_tokens))
        exact = truth.whole64(tokens)
        subject.fp64 = "used for the logits" if exact is not None else "not used: the model does not run in fp64"
        yield _judged("logits", f"prompt {length}", subject.compare(got, wanted, exact), subject.seconds - before)


def _tokens(subject: _Subject, truth: Truth) -> Iterator[Result]:
    """Each prompt's greedy continuation, all prompts side by side."""
    generation = subject.generation
    count = min(TOKENS, max(generation.context // 2, 1))
    longest = min(40, generation.context - count)
    if longest < 1:
        subject.left_out.append("tokens: the context is too short")
        return
    prompts = [
        random_tokens(generation.vocabulary, max(1, longest * (at + 1) // PROMPTS), subject.seed + 100 + at)
        for at in range(PROMPTS)
    ]
    wanted = [truth.greedy(prompt, count) for prompt in prompts]
    _forget(subject)
    start = subject.seconds
    requests = [Request(prompt + tokens[:-1]) for prompt, tokens in zip(prompts, wanted, strict=True)]
    blocks = Blocks(list(range(sum(-(-len(request.tokens) // BLOCK) for request in requests))))
    made: list[list[Tensor]] = [[] for _ in requests]
    for step in range(count):
        counts = [len(prompt) if step == 0 else 1 for prompt in prompts]
        parts = [next_part(r, n, blocks, every=False) for r, n in zip(requests, counts, strict=True)]
        for at, row in enumerate(subject(parts)):
            made[at].append(row)
    seconds = (subject.seconds - start) / len(prompts)
    for prompt, tokens, rows in zip(prompts, wanted, made, strict=True):
        yield _chosen(subject, truth, prompt, tokens, torch.stack(rows), seconds)


def _chosen(
    subject: _Subject, truth: Truth, prompt: list[int], tokens: list[int], rows: Tensor, seconds: float
) -> Result:
    """Whether the likeliest token of each row is the model's own, or tied with it."""
    case = f"{len(tokens)} tokens after {len(prompt)}"
    chosen = rows.argmax(1).tolist()
    different = [at for at, (mine, theirs) in enumerate(zip(chosen, tokens, strict=True)) if mine != theirs]
    ties = []
    if different:
        eager = truth.whole(prompt + tokens[:-1])[len(prompt) - 1 :]
        for at in different:
            margin = float(eager[at][tokens[at]] - eager[at][chosen[at]])
            if margin > _tie(subject, eager[at]):
                text = f"token {at} is {chosen[at]}, eager's is {tokens[at]}, ahead by {margin:.3g}"
                return Result(check="tokens", case=case, verdict="differs", detail=text, seconds=seconds)
            ties.append(at)
    detail = f"ties at {', '.join(map(str, ties))}" if ties else ""
    return Result(check="tokens", case=case, verdict="pass", detail=detail, seconds=seconds)


def _tie(subject: _Subject, logits: Tensor) -> float:
    """What two logits may lie apart, each being off by the tolerance."""
    given = subject.tolerance or subject.manifest.tolerances.get(LOGITS)
    assert given is not None
    direct = judge.direct_tolerance(logits)
    atol, rtol = max(given.atol, direct.atol), max(given.rtol, direct.rtol)
    return 2 * (atol + rtol * float(logits.abs().max()))


def _judged(check: Check, case: str, found: judge.Comparison, seconds: float) -> Result:
    verdict: Verdict = "pass" if found.ok else "differs"
    return Result(check=check, case=case, verdict=verdict, outputs=(found,), seconds=seconds)


# --- invariance --------------------------------------------------------------------------------------------------


def _invariance(subject: _Subject) -> Iterator[Result]:
    """One request's logits, to the bit, computed in many ways. Caches are NaN before each."""
    length = max(1, min(INVARIANT, subject.generation.context, subject.most_tokens // 2))
    tokens = random_tokens(subject.generation.vocabulary, length, subject.seed + 7)
    wanted = _alone(subject, tokens, [length])
    ways: dict[str, Callable[[], Tensor]] = {
        f"chunks of {size}": lambda size=size: _alone(subject, tokens, chunks_of(length, size))  # type: ignore[misc]
        for size in (1, 7, 16, 17)
        if size < length
    }
    for count in OTHERS:
        ways[f"beside {count} others"] = lambda count=count: _beside(subject, tokens, count)  # type: ignore[misc]
    for cached in sorted({0, min(1, (length - 1) // BLOCK), (length - 1) // BLOCK}):
        ways[f"on {cached} cached blocks"] = lambda cached=cached: _on_prefix(subject, tokens, cached, wanted)  # type: ignore[misc]
    ways["computed again after a preemption"] = lambda: _preempted(subject, tokens)
    for name, way in ways.items():
        before = subject.seconds
        got = way()
        same = torch.equal(got, wanted)
        detail = "" if same else _first_difference(got, wanted)
        verdict: Verdict = "pass" if same else "differs"
        seconds = subject.seconds - before
        yield Result(check="invariance", case=name, verdict=verdict, detail=detail, seconds=seconds)


def _first_difference(got: Tensor, wanted: Tensor) -> str:
    rows = ((got != wanted) & ~(got.isnan() & wanted.isnan())).any(1).nonzero().flatten().tolist()
    if not rows:
        return "only in NaN or the sign of zero"
    error = float((got - wanted).abs().max())
    return f"token {rows[0]} and {len(rows) - 1} more have other bits, off by {error:.3g}"


def _forget(subject: _Subject) -> None:
    subject.compiled.ask(Ask("reset"))


def _alone(subject: _Subject, tokens: Sequence[int], chunks: Sequence[int]) -> Tensor:
    """In blocks that lie anyhow, among some that are NaN."""
    _forget(subject)
    return in_chunks(subject, tokens, chunks, _shuffled(2 * -(-len(tokens) // BLOCK), len(chunks)))


def _shuffled(count: int, seed: int) -> Blocks:
    free = list(range(count))
    random.Random(seed).shuffle(free)
    return Blocks(free)


def _beside(subject: _Subject, tokens: Sequence[int], count: int) -> Tensor:
    """In three steps, the others with chunks of their own, of which some end."""
    _forget(subject)
    count = min(count, subject.most_tokens - len(tokens))
    longest = max(1, min(20, subject.generation.context))
    vocabulary = subject.generation.vocabulary
    others = [Request(random_tokens(vocabulary, 1 + at * 7 % longest, at)) for at in range(count)]
    request, blocks = Request(list(tokens)), _shuffled(len(tokens) + 2 * count + 2, count)
    made = []
    for share in _thirds(len(tokens)):
        left = subject.most_tokens - share
        parts: list[Part] = []
        mine = 0
        for at, other in enumerate(others):
            if at == count // 2:
                mine = len(parts)
                parts.append(next_part(request, share, blocks))
            size = min(other.left, 1 + at % 9, left)
            if size:
                left -= size
                parts.append(next_part(other, size, blocks))
        if not others:
            parts.append(next_part(request, share, blocks))
        logits = subject(parts)
        begin = sum(len(part.wanted) for part in parts[:mine])
        made.append(logits[begin : begin + share])
    return torch.cat(made)


def _thirds(length: int) -> list[int]:
    ends = [length * at // 3 for at in range(4)]
    return [end - begin for begin, end in pairwise(ends) if end > begin]


def _on_prefix(subject: _Subject, tokens: Sequence[int], cached: int, wanted: Tensor) -> Tensor:
    """What follows the first blocks, which another request with the same beginning computed."""
    _forget(subject)
    blocks = _shuffled(4 * -(-len(tokens) // BLOCK), cached)
    first = Request(list(tokens[: cached * BLOCK]) or list(tokens))
    subject([next_part(first, first.left, blocks)])
    request = Request(list(tokens), first.blocks[:cached], cached * BLOCK)
    rest = subject([next_part(request, request.left, blocks)])
    return torch.cat([wanted[: cached * BLOCK], rest])


def _preempted(subject: _Subject, tokens: Sequence[int]) -> Tensor:
    _forget(subject)
    blocks = _shuffled(3 * -(-len(tokens) // BLOCK), 5)
    request = Request(list(tokens))
    subject([next_part(request, max(1, len(tokens) // 2), blocks)])
    blocks.take_back(request)
    return subject([next_part(request, request.left, blocks)])
