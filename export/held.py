"""Tensors that a model holds in plain objects (a cache, a list), where torch.export does not look for state."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from logging import Logger
from types import ModuleType
from typing import Any

import torch
from torch import nn

_DEEP = 8  # objects inside one another
_OWN = ("_parameters", "_buffers", "_modules")  # where torch.export does look


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor at `owner[key]`, and the buffer that it is."""

    owner: Any  # a list, or the dict of an object's attributes
    key: Any
    tensor: torch.Tensor
    module: nn.Module
    buffer: str


def held_buffers(model: nn.Module, *, register: bool = False) -> list[Held]:
    """Tensors in plain objects that are buffers of the model's as well, like those of a cache.

    `register`: all other tensors there become buffers of the model, named by their places.
    """
    buffers = {id(value): (module, name) for module in model.modules() for name, value in module._buffers.items()}
    found = []
    for owner, key, path in _places(model):
        tensor = owner[key]
        if register and id(tensor) not in buffers:
            name = path.replace(".", "_")
            while hasattr(model, name):
                name += "_"
            model.register_buffer(name, tensor)
            buffers[id(tensor)] = model, name
        if id(tensor) in buffers:
            found.append(Held(owner, key, tensor, *buffers[id(tensor)]))
    return found


def has_tensors(model: nn.Module) -> bool:
    """Whether there is any tensor in a plain object."""
    return next(_places(model), None) is not None


@contextmanager
def traced_as_buffers(held: Sequence[Held]) -> Iterator[None]:
    """While torch traces, each of them is what stands for its buffer."""
    for each in held:
        each.owner[each.key] = each.module._buffers[each.buffer]
    try:
        yield
    finally:
        for each in held:
            each.owner[each.key] = each.tensor


def _places(model: nn.Module) -> Iterator[tuple[Any, Any, str]]:
    """(owner, key, path) of every tensor below an attribute that is no module, parameter or buffer."""
    seen: set[int] = set()
    for prefix, module in list(model.named_modules()):
        attributes = vars(module)
        for name in [name for name in attributes if name not in _OWN and not name.endswith("_hooks")]:
            yield from _below(attributes, name, f"{prefix}.{name}".lstrip("."), seen, _DEEP)


def _below(owner: Any, key: Any, path: str, seen: set[int], deep: int) -> Iterator[tuple[Any, Any, str]]:
    value = owner[key]
    if isinstance(value, torch.Tensor):
        if not isinstance(value, nn.Parameter):
            yield owner, key, path
        return
    inside = _inside(value)
    if inside is None or id(value) in seen or not deep:
        return
    seen.add(id(value))
    for name in list(inside) if isinstance(inside, dict) else range(len(inside)):
        yield from _below(inside, name, f"{path}.{name}", seen, deep - 1)


def _inside(value: Any) -> dict[Any, Any] | list[Any] | None:
    """What a plain object holds, where it can be put in place; None for anything else."""
    if isinstance(value, (dict, list)):
        return value
    if isinstance(value, tuple):  # its tensors stay, those inside its objects are found
        return [each for each in value if not isinstance(each, torch.Tensor)]
    if isinstance(value, (nn.Module, ModuleType, Logger)) or callable(value) or not hasattr(value, "__dict__"):
        return None
    attributes: dict[str, Any] = vars(value)
    return attributes
