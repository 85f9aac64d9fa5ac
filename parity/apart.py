"""The compiled model beside itself: calls in a row, rows of a batch, padding. No eager is needed."""

from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor

from ..export.raw import bytes_of
from . import batching, judge
from .budget import Budget
from .cases import Case
from .frames import Ask
from .report import Check, Result, Verdict
from .runs import Crashed, Outcome, Raised, Returned, attempt
from .subject import Subject

Tensors = Mapping[str, Tensor]
Progress = Callable[[str], None]

CONSISTENT = 4.0  # times the direct tolerance: at another size the same sums are made in another order
ROWS_SECONDS, PADDING_SECONDS = 15.0, 10.0


# --- calls in a row ----------------------------------------------------------------------------------------------


def repeat(subject: Subject, progress: Progress) -> Result:
    """Three calls on the same instance, and the outputs of the first looked at again after the last.

    The seed of torch's random numbers tells a random model (another seed, another answer) from one with hidden state.
    Values that eager does not take (offsets that have to begin with 0, say) are replaced by those of stored cases.
    """
    progress("calls in a row")
    case = Case(subject.middle, "normal")
    name, inputs, other = case.name, subject.inputs(case), subject.inputs(case, 1)
    outcomes = _in_a_row(subject, inputs, other)
    raised = any(isinstance(outcome, Raised) for outcome in outcomes)
    if raised and subject.goldens and _refused(subject, inputs, other):
        name, inputs, other = subject.goldens[-1].name, subject.goldens[-1].inputs, subject.goldens[0].inputs
        outcomes = _in_a_row(subject, inputs, other)
    verdict, detail = _repeated(*outcomes)
    return Result(check="repeat", case=name, verdict=verdict, detail=detail)


def _in_a_row(subject: Subject, inputs: dict[str, Tensor], other: dict[str, Tensor]) -> list[Outcome]:
    return [
        subject.call(inputs, Ask("call", keep=True, seed=1)),
        subject.call(inputs, Ask("call", seed=1)),
        subject.call(inputs, Ask("call", seed=2)),
        subject.call(other, Ask("call", seed=1)),
        subject.call({}, Ask("kept")),
    ]


def _refused(subject: Subject, *given: dict[str, Tensor]) -> bool:
    """Does eager raise for some of these?"""
    reference = subject.truth.reference if subject.truth else None
    return reference is not None and any(isinstance(attempt(reference, inputs), Raised) for inputs in given)


def _repeated(*outcomes: Outcome) -> tuple[Verdict, str]:
    for outcome in outcomes:
        if isinstance(outcome, Crashed):
            return "crash", outcome.message
        if not isinstance(outcome, Returned):
            return "compiled-raises", outcome.message
    first, again, reseeded, _, kept = (outcome.outputs for outcome in outcomes if isinstance(outcome, Returned))
    if name := _changed(first, again):
        return "stateful", f"output '{name}' of a second call with the same inputs is another"
    if name := _changed(first, reseeded):
        return "random", f"output '{name}' depends on torch's random numbers"
    if name := _changed(first, kept):
        return "differs", f"output '{name}' of the first call was overwritten by later calls"
    return "pass", ""


def _changed(before: Tensors, after: Tensors) -> str:
    """The first output that is not the same; or ""."""
    return next((name for name in before if not _same(before[name], after[name])), "")


def _same(left: Tensor, right: Tensor) -> bool:
    """Bit by bit (NaN equals NaN), or but for roundings: threads may add up in another order."""
    return left.shape == right.shape and (
        bytes_of(left) == bytes_of(right) or (judge.has_floor(left, right) and judge.agrees_to_the_floor(left, right))
    )


# --- rows of a batch ---------------------------------------------------------------------------------------------


def rows(subject: Subject, batch: str, progress: Progress) -> list[Result]:
    """At every bucket: a row gives what it gives alone, wherever it stands and whatever the others hold."""
    smallest = subject.manifest.contract.dim(batch).min
    single = subject.inputs(Case({**subject.middle, batch: 1}, "normal"))
    alone = subject.call(batching.row(subject.manifest.contract, single, 0, copies=smallest))
    budget = Budget(subject.manifest.contract, ROWS_SECONDS)
    results = []
    for size in subject.manifest.buckets.get(batch, ()):
        dims = {**subject.middle, batch: size}
        name = f"{batch}={size}"
        if size > smallest and subject.affordable(budget, dims, f"rows of {name}"):
            progress(f"rows of {name}")
            results += _rows_at(subject, dims, single, alone, budget)
    return results


def _rows_at(subject: Subject, dims: dict[str, int], single: Tensors, alone: Outcome, budget: Budget) -> list[Result]:
    contract = subject.manifest.contract
    size = dims[contract.batch_dim or ""]
    wanted = _cut(alone, partial(batching.output_row, contract, index=0))
    results = []
    for fill, others in _fills(subject, dims).items():
        places = batching.places(size)
        for together in [places] if fill == "others" else [[place] for place in places]:
            got = subject.call(batching.with_row(contract, others, single, together))
            if isinstance(got, Returned):
                subject.spend(budget, dims, got.seconds)
            for place in together:
                cut = _cut(got, partial(batching.output_row, contract, index=place))
                results.append(_consistent(subject, "rows", f"row {place} of {size} beside {fill}", cut, wanted))
    return results


def _fills(subject: Subject, dims: dict[str, int]) -> dict[str, dict[str, Tensor]]:
    """What the other rows hold: values like its own, and what must not reach it (NaN, or the largest integers)."""
    others = subject.inputs(Case(dims, "normal"), 1)
    poisoned = batching.poisoned(subject.manifest.contract, others)
    if any(poisoned[name] is not others[name] for name in others):
        return {"others": others, "NaN": poisoned}
    return {"others": others, "largest values": subject.inputs(Case(dims, "high"), 1)}


# --- padding of other dims ---------------------------------------------------------------------------------------


def padding(subject: Subject, dim: str, progress: Progress) -> list[Result]:
    """At every bucket of the dim: inputs padded up to it, and outputs cut back, give what the unpadded inputs give."""
    contract = subject.manifest.contract
    budget = Budget(contract, PADDING_SECONDS)
    results = []
    below = contract.dim(dim).min - contract.dim(dim).multiple
    for size in subject.manifest.buckets[dim]:
        real = {**subject.middle, dim: below + contract.dim(dim).multiple}  # as much padding as this bucket ever sees
        below = size
        name = f"{dim}={real[dim]} padded to {size}"
        if real[dim] < size and subject.affordable(budget, {**real, dim: size}, name):
            progress(name)
            inputs = subject.inputs(Case(real, "normal"))
            wanted = subject.call(inputs)
            got = subject.call(batching.pad(contract, inputs, dim, size))
            if isinstance(got, Returned):
                subject.spend(budget, {**real, dim: size}, got.seconds)
            cut = _cut(got, partial(batching.cut, contract, dims=real))
            results.append(_consistent(subject, "padding", name, cut, wanted))
    return results


# -----------------------------------------------------------------------------------------------------------------


def _cut(outcome: Outcome, part: Callable[[Tensors], dict[str, Tensor]]) -> Outcome:
    return Returned(part(outcome.outputs), outcome.seconds) if isinstance(outcome, Returned) else outcome


def _consistent(subject: Subject, check: Check, name: str, got: Outcome, wanted: Outcome) -> Result:
    """Two outcomes of the compiled model that have to be the same."""
    for outcome in (wanted, got):
        if isinstance(outcome, Crashed):
            return Result(check=check, case=name, verdict="crash", detail=outcome.message)
    raised = [outcome.message for outcome in (wanted, got) if isinstance(outcome, Raised)]
    if raised:
        verdict: Verdict = "pass" if len(raised) == 2 else "differs"
        detail = f"{'both raise' if len(raised) == 2 else 'one of the two raises'}: {raised[0]}"
        return Result(check=check, case=name, verdict=verdict, detail=detail)
    assert isinstance(got, Returned) and isinstance(wanted, Returned)
    outputs = subject.compare(got.outputs, wanted.outputs, slack=CONSISTENT)
    verdict = "pass" if all(found.ok for found in outputs) else "differs"
    return Result(check=check, case=name, verdict=verdict, outputs=outputs, seconds=got.seconds)
