"""`mctl doctor`: what this machine has, and what to do where something is missing."""

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from . import console


def doctor(
    work_dir: Annotated[Path | None, typer.Option(help="The folder that compiles will work in.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Check what export, compile and serve need on this machine. Exit code 1 if something needed is missing."""
    from .machine import abilities, examine

    checks = examine(work_dir)
    able = abilities(checks)
    ok = not any(check.state == "missing" for check in checks)
    if json:
        console.emit_json("mctl.doctor/1", ok, checks=msgspec.to_builtins(checks), abilities=msgspec.to_builtins(able))
    else:
        width = max(len(check.name) for check in checks)
        for check in checks:
            todo = [f"{'':{width + 9}}{check.hint}"] if check.hint else []
            console.write([f"{check.state:8} {check.name:{width}} {check.found}", *todo])
        width = max(len(each.does) for each in able)
        states = ("lacks " + ", ".join(each.lacks) if each.lacks else "works" for each in able)
        console.write(["", *(f"{each.does:{width}}  {state}" for each, state in zip(able, states, strict=True))])
    if not ok:
        raise typer.Exit(1)
