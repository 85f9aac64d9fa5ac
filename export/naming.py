"""Flat names for nested arguments and results: `batch.ids`, `pair.0`, and the way back."""

import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from inspect import Parameter
from typing import Any, NamedTuple, cast

import torch
from torch.utils import _pytree

from ..bundle_format.contract import DTYPES, Dtype, Scalar
from ..bundle_format.errors import ExportError

Tensors = dict[str, torch.Tensor]
Rebuild = Callable[[Iterator[Any]], Any]  # takes leaves off an iterator and gives the container back


class Leaf(NamedTuple):
    name: str
    value: Any


def dtype_name(dtype: torch.dtype) -> Dtype:
    """`float32` of `torch.float32`."""
    return cast(Dtype, str(dtype).removeprefix("torch."))


def dtype_of(name: str) -> torch.dtype:
    """`torch.float32` of `float32`, which is one of the contract's dtypes."""
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


class Named:
    """A model's example arguments taken apart into named leaves, and calls put together from named tensors.

    `names` are all leaves in call order; `tensors` those that are tensors, `constants` the others. `supplied` tensors
    take the place of leaves; those that the example does not have become keyword arguments.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        supplied: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        supplied = supplied or {}
        known = self.leaves(forward, args, kwargs)
        args, kwargs = _extended(
            forward, args, kwargs, {name: supplied[name] for name in supplied if name not in known}
        )
        leaves: list[Leaf] = []
        self._args = [_take_apart(value, name, leaves) for name, value in _positional(forward, args, kwargs)]
        self._kwargs = {name: _take_apart(value, name, leaves) for name, value in kwargs.items()}
        self.names = tuple(leaf.name for leaf in leaves)
        self.tensors: Tensors = {}
        self.constants: dict[str, Scalar] = {}
        for name, value in leaves:
            if name in self.tensors or name in self.constants:
                raise ExportError(f"two inputs have the flat name `{name}`", "rename a key of the example inputs")
            value = supplied.get(name, value)
            if isinstance(value, torch.Tensor):
                self.tensors[name] = plain(value, f"input `{name}`")
            else:
                self.constants[name] = value

    @staticmethod
    def leaves(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """All leaves of the arguments by flat names, also where the arguments are not complete."""
        leaves: list[Leaf] = []
        for name, value in [*_positional(forward, args, kwargs, partial=True), *kwargs.items()]:
            _take_apart(value, name, leaves)
        return {leaf.name: leaf.value for leaf in leaves}

    def call(self, inputs: Mapping[str, torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """`(args, kwargs)` of the model with these tensors in their places."""
        leaves = iter([inputs[name] if name in self.tensors else self.constants[name] for name in self.names])
        args = tuple(rebuild(leaves) for rebuild in self._args)
        return args, {name: rebuild(leaves) for name, rebuild in self._kwargs.items()}


def name_outputs(result: Any) -> tuple[Tensors, list[str]]:
    """A model's result as named tensors, and the names of entries that were dropped because they are None.

    A lone tensor is `output`, positional ones are `output_0`, …; ExportError for a result that is no tensor.
    """
    leaves: list[Leaf] = []
    _take_apart(result, "", leaves, "output")
    tensors: Tensors = {}
    dropped: list[str] = []
    for path, value in leaves:
        name = "output" if not path else f"output_{path}" if path[0].isdigit() else path
        if value is None:
            dropped.append(name)
        elif isinstance(value, torch.Tensor):
            tensors[name] = _describable(value, f"output `{name}`", _RETURN)
        else:
            hint = "return tensors only: leave it out, or make it a tensor"
            raise ExportError(f"output `{name}` is {_a(type(value))}, not a tensor", hint)
    if not tensors:
        raise ExportError("the model returns no tensor", "`forward` has to return tensors")
    return tensors, dropped


def plain(tensor: torch.Tensor, what: str) -> torch.Tensor:
    """The tensor as the contract can describe it: dense, on the CPU, of one of its dtypes, without gradient."""
    return _describable(tensor, what, _TAKE).detach().cpu()


class _WaysOut(NamedTuple):
    """Hints for a tensor that a contract cannot describe: complex, not dense, of another dtype."""

    complex: str
    sparse: str
    other: str


_TAKE = _WaysOut(
    "take real and imaginary part as a last axis of 2, and begin with `torch.view_as_complex(x)`",
    "take a dense tensor, and convert it inside the model",
    f"use one of {', '.join(DTYPES)}",
)
_RETURN = _WaysOut("return `torch.view_as_real(z)`", "return `x.to_dense()`", f"return one of {', '.join(DTYPES)}")


def _describable(tensor: torch.Tensor, what: str, ways_out: _WaysOut) -> torch.Tensor:
    """The tensor itself; ExportError if it is not dense or of a dtype that a contract does not have."""
    if tensor.layout != torch.strided or tensor.is_nested:
        kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        raise ExportError(f"{what} is not a dense tensor ({kind})", ways_out.sparse)
    if dtype_name(tensor.dtype) not in DTYPES:
        hint = ways_out.complex if tensor.is_complex() else ways_out.other
        raise ExportError(f"{what} has dtype {str(tensor.dtype).removeprefix('torch.')}", hint)
    return tensor


def _extended(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], extra: Tensors
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with `extra` tensors by parameter: positional where they follow the others, else by keyword."""
    kwargs = dict(kwargs)
    positional = not kwargs
    for parameter in list(inspect.signature(forward).parameters.values())[len(args) :]:
        if parameter.name not in extra:
            positional = False
        elif positional and parameter.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD):
            args = (*args, extra.pop(parameter.name))
        else:
            kwargs[parameter.name] = extra.pop(parameter.name)
    return args, {**kwargs, **extra}


def _positional(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], *, partial: bool = False
) -> list[tuple[str, Any]]:
    """Positional arguments with the names of the parameters that take them; `rest.0` for those of `*rest`."""
    signature = inspect.signature(forward)
    try:
        bound = (signature.bind_partial if partial else signature.bind)(*args, **kwargs)
    except TypeError as error:
        hint = "`example_inputs` is a tuple of positional or a dict of keyword arguments; `--input` adds to it by name"
        raise ExportError(f"the example inputs do not fit `forward{signature}`: {error}", hint) from None
    named: list[tuple[str, Any]] = []
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        if kind is Parameter.VAR_POSITIONAL:
            named.extend((f"{name}.{at}", each) for at, each in enumerate(value))
        elif kind is not Parameter.VAR_KEYWORD and name not in kwargs:
            named.append((name, value))
    return named


def _take_apart(value: Any, path: str, leaves: list[Leaf], what: str = "input") -> Rebuild:
    """Adds the leaves of `value` to `leaves`; the result puts a value of the same structure together."""
    parts = _parts(value, f"{what} `{path}`" if path else f"the {what}")
    if parts is None:
        leaves.append(Leaf(path, value))
        return next
    keys, values, make = parts
    inner = [
        _take_apart(each, f"{path}.{key}" if path else str(key), leaves, what)
        for key, each in zip(keys, values, strict=True)
    ]
    return lambda fresh: make([rebuild(fresh) for rebuild in inner])


Parts = tuple[list[Any], list[Any], Callable[[list[Any]], Any]]  # keys, values, and how to make it from values


def _parts(value: Any, what: str) -> Parts | None:
    """One level of a container; None for a leaf. ExportError for `what` that is neither."""
    if value is None or isinstance(value, (torch.Tensor, bool, int, float, str)):
        return None
    if isinstance(value, Mapping):
        return list(value), list(value.values()), lambda values: _refilled(value, values)
    if isinstance(value, (tuple, list)):
        fields = getattr(value, "_fields", None)
        kind = type(value)
        keys = list(fields) if fields else list(range(len(value)))
        return keys, list(value), kind._make if fields else kind  # type: ignore[union-attr]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        values = [getattr(value, name) for name in names]
        return names, values, lambda values: _with_fields(value, dict(zip(names, values, strict=True)))
    if type(value) in _pytree.SUPPORTED_NODES:
        node = _pytree.SUPPORTED_NODES[type(value)]
        values, context = node.flatten_fn(value)
        return list(range(len(values))), values, lambda values: node.unflatten_fn(values, context)
    hint = (
        "use a tensor, number, string, tuple, list, dict, namedtuple or dataclass, or register the class: "
        "`torch.utils._pytree.register_pytree_node`"
    )
    if type(value).__name__.endswith("Cache"):
        hint = "a cache cannot be an output of the contract: set `model.config.use_cache = False`"
    raise ExportError(f"{what} is {_a(type(value))}, which mctl cannot take apart", hint)


def _refilled(value: Mapping[Any, Any], values: list[Any]) -> Any:
    if not isinstance(value, MutableMapping):
        return dict(zip(value, values, strict=True))
    fresh = copy.copy(value)  # keeps the class and what else it holds
    for key, each in zip(value, values, strict=True):
        fresh[key] = each
    return fresh


def _with_fields(value: Any, fields: dict[str, Any]) -> Any:
    fresh = copy.copy(value)
    for name, each in fields.items():
        object.__setattr__(fresh, name, each)  # frozen ones too
    return fresh


def _a(kind: type) -> str:
    return f"{'an' if kind.__name__[0] in 'aeiouAEIOU' else 'a'} `{kind.__name__}`"
