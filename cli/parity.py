"""`mctl parity`: is the compiled model the eager model?"""

from pathlib import Path
from typing import Annotated

import typer

from . import verdict

_BUNDLE = Path("bundle.pt2")


def parity(
    bundle: Annotated[Path, typer.Argument(help="What `mctl compile` wrote.")] = _BUNDLE,
    against: Annotated[
        str | None, typer.Option(metavar="MODEL.py[:NAME]", help="Compare with this model, run by eager torch.")
    ] = None,
    weights: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Its weights, if they are not where they were at export.")
    ] = None,
    tolerance: Annotated[
        list[str], typer.Option(metavar="OUTPUT=RTOL,ATOL", help="What an output may differ by.")
    ] = [],  # noqa: B006
    seed: Annotated[int, typer.Option(metavar="N", help="Of the inputs that are tried.")] = 0,
    junit: Annotated[Path | None, typer.Option(metavar="FILE", help="Write JUnit XML.")] = None,
    report: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the report as JSON.")] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the report as one HTML page.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the report as one JSON object on stdout.")] = False,
) -> None:
    """Check that a bundle computes what eager torch computes, over its whole contract.

    Without --against it is compared with the cases that export stored. Exit code 1 if it is another model.
    """
    tolerances = verdict.parse_tolerances(tolerance)
    from ..parity.check import check_bundle

    with verdict.progress() as progress:
        found = check_bundle(
            bundle, against=against, weights=weights, tolerance=tolerances, seed=seed, progress=progress
        )
    verdict.tell(found, {"junit": junit, "report": report, "html": html, "json": json})
    raise typer.Exit(0 if found.ok else 1)
