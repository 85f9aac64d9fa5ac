"""What parity found: the report, and its forms as text, Markdown, JSON and JUnit XML."""

from collections.abc import Iterable
from typing import Literal
from xml.etree import ElementTree

import msgspec

from ..bundle_format.contract import Strict
from ..bundle_format.manifest import Tolerance
from .judge import Comparison
from .onnx import Runs

Verdict = Literal["pass", "differs", "random", "stateful", "eager-raises-compiled-returns", "compiled-raises", "crash"]
Check = Literal["load", "golden", "values", "repeat", "rows", "padding", "logits", "tokens", "invariance"]

SCHEMA = "mctl.parity/1"
SEVERITY: tuple[Verdict, ...] = (
    *("crash", "compiled-raises", "eager-raises-compiled-returns", "stateful", "random", "differs", "pass"),
)
ADVICE: dict[Verdict, str] = {
    "differs": "make it again from the same program and weights; a tolerance that is too narrow for the model is"
    " widened with `--tolerance OUTPUT=RTOL,ATOL`",
    "random": "export with `--allow-random` if the model is meant to draw random numbers, else put it in eval mode",
    "stateful": "register what changes between calls as a buffer and export again, so that the state is declared",
    "eager-raises-compiled-returns": "declare at export what the model takes: narrower `--dim` ranges for sizes,"
    " `--range INPUT=LOW:HIGH` for the values of integers",
    "compiled-raises": "export again with `--dim` ranges that the model supports",
    "crash": "compile again with another `--inductor` setting",
}
ADVICE_BF16 = (
    "bfloat16 is off by what is `needed` above: allow it with `--tolerance OUTPUT=RTOL,ATOL`, or compile with"
    " `--precision f32`"
)
ADVICE_BY_CHECK: dict[Check, str] = {
    "rows": "serve it without batching: export with `--batch-dim none`",
    "invariance": "compile it again: `mctl compile` notes such a model as not invariant",
    "padding": "export without `--pad` for these inputs, or let the model ignore what is padded",
}
TITLES: dict[Check, str] = {
    "load": "loading",
    "golden": "stored cases of eager",
    "values": "sizes and values",
    "repeat": "calls in a row",
    "rows": "rows apart",
    "padding": "padding",
    "logits": "logits of prompts",
    "tokens": "tokens after prompts",
    "invariance": "the same bits in any batch",
}


class Result(Strict, frozen=True):
    """One check of one case. `seconds` are of the compiled calls; `counts`: a failure fails the whole; `bf16`: the
    compiled model multiplied in bfloat16 where the program did not ask for it.
    """

    check: Check
    case: str
    verdict: Verdict
    detail: str = ""
    outputs: tuple[Comparison, ...] = ()
    seconds: float = 0.0
    counts: bool = True
    bf16: bool = False
    unranged: tuple[str, ...] = ()  # inputs whose integers the case tries beyond what the example holds

    @property
    def ok(self) -> bool:
        return self.verdict == "pass" or not self.counts

    @property
    def advice(self) -> str:
        """What to do about a failure."""
        if self.unranged:
            options = " ".join(f"`--range {name}=LOW:HIGH`" for name in self.unranged)
            return (
                f"declare the values that the model takes with {options} at export: compiled code does not check them"
            )
        if self.bf16 and self.verdict == "differs":
            return ADVICE_BF16
        return ADVICE_BY_CHECK.get(self.check) or ADVICE[self.verdict]


class Summary(Strict, frozen=True):
    """One output over all cases: the case that came closest to its tolerance, or exceeded it the most."""

    output: str
    cases: int
    failed: int
    case: str
    comparison: Comparison
    error64: float | None = None  # largest errors against fp64, over the cases where it was asked
    eager64: float | None = None


class Report(Strict, frozen=True):
    """The verdict and everything it rests on."""

    schema: str
    ok: bool
    verdict: Verdict
    model: str  # name and version
    file: str
    digest: str  # SHA-256 of the bundle's manifest
    reference: str  # what the compiled model was compared with
    fp64: str  # whether an fp64 reference was used, or why not
    seed: int
    seconds: float
    results: tuple[Result, ...]
    left_out: tuple[str, ...] = ()  # cases beyond the budget
    notes: tuple[str, ...] = ()
    batchable: bool | None = None  # None: there is no batch dim
    runs: Runs = "compiled"  # what ran the model that was judged

    @property
    def failures(self) -> tuple[Result, ...]:
        return tuple(result for result in self.results if not result.ok)


def overall(results: Iterable[Result]) -> Verdict:
    """The gravest verdict among the results that count."""
    found = {result.verdict for result in results if not result.ok}
    return next(verdict for verdict in SEVERITY if verdict in found or verdict == "pass")


def summaries(report: Report) -> list[Summary]:
    """One line for each output, in the order of the outputs."""
    found: dict[str, list[tuple[Result, Comparison]]] = {}
    for result in report.results:
        for comparison in result.outputs if result.counts else ():
            found.setdefault(comparison.output, []).append((result, comparison))
    return [_summary(output, pairs) for output, pairs in found.items()]


def _summary(output: str, pairs: list[tuple[Result, Comparison]]) -> Summary:
    result, worst = max(pairs, key=lambda pair: (not pair[1].ok, _strain(pair[1])))
    exact = [found for _, found in pairs if found.error64 is not None]
    return Summary(
        output=output,
        cases=len(pairs),
        failed=sum(not found.ok for _, found in pairs),
        case=result.case,
        comparison=worst,
        error64=max((found.error64 or 0.0 for found in exact), default=None),
        eager64=max((found.eager64 or 0.0 for found in exact), default=None),
    )


def _strain(comparison: Comparison) -> float:
    """How much of its tolerance a comparison needs; infinite where no tolerance would do."""
    if comparison.needed is None or comparison.tolerance is None:
        return 0.0 if comparison.ok else float("inf")
    return comparison.needed.rtol / comparison.tolerance.rtol if comparison.tolerance.rtol else comparison.max_abs


def counts(report: Report) -> list[tuple[str, int, int]]:
    """(title, passed, all) for each kind of check that ran."""
    rows = []
    for check, title in TITLES.items():
        results = [result for result in report.results if result.check == check]
        if results and all(result.counts for result in results):
            rows.append((title, sum(result.verdict == "pass" for result in results), len(results)))
    return rows


def headline(report: Report) -> str:
    """`pass: mlp 1 is the eager model: 34 of 34 checks pass (12.3 s)`."""
    judged = [result for result in report.results if result.counts]
    passed, total = sum(result.verdict == "pass" for result in judged), len(judged)
    is_it = "is the eager model" if report.ok else "is not the eager model"
    if report.ok and report.verdict == "random":
        is_it = "draws random numbers: only shapes and dtypes were compared"
    by = "" if report.runs == "compiled" else f" by {report.runs}"
    alone = "; not batchable: rows of a batch depend on each other" if report.ok and report.batchable is False else ""
    took = f"{report.seconds:.1f} s"
    return f"{report.verdict}: {report.model}{by} {is_it}: {passed} of {total} checks pass{alone} ({took})"


def fair_tolerances(results: Iterable[Result]) -> dict[str, Tolerance]:
    """Twice what outputs needed in ordinary cases, where that is more than the manifest allows and was found fair."""
    found: dict[str, Tolerance] = {}
    for result in results:
        ordinary = result.check == "golden" or result.case.endswith("/normal")
        for comparison in result.outputs if ordinary else ():
            if (needed := _fairly_needed(comparison)) is not None:
                before = found.get(comparison.output, needed)
                found[comparison.output] = Tolerance(
                    rtol=max(needed.rtol, before.rtol), atol=max(needed.atol, before.atol)
                )
    return found


def _fairly_needed(comparison: Comparison) -> Tolerance | None:
    needed, allowed = comparison.needed, comparison.tolerance
    if not comparison.ok or needed is None:
        return None
    if comparison.rule in ("exact", "edge"):
        return needed  # a step of integers is as large on any machine
    if allowed is None or needed.rtol <= allowed.rtol:
        return None
    return Tolerance(rtol=2 * needed.rtol, atol=2 * needed.atol)


OUTPUT_COLUMNS = (
    *(
        "output",
        "max error",
        "mean error",
        "cosine",
        "worst at",
        "needed",
        "allowed",
        "rule",
        "to fp64",
        "eager to fp64",
    ),
    "case",
)


FEW = ("output", "max error", "allowed", "rule")  # where there is no room for more
SHOWN = 3  # failures of one cause


def output_row(summary: Summary) -> tuple[str, ...]:
    """The cells of an output's line, in the order of OUTPUT_COLUMNS."""
    found = summary.comparison
    return (
        found.output,
        _number(found.max_abs),
        _number(found.mean_abs),
        f"{found.cosine:.9f}",
        str(list(found.worst)),
        "" if found.rule == "exact" else _tolerance(found.needed),
        "0" if found.rule == "exact" else _tolerance(found.tolerance),
        found.rule,
        _number(summary.error64),
        _number(summary.eager64),
        summary.case,
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2e}"


def _tolerance(tolerance: Tolerance | None) -> str:
    return "none would do" if tolerance is None else f"{tolerance.rtol:.1e},{tolerance.atol:.1e}"


def failure_text(result: Result) -> str:
    """What went wrong in one case, over a few lines, with what to do."""
    return "\n".join([*_faults(result), f"to do: {result.advice}"])


def _faults(result: Result) -> list[str]:
    lines = [result.detail] if result.detail else []
    return lines + [f"output '{found.output}': {found.fault}" for found in result.outputs if not found.ok]


def by_cause(report: Report) -> list[list[Result]]:
    """The failures that ask for the same, together."""
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in report.failures:
        groups.setdefault((result.verdict, result.advice), []).append(result)
    return list(groups.values())


# --- forms -------------------------------------------------------------------------------------------------------


def to_text(report: Report, width: int | None = None) -> list[str]:
    """Lines for a terminal: the outputs, what failed and what to do, and the verdict at the end.

    `width`: columns of the terminal; a table that does not fit has only the columns that decide.
    """
    table = [OUTPUT_COLUMNS, *(output_row(summary) for summary in summaries(report))]
    lines = _aligned(table)
    if width is not None and max(map(len, lines)) > width:
        lines = _aligned(
            [tuple(cell for name, cell in zip(OUTPUT_COLUMNS, row, strict=True) if name in FEW) for row in table]
        )
    lines = lines if len(lines) > 1 else []
    lines += ["", *(f"{passed} of {total} pass: {title}" for title, passed, total in counts(report))]
    for group in by_cause(report):
        for result in group[:SHOWN]:
            lines += ["", f"{result.verdict} in `{result.case}` ({TITLES[result.check]})"]
            lines += [f"  {line}" for line in _faults(result)]
        if len(group) > SHOWN:
            lines += ["", f"{group[0].verdict} in {len(group) - SHOWN} more"]
        lines += [f"  to do: {group[0].advice}"]
    lines += [f"left out: {text}" for text in report.left_out] + [f"note: {text}" for text in report.notes]
    return [*lines, "", headline(report)]


def _aligned(table: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]


def without_times(report: Report) -> Report:
    """As it is kept in the bundle: the same inputs make the same bytes, wherever and whenever."""
    results = tuple(msgspec.structs.replace(result, seconds=0.0) for result in report.results)
    return msgspec.structs.replace(report, file="", seconds=0.0, results=results)


def to_json(report: Report) -> bytes:
    """The whole report; infinities and NaN are null, as JSON has none."""
    return msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n"


def to_markdown(report: Report) -> str:
    """For the summary page of a CI job."""
    lines = [f"### {'✅' if report.ok else '❌'} Parity: {headline(report)}", ""]
    lines += _markdown_table(OUTPUT_COLUMNS, [output_row(summary) for summary in summaries(report)])
    for result in report.failures:
        lines += ["", f"**{result.verdict}** in `{result.case}` ({TITLES[result.check]})", "", "```"]
        lines += [failure_text(result), "```"]
    lines += ["", *(f"- {note}" for note in report.notes)]
    return "\n".join(lines)


def _markdown_table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    cells = [header, tuple("---" for _ in header), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells]


def to_junit(report: Report) -> bytes:
    """One test case for each check, in JUnit's XML as Jenkins, GitLab and GitHub actions read it."""
    failures = str(len(report.failures))
    total = {"tests": str(len(report.results)), "failures": failures, "errors": "0", "time": f"{report.seconds:.3f}"}
    suites = ElementTree.Element("testsuites", total)
    suite = ElementTree.SubElement(
        suites, "testsuite", {"name": f"mctl parity {report.model}", "skipped": "0", **total}
    )
    for result in report.results:
        place = {"classname": f"parity.{result.check}", "name": result.case, "time": f"{result.seconds:.3f}"}
        case = ElementTree.SubElement(suite, "testcase", place)
        if not result.ok:
            text = _xml_safe(failure_text(result))
            what = {"type": result.verdict, "message": text.splitlines()[0]}
            ElementTree.SubElement(case, "failure", what).text = text
    ElementTree.indent(suites)
    return bytes(ElementTree.tostring(suites, encoding="utf-8", xml_declaration=True)) + b"\n"


def _xml_safe(text: str) -> str:
    """With `?` for the control characters that XML 1.0 has no way to write."""
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text)
