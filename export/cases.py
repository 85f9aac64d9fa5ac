"""Runs the model over its declared range: the golden cases, within a budget of bytes and of work."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ..bundle_format.contract import Contract, Input, Output, nbytes
from ..bundle_format.errors import ExportError, ModelError
from .declare import Declared
from .example import elements, make_inputs
from .golden import Case, case_name, case_points
from .limits import explain_sizes, find_working
from .naming import Tensors
from .running import Run, call_model, run_model
from .usercode import quiet

MAX_BYTES = 32 << 20  # of all golden cases together
MAX_CASE_BYTES = 256 << 20  # of the inputs of one case
MAX_FLOPS = 2e11  # of one case: a second or two. Counted, not timed: the same model gives the same cases


@dataclass(slots=True)
class Cases:
    """Inputs of any declared size, and what eager makes of them; `notes` say which cases are not run or kept."""

    models: Callable[[], nn.Module]  # the model in a fresh state
    program: Callable[[], Run]  # the exported program in a fresh state
    declared: Declared
    contract: Contract
    doubtful: Mapping[str, list[int]]  # sizes to look at besides
    seed: int
    notes: list[str]

    def bind(self, model: nn.Module) -> Run:
        return run_model(model, self.declared.named, [output.name for output in self.contract.outputs])

    def inputs(self, sizes: Mapping[str, int]) -> Tensors:
        ranges = {declared.name: declared.range for declared in self.contract.inputs}
        return make_inputs(self.declared.named.tensors, self.declared.shapes, sizes, ranges, self.seed)

    def run(self, sizes: Mapping[str, int]) -> Case:
        inputs = self.inputs(sizes)
        with quiet():
            outputs = self.bind(self.models())(inputs)
        kept = {name: value.clone() for name, value in outputs.items()}  # one may be state, which a next case puts back
        return Case(case_name(sizes), dict(sizes), inputs, kept)

    def all(self) -> Iterator[Case]:
        """The case that was traced, then the others, the smallest first.

        ExportError where the model fails inside its declared range.
        """
        each = self._flops_of_an_element()
        traced = self.declared.sizes
        doubtful = [{**traced, name: size} for name, sizes in self.doubtful.items() for size in sizes]
        others = [point for point in case_points(self.declared.dims) if point not in (traced, *doubtful)]
        for point in [traced, *doubtful, *sorted(others, key=self._elements)]:
            if point in others and (why := self._too_much(point, each)):
                self.notes.append(f"case {case_name(point)} is left out: {why}")
                continue
            try:
                yield self.run(point)
            except ModelError as error:
                raise explain_sizes(self.run, self.declared, self.declared.sizes, point, error) from error

    def _too_much(self, point: Mapping[str, int], flops_of_an_element: float) -> str | None:
        size = self._elements(point) * max(value.element_size() for value in self.declared.named.tensors.values())
        if size > MAX_CASE_BYTES:
            return f"its inputs have {size / 1e6:.0f} MB"
        flops = flops_of_an_element * self._elements(point)
        return f"it takes about {flops / 1e12:.1f} TFLOP" if flops > MAX_FLOPS else None

    def _elements(self, sizes: Mapping[str, int]) -> int:
        return elements(self.declared.shapes, sizes)

    def _flops_of_an_element(self) -> float:
        """Floating-point operations of the model for each element of its inputs."""
        with FlopCounterMode(display=False) as counter, suppress(Exception):  # not every operator runs inside of it
            self.program()(self.inputs(self.declared.sizes))
        return float(counter.get_total_flops() / max(self._elements(self.declared.sizes), 1))

    def kept(self, cases: list[Case]) -> list[Case]:
        """Those that are stored: the smallest, and what fits into the budget."""
        if self.contract.random:
            self.notes.append("no golden cases are stored: the model draws random numbers")
            return []
        tensors: list[Input | Output] = [*self.contract.inputs, *self.contract.outputs]
        kept: list[Case] = []
        total = 0
        for case in sorted(cases, key=lambda case: self._elements(case.dims)):
            size = sum(nbytes(tensor, case.dims) for tensor in tensors)
            if kept and total + size > MAX_BYTES:
                self.notes.append(f"case {case.name} is proven, but not stored: it has {size / 1e6:.0f} MB")
                continue
            kept.append(case)
            total += size
        return kept


def try_example(declared: Declared, fresh: Callable[[], nn.Module], seed: int, notes: list[str]) -> list[str]:
    """Runs the model as the example says, then with the sizes to trace; the names of its outputs, in order.

    ExportError where it fails.
    """

    def attempt(sizes: Mapping[str, int]) -> Tensors:
        if elements(declared.shapes, sizes) > MAX_CASE_BYTES // 8:
            raise ModelError(f"{case_name(sizes)} is too large to try")
        return call_model(fresh(), declared.named, declared.inputs(sizes, seed))[0]

    try:
        outputs, dropped = call_model(fresh(), declared.named, declared.named.tensors)
        notes += [f"output `{name}` is None and left out" for name in dropped]
        works = declared.given
    except ModelError as error:
        found = find_working(attempt, declared.dims) if declared.supplied else None
        if found is None:
            raise ExportError(error.message.replace("failed", "fails on its example inputs", 1), error.hint) from error
        works = found
    if declared.sizes != works:
        try:
            outputs = attempt(declared.sizes)
        except ModelError as error:
            raise explain_sizes(attempt, declared, works, declared.sizes, error) from error
    return list(outputs)
