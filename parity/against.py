"""Compiled beside eager: the stored cases, and the sweep over sizes and values."""

import time
from collections.abc import Callable

from ..bundle_format.contract import shape_of
from ..export import golden
from . import cases
from .budget import Budget
from .cases import Case
from .frames import Ask
from .report import Check, Result
from .runs import Crashed, Outcome, Returned, attempt
from .subject import Judgement, Subject

STEPS = 3  # calls in a row of a model with state, each compared
SECONDS = 40.0  # for the sweep
Progress = Callable[[str], None]


def stored_cases(subject: Subject, progress: Progress) -> list[Result]:
    """The golden cases: eager's outputs at export, from a fresh state."""
    results = []
    for at, case in enumerate(subject.goldens):
        progress(f"stored case {at + 1} of {len(subject.goldens)}")
        _reset(subject)
        got = subject.call(case.inputs)
        found = subject.judge(case.inputs, got, Returned(case.outputs, 0.0), case.dims, stored=True)
        results.append(_result(subject, "golden", case, found, got))
    return results


def sweep(subject: Subject, progress: Progress) -> list[Result]:
    """Every case of the sweep that the budget allows, the smallest sizes first."""
    manifest = subject.manifest
    planned = cases.sweep(manifest.contract, subject.middle, manifest.buckets)
    budget = Budget(manifest.contract, SECONDS)
    results = []
    for at, case in enumerate(planned):
        progress(f"case {at + 1} of {len(planned)}: {case.name}")
        if subject.affordable(budget, case.dims, case.name):
            results.append(_one(subject, case, budget))
    return results


def at_sizes(subject: Subject, dims: dict[str, int], progress: Progress) -> list[Result]:
    """Every kind of values at one size, and the golden cases of that size."""
    progress("its size")
    stored = [case for case in subject.goldens if case.dims == dims]
    results = [
        _result(subject, "golden", case, subject.judge(case.inputs, got, Returned(case.outputs, 0.0), case.dims), got)
        for case in stored
        for got in [subject.call(case.inputs)]
    ]
    budget = Budget(subject.manifest.contract, SECONDS)
    kinds = ("normal", *cases.kinds(subject.manifest.contract))
    return results + [_one(subject, Case(dims, kind), budget) for kind in kinds]


def _one(subject: Subject, case: Case, budget: Budget) -> Result:
    """A case in one call, or, for a model with state, in a few from a fresh state."""
    _reset(subject)
    steps = STEPS if subject.manifest.contract.state else 1
    found, got = Judgement("pass"), None
    for step in range(steps):
        inputs = subject.inputs(case, step)
        start = time.monotonic()
        got = subject.call(inputs)
        wanted = attempt(subject.truth.reference, inputs) if subject.truth else None
        found = subject.judge(inputs, got, wanted, case.dims) if wanted else _alone(subject, case, got)
        subject.spend(budget, case.dims, time.monotonic() - start)
        if found.verdict != "pass":
            break
    return _result(subject, "values", case, found, got)


def _alone(subject: Subject, case: Case, got: Outcome) -> Judgement:
    """Without eager at hand: it answers, in the shapes of the contract."""
    if isinstance(got, Crashed):
        return Judgement("crash", got.message)
    if not isinstance(got, Returned):
        return Judgement("pass" if case.values in cases.UNDECLARED else "compiled-raises", got.message)
    for output in subject.manifest.contract.outputs:
        shape, wanted = tuple(got.outputs[output.name].shape), shape_of(output, case.dims)
        if shape != wanted:
            return Judgement("differs", f"output '{output.name}' has shape {list(shape)}, declared {list(wanted)}")
    return Judgement("pass")


def _reset(subject: Subject) -> None:
    if subject.manifest.contract.state:
        subject.call({}, Ask("reset"))  # if it fails, so does the call after it
        if subject.truth:
            subject.truth.reference.reset()
            subject.truth.double.reset()


def _result(subject: Subject, check: Check, case: Case | golden.Case, found: Judgement, got: Outcome | None) -> Result:
    return Result(
        check=check,
        case=case.name,
        verdict=found.verdict,
        detail=found.detail,
        outputs=found.outputs,
        seconds=got.seconds if isinstance(got, Returned) else 0.0,
        bf16=subject.in_bf16(case.dims),
        unranged=cases.unranged(subject.manifest.contract, case) if isinstance(case, Case) else (),
    )
