"""`mctl compile`: program.pt2 to a bundle."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ..bundle_format.errors import UsageError
from . import verdict
from .bench import parse_threads
from .parity import parse_tolerances

if TYPE_CHECKING:
    from ..bundle_format.handler_files import HandlerFiles
    from ..tuning.tune import TuneOptions

_DEFAULT = Path("program.pt2")
Kernels = Literal["mctl", "torch"]
Precision = Literal["f32", "bf16", "auto"]
Tune = Literal["none", "fast", "full"]
Standalone = Literal["yes", "auto"]


def compile(
    program: Annotated[
        Path, typer.Argument(help="What `mctl export` wrote. torch reads it with pickle: trust it.")
    ] = _DEFAULT,
    output: Annotated[Path, typer.Option("-o", "--output", help="The file to write.")] = Path("bundle.pt2"),
    name: Annotated[str | None, typer.Option(help="The model's name in its server's paths.")] = None,
    model_version: Annotated[str | None, typer.Option(help="The model's version in its server's paths.")] = None,
    target: Annotated[
        str, typer.Option(metavar="native|x86-64-v2|x86-64-v3|x86-64-v4", help="The CPUs that the code has to run on.")
    ] = "native",
    bucket: Annotated[
        list[str], typer.Option(metavar="DIM=V,V,…", help="Sizes of a dim that are served without padding.")
    ] = [],  # noqa: B006
    inductor: Annotated[list[str], typer.Option(metavar="KEY=VALUE", help="A setting of torch's compiler.")] = [],  # noqa: B006
    kernels: Annotated[
        Kernels, typer.Option(help="What computes linear layers, convolutions and attention in float32.")
    ] = "mctl",
    standalone: Annotated[
        Standalone | None,
        typer.Option(metavar="[=auto]", help="A bundle that needs no libtorch; auto: where that is possible."),
    ] = None,
    standalone_slowdown: Annotated[
        float | None,
        typer.Option(metavar="RATIO", help="How many times libtorch's time that may take, measured here [auto: 1.05]."),
    ] = None,
    tune: Annotated[
        Tune, typer.Option(help="Compile more variants, measure them here, and keep what is faster at some size.")
    ] = "none",
    tune_budget: Annotated[
        float | None, typer.Option(min=0, metavar="SECONDS", help="For that [fast: 180, full: 3600]; Ctrl-C ends it.")
    ] = None,
    threads: Annotated[str, typer.Option(metavar="N,N,…", help="OpenMP threads to tune for [1 and all cores].")] = "",
    precision: Annotated[
        Precision,
        typer.Option(help="Of products in mctl's kernels; auto: bf16 where tuning finds it faster and right."),
    ] = "f32",
    max_packed_mb: Annotated[
        int, typer.Option(min=0, metavar="MIB", help="Weights that only tuned variants use, together.")
    ] = 1024,
    tolerance: Annotated[
        list[str], typer.Option(metavar="OUTPUT=RTOL,ATOL", help="What an output may differ by.")
    ] = [],  # noqa: B006
    timeout: Annotated[float | None, typer.Option(metavar="SECONDS", help="Give up a variant after this time.")] = None,
    work_dir: Annotated[Path | None, typer.Option(metavar="DIR", help="Where the temporary folder is made.")] = None,
    handler: Annotated[
        str | None,
        typer.Option(metavar="FILE.py|NAME", help="Python for raw requests that the bundle brings, or mctl's own."),
    ] = None,
    asset: Annotated[
        list[Path], typer.Option(metavar="FILE", help="A file or folder that the handler reads: a tokenizer, labels.")
    ] = [],  # noqa: B006
    parity: Annotated[bool, typer.Option("--parity/--no-parity", help="Check the bundle before it is written.")] = True,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Compile a program ahead of time, check it against its golden cases, and write the bundle."""
    from ..aoti.compiler import CompileOptions
    from ..aoti.plan import parse_buckets
    from ..tuning.gate import compile_checked

    options = CompileOptions(
        name=name,
        version=model_version,
        target=target,
        buckets=parse_buckets(bucket),
        inductor=tuple(inductor),
        packed=kernels == "mctl",
        precision=precision,
        tune=tune,
        standalone=standalone or "",
        standalone_slowdown=allowed_slowdown(standalone, standalone_slowdown),
        timeout=timeout,
        work_dir=work_dir,
        handler=handler_files(handler, asset),
    )
    tuning = tune_options(tune, tune_budget, threads, precision, max_packed_mb)
    tolerances = parse_tolerances(tolerance)
    with verdict.told({"json": json}) as progress:
        made = compile_checked(
            program, output, options, tuning=tuning, parity=parity, tolerance=tolerances, progress=progress
        )
    verdict.tell_made(made, {"json": json, "target": target})


def handler_files(handler: str | None, assets: list[Path]) -> "HandlerFiles | None":
    """What `--handler` and `--asset` name."""
    if handler is None:
        if assets:
            raise UsageError("`--asset` is for a handler", "name it with `--handler`")
        return None
    from ..handlers.carrying import collect

    return collect(handler, assets)


def allowed_slowdown(standalone: Standalone | None, ratio: float | None) -> float | None:
    """What `--standalone-slowdown` says. UsageError where that means nothing."""
    if ratio is not None and standalone is None:
        raise UsageError("`--standalone-slowdown` is for bundles without libtorch", "add `--standalone`")
    if ratio is not None and not ratio >= 1:
        raise UsageError(
            f"`--standalone-slowdown {ratio:g}` is below 1", "1.05 allows 5 % more time than with libtorch"
        )
    return ratio


def tune_options(
    tune: Tune, budget: float | None, threads: str, precision: Precision, max_packed_mb: int
) -> "TuneOptions":
    """What the options of tuning say. UsageError for those that mean nothing without it."""
    from ..tuning.tune import TuneOptions

    for flag, given in (("--tune-budget", budget is not None), ("--threads", bool(threads))):
        if tune == "none" and given:
            raise UsageError(f"`{flag}` is for tuning", "add `--tune fast`")
    if tune == "none" and precision == "auto":
        raise UsageError("`--precision auto` is chosen by measuring", "add `--tune fast`, or use `bf16` or `f32`")
    numbers = parse_threads(threads) if threads else ()
    return TuneOptions(tune, budget, numbers, precision == "auto", max_packed_mb)
