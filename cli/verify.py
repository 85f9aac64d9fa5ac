"""`mctl verify`: is a file whole?"""

import time
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from . import console


def verify(
    file: Annotated[Path, typer.Argument(help="A program or a bundle.")] = Path("bundle.pt2"),
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Check every digest and limit of a program or bundle. Exit code 1 names the member that fails."""
    from ..bundle_format import contents
    from ..bundle_format.errors import printable
    from ..bundle_format.summary import human_bytes

    start = time.monotonic()
    with console.phase(f"hashing {file}"):
        found = contents.verify(file)
    seconds = time.monotonic() - start
    if json:
        console.emit_json(
            "mctl.verify/1", True, file=printable(str(file)), **msgspec.to_builtins(found), seconds=round(seconds, 3)
        )
    else:
        console.write(
            [f"{file}: {found.members} members, {human_bytes(found.bytes)}, all as written ({seconds:.2f} s)"]
        )
        console.write([f"digest {found.digest}"])
