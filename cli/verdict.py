"""What `mctl parity`, `compile` and `build` share: tolerances of the command line, and a report told and written."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isfinite
from typing import TYPE_CHECKING, Any

import msgspec

from ..bundle_format.errors import UsageError
from ..bundle_format.files import atomic
from ..bundle_format.manifest import Tolerance
from . import console

if TYPE_CHECKING:
    from ..parity.report import Report


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


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """A function that shows what is done now: in one line that changes, or now and then where that is no terminal."""
    if not console.talk().is_terminal:
        yield _now_and_then()
        return
    with console.talk().status("") as status:
        yield lambda text: status.update(text.replace("[", r"\["))


def _now_and_then(seconds: float = 2.0) -> Callable[[str], None]:
    """Says a text if the one before was said some seconds ago."""
    last = float("-inf")

    def say(text: str) -> None:
        nonlocal last
        if time.monotonic() - last >= seconds:
            console.say(text)
            last = time.monotonic()

    return say


def tell(report: "Report", options: Mapping[str, Any]) -> None:
    """Everything that was asked for with --junit, --report, --html and --json, and what a person wants to see."""
    from ..parity.html import to_html
    from ..parity.report import to_json, to_junit

    for option, form in (("junit", to_junit), ("report", to_json), ("html", to_html)):
        if options[option] is not None:
            with atomic(options[option]) as file:
                file.write(form(report))
    _show(report)
    if options["json"]:
        fields = msgspec.to_builtins(report)
        console.emit_json(fields.pop("schema"), fields.pop("ok"), **fields)


def _show(report: "Report") -> None:
    """On stderr: the outputs, what failed and what to do, and the verdict; in GitHub Actions also there."""
    from ..parity import report as forms

    for line in forms.to_text(report):
        console.say(line)
    for result in report.failures:
        console.annotate("error", f"parity: {result.verdict} in {result.case}: {forms.failure_text(result)}")
    console.step_summary(forms.to_markdown(report))
