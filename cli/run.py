"""`mctl run`: a bundle over files, offline."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from ..bundle_format.errors import UsageError
from . import console

_INPUT = "NAME=@FILE.npy|@FILE.safetensors[:KEY]|zeros|ones|random"


def run(
    bundle: Annotated[Path, typer.Argument(help="What `mctl compile` wrote.")] = Path("bundle.pt2"),
    input: Annotated[list[str], typer.Option(metavar=_INPUT, help="An input: rows of a file, or made up.")] = [],  # noqa: B006
    dim: Annotated[list[str], typer.Option(metavar="NAME=SIZE", help="The size of inputs that are made up.")] = [],  # noqa: B006
    output: Annotated[Path | None, typer.Option("-o", "--output", help="The safetensors file to write.")] = None,
    handler: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.py|NAME|bundle", help="Answers --request: a file, mctl's own, or the bundle's code."
        ),
    ] = None,
    request: Annotated[
        Path | None, typer.Option(metavar="FILE", help="One request's body, answered without a server.")
    ] = None,
    path: Annotated[str | None, typer.Option(help="The request's path [that of the model].")] = None,
    seed: Annotated[int, typer.Option(help="Of random inputs.")] = 0,
    threads: Annotated[int | None, typer.Option(min=1, help="OpenMP threads [torch's own choice].")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Run a bundle over the rows of files, however many they are, over made-up inputs, or on one raw request."""
    if request is not None:
        if input or dim or output:
            raise UsageError("`--request` goes without `--input`, `--dim` and `--output`")
        _answer(bundle, handler, request, path, threads, json)
        return
    if handler is not None or path is not None:
        raise UsageError("a handler answers a request", "give its body: `--request FILE`")
    from dataclasses import asdict

    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    from ..runner.offline import run_files
    from ..runner.session import load
    from ..runner.sources import parse_size, parse_spec

    specs, dims = [parse_spec(text) for text in input], dict(map(parse_size, dim))
    columns = ("rows", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with (
        load(bundle, threads) as session,
        Progress(*columns, console=console.talk(), disable=not sys.stderr.isatty(), transient=True) as bar,
    ):
        task = bar.add_task("rows")
        report = run_files(
            session,
            specs,
            dims=dims,
            seed=seed,
            output=output,
            progress=lambda done, rows: bar.update(task, completed=done, total=rows),
        )
    if json:
        console.emit_json("mctl.run/1", True, **asdict(report), file=output)
        return
    console.write(f"{out.name}: {out.dtype}[{','.join(map(str, out.shape))}]" for out in report.outputs)
    console.say(f"{report.rows} rows in {report.seconds:.3f} s, {report.rows_per_second:,.0f} rows/s")
    if output is not None:
        console.say(f"wrote {output}")


def _answer(bundle: Path, handler: str | None, file: Path, path: str | None, threads: int | None, json: bool) -> None:
    """The body on stdout, status and headers on stderr; exit 1 where the answer is an error."""
    from ..handlers.local import run_request

    answer = run_request(bundle, handler, file, path, threads)
    body = bytes(answer.body)
    ok = answer.status < 400
    if json:
        text = body.decode(errors="replace")
        console.emit_json("mctl.answer/1", ok, status=answer.status, headers=dict(answer.headers), body=text)
    else:
        console.say(" ".join([str(answer.status), *(f"{name}: {value}" for name, value in answer.headers)]))
        sys.stdout.flush()
        sys.stdout.buffer.write(body if body.endswith(b"\n") or not body else body + b"\n")
    if not ok:
        raise typer.Exit(1)
