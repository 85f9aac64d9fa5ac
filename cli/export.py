"""`mctl export`: a model's source file to program.pt2."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import typer

from ..bundle_format.errors import MctlError, UsageError
from . import console, progress

if TYPE_CHECKING:
    from ..bundle_format.manifest import Manifest, Source
    from ..export.program import ExportReport
    from ..generation.export import GenerationRequest

GENERATION = "text-generation"
Task = Literal[
    "text-generation", "text-embedding", "text-classification", "token-classification", "image-classification"
]
_DIM = "NAME=MIN:MAX[:MULTIPLE][@INPUT:AXIS,…]"


def export(
    model: Annotated[
        str, typer.Argument(metavar="MODEL.py[:NAME]", help="The file that defines the model; for a task, or a folder.")
    ],
    task: Annotated[
        Task | None,
        typer.Option(help="What a language model, or a Hugging Face folder, is for."),
    ] = None,
    context: Annotated[int | None, typer.Option(min=1, metavar="N", help="Its tokens at most [its own].")] = None,
    eos: Annotated[str | None, typer.Option(metavar="N,N,…", help="Its tokens that end a text [its own].")] = None,
    kv_dtype: Annotated[
        Literal["float32", "bfloat16"] | None, typer.Option(help="What it keeps keys and values in [float32].")
    ] = None,
    dim: Annotated[list[str], typer.Option(metavar=_DIM, help="A size that varies.")] = [],  # noqa: B006
    input: Annotated[list[str], typer.Option(metavar="NAME=DTYPE[SHAPE]", help="An example input.")] = [],  # noqa: B006
    weights: Annotated[Path | None, typer.Option(help="Weights: safetensors or a torch checkpoint.")] = None,
    library: Annotated[
        list[Path], typer.Option(metavar="FILE.so", help="A C++ library of operators: it goes with the model.")
    ] = [],  # noqa: B006
    seed: Annotated[int, typer.Option(help="Of all random numbers: of the model file and of golden inputs.")] = 0,
    pad: Annotated[list[str], typer.Option(metavar="INPUT=VALUE", help="The value that fills a bucket up.")] = [],  # noqa: B006
    range: Annotated[
        list[str], typer.Option(metavar="INPUT=LOW:HIGH", help="Values that an input may hold: `0:nodes-1`.")
    ] = [],  # noqa: B006
    batch_dim: Annotated[
        str | None, typer.Option(metavar="NAME|none", help="The dim that requests are joined along.")
    ] = None,
    output_name: Annotated[str | None, typer.Option(metavar="A,B", help="Names of the outputs, in order.")] = None,
    name: Annotated[str | None, typer.Option(help="The model's name in its server's paths.")] = None,
    allow_random: Annotated[
        bool, typer.Option("--allow-random", help="Export a model that draws random numbers.")
    ] = False,
    onnx: Annotated[bool, typer.Option("--onnx", help="Write the same program as ONNX, beside the output.")] = False,
    embed_onnx: Annotated[bool, typer.Option("--embed-onnx", help="Keep the ONNX model in the output.")] = False,
    output: Annotated[Path, typer.Option("-o", "--output", help="The file to write.")] = Path("program.pt2"),
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Export a PyTorch model with its contract and golden cases, and prove that it is what was declared."""
    if task == GENERATION:
        from ..generation.export import export_generation

        wanted = generation_request(locals())
        with progress.shown() as say:
            _tell(export_generation(wanted, say), json)
        return
    refuse_without_task(locals())
    from ..export import dims
    from ..export.program import ExportRequest, export_model

    request = ExportRequest(
        spec=spec_of(model, task),
        output=output,
        dims=tuple(map(dims.parse_dim, dim)),
        inputs=tuple(map(dims.parse_input, input)),
        weights=weights,
        libraries=tuple(library),
        seed=seed,
        ranges=dict(map(dims.parse_range, range)),
        pads=dict(map(dims.parse_pad, pad)),
        output_names=tuple(output_name.split(",")) if output_name else (),
        name=name,
        batch_dim=batch_dim,
        allow_random=allow_random,
        onnx=output.with_suffix(".onnx") if onnx else None,
        embed_onnx=embed_onnx,
    )
    before = _source_of(output)
    with progress.shown() as say:
        report = export_model(request, say)
    for note in _hints(report.manifest, before):
        console.say(f"note: {note}")
    _tell(report, json)


def spec_of(model: str, task: str | None) -> str:
    """What the exporter takes: `FOLDER:TASK` for a task. UsageError where it is no folder."""
    if task is None:
        return model
    if not Path(model).is_dir():
        hint = "give the folder that `save_pretrained` wrote; a model file needs no `--task`"
        raise UsageError(f"`{model}` is no folder, which `--task {task}` needs", hint)
    return f"{model}:{task}"


_OF_TASK = ("context", "eos", "kv_dtype")
_WITHOUT_TASK = (
    *("dim", "input", "pad", "range", "batch_dim", "output_name", "allow_random", "onnx", "embed_onnx", "library"),
)


def generation_request(options: Mapping[str, Any]) -> "GenerationRequest":
    """What the options of `--task text-generation` say. UsageError for those that mean nothing with it."""
    for name in _WITHOUT_TASK:
        if options[name]:
            raise UsageError(
                f"`--{name.replace('_', '-')}` means nothing with `--task`", "a step has inputs of its own"
            )
    from ..generation.export import GenerationRequest
    from .generate import parse_ids

    eos = options["eos"]
    return GenerationRequest(
        spec=options["model"],
        output=options["output"],
        context=options["context"],
        eos=None if eos is None else tuple(parse_ids(eos, "--eos")) if eos else (),
        cache_dtype=options["kv_dtype"] or "float32",
        weights=options["weights"],
        seed=options["seed"],
    )


def refuse_without_task(options: Mapping[str, Any]) -> None:
    """UsageError for options that are for language models."""
    for name in _OF_TASK:
        if options[name] is not None:
            flag = name.replace("_", "-")
            raise UsageError(f"`--{flag}` is for language models", f"add `--task {GENERATION}`")


def _tell(report: "ExportReport", json: bool) -> None:
    from ..bundle_format import summary

    made = summary.summarize(report.path)
    if json:
        console.emit_json(
            "mctl.export/1", True, **msgspec.to_builtins(made), proven=report.proven, seconds=report.seconds
        )
        return
    worst = max(report.proven.values(), default=0.0)
    console.write(summary.lines(made))
    console.write(
        [
            "",
            f"proven: equal to eager at {len(report.proven)} sizes, largest error {worst:.2g}",
            f"seconds: {', '.join(f'{phase} {seconds:.1f}' for phase, seconds in report.seconds.items())}",
        ]
    )


def _source_of(path: Path) -> "Source | None":
    """Of the program that is there already."""
    from ..bundle_format.archive import open_program

    try:
        with open_program(path) as archive:
            return archive.manifest.source
    except MctlError:
        return None


def _hints(manifest: "Manifest", before: "Source | None") -> list[str]:
    """What may not have been meant."""
    from ..aoti.plan import unbucketed

    contract, source = manifest.contract, manifest.source
    notes = []
    if before and (before.file, before.model) != (source.file, source.model):
        notes.append(
            f"the file was the program of `{before.file}:{before.model}`, which is replaced; `-o` names another"
        )
    if not contract.dims:
        sizes = ", ".join(f"{each.name} [{','.join(map(str, each.shape))}]" for each in contract.inputs)
        notes.append(f"every size is fixed as in the example ({sizes}): declare what varies, as in `--dim batch=1:64`")
    if apart := unbucketed(contract, {}):
        notes.append(apart)
    return notes
