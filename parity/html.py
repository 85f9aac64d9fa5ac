"""The report as one HTML file: no script, no link outside, the verdict first."""

from collections.abc import Iterable
from html import escape

from .report import (
    OUTPUT_COLUMNS,
    TITLES,
    Report,
    Result,
    counts,
    failure_text,
    headline,
    output_row,
    summaries,
)

_STYLE = """
:root { --ink: #1c2430; --soft: #5b6675; --line: #dfe4ea; --paper: #ffffff; --shade: #f5f7f9;
        --good: #1a7f4b; --good-paper: #e7f6ee; --bad: #b42318; --bad-paper: #fdecea; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6eaf0; --soft: #9aa6b5; --line: #2c3542; --paper: #12171e; --shade: #1a212a;
          --good: #4cc38a; --good-paper: #12291f; --bad: #ff8a7d; --bad-paper: #33191a; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 76rem; background: var(--paper); color: var(--ink);
       font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h2 { margin: 2.4rem 0 .8rem; font-size: 1.05rem; }
.verdict { padding: 1.3rem 1.5rem; border-radius: 10px; border-left: 6px solid; }
.verdict.pass { background: var(--good-paper); border-color: var(--good); }
.verdict.fail { background: var(--bad-paper); border-color: var(--bad); }
.verdict h1 { margin: 0; font-size: 1.7rem; letter-spacing: -.01em; }
.pass h1, .ok { color: var(--good); } .fail h1, .no { color: var(--bad); }
.verdict p { margin: .35rem 0 0; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .8rem; margin-top: 1rem; }
.tile { padding: .8rem 1rem; border: 1px solid var(--line); border-radius: 10px; }
.tile b { display: block; font-size: 1.35rem; font-variant-numeric: tabular-nums; }
.tile span, dt, .soft { color: var(--soft); }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 10px; }
table { width: 100%; border-collapse: collapse; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 600; color: var(--soft); background: var(--shade); white-space: nowrap; }
th, td { padding: .5rem .8rem; border-bottom: 1px solid var(--line); vertical-align: top; }
tr:last-child td { border-bottom: 0; }
code, td.number, pre { font-family: ui-monospace, "SF Mono", Menlo, Consolas, monospace; font-size: .9em; }
td.number { white-space: nowrap; }
pre { margin: .4rem 0 0; white-space: pre-wrap; overflow-wrap: anywhere; }
.failure { margin: 0 0 .8rem; padding: .9rem 1.1rem; border: 1px solid var(--line); border-left: 4px solid var(--bad);
           border-radius: 8px; }
.failure .do { margin-top: .5rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .3rem 1.2rem; margin: 0; }
dd { margin: 0; overflow-wrap: anywhere; }
summary { cursor: pointer; font-weight: 600; margin-bottom: .6rem; }
"""


def to_html(report: Report) -> bytes:
    """A page for a person: verdict, counts, outputs, failures with what to do, and every check."""
    parts = [
        _verdict(report),
        _tiles(report),
        _section("Failures", "".join(map(_failure, report.failures))),
        _section("Outputs", _table(OUTPUT_COLUMNS, [output_row(summary) for summary in summaries(report)])),
        _section("How it was compared", _facts(report)),
        _section("Left out", _list(report.left_out)),
        _section("Notes", _list(report.notes)),
        _every_check(report),
    ]
    title = escape(f"{report.verdict}: parity of {report.model}")
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>'
    body = "\n".join(part for part in parts if part)
    head = f"<head>{head}<style>{_STYLE}</style></head>"
    return f'<!doctype html>\n<html lang="en">{head}\n<body>\n{body}\n</body></html>\n'.encode()


def _verdict(report: Report) -> str:
    kind = "pass" if report.ok else "fail"
    _, _, rest = headline(report).partition(": ")
    return f'<div class="verdict {kind}"><h1>{escape(report.verdict)}</h1><p>{escape(rest)}</p></div>'


def _tiles(report: Report) -> str:
    tiles = [
        f'<div class="tile"><b class="{"ok" if passed == total else "no"}">{passed} / {total}</b>'
        f"<span>{escape(title)}</span></div>"
        for title, passed, total in counts(report)
    ]
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _section(title: str, content: str) -> str:
    return f"<h2>{title}</h2>\n{content}" if content else ""


def _failure(result: Result) -> str:
    what = failure_text(result).rpartition("\nto do: ")[0]
    return (
        f'<div class="failure"><b class="no">{escape(result.verdict)}</b> in <code>{escape(result.case)}</code>'
        f' <span class="soft">{escape(TITLES[result.check])}</span><pre>{escape(what)}</pre>'
        f'<div class="do"><b>What to do:</b> {escape(result.advice)}</div></div>'
    )


def _facts(report: Report) -> str:
    batchable = {True: "yes: rows do not depend on each other", False: "no: rows depend on each other"}
    facts = [
        ("bundle", f"{report.file} ({report.digest[:16]})" if report.digest else report.file),
        ("compared with", report.reference),
        ("fp64 reference", report.fp64),
        (
            "can be batched",
            batchable.get(report.batchable is True, "") if report.batchable is not None else "no batch dim",
        ),
        ("seed of the inputs", str(report.seed)),
    ]
    return "<dl>" + "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts) + "</dl>"


def _every_check(report: Report) -> str:
    rows = [
        (TITLES[result.check], result.case, result.verdict, f"{result.seconds * 1000:.1f} ms", _largest_error(result))
        for result in report.results
    ]
    table = _table(("check", "case", "verdict", "time", "max error"), rows)
    return f"<h2>Every check</h2><details><summary>{len(rows)} checks</summary>{table}</details>"


def _largest_error(result: Result) -> str:
    return f"{max(found.max_abs for found in result.outputs):.2e}" if result.outputs else ""


def _table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f'<td class="number">{escape(c)}</td>' for c in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _list(lines: Iterable[str]) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<ul>{items}</ul>" if items else ""
