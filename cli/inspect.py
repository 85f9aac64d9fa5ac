"""`mctl inspect`: what a file is."""

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from . import console


def inspect(
    file: Annotated[Path, typer.Argument(help="A program, a bundle, or what may be one.")] = Path("bundle.pt2"),
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Tell what a file is: its contract, variants, buckets, sizes, parity and host verdict. Runs no code of it."""
    from ..bundle_format import kinds, summary
    from ..bundle_format.errors import BundleError, printable

    try:
        found = summary.summarize(file)
    except BundleError as error:
        kind = kinds.identify(file)
        if json:
            failed = {"file": printable(str(file)), "kind": kind.name, "error": error.message, "hint": error.hint}
            console.emit_json("mctl.inspect/1", False, **failed)
        else:
            console.write([f"{file}: {kind.what}"])
        console.render_error(error)
        raise typer.Exit(error.exit_code) from error
    if json:
        console.emit_json("mctl.inspect/1", True, **msgspec.to_builtins(found))
    else:
        console.write(summary.lines(found))
