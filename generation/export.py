"""A causal language model to program.pt2: one step over the tokens of many requests, proved equal to the model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from ..bundle_format import archive as archives
from ..bundle_format import layout
from ..bundle_format.contract import Contract
from ..bundle_format.errors import ExportError, MctlError, UsageError
from ..bundle_format.files import require_place
from ..bundle_format.manifest import Generation, Golden, Manifest, name_from
from ..export import graph
from ..export.golden import Case, dump_case, member_of
from ..export.program import Clock, ExportReport, now, producer, write_program
from ..export.proof import tolerance_of
from ..export.running import widen
from ..export.usercode import describe, quiet, user_code
from . import source
from .adapt import HuggingFace, Model, adapted
from .attention import Paged, Probe, attending
from .script import Blocks, Request, chunks_of, in_chunks, next_part, random_tokens
from .step import LOGITS, MOST_TOKENS, TRACED_TABLE, Part, contract_of, new_caches, step_inputs

Progress = Callable[[str], None]

_PROBE = 13  # tokens: a number that no other size of a model is likely to be
_PROOFS = (1, 15, 16, 17, 33)  # lengths of prompts
_LONGEST = 700  # tokens of a proof that a window asks for
_POOL = 8  # blocks that the golden script needs at most


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What `mctl export --task text-generation` was asked for."""

    spec: str  # a folder, or MODEL.py[:NAME]
    output: Path
    context: int | None = None
    eos: tuple[int, ...] | None = None
    cache_dtype: str = "float32"
    weights: Path | None = None
    seed: int = 0


def export_generation(request: GenerationRequest, progress: Progress) -> ExportReport:
    """Writes program.pt2 and says what it holds. UsageError and ExportError say what is in the way."""
    require_place(request.output)
    clock = Clock(progress)
    with clock.phase("import", f"loading {request.spec}"):
        found = source.load(request.spec, weights=request.weights, seed=request.seed)
    with torch.no_grad():
        with clock.phase("trace", "tracing one step with torch.export"):
            model = adapted(found.module)
            generation = _describe(model, found, request)
            contract = contract_of(generation, _most_tokens(model, generation))
            exported = _trace(model, generation, contract)
        with clock.phase("prove", "comparing the program with the model"):
            proven = _prove(model, exported, generation, request.seed)
            cases = _golden(model, exported, generation, request.seed)
    manifest = Manifest(
        schema="mctl.program/1",
        name=name_from(Path(found.record.file).stem),
        version="1",
        created=now().isoformat(timespec="seconds"),
        producer=producer(),
        source=found.record,
        contract=contract,
        golden=tuple(Golden(name=case.name, member=member_of(case), dims=case.dims) for case in cases),
        tolerances={LOGITS: tolerance_of(generation.cache_dtype)},
        members={},
        generation=generation,
    )
    members: list[tuple[str, archives.Data]] = [(member_of(case), dump_case(case)) for case in cases]
    if found.tokenizer is not None:
        members.append((layout.TOKENIZER, found.tokenizer))
    with clock.phase("write", f"writing {request.output}"):
        manifest = write_program(request.output, exported, manifest, members)
    return ExportReport(request.output, request.output.stat().st_size, manifest, proven, clock.seconds, ())


def _most_tokens(model: Model, generation: Generation) -> int:
    """A module for whole sequences may refuse one that is longer than its context."""
    return MOST_TOKENS if isinstance(model, HuggingFace) else max(2, min(MOST_TOKENS, generation.context))


def _describe(model: Model, found: source.Found, request: GenerationRequest) -> Generation:
    """What the model is like, by one call over a few tokens."""
    context = request.context or found.context
    if context is None:
        raise UsageError("how many tokens the model can look at is not known", "say it: `--context 1024`")
    if found.context is not None and context > found.context:
        raise UsageError(f"`--context {context}` is more than the model's own, {found.context}")
    tokens = torch.zeros(min(_PROBE, context), dtype=torch.int64)
    probe = Probe()
    with attending(probe), _told():
        logits = model.step(tokens, torch.arange(len(tokens)), torch.arange(len(tokens)))
    model.check_layers(len(probe.asked))
    groups, layers = probe.layers()
    vocabulary = logits.shape[1]
    eos = found.eos if request.eos is None else request.eos
    if wrong := [token for token in eos if not 0 <= token < vocabulary]:
        raise UsageError(
            f"the token {wrong[0]}, which ends a text, is not in the vocabulary of {vocabulary}",
            "name those that do: `--eos N,N`",
        )
    return Generation(
        vocabulary=vocabulary,
        context=context,
        groups=groups,
        layers=layers,
        eos=tuple(sorted(set(eos))),
        cache_dtype="bfloat16" if request.cache_dtype == "bfloat16" else "float32",
    )


def _told() -> Any:
    return user_code("the model failed")


class _Step(nn.Module):  # type: ignore[misc]
    """The model as what is exported."""

    def __init__(self, model: Model, generation: Generation) -> None:
        super().__init__()
        self.inner = model.module
        self._model, self._layers = model, generation.layers

    def forward(self, tokens: Tensor, positions: Tensor, slots: Tensor, tables: Tensor, lengths: Tensor, ends: Tensor, rows: Tensor, caches: list[Tensor]) -> dict[str, Tensor]:  # fmt: skip  # noqa: E501
        with attending(Paged(self._layers, tuple(caches), (slots, tables, lengths, ends))):
            return {LOGITS: self._model.step(tokens, positions, rows)}


def _trace(model: Model, generation: Generation, contract: Contract) -> ExportedProgram:
    """The exported step. Sizes that are traced are unlike each other, and like none that a model has."""
    parts = [Part([0] * count, 0, (at,), range(1)) for at, count in enumerate((5, 3, 3))]
    inputs = step_inputs(parts)
    inputs["tables"] = torch.zeros(3, TRACED_TABLE, dtype=torch.int64)
    inputs["rows"] = torch.tensor([0, 3])
    symbols = {dim.name: Dim(dim.name, min=dim.min, max=dim.max) for dim in contract.dims}
    shapes = [
        {axis: symbols[size] for axis, size in enumerate(declared.shape) if isinstance(size, str)}
        for declared in contract.inputs
    ]
    caches = new_caches(generation, 7)
    for cache in caches:
        cache.zero_()
    plain = shapes[: len(inputs)]
    try:
        with quiet():
            exported = torch.export.export(
                _Step(model, generation),
                (*inputs.values(), caches),
                dynamic_shapes=(*plain, shapes[len(inputs) :]),
                strict=False,
            )
    except MctlError:
        raise
    except Exception as error:
        raise _untraceable(error) from error
    graph.refuse_training(exported)
    if line := graph.random_line(exported):
        raise ExportError(f"the model draws random numbers: {line}", "take them out: mctl samples by itself")
    for name, value in graph.input_values(exported).items():
        _require_symbols(name, value, contract)
    return exported


def _untraceable(error: Exception) -> ExportError:
    text = describe(error)
    hint = "what depends on the number of tokens or on their values cannot be one step; `mctl export` alone exports it"
    return ExportError(f"one step of the model cannot be exported: {text}", hint)


def _require_symbols(name: str, value: Any, contract: Contract) -> None:
    """ExportError where torch made a size of an input constant."""
    declared = next((each for each in contract.inputs if each.name == name), None)
    if declared is None or not isinstance(value, Tensor):
        return
    for axis, size in zip(declared.shape, value.shape, strict=True):
        if isinstance(axis, str) and not isinstance(size, torch.SymInt):
            raise ExportError(f"the model makes the number of {axis} constant ({size})", "treat all numbers alike")


# --- proof -------------------------------------------------------------------------------------------------------


class ProgramSteps:
    """The exported program run by torch, over caches of its own, as a function of parts."""

    def __init__(self, exported: ExportedProgram, generation: Generation, blocks: int, *, double: bool = False) -> None:
        self.module: Any = exported.module(check_guards=False)
        if double:
            widen(self.module)
        self._generation, self._dtype = generation, torch.float64 if double else None
        self.forget(blocks)

    def forget(self, blocks: int) -> Blocks:
        """Fresh caches of so many blocks, which are all free."""
        self.caches = new_caches(self._generation, blocks, self._dtype)
        return Blocks(list(range(blocks)))

    def __call__(self, parts: Sequence[Part]) -> Tensor:
        with torch.no_grad():
            logits: Tensor = self.module(*step_inputs(parts).values(), self.caches)[LOGITS]
        return logits


def _prove(model: Model, exported: ExportedProgram, generation: Generation, seed: int) -> dict[str, float]:
    """Largest errors by prompt, each at once and in chunks. ExportError where the program is not the model."""
    windows = [layer.window + 3 for layer in generation.layers if layer.window]
    lengths = [*_PROOFS, *(length for length in sorted(set(windows)) if length <= _LONGEST)]
    lengths = sorted({min(length, generation.context) for length in lengths})
    run = ProgramSteps(exported, generation, -(-lengths[-1] // 16) + 1)
    blocks = Blocks(list(range(run.caches[0].shape[1])))
    errors = {}
    for length in lengths:
        tokens = random_tokens(generation.vocabulary, length, seed + length)
        with _told(), quiet():
            wanted = model.whole(torch.tensor(tokens))
        for chunks in ([length], chunks_of(length, 5)):
            blocks.free.reverse()
            got = in_chunks(run, tokens, chunks, blocks)
            name = f"prompt {length}" + (f" in chunks of {chunks[0]}" if len(chunks) > 1 else "")
            errors[name] = _compare(got, wanted, name, generation)
    return errors


def _compare(got: Tensor, wanted: Tensor, name: str, generation: Generation) -> float:
    if got.shape != wanted.shape:
        raise ExportError(f"at {name}, the step gives {list(got.shape)} logits, and the model {list(wanted.shape)}")
    narrow = 1.0 if generation.cache_dtype == "float32" else 300.0  # a cache in bfloat16 rounds what it holds
    tolerance = tolerance_of("float32")
    allowed = narrow * (tolerance.atol + tolerance.rtol * wanted.abs() + tolerance.rtol * wanted.abs().mean())
    error = (got - wanted).abs()
    worst = float(error.nan_to_num(float("inf")).max())
    if not bool((error <= allowed).all()):
        raise ExportError(
            f"one step over many requests is not the model: at {name}, logits are off by {worst:.3g}",
            "a token may look at others by causal attention alone, and know its place by `position_ids` or"
            " `torch.arange(T)` alone; else write `forward(tokens, positions, attend)`",
        )
    return worst


def _golden(model: Model, exported: ExportedProgram, generation: Generation, seed: int) -> list[Case]:
    """A script of steps with the model's own logits: requests come in chunks and decode beside each other."""
    longest = min(40, generation.context)
    requests = [Request(random_tokens(generation.vocabulary, count, seed + count)) for count in (longest, 9, 21)]
    requests = [request for request in requests if len(request.tokens) <= generation.context]
    whole = [model.whole(torch.tensor(request.tokens)) for request in requests]
    blocks = Blocks([5, 0, 3, 6, 1, 4, 2, 7][:_POOL])
    cases = []
    for at, counts in enumerate(((17, 0, 5), (1, 7, 11), (15, 1, 1), (1, 1, 4))):
        chosen = [
            (request, logits, min(count, request.left))
            for request, logits, count in zip(requests, whole, counts, strict=False)
            if min(count, request.left)
        ]
        if not chosen:
            continue
        parts = [next_part(request, count, blocks, every=False) for request, _, count in chosen]
        wanted = torch.stack([logits[request.cached - 1] for request, logits, _ in chosen])
        inputs = step_inputs(parts)
        tables = inputs["tables"]
        dims = {
            "tokens": len(inputs["tokens"]),
            "requests": tables.shape[0],
            "table": tables.shape[1],
            "rows": len(inputs["rows"]),
            "pool": _POOL,
        }
        cases.append(Case(f"step-{at}", dims, inputs, {LOGITS: wanted}))
    return cases
