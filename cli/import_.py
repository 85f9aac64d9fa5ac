"""`mctl import`: what another server's archive holds, as files to go on with."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from . import console


def import_(
    kind: Annotated[Literal["torchserve"], typer.Argument(help="Whose archive it is.")],
    archive: Annotated[Path, typer.Argument(metavar="MODEL.mar", help="What `torch-model-archiver` wrote.")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="DIR", help="The folder to make [the model's name].")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Take a TorchServe archive apart, and say what is in it and what to do next."""
    from ..handlers.importing import import_mar

    found = import_mar(archive, output)
    if json:
        console.emit_json("mctl.import/1", True, **asdict(found))
        return
    rows = {
        "model": f"{found.name}, version {found.version}",
        "code": f"{found.model_file} ({', '.join(found.classes) or 'no class'})" if found.model_file else "none",
        "weights": found.weights or "none",
        "handler": found.handler or "none",
        "files": ", ".join(found.assets),
        "packages": found.requirements,
    }
    console.write([f"{found.folder}:", *(f"{label:9} {text}" for label, text in rows.items() if text)])
    console.write(["", *(f"note: {note}" for note in found.notes), "", *found.commands])
