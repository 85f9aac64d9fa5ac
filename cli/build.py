"""`mctl build`: export, compile, and parity against live eager, in one gate."""

import inspect
from typing import TYPE_CHECKING, Any

from . import verdict
from .compile import allowed_slowdown, compile, handler_files, tune_options
from .export import GENERATION, export, generation_request, refuse_without_task, spec_of
from .parity import parity, parse_tolerances

if TYPE_CHECKING:
    from ..aoti.compiler import CompileOptions
    from ..export.program import ExportRequest

# The options of the three verbs, but for those that only connect them; of two with one name the first.
_CONNECT = {"program", "bundle", "against", "parity", "runs"}
_OPTIONS: dict[str, inspect.Parameter] = {}
for verb in (export, compile, parity):
    for name, option in inspect.signature(verb).parameters.items():
        _OPTIONS.setdefault(name, option)
_OPTIONS = {name: option for name, option in _OPTIONS.items() if name not in _CONNECT}
_OPTIONS["output"] = inspect.signature(compile).parameters["output"]


def build(**options: Any) -> None:
    """Export, compile and check a model against eager torch in one gate: the bundle is written if it passes.

    Options may come from mctl.toml or [tool.mctl] in pyproject.toml (dim = ["batch=1:64"]); the command line wins.
    """
    tolerances = parse_tolerances(options["tolerance"])
    request = generation_request(options) if options["task"] == GENERATION else _export_request(options)
    settings = _compile_options(options)
    tuning = tune_options(*(options[name] for name in ("tune", "tune_budget", "threads", "precision", "max_packed_mb")))
    from ..tuning.gate import build as build_checked

    with verdict.told(options) as progress:
        made = build_checked(
            request, options["output"], settings, tuning=tuning, tolerance=tolerances, progress=progress
        )
    verdict.tell_made(made, options)


build.__signature__ = inspect.Signature(list(_OPTIONS.values()))  # type: ignore[attr-defined]
build.__annotations__ = {name: option.annotation for name, option in _OPTIONS.items()}


def _export_request(options: dict[str, Any]) -> "ExportRequest":
    refuse_without_task(options)
    from ..export import dims
    from ..export.program import ExportRequest

    return ExportRequest(
        spec=spec_of(options["model"], options["task"]),
        output=options["output"],
        dims=tuple(map(dims.parse_dim, options["dim"])),
        inputs=tuple(map(dims.parse_input, options["input"])),
        ranges=dict(map(dims.parse_range, options["range"])),
        pads=dict(map(dims.parse_pad, options["pad"])),
        output_names=tuple(options["output_name"].split(",")) if options["output_name"] else (),
        libraries=tuple(options["library"]),
        onnx=options["output"].with_suffix(".onnx") if options["onnx"] else None,
        **{name: options[name] for name in ("weights", "seed", "name", "batch_dim", "allow_random", "embed_onnx")},
    )


def _compile_options(options: dict[str, Any]) -> "CompileOptions":
    from ..aoti.compiler import CompileOptions
    from ..aoti.plan import parse_buckets

    return CompileOptions(
        version=options["model_version"],
        buckets=parse_buckets(options["bucket"]),
        inductor=tuple(options["inductor"]),
        packed=options["kernels"] == "mctl",
        precision=options["precision"],
        tune=options["tune"],
        standalone=options["standalone"] or "",
        standalone_slowdown=allowed_slowdown(options["standalone"], options["standalone_slowdown"]),
        handler=handler_files(options["handler"], options["asset"]),
        **{name: options[name] for name in ("name", "target", "timeout", "work_dir")},
    )
