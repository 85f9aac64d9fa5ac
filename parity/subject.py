"""The compiled model under test, with what it is compared with: calls, judgements, and what they cost."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ..bundle_format.lookup import Lookup
from ..bundle_format.manifest import Manifest, Tolerance
from ..export import golden
from . import cases, judge
from .budget import Budget
from .cases import Case
from .frames import Ask
from .judge import Comparison
from .report import Verdict
from .runs import Compiled, Crashed, Outcome, Raised, Returned, attempt
from .truth import Truth

Tensors = Mapping[str, Tensor]

MAX_CRASHES = 3
SHAKES = 12  # runs that show which integers stand at an edge
ROUNDINGS = 16  # that an operation may be off by: sums of many terms add theirs up
EPSILON = {"float32": 2**-24, "float16": 2**-11, "bfloat16": 2**-8}  # one rounding


class Judgement(NamedTuple):
    verdict: Verdict
    detail: str = ""
    outputs: tuple[Comparison, ...] = ()


@dataclass(slots=True)
class Subject:
    """One bundle in its process. `given` are the user's tolerances, which decide alone."""

    manifest: Manifest
    compiled: Compiled
    truth: Truth | None
    goldens: list[golden.Case]
    given: Mapping[str, Tolerance]
    seed: int
    random: bool = False  # the model draws random numbers: values are not compared
    fp64: str = ""  # what became of the fp64 reference
    crashes: int = 0
    warm: int = 0  # resident bytes of the child after its first call
    left_out: list[str] = field(default_factory=list)
    wider: Mapping[str, Tolerance] = field(default_factory=dict)  # in the place of the manifest's, where that is fair
    spans: dict[str, cases.Bounds] = field(init=False)
    middle: dict[str, int] = field(init=False)  # example sizes: small, and of no special size

    def __post_init__(self) -> None:
        contract = self.manifest.contract
        self.random = contract.random
        self.spans = cases.spans(contract, [case.inputs for case in self.goldens])
        stored = sorted((case.dims for case in self.goldens), key=lambda dims: cases.volume(contract, dims))
        default = {dim.name: cases.default_size(dim) for dim in contract.dims}
        self.middle = default | (stored[min(1, len(stored) - 1)] if stored else {})

    def inputs(self, case: Case, variation: int = 0) -> dict[str, Tensor]:
        """The case's inputs; another `variation` has other values."""
        return cases.tensors(self.manifest.contract, case, self.seed + 1000003 * variation, self.spans)

    def call(self, inputs: Tensors, ask: Ask = Ask("call")) -> Outcome:  # noqa: B008
        outcome = attempt(lambda given: self.compiled.ask(ask, given), inputs)
        self.crashes += isinstance(outcome, Crashed)
        return outcome

    def in_bf16(self, dims: Mapping[str, int]) -> bool:
        """Whether a variant in bfloat16 runs at these sizes."""
        variant = Lookup(self.manifest, torch.get_num_threads()).variant(dims)
        return variant is not None and variant.bf16 and self.compiled.runs == "compiled"

    def spend(self, budget: Budget, dims: Mapping[str, int], seconds: float) -> None:
        """A call of these sizes was made. What the very first took in memory is no measure: it warms up."""
        self.warm = self.warm or self.compiled.peak
        budget.record(dims, seconds, max(0, self.compiled.peak - self.warm))

    def affordable(self, budget: Budget, dims: Mapping[str, int], what: str) -> bool:
        """Whether a call of these sizes may be made; if not, `left_out` says why."""
        reason = budget.refuse(dims)
        if self.crashes >= MAX_CRASHES:
            reason = f"the compiled model crashed {self.crashes} times"
        if reason:
            self.left_out.append(f"{what}: {reason}")
        return not reason

    def compare(
        self,
        got: Tensors,
        wanted: Tensors,
        *,
        slack: float = 1.0,
        reference: Tensors | None = None,
        shaken: Sequence[Tensors] = (),
    ) -> tuple[Comparison, ...]:
        """Each output by the rules of judge.py."""
        return tuple(
            judge.compare(
                name,
                self._comparable(got[name], wanted[name]),
                wanted[name],
                tolerance=self.given.get(name) or self.wider.get(name) or self.manifest.tolerances.get(name),
                strict=name in self.given,
                slack=slack,
                reference=None if reference is None else reference.get(name),
                shaken=[outputs[name] for outputs in shaken],
            )
            for name in wanted
        )

    def _comparable(self, got: Tensor, wanted: Tensor) -> Tensor:
        """Of a random model only dtype and shape are compared."""
        alike = got.dtype == wanted.dtype and got.shape == wanted.shape
        return wanted if self.random and alike else got

    def judge(
        self, inputs: Tensors, got: Outcome, wanted: Outcome, dims: Mapping[str, int], *, stored: bool = False
    ) -> Judgement:
        """The verdict of one call beside eager's. `stored`: a server compares it too, maybe on another machine."""
        if isinstance(got, Crashed):
            return Judgement("crash", got.message)
        if isinstance(wanted, Raised):
            if isinstance(got, Raised):
                return Judgement("pass", f"both raise: {got.message}")
            return Judgement("eager-raises-compiled-returns", f"eager raises {wanted.message}")
        if isinstance(got, Raised):
            return Judgement("compiled-raises", got.message)
        assert isinstance(got, Returned) and isinstance(wanted, Returned)
        shaken = self._shaken(inputs, dims) if stored or self._steps(got.outputs, wanted.outputs) else []
        outputs = self.compare(got.outputs, wanted.outputs, shaken=shaken)
        if self._wants_reference(got.outputs, wanted.outputs) and (exact := self._exact(inputs)):
            outputs = self.compare(got.outputs, wanted.outputs, reference=exact, shaken=shaken)
        return Judgement("pass" if all(found.ok for found in outputs) else "differs", "", outputs)

    def _wants_reference(self, got: Tensors, wanted: Tensors) -> bool:
        """The first time for the report, and then where it could change the verdict; with state at every step."""
        if self.truth is None or self.random:
            return False
        if self.manifest.contract.state:
            return True
        pairs = [(got[name], wanted[name]) for name in wanted if judge.has_floor(got[name], wanted[name])]
        return not self.fp64 or not all(judge.agrees_to_the_floor(*pair) for pair in pairs)

    def _steps(self, got: Tensors, wanted: Tensors) -> bool:
        """Whether an output that is no float differs."""
        pairs = [(self._comparable(got[name], wanted[name]), wanted[name]) for name in wanted]
        return any(not one.is_floating_point() and not torch.equal(one, other) for one, other in pairs)

    def _shaken(self, inputs: Tensors, dims: Mapping[str, int]) -> list[Tensors]:
        """What a few roundings change, for a model with outputs that are no floats; empty where it does not tell."""
        contract = self.manifest.contract
        dtypes = [*(each.dtype for each in contract.inputs), *(each.dtype for each in contract.outputs)]
        floats: set[str] = {dtype for dtype in dtypes if "float" in dtype}
        if self.truth is None or self.random or contract.state or "float64" in floats:
            return []
        if all("float" in output.dtype for output in contract.outputs):
            return []
        floats |= {"bfloat16"} if self.in_bf16(dims) else set()
        roundings = ROUNDINGS * max((EPSILON[dtype] for dtype in floats), default=EPSILON["float32"])
        double = self.truth.double

        def shake(seed: int) -> Outcome:
            return attempt(lambda given: double.shaken(given, roundings, seed), inputs)

        return [found.outputs for found in map(shake, range(SHAKES)) if isinstance(found, Returned)]

    def _exact(self, inputs: Tensors) -> Tensors | None:
        """The outputs in fp64, if the model can."""
        assert self.truth is not None
        outcome = attempt(self.truth.double, inputs)
        if isinstance(outcome, Returned) and all(_wide_enough(tensor) for tensor in outcome.outputs.values()):
            self.fp64 = "used where eager and compiled differ by more than rounding"
            return outcome.outputs
        why = outcome.message if isinstance(outcome, Raised) else "an output keeps a narrower dtype"
        self.fp64 = f"not used: the model does not run in fp64 ({why.splitlines()[0][:200]})"
        return None


def _wide_enough(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or tensor.dtype is torch.float64
