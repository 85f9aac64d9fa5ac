"""Flat names of nested arguments and results, and the way back."""

import dataclasses
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from mctl.bundle_format.errors import ExportError
from mctl.export.naming import Named, name_outputs

Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass(frozen=True)
class Batch:
    ids: torch.Tensor
    note: str = "kept"


class Opaque:
    pass


def tensor(value: int = 0) -> torch.Tensor:
    return torch.tensor([value])


def accepts(a: Any, b: Any = None, *rest: Any, k: Any = 1, **more: Any) -> None:
    pass


def test_names_of_every_kind_of_container() -> None:
    args = (Batch(tensor()), Pair(tensor(), [tensor(), tensor()]), tensor())
    kwargs = {"k": {"x": tensor(), "y": (tensor(), 5)}, "other": True}
    named = Named(accepts, args, kwargs)
    assert list(named.tensors) == ["a.ids", "b.left", "b.right.0", "b.right.1", "rest.0", "k.x", "k.y.0"]
    assert named.constants == {"a.note": "kept", "k.y.1": 5, "other": True}


leaves = st.integers(0, 99).map(tensor) | st.integers(0, 9) | st.none()
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.sampled_from(["p", "q"]), inner, max_size=2)
        | st.builds(Pair, inner, inner)
        | st.dictionaries(st.sampled_from(["p", "q"]), inner, max_size=2).map(OrderedDict)
    ),
    max_leaves=6,
)


@given(trees, trees)
def test_a_call_puts_together_what_was_taken_apart(first: Any, second: Any) -> None:
    named = Named(accepts, (first,), {"k": second})
    fresh = {name: value + 100 for name, value in named.tensors.items()}
    args, kwargs = named.call(fresh)
    again = Named(accepts, args, kwargs)
    assert again.names == named.names and again.constants == named.constants
    assert all(again.tensors[name].equal(value) for name, value in fresh.items())
    assert repr(type(args[0])) == repr(type(first))


def test_containers_keep_their_class_and_what_else_they_hold() -> None:
    named = Named(accepts, (Batch(tensor(1), "other"),), {"k": OrderedDict(y=tensor(2))})
    args, kwargs = named.call({"a.ids": tensor(3), "k.y": tensor(4)})
    assert args == (Batch(args[0].ids, "other"),) and args[0].ids.item() == 3
    assert type(kwargs["k"]) is OrderedDict and kwargs["k"]["y"].item() == 4


def test_supplied_tensors_replace_and_add() -> None:
    named = Named(accepts, (tensor(1),), {}, {"a": tensor(7), "b": tensor(8), "k": tensor(9)})
    args, kwargs = named.call(named.tensors)
    assert [value.item() for value in args] == [7, 8] and kwargs["k"].item() == 9
    assert list(named.tensors) == ["a", "b", "k"]


@pytest.mark.parametrize(
    ("args", "kwargs", "why"),
    [
        ((), {}, "missing a required argument: 'a'"),
        ((1,), {"a": 2}, "multiple values for argument 'a'"),
        (({"x.y": tensor(), "x": {"y": tensor()}},), {}, "two inputs have the flat name `a.x.y`"),
        ((Opaque(),), {}, "input `a` is an `Opaque`, which mctl cannot take apart"),
        (({"inner": [Opaque()]},), {}, "input `a.inner.0` is an `Opaque`"),
        ((torch.tensor([1j]),), {}, "input `a` has dtype complex64"),
        ((torch.eye(2).to_sparse(),), {}, "input `a` is not a dense tensor"),
    ],
)
def test_arguments_that_are_refused(args: tuple[Any, ...], kwargs: dict[str, Any], why: str) -> None:
    with pytest.raises(ExportError) as refused:
        Named(accepts, args, kwargs)
    assert why in refused.value.message


def test_a_container_registered_with_torch_is_taken_apart() -> None:
    class Registered:
        def __init__(self, one: Any, two: Any) -> None:
            self.one, self.two = one, two

    torch.utils._pytree.register_pytree_node(
        Registered, lambda value: ([value.one, value.two], None), lambda values, context: Registered(*values)
    )
    named = Named(accepts, (Registered(tensor(1), tensor(2)),), {})
    args, _ = named.call({"a.0": tensor(3), "a.1": tensor(4)})
    assert isinstance(args[0], Registered) and (args[0].one.item(), args[0].two.item()) == (3, 4)


@pytest.mark.parametrize(
    ("result", "names"),
    [
        (tensor(), ["output"]),
        ((tensor(), tensor()), ["output_0", "output_1"]),
        ([(tensor(),), {"x": tensor()}], ["output_0.0", "output_1.x"]),
        ({"logits": tensor(), "aux": {"loss": tensor()}}, ["logits", "aux.loss"]),
        (Pair(tensor(), tensor()), ["left", "right"]),
    ],
)
def test_names_of_outputs(result: Any, names: list[str]) -> None:
    assert list(name_outputs(result)[0]) == names


def test_none_among_the_outputs_is_left_out_and_told() -> None:
    assert [list(each) for each in name_outputs((tensor(), None))] == [["output_0"], ["output_1"]]


@pytest.mark.parametrize(
    ("result", "why"),
    [
        ((tensor(), 3), "output `output_1` is an `int`, not a tensor"),
        (None, "the model returns no tensor"),
        (Opaque(), "the output is an `Opaque`"),
        ({"memory": Opaque()}, "output `memory` is an `Opaque`"),
    ],
)
def test_outputs_that_are_refused(result: Any, why: str) -> None:
    with pytest.raises(ExportError) as refused:
        name_outputs(result)
    assert why in refused.value.message


def test_a_cache_among_the_outputs_has_its_own_way_out() -> None:
    class DynamicCache:
        pass

    with pytest.raises(ExportError) as refused:
        name_outputs({"past": DynamicCache()})
    assert "use_cache = False" in str(refused.value.hint)


def test_parameters_of_a_module() -> None:
    assert list(Named(nn.Linear(2, 2).forward, (tensor(),), {}).tensors) == ["input"]
