"""The user's model file: imports it, finds the model and its example inputs, loads weights safely."""

import hashlib
import importlib.util
import inspect
import random
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from ..bundle_format import manifest
from ..bundle_format.contract import Contract
from ..bundle_format.errors import ExportError, UsageError
from ..bundle_format.handler_files import HandlerFiles
from .dims import DimSpec
from .folder import load_folder, split_folder
from .fresh import Fresh
from .naming import Named
from .running import Run, run_model
from .usercode import user_code
from .weights import load_weights


@dataclass(frozen=True, slots=True)
class Source:
    """A model ready to be called: on the CPU, in eval mode, with its example arguments."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    record: manifest.Source
    preprocessing: dict[str, Any] = field(default_factory=dict)
    dims: tuple[DimSpec, ...] = ()  # of a folder: those that nobody declared
    pads: Mapping[str, int | float] = field(default_factory=dict)
    handler: HandlerFiles | None = None
    fresh: Fresh = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "fresh", Fresh(self.model))

    def named(self, supplied: Mapping[str, torch.Tensor] | None = None) -> Named:
        """The arguments by flat names; `supplied` tensors replace or add to those of the example."""
        return Named(self.model.forward, self.args, self.kwargs, supplied)


def load_source(spec: str, *, weights: Path | None = None, seed: int = 0) -> Source:
    """Imports `MODEL.py[:NAME]` and makes its model and example inputs, after `seed` is set.

    `FOLDER:TASK` is a Hugging Face folder. UsageError where the file or a name in it is missing; ExportError where the
    user's code fails.
    """
    if (found := split_folder(spec)) is not None:
        if weights is not None:
            raise UsageError("`--weights` goes with a Python file: a folder has its own")
        return _source_of_folder(*found)
    path, name = _split(spec)
    seed_everything(seed)
    module = _run_file(path)
    model = _make_model(module, path, name)
    if weights is not None:
        load_weights(model, weights)
    args, kwargs = _example(module, path)
    preprocessing = getattr(module, "preprocessing", {})
    if not isinstance(preprocessing, Mapping):
        raise ExportError(f"`preprocessing` in `{path.name}` is not a dict")
    record = manifest.Source(
        file=path.name,
        sha256=_sha256(path),
        model=name,
        seed=seed,
        weights=weights.name if weights else "",
        weights_sha256=_sha256(weights) if weights else "",
    )
    return Source(_settled(model), args, kwargs, record, dict(preprocessing))


def _source_of_folder(folder: Path, task: str) -> Source:
    seed_everything(0)
    found = load_folder(folder, task)
    return Source(
        found.module,
        (),
        found.example,
        found.record,
        {"task": task},
        dims=found.dims,
        pads=found.pads,
        handler=found.handler_files(),
    )


def seed_everything(seed: int) -> None:
    """torch's and Python's random numbers; numpy's too, where it is loaded."""
    torch.manual_seed(seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)


def _split(spec: str) -> tuple[Path, str]:
    file, _, name = spec.rpartition(":") if not spec.endswith(".py") else (spec, "", "")
    path, name = Path(file or spec), name or "model"
    if path.is_dir():
        raise UsageError(f"`{path}` is a folder", "give the Python file that defines `model`")
    if not path.is_file():
        raise UsageError(f"there is no file `{path}`", "give the Python file that defines `model`: `MODEL.py[:NAME]`")
    if path.suffix != ".py":
        raise UsageError(f"`{path}` is not a Python file", "give the Python file that defines `model`")
    return path, name


def _run_file(path: Path) -> ModuleType:
    """The module of the file, imported under a name of its own, with its folder on the import path."""
    full = path.resolve()
    name = f"{full.stem}_{hashlib.sha256(bytes(full)).hexdigest()[:8]}"
    _put_first_on_path(full.parent)
    spec = importlib.util.spec_from_file_location(name, full)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up
    with user_code(f"`{path.name}` cannot be imported"):
        spec.loader.exec_module(module)
    return module


def _put_first_on_path(folder: Path) -> None:
    """The folder's modules are found first, also where another model's neighbours of the same names were imported."""
    sys.path[:] = [str(folder), *(entry for entry in sys.path if entry != str(folder))]
    libraries = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
    kept = ("__main__", __name__.partition(".")[0])
    for neighbour in [*folder.glob("*.py"), *(path.parent for path in folder.glob("*/__init__.py"))]:
        file = getattr(sys.modules.get(neighbour.stem), "__file__", None)
        if file and neighbour.stem not in kept and not file.startswith((str(folder), *libraries)):
            del sys.modules[neighbour.stem]


def _make_model(module: ModuleType, path: Path, name: str) -> nn.Module:
    found = getattr(module, name, None)
    if found is None:
        raise ExportError(
            f"`{path.name}` defines no `{name}`",
            "define `model`: an `nn.Module`, or a class or function without arguments that makes one",
        )
    made = found
    if not isinstance(found, nn.Module) and callable(found):
        with user_code(f"`{name}()` failed"):
            made = found()
    if not isinstance(made, nn.Module):
        what = f"`{name}()` returns" if made is not found else f"`{name}` is"
        raise ExportError(f"{what} {type(made).__name__}, not an `nn.Module` (`{path.name}`)")
    return made


def _example(module: ModuleType, path: Path) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """`(args, kwargs)` of the file's `example_inputs`; both empty where it has none."""
    found = getattr(module, "example_inputs", None)
    if inspect.isroutine(found):
        with user_code("`example_inputs()` failed"):
            found = found()
    if found is None:
        return (), {}
    if isinstance(found, Mapping) and all(isinstance(key, str) for key in found):
        return (), dict(found)
    if isinstance(found, tuple) and not hasattr(found, "_fields"):
        return found, {}
    raise ExportError(
        f"`example_inputs` in `{path.name}` is a {type(found).__name__}",
        "make it a tuple of positional or a dict of keyword arguments: one input is `(x,)`",
    )


def _settled(model: nn.Module) -> nn.Module:
    if isinstance(model, torch.jit.ScriptModule):
        raise ExportError("the model is TorchScript", "export the `nn.Module` that it was made from")
    empty = [name for name, value in model.state_dict(keep_vars=True).items() if getattr(value, "is_meta", False)]
    if empty:
        raise ExportError(
            f"{len(empty)} weights of the model have no values (`{empty[0]}` is on the meta device)",
            "give them with `--weights`, or make the model on the CPU",
        )
    with user_code("`model.eval()` failed"):
        return model.to("cpu").eval()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def eager(source: Source, contract: Contract | None = None, *, double: bool = False) -> Run:
    """The model itself, in a fresh state, as a function from named inputs to named outputs; it gets copies of inputs.

    Inputs and outputs are named by `contract`, or else by the example. `double`: parameters, buffers and floating
    inputs are float64. ModelError where the model raises.
    """
    named = source.named({declared.name: torch.empty(0) for declared in contract.inputs} if contract else None)
    names = [output.name for output in contract.outputs] if contract else None
    run = run_model(source.fresh.double() if double else source.fresh(), named, names)
    return (lambda inputs: run({name: _widened(value) for name, value in inputs.items()})) if double else run


def _widened(value: torch.Tensor) -> torch.Tensor:
    return value.double() if value.is_floating_point() else value
