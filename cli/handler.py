"""`mctl handler new`: a file to start from."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from . import console


def handler(
    action: Annotated[Literal["new"], typer.Argument(help="What to do.")],
    name: Annotated[str, typer.Argument(help="The handler's name: the file is NAME.py, the class is called like it.")],
    kind: Annotated[
        Literal["routes", "torchserve", "stream"], typer.Option(help="The form: see docs/handlers.md.")
    ] = "routes",
    force: Annotated[bool, typer.Option("--force", help="Write over a file that is there.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Write a handler to start from: Python between raw requests and the model."""
    from ..handlers.templates import write_template

    path = write_template(Path(f"{name.removesuffix('.py')}.py"), kind, force)
    if json:
        console.emit_json("mctl.handler/1", True, file=str(path))
        return
    console.say(f"wrote {path}: try it with `mctl run bundle.pt2 --handler {path} --request request.json`")
