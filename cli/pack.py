"""`mctl pack`: a bundle with its server, for machines that have nothing but a C library."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from . import console, progress

if TYPE_CHECKING:
    from ..runner.packing.pack import Pack


def pack(
    bundle: Annotated[Path, typer.Argument(help="What `mctl compile --standalone` wrote.")] = Path("bundle.pt2"),
    output: Annotated[
        Path, typer.Option("-o", "--output", help="A folder, or a file that ends with .tar.zst or .tar.gz.")
    ] = Path("dist"),
    with_libtorch: Annotated[
        bool, typer.Option("--with-libtorch", help="Also pack libtorch, for a bundle that needs it.")
    ] = False,
    dockerfile: Annotated[bool, typer.Option("--dockerfile", help="Write a Dockerfile into it.")] = False,
    check: Annotated[bool, typer.Option("--check/--no-check", help="Try the packed server before it is kept.")] = True,
    force: Annotated[bool, typer.Option("--force", help="Replace a folder that mctl did not pack.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Pack a bundle with mctl-runner and all that it needs: it runs without Python and torch."""
    from ..runner.packing.pack import PackOptions
    from ..runner.packing.pack import pack as pack_bundle

    with progress.shown() as say:
        made = pack_bundle(bundle, output, PackOptions(with_libtorch, dockerfile, check, force), say)
    if json:
        console.emit_json("mctl.pack/1", True, **msgspec.to_builtins(made, enc_hook=str))
    else:
        console.write(_lines(made))


def _lines(made: "Pack") -> list[str]:
    from ..bundle_format.summary import human_bytes

    parts = ", ".join(f"{part} {human_bytes(size)}" for part, size in made.sizes.items() if size)
    tried = "not tried"
    if made.trial:
        tried = (
            f"ready in {made.trial.seconds:.2f} s, {human_bytes(made.trial.resident)} resident, golden cases as stored"
        )
    return [
        f"{made.path}: {made.model} version {made.version}, {human_bytes(made.bytes)}",
        f"sizes      {parts}",
        f"libraries  {', '.join(made.libraries)}",
        f"runs with  glibc {made.glibc} or newer",
        f"tried      {tried}",
    ]
