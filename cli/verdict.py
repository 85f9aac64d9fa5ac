"""How `mctl parity`, `compile` and `build` tell what parity found."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import typer

from ..aoti.plan import unbucketed
from ..bundle_format.files import atomic, require_place
from ..bundle_format.summary import summarize, tuning_costs
from . import console, progress

if TYPE_CHECKING:
    from ..parity.report import Report
    from ..tuning.gate import Made


@contextmanager
def told(options: Mapping[str, Any]) -> Iterator[Callable[[str], None]]:
    """`progress` for a gate; where the gate refuses to write the bundle, its report is told and mctl ends with 1."""
    from ..tuning.gate import FailedError

    require_outputs(options)
    try:
        with progress.shown() as say:
            yield say
    except FailedError as error:
        tell(error.report, options)
        console.render_error(error)
        raise typer.Exit(error.exit_code) from None


OUTPUTS = ("junit", "report", "html")


def require_outputs(options: Mapping[str, Any]) -> None:
    """UsageError, before the work, for a file that could not be written after it."""
    for option in OUTPUTS:
        if options.get(option) is not None:
            require_place(options[option], f"--{option}")


def tell_made(made: "Made", options: Mapping[str, Any]) -> None:
    """A bundle that was written, with its report."""
    if made.report:
        tell(made.report, {**options, "json": False})
    stats = made.stats
    compiled = f"compiled in {stats.total_seconds:.1f} s" if stats.seconds else "compiled before"
    console.say(
        f"wrote {made.path}: {made.size / 1e6:.3g} MB, {compiled},"
        f" at most {stats.peak_bytes / 1e9:.2g} GB of memory, parity {made.manifest.parity}"
    )
    apart = unbucketed(made.manifest.contract, made.manifest.buckets) if made.manifest.generation is None else ""
    for note in (*made.manifest.notes, *([apart] if apart else [])):
        console.say(f"note: {note}")
    if os.environ.get("CI") and options.get("target") == "native":
        console.say("note: the code is for the CPU of this CI machine: name the one that serves with `--target`")
    for line in tuning_costs(summarize(made.path)):
        console.say(line)
    if options["json"]:
        console.emit_json(
            "mctl.bundle.made/1",
            True,
            path=str(made.path),
            size=made.size,
            seconds=stats.seconds,
            peak_bytes=stats.peak_bytes,
            manifest=msgspec.to_builtins(made.manifest),
            parity=msgspec.to_builtins(made.report),
        )


def tell(report: "Report", options: Mapping[str, Any]) -> None:
    """Everything that was asked for with --junit, --report, --html and --json, and what a person wants to see."""
    from ..parity.html import to_html
    from ..parity.report import to_json, to_junit

    for option, form in zip(OUTPUTS, (to_junit, to_json, to_html), strict=True):
        if options.get(option) is not None:
            with atomic(options[option]) as file:
                file.write(form(report))
    _show(report, options.get("model") or options.get("against"))
    if options["json"]:
        fields = msgspec.to_builtins(report)
        console.emit_json(fields.pop("schema"), fields.pop("ok"), **fields)


def _show(report: "Report", model: str | None) -> None:
    """On stderr: the outputs, what failed and what to do, and the verdict; in GitHub Actions also there, at the model's
    file, once for each cause.
    """
    from ..parity import report as forms

    for line in forms.to_text(report, console.width(sys.stderr)):
        console.say(line)
    file = model.partition(".py")[0] + ".py" if model else None
    for first, *others in forms.by_cause(report):
        more = f" and {len(others)} more" if others else ""
        text = f"parity: {first.verdict} in {first.case}{more}: {forms.failure_text(first)}"
        console.annotate("error", text, file, 1 if file else None)
    console.step_summary(forms.to_markdown(report))
