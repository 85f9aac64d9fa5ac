"""Every class of fault, made with functions in the place of compiled code, is found and named."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from mctl.bundle_format.contract import Dim, Input, Output, State
from mctl.bundle_format.manifest import Tolerance
from mctl.export.golden import Case
from mctl.parity.check import run_checks
from mctl.parity.report import Result, fair_tolerances

from .fakes import BATCH, SEQ, Compiled, Model, Tensors, contract, subject, verdicts


def checked(*arguments: object, **more: object) -> list[Result]:
    return run_checks(subject(*arguments, **more), lambda text: None)  # type: ignore[arg-type]


def the_same(function: Callable[[torch.Tensor], torch.Tensor]) -> Model:
    return lambda inputs: {"y": function(inputs["x"])}


good = the_same(lambda x: torch.tanh(x) * 2)


def eager_good() -> Model:
    return good


def test_a_faithful_model_passes_everything() -> None:
    found = verdicts(checked(good, eager_good))
    assert found == {kind: {"pass"} for kind in ("repeat", "values", "rows")}


def test_another_function_differs() -> None:
    results = checked(the_same(lambda x: torch.tanh(x) * 2.001), eager_good)
    assert verdicts(results)["values"] == {"pass", "differs"}  # zeros are zeros either way
    zeros = next(result for result in results if result.case == "batch=2/zeros")
    assert zeros.verdict == "pass"


def test_a_stored_case_is_enough() -> None:
    x = torch.ones(3, 4)
    golden = Case("batch=3", {"batch": 3}, {"x": x}, {"y": torch.tanh(x) * 2})
    assert verdicts(checked(good, golden=(golden,)))["golden"] == {"pass"}
    assert verdicts(checked(the_same(torch.tanh), golden=(golden,)))["golden"] == {"differs"}


def steps(x: torch.Tensor) -> torch.Tensor:
    return (x / 3 * 640).round().to(torch.int64)


def above(x: torch.Tensor) -> torch.Tensor:
    return (x / 3 * 640 - 0.5) % 1 > 0.5


def place(x: torch.Tensor) -> torch.Tensor:
    return (x / 3).exp().argmax(1, keepdim=True).expand(-1, 4).contiguous()


AT_EDGES = torch.tensor([[(k + 0.5) * 3 / 640 for k in (0, 1, 3, 4)]])  # none is a float32, as that of 2 would be
ALL_ALIKE = torch.full((1, 4), 0.7) * torch.tensor([[1.0, 1 + 1e-7, 1 - 1e-7, 0.5]])


@pytest.mark.parametrize(
    ("function", "x", "other_side", "step"),
    [
        (steps, AT_EDGES, lambda x: 2 * (x.double() / 3 * 640).floor().long() + 1 - steps(x), 1.0),
        (above, AT_EDGES, lambda x: ~above(x), 1.0),
        (place, ALL_ALIKE, lambda x: torch.full((1, 4), 2), 2.0),
    ],
    ids=["rounded", "compared", "the place of the largest"],
)
def test_integers_made_from_floats_may_fall_to_either_side_of_an_edge(
    function: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    other_side: Callable[[torch.Tensor], torch.Tensor],
    step: float,
) -> None:
    dtype = "bool" if function is above else "int64"
    model = contract(outputs=(Output(name="y", dtype=dtype, shape=("batch", 4)),))
    stored = (Case("batch=1", {"batch": 1}, {"x": x}, {"y": function(x)}),)

    def compiled(change: Callable[[torch.Tensor], torch.Tensor]) -> Model:
        return the_same(lambda given: change(given) if torch.equal(given, x) else function(given))

    def golden(change: Callable[[torch.Tensor], torch.Tensor]) -> Result:
        results = checked(compiled(change), lambda: the_same(function), model=model, golden=stored)
        return next(result for result in results if result.check == "golden")

    fallen = golden(other_side)
    assert (fallen.verdict, fallen.outputs[0].rule) == ("pass", "edge")
    assert fair_tolerances([fallen]) == {"y": Tolerance(rtol=0.0, atol=step)}, "a server compares the case too"
    assert fair_tolerances([golden(function)]) == {"y": Tolerance(rtol=0.0, atol=step)}, "on another machine perhaps"
    if function is steps:
        assert golden(lambda x: function(x) + 7).verdict == "differs"
    if function is place:
        assert golden(lambda x: torch.full((1, 4), 3)).verdict == "differs"


def test_integers_that_stand_at_no_edge_are_exact() -> None:
    x = torch.tensor([[1.0, 2.0, 3.0, 250.0]])  # whole numbers: nothing is rounded on the way
    model = contract(outputs=(Output(name="y", dtype="int32", shape=("batch", 4)),))

    def eager(given: torch.Tensor) -> torch.Tensor:
        return (given * 4).floor().int()

    wrong = the_same(lambda given: torch.where(given == 3.0, eager(given) - 1, eager(given)))
    golden = (Case("batch=1", {"batch": 1}, {"x": x}, {"y": eager(x)}),)
    results = checked(wrong, lambda: the_same(eager), model=model, golden=golden)
    assert next(result for result in results if result.check == "golden").verdict == "differs"
    assert fair_tolerances(results) == {}


def test_nan_only_in_the_compiled_model() -> None:
    results = checked(the_same(lambda x: x / x.abs() * x.abs()), lambda: the_same(lambda x: x))  # NaN at 0
    zeros = next(result for result in results if result.case == "batch=2/zeros")
    assert zeros.verdict == "differs" and "NaN at [0, 0] where eager has 0" in zeros.outputs[0].fault


def test_a_specialised_dim_gives_another_shape() -> None:
    def baked(inputs: Tensors) -> Tensors:
        return good({"x": inputs["x"][:2]})

    with_eager, alone = checked(baked, eager_good), checked(baked)
    assert any(r.outputs[0].fault == "shape is [2, 4], eager gives [8, 4]" for r in with_eager if r.outputs)
    assert "output 'y' has shape [2, 4], declared [8, 4]" in [r.detail for r in alone if r.check == "values"]


def test_raising() -> None:
    def picky(inputs: Tensors) -> Tensors:
        if inputs["x"].shape[0] > 4:
            raise RuntimeError("too many")
        return good(inputs)

    def eager_picky() -> Model:
        return picky

    assert verdicts(checked(picky, eager_good))["values"] == {"pass", "compiled-raises"}
    assert verdicts(checked(good, eager_picky))["values"] == {"pass", "eager-raises-compiled-returns"}
    assert verdicts(checked(picky, eager_picky))["values"] == {"pass"}


def test_an_embedding_that_wraps_negative_ids() -> None:
    """Eager refuses -1; compiled code that wraps it gives the last row."""
    table = torch.arange(40.0).reshape(10, 4)
    model = contract(inputs=(Input(name="x", dtype="int64", shape=("batch",)),))
    seen = Case("batch=2", {"batch": 2}, {"x": torch.tensor([0, 9])}, {"y": table[[0, 9]]})
    wrapping, strict = (
        the_same(lambda x: table[torch.where(x < 0, x + 10, x)]),
        the_same(lambda x: nn.functional.embedding(x, table)),
    )
    results = {r.case: r.verdict for r in checked(wrapping, lambda: strict, model=model, golden=(seen,))}
    assert results["batch=2/below"] == "eager-raises-compiled-returns" and results["batch=2/normal"] == "pass"
    ranged = contract(inputs=(Input(name="x", dtype="int64", shape=("batch",), range=(0, 9)),))
    assert verdicts(checked(wrapping, lambda: strict, model=ranged, golden=(seen,)))["values"] == {"pass"}


def test_random() -> None:
    noisy = the_same(lambda x: x + torch.rand(x.shape))
    found = checked(noisy, lambda: noisy)
    assert verdicts(found)["repeat"] == {"random"} and not all(result.ok for result in found)
    declared = checked(noisy, lambda: noisy, model=contract(random=True))
    assert verdicts(declared) == {"repeat": {"random"}, "values": {"pass"}} and all(r.ok for r in declared)
    other_shape = checked(lambda i: {"y": torch.rand(1, 4)}, lambda: noisy, model=contract(random=True))
    assert "differs" in verdicts(other_shape)["values"]


class Counter:
    """y = x + the number of calls; `buffer` is where it counts."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, inputs: Tensors) -> Tensors:
        self.calls += 1
        return {"y": inputs["x"] + self.calls}

    def reset(self) -> None:
        self.calls = 0


def test_hidden_state() -> None:
    assert verdicts(checked(Counter()))["repeat"] == {"stateful"}


def test_declared_state_is_compared_as_a_sequence() -> None:
    model = contract(batch_dim=None, state=(State(name="n", dtype="int64", shape=()),))
    counting = Counter()
    found = verdicts(checked(Compiled(counting, counting.reset), Counter, model=model))
    assert found == {"values": {"pass"}}
    stuck = the_same(lambda x: x + 1)  # 1, 1, 1 in place of 1, 2, 3
    assert verdicts(checked(stuck, Counter, model=model)) == {"values": {"differs"}}


def test_outputs_that_share_memory_from_call_to_call() -> None:
    memory = torch.zeros(8, 4)

    def sharing(inputs: Tensors) -> Tensors:
        rows = memory[: inputs["x"].shape[0]]
        rows.copy_(good(inputs)["y"])
        return {"y": rows}

    (repeat,) = (result for result in checked(sharing, eager_good) if result.check == "repeat")
    assert repeat.verdict == "differs" and "overwritten by later calls" in repeat.detail


@pytest.mark.parametrize("eager_takes_them", [False, True])
def test_values_that_eager_does_not_take_are_those_of_stored_cases(eager_takes_them: bool) -> None:
    """As offsets that have to begin with 0: no random ones do."""

    def picky(inputs: Tensors) -> Tensors:
        if inputs["x"][0, 0] != 0:
            raise RuntimeError("it has to begin with 0")
        return eager_good()(inputs)

    x = torch.zeros(2, 4)
    stored = (Case("example", {"batch": 2}, {"x": x}, eager_good()({"x": x})),)
    results = checked(picky, eager_good if eager_takes_them else lambda: picky, golden=stored)
    (repeat,) = (result for result in results if result.check == "repeat")
    assert (repeat.verdict == "compiled-raises") == eager_takes_them
    assert (repeat.case == "example") == (not eager_takes_them)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.softmax(x, dim=0),
        lambda x: nn.functional.batch_norm(x, None, None, training=True),
        lambda x: x - 1e-3 * x.mean(),
        lambda x: x + x[:1] * 0,  # only NaN shows it
        lambda x: x.roll(1, 0) * 0 + x,
        lambda x: x * torch.arange(1, len(x) + 1).unsqueeze(1),  # depends on the place
    ],
    ids=["softmax over the batch", "batch norm in training", "mean", "times zero", "neighbour", "position"],
)
def test_rows_that_depend_on_each_other(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    model = the_same(function)
    found = verdicts(checked(model, lambda: model))
    assert "differs" in found["rows"] and found["values"] == {"pass"}


def test_rows_of_integers_are_filled_with_the_largest() -> None:
    model = contract(inputs=(Input(name="x", dtype="int64", shape=("batch", 4), range=(0, 10**9)),))
    dependent = the_same(lambda x: (x + (x.max() == 10**9) * 10**8).float())
    assert "differs" in verdicts(checked(dependent, lambda: dependent, model=model))["rows"]


def test_rows_of_an_output_that_has_several_for_each() -> None:
    model = contract(outputs=(Output(name="y", dtype="float32", shape=("2*batch", 4)),))
    doubled = the_same(lambda x: torch.stack([x, x + 1], 1).flatten(0, 1))
    assert verdicts(checked(doubled, lambda: doubled, model=model))["rows"] == {"pass"}
    interleaved = the_same(lambda x: torch.cat([x, x + 1]))
    assert "differs" in verdicts(checked(interleaved, lambda: interleaved, model=model))["rows"]


def test_a_smallest_batch_of_more_than_one() -> None:
    model = contract(dims=(Dim(name="batch", min=2, max=8),))
    assert verdicts(checked(good, eager_good, model=model, buckets={"batch": (2, 8)}))["rows"] == {"pass"}


PADDED = {
    "dims": (BATCH, SEQ),
    "inputs": (
        Input(name="x", dtype="float32", shape=("batch", "seq"), pad=0),
        Input(name="mask", dtype="int64", shape=("batch", "seq"), range=(0, 1), pad=0),
    ),
    "outputs": (Output(name="y", dtype="float32", shape=("batch", "seq")),),
}


def test_padding_that_is_ignored_and_that_is_not() -> None:
    def masked(inputs: Tensors) -> Tensors:
        mask = inputs["mask"]
        mean = (inputs["x"] * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
        return {"y": (inputs["x"] - mean) * mask}

    def unmasked(inputs: Tensors) -> Tensors:
        return {"y": inputs["x"] - inputs["x"].mean(1, keepdim=True)}

    buckets = {"batch": (1, 8), "seq": (4, 16)}
    found = checked(masked, lambda: masked, model=contract(**PADDED), buckets=buckets)
    assert verdicts(found)["padding"] == {"pass"}
    assert [r.case for r in found if r.check == "padding"] == ["seq=1 padded to 4", "seq=5 padded to 16"]
    assert "differs" in verdicts(checked(unmasked, model=contract(**PADDED), buckets=buckets))["padding"]


def test_bf16_that_is_fine_and_that_is_not() -> None:
    torch.manual_seed(0)
    weight = torch.randn(4, 4).bfloat16()
    model = contract(
        inputs=(Input(name="x", dtype="bfloat16", shape=("batch", 4)),),
        outputs=(Output(name="y", dtype="bfloat16", shape=("batch", 4)),),
    )

    def eager() -> Model:
        return the_same(lambda x: torch.nn.functional.gelu(x @ weight.to(x.dtype)) @ weight.to(x.dtype))

    def fused(x: torch.Tensor) -> torch.Tensor:  # in float32 up to the end, as compiled code does it
        wide = weight.float()
        return (torch.nn.functional.gelu(x.float() @ wide) @ wide).bfloat16()

    assert verdicts(checked(the_same(fused), eager, model=model))["values"] == {"pass"}
    coarse = the_same(lambda x: (fused(x).float() * 1.06).bfloat16())
    assert "differs" in verdicts(checked(coarse, eager, model=model))["values"]


def test_rows_are_held_to_no_more_than_eager_is_worth() -> None:
    """bf16 inside, float32 outside: another batch size rounds elsewhere, by more than float32's tolerance."""
    torch.manual_seed(0)
    first, second = torch.randn(4, 64) / 2, torch.randn(64, 4) / 8

    def rounding(x: torch.Tensor) -> torch.Tensor:
        wide = x.double() if x.dtype is torch.float64 else x.bfloat16()
        return ((wide @ first.to(wide.dtype)) @ second.to(wide.dtype)).to(x.dtype)

    def elsewhere(x: torch.Tensor) -> torch.Tensor:
        if len(x) == 1:
            return rounding(x)
        return ((x.bfloat16().float() @ first.bfloat16().float()) @ second.bfloat16().float()).float()

    results = checked(the_same(elsewhere), lambda: the_same(rounding))
    assert verdicts(results) == {kind: {"pass"} for kind in ("repeat", "values", "rows")}
    fair = fair_tolerances(results)["y"]
    assert 1e-3 < fair.rtol < 1e-1
    leaking = the_same(lambda x: elsewhere(x) + (0.3 if len(x) > 1 else 0.0))
    assert "differs" in verdicts(checked(leaking, lambda: leaking))["rows"]


def test_what_is_beyond_the_budget_is_left_out_and_said() -> None:
    huge = contract(
        dims=(Dim(name="batch", min=1, max=4096), Dim(name="seq", min=1, max=512)),
        inputs=(Input(name="x", dtype="float32", shape=("batch", "seq", 64)),),
        outputs=(Output(name="y", dtype="float32", shape=("batch", "seq", 64)),),
    )
    under_test = subject(the_same(lambda x: x * 2), lambda: the_same(lambda x: x * 2), model=huge, buckets={})
    results = run_checks(under_test, lambda text: None)
    assert verdicts(results)["values"] == {"pass"}
    assert under_test.left_out == ["batch=4096,seq=512/normal: 1.07 GB of inputs and outputs, allowed 268 MB"]
