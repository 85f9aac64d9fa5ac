"""The user's model in the state that it was loaded in, as often as it is asked for."""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from ..bundle_format.errors import ModelError


class Fresh:
    """Gives copies with buffers and attributes of their own, so that calls leave no trace; parameters are shared.

    Some models cannot be copied: a hook that keeps an output for later, say, is a function that holds the model, and a
    copy's hook would write to the model that was copied. Such a model is given itself, with its state put back: then
    what an earlier call returned may change, as it may be that state.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._state = _State(model) if _holds_itself(model) else None

    def __call__(self) -> nn.Module:
        if self._state is None:
            try:
                return copy.deepcopy(self._model, {id(parameter): parameter for parameter in self._model.parameters()})
            except Exception:  # a lock, a file, or what else no copy can be made of
                self._state = _State(self._model)
        self._state.put_back()
        return self._model

    def double(self) -> nn.Module:
        """A copy in float64. ModelError where there can be none."""
        if self._state is not None:
            raise ModelError("the model cannot be copied")
        return copy.deepcopy(self._model).double()


def _holds_itself(model: nn.Module) -> bool:
    """Whether a function of the model's holds a part of it, and so would a copy's."""
    return any(_is_part(held) for function in _functions(model) for held in _held_by(function))


def _functions(model: nn.Module) -> Iterator[Callable[..., Any]]:
    """Hooks, and functions that stand in the place of methods."""
    for module in model.modules():
        for name, value in vars(module).items():
            values = value.values() if name.endswith("_hooks") and isinstance(value, dict) else [value]
            yield from (each for each in values if callable(each))


def _held_by(function: Any) -> Iterator[Any]:
    """What a function was made with, which a copy of it has too."""
    if isinstance(function, partial):
        function = function.func  # its arguments are copied
    for cell in getattr(function, "__closure__", None) or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not filled yet
            continue
    yield from getattr(function, "__defaults__", None) or ()


def _is_part(held: Any) -> bool:
    held = getattr(held, "__self__", held)  # a method holds its object
    return isinstance(held, (nn.Module, list, dict, set))


class _State:
    """Attributes and buffers of all modules, and the containers that they and their functions hold."""

    def __init__(self, model: nn.Module) -> None:
        self._attributes = [(module, dict(vars(module))) for module in model.modules()]
        held = [value for _, attributes in self._attributes for value in attributes.values()]
        held += [part for function in _functions(model) for part in _held_by(function)]
        self._containers = [(value, copy.copy(value)) for value in held if isinstance(value, (list, dict, set))]
        inside = [
            each for value, _ in self._containers for each in (value.values() if isinstance(value, dict) else value)
        ]
        self._tensors = [
            (value, value.detach().clone())
            for value in [*held, *inside]
            if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)
        ]

    def put_back(self) -> None:
        for module, attributes in self._attributes:
            vars(module).clear()
            vars(module).update(attributes)
        for container, content in self._containers:
            if isinstance(container, list):
                container[:] = content
            else:
                container.clear()
                container.update(content)
        with torch.no_grad():
            for tensor, value in self._tensors:
                tensor.copy_(value)
