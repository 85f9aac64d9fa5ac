"""`mctl parity`: is the compiled model the eager model?"""

from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import Annotated, Literal

import typer

from ..bundle_format.archive import open_bundle
from ..bundle_format.errors import UsageError
from ..bundle_format.manifest import Tolerance
from . import progress, verdict

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
    runs: Annotated[
        Literal["compiled", "onnxruntime", "onnx-reference"],
        typer.Option(help="What is judged: the compiled model, or a runtime with its ONNX twin."),
    ] = "compiled",
    onnx: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The ONNX twin, if it is neither in the bundle nor beside it.")
    ] = None,
    junit: Annotated[Path | None, typer.Option(metavar="FILE", help="Write JUnit XML.")] = None,
    report: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the report as JSON.")] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the report as one HTML page.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the report as one JSON object on stdout.")] = False,
) -> None:
    """Check that a bundle computes what eager torch computes, over its whole contract.

    Without --against it is compared with the cases that export stored. Exit code 1 if it is another model.
    """
    tolerances = parse_tolerances(tolerance)
    verdict.require_outputs({"junit": junit, "report": report, "html": html})
    with open_bundle(bundle):  # what is no bundle is said before torch is imported
        pass
    from ..parity.check import check_bundle

    with progress.shown() as say:
        found = check_bundle(
            bundle,
            against=against,
            weights=weights,
            tolerance=tolerances,
            seed=seed,
            runs=runs,
            onnx=onnx,
            progress=say,
        )
    verdict.tell(found, {"junit": junit, "report": report, "html": html, "json": json, "against": against})
    raise typer.Exit(0 if found.ok else 1)


def parse_tolerances(options: Sequence[str]) -> dict[str, Tolerance]:
    """`["logits=1e-3,1e-5"]` by output. UsageError for what is no pair of numbers >= 0."""
    found = {}
    for option in options:
        name, _, numbers = option.rpartition("=")
        try:
            rtol, atol = (float(number) for number in numbers.split(","))
        except ValueError:
            rtol = atol = float("nan")
        if not name or not (isfinite(rtol) and isfinite(atol) and rtol >= 0 and atol >= 0):
            raise UsageError(f"`--tolerance {option}` is not understood", "write it as `--tolerance logits=1e-3,1e-5`")
        found[name] = Tolerance(rtol=rtol, atol=atol)
    return found
