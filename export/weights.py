"""Weights from a file into a model: safetensors or a torch checkpoint, tensors only."""

import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from ..bundle_format.errors import ExportError, UsageError
from .naming import dtype_name

_LISTED = 10  # faulty keys shown of each sort
_WRAPPERS = ("module.", "_orig_mod.")  # of DataParallel and `torch.compile`, before every key
_NESTS = ("state_dict", "model_state_dict", "model")  # where training scripts put the weights


def load_weights(model: nn.Module, path: Path) -> None:
    """Copies the tensors of `path` into `model`, strictly: every key, every shape; dtypes are converted to the model's.

    UsageError where there is no file; ExportError for a file that holds more than tensors, or other tensors.
    """
    if not path.is_file():
        raise UsageError(f"there is no file `{path}`", "give a safetensors file or a torch checkpoint to `--weights`")
    wanted = {key: value for key, value in model.state_dict(keep_vars=True).items() if isinstance(value, torch.Tensor)}
    given = _unwrapped(_read(path), wanted)
    tied = _tied(wanted)
    absent = [key for key in wanted if key not in given and not any(other in given for other in tied[id(wanted[key])])]
    faults = [
        *_listed("missing", absent),
        *_listed("unexpected", [key for key in given if key not in wanted]),
        *_listed("misshapen", [fault for key in wanted if (fault := _misfit(key, given, wanted))]),
        *_listed("tied in the model, but not equal in the file", _untied(tied.values(), given)),
    ]
    if faults:
        raise ExportError(
            f"the weights in `{path.name}` do not fit the model: {'; '.join(faults)}", _hint(given, wanted)
        )
    if not any(value.is_meta for value in wanted.values()):
        model.load_state_dict(given, strict=False)
        return
    # a model without storage of its own takes the mapped tensors themselves
    complete = {key: given[next(other for other in tied[id(wanted[key])] if other in given)] for key in wanted}
    model.load_state_dict({key: complete[key].to(wanted[key].dtype) for key in wanted}, assign=True)


def _read(path: Path) -> dict[str, torch.Tensor]:
    """Named tensors, mapped from the file."""
    if path.suffix == ".safetensors" or _looks_like_safetensors(path):
        try:
            return load_file(path)
        except SafetensorError as error:
            raise ExportError(f"`{path.name}` is no sound safetensors file: {error}") from error
    return _tensors(_read_checkpoint(path), path)


def _looks_like_safetensors(path: Path) -> bool:
    with path.open("rb") as file:
        head = file.read(9)
    return len(head) == 9 and head[8:] == b"{" and int.from_bytes(head[:8], "little") < path.stat().st_size


def _read_checkpoint(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            is_zip = file.read(2) == b"PK"
        return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip or None)
    except pickle.UnpicklingError as error:
        why = _unsafe_global(str(error))
        hint = "save the tensors alone, where you trust the file: `torch.save(model.state_dict(), …)`"
        raise ExportError(f"`{path.name}` is a checkpoint that needs more than tensors{why}", hint) from error
    except (RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        hint = "`--weights` takes a safetensors file or what `torch.save(model.state_dict(), …)` wrote"
        raise ExportError(f"`{path.name}` is neither safetensors nor a torch checkpoint", hint) from error


def _unsafe_global(text: str) -> str:
    """`: it names the class x.Y`, where torch says so."""
    _, found, rest = text.partition("Unsupported global: GLOBAL ")
    return f": it needs `{rest.split()[0]}`" if found else ""


def _tensors(loaded: Any, path: Path) -> dict[str, torch.Tensor]:
    """The state dict in what a checkpoint holds."""
    if isinstance(loaded, Mapping):
        for nest in _NESTS:
            if isinstance(loaded.get(nest), Mapping):
                loaded = loaded[nest]
                break
        tensors = {key: value for key, value in loaded.items() if isinstance(value, torch.Tensor)}
        if tensors and all(isinstance(key, str) for key in tensors):
            return tensors
    hint = "`--weights` takes a safetensors file or what `torch.save(model.state_dict(), …)` wrote"
    raise ExportError(f"`{path.name}` holds no named tensors", hint)


def _unwrapped(given: dict[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The keys without what a wrapper of the model put before all of them."""
    for prefix in _WRAPPERS * 2:  # one may be around the other
        if given and all(key.startswith(prefix) and key not in wanted for key in given):
            given = {key.removeprefix(prefix): value for key, value in given.items()}
    return given


def _tied(wanted: Mapping[str, torch.Tensor]) -> dict[int, list[str]]:
    """The keys of each tensor, which are several where weights are tied."""
    keys: dict[int, list[str]] = {}
    for key, value in wanted.items():
        keys.setdefault(id(value), []).append(key)
    return keys


def _untied(groups: Iterable[list[str]], given: Mapping[str, torch.Tensor]) -> list[str]:
    shared = [[key for key in keys if key in given] for keys in groups]
    return [
        " and ".join(keys)
        for keys in shared
        if any(given[key].shape == given[keys[0]].shape and not given[key].equal(given[keys[0]]) for key in keys[1:])
    ]


def _misfit(key: str, given: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> str:
    if key not in given:
        return ""
    got, want = given[key], wanted[key]
    if got.shape != want.shape:
        return f"{key} is {_shape(got)}, the model has {_shape(want)}"
    if got.dtype.is_floating_point != want.dtype.is_floating_point:
        return f"{key} is {dtype_name(got.dtype)}, the model has {dtype_name(want.dtype)}"
    return ""


def _shape(tensor: torch.Tensor) -> str:
    return f"[{','.join(map(str, tensor.shape))}]"


def _listed(what: str, keys: list[str]) -> list[str]:
    if not keys:
        return []
    more = f" and {len(keys) - _LISTED} more" if len(keys) > _LISTED else ""
    return [f"{len(keys)} {what} ({', '.join(keys[:_LISTED])}{more})"]


def _hint(given: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> str | None:
    """Where the keys differ by one prefix only, say so."""
    for prefix in {f"{key.split('.')[0]}." for key in given}:
        if {key.removeprefix(prefix) for key in given} == set(wanted):
            return f"the keys of the file begin with `{prefix}`: save the state dict of the module inside"
    for prefix in {f"{key.split('.')[0]}." for key in wanted}:
        if {key.removeprefix(prefix) for key in wanted} == set(given):
            return f"the keys of the model begin with `{prefix}`: the file was saved from the module inside"
    return None
