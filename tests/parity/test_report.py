"""The report's forms, read by other programs: an XML parser, an HTML parser, JSON."""

import json
import math
from html.parser import HTMLParser
from xml.etree import ElementTree

import msgspec
import pytest
import torch

from mctl.bundle_format.manifest import Tolerance
from mctl.parity.html import to_html
from mctl.parity.judge import compare
from mctl.parity.report import (
    Report,
    Result,
    by_cause,
    counts,
    headline,
    overall,
    summaries,
    to_json,
    to_junit,
    to_markdown,
    to_text,
    without_times,
)

GOOD = compare("logits", torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0]))
WIDE = Tolerance(rtol=0.1, atol=0.0)
NEAR = compare("logits", torch.tensor([1.0, 2.1]), torch.tensor([1.0, 2.0]), tolerance=WIDE)
FAR = compare("logits", torch.tensor([1.0, 4.0]), torch.tensor([1.0, 2.0]), tolerance=WIDE)
NAN = compare("scores", torch.tensor([math.nan]), torch.tensor([1.0]))

PASSED = Result(check="values", case="batch=1/normal", verdict="pass", outputs=(GOOD,), seconds=0.25)
DIFFERS = Result(check="values", case="batch=7/<large>", verdict="differs", outputs=(FAR, NAN))
CRASHED = Result(
    check="golden", case="batch=9", verdict="crash", detail="the process was killed by SIGSEGV: \x1b[31m<mark>"
)
NOT_APART = Result(check="rows", case="row 0 of 4 beside NaN", verdict="differs", outputs=(FAR,), counts=False)


def report(*results: Result, **more: object) -> Report:
    verdict = overall(results)
    fields: dict[str, object] = {
        "schema": "mctl.parity/1",
        "ok": verdict == "pass",
        "verdict": verdict,
        "model": "mlp 3",
        "file": "bundle.pt2",
        "digest": "ab" * 32,
        "reference": "live eager",
        "fp64": "used",
        "seed": 0,
        "seconds": 1.5,
        "results": results,
    }
    return Report(**{**fields, **more})  # type: ignore[arg-type]


FAILED = report(PASSED, DIFFERS, CRASHED, NOT_APART, left_out=("batch=64: too long",), notes=("a | note",))


def test_the_gravest_verdict_wins() -> None:
    assert overall([PASSED, DIFFERS, CRASHED]) == "crash"
    assert overall([PASSED, DIFFERS]) == "differs"
    assert overall([PASSED, NOT_APART]) == "pass"  # a finding that does not count
    assert overall([]) == "pass"


def test_headline() -> None:
    assert headline(FAILED) == "crash: mlp 3 is not the eager model: 1 of 3 checks pass (1.5 s)"
    alone = report(PASSED, NOT_APART, batchable=False)
    why = "not batchable: rows of a batch depend on each other"
    assert headline(alone) == f"pass: mlp 3 is the eager model: 1 of 1 checks pass; {why} (1.5 s)"
    assert headline(report(PASSED)) == "pass: mlp 3 is the eager model: 1 of 1 checks pass (1.5 s)"
    random = report(PASSED, verdict="random")
    assert headline(random).startswith("random: mlp 3 draws random numbers: only shapes and dtypes were compared")


def test_an_output_is_summed_up_by_the_case_that_needs_most() -> None:
    near = Result(check="values", case="near", verdict="pass", outputs=(NEAR,))
    (logits,) = summaries(report(PASSED, near))
    assert (logits.case, logits.cases, logits.failed) == ("near", 2, 0)
    assert logits.comparison.max_abs == pytest.approx(0.1)
    logits, scores = summaries(FAILED)
    assert (logits.case, logits.failed) == ("batch=7/<large>", 1) and scores.failed == 1


def test_counts() -> None:
    assert counts(FAILED) == [("stored cases of eager", 0, 1), ("sizes and values", 1, 2)]


def test_text() -> None:
    text = "\n".join(to_text(FAILED))
    assert "differs in `batch=7/<large>` (sizes and values)\n  output 'logits': off by 2 at [1]" in text
    assert "output 'scores': NaN at [0] where eager has 1" in text
    assert "\n  to do: compile again" in text and "left out: batch=64: too long" in text
    assert text.endswith(headline(FAILED))


def test_failures_of_one_cause_are_told_once() -> None:
    same = [Result(check="values", case=f"n={n}", verdict="differs", outputs=(FAR,)) for n in range(9)]
    found = report(*same, CRASHED)
    assert [len(group) for group in by_cause(found)] == [9, 1]
    text = "\n".join(to_text(found))
    assert text.count("to do: make it again") == 1 and "differs in `n=2`" in text and "differs in `n=3`" not in text
    assert "differs in 6 more" in text


def test_a_narrow_terminal_gets_the_columns_that_decide() -> None:
    wide, narrow = to_text(report(PASSED), 400)[0], to_text(report(PASSED), 60)[:2]
    assert "eager to fp64" in wide
    assert narrow[0].split() == ["output", "max", "error", "allowed", "rule"] and max(map(len, narrow)) <= 60


def test_what_a_bundle_keeps_has_no_times() -> None:
    slow = msgspec.structs.replace(
        FAILED,
        seconds=9.0,
        file="other.pt2",
        results=tuple(msgspec.structs.replace(result, seconds=3.0) for result in FAILED.results),
    )
    assert to_json(without_times(slow)) == to_json(without_times(FAILED))
    assert json.loads(to_json(without_times(FAILED)))["results"][1]["outputs"]


def test_advice_names_the_input_that_has_no_range() -> None:
    above = Result(check="values", case="n=5/above", verdict="eager-raises-compiled-returns", unranged=("idx",))
    assert "`--range idx=LOW:HIGH`" in above.advice


def test_json_is_valid_and_complete() -> None:
    data = json.loads(to_json(FAILED), parse_constant=pytest.fail)
    assert data["schema"] == "mctl.parity/1" and data["ok"] is False and data["verdict"] == "crash"
    assert [result["verdict"] for result in data["results"]] == ["pass", "differs", "crash", "differs"]
    assert data["results"][1]["outputs"][0]["max_abs"] == 2.0


def test_junit() -> None:
    root = ElementTree.fromstring(to_junit(FAILED))
    suite = root.find("testsuite")
    assert suite is not None and (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("4", "2", "0")
    failures = {case.get("name"): case.find("failure") for case in suite.findall("testcase")}
    assert failures["batch=1/normal"] is None and failures["row 0 of 4 beside NaN"] is None
    differs = failures["batch=7/<large>"]
    assert differs is not None and differs.get("type") == "differs"
    assert differs.get("message") == "output 'logits': off by 2 at [1]"
    assert suite.findall("testcase")[0].get("time") == "0.250"


def test_markdown_keeps_its_table() -> None:
    lines = to_markdown(FAILED).splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert len({line.count("|") for line in table}) == 1 and len(table) == 4
    assert lines[0].startswith("### ❌ Parity: crash")
    assert to_markdown(report(PASSED)).startswith("### ✅ Parity: pass")


class Page(HTMLParser):
    """The text in order, links, and whether every tag is closed."""

    def __init__(self, page: bytes) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.outside: list[str] = []
        self.feed(page.decode())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "link", "img"):
            self.open.append(tag)
        self.outside += [f"{tag} {name}" for name, _ in attrs if name in ("src", "href", "action", "onclick")]
        if tag in ("script", "link", "iframe"):
            self.outside.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip() and self.open[-1] not in ("style", "title"):
            self.text.append(data.strip())


@pytest.mark.parametrize("made", [FAILED, report(PASSED), report()])
def test_html_is_one_sound_file_with_the_verdict_first(made: Report) -> None:
    page = Page(to_html(made))
    assert page.open == [] and page.outside == []
    assert page.text[0] == made.verdict
    assert b"url(" not in to_html(made) and b"@import" not in to_html(made)


def test_html_tells_what_failed_and_what_to_do() -> None:
    text = " ".join(Page(to_html(FAILED)).text)
    assert "batch=7/<large>" in text and "off by 2 at [1]" in text and "What to do: compile again" in text
    assert "batch=64: too long" in text and "a | note" in text
    assert b"<large>" not in to_html(FAILED) and b"<mark>" not in to_html(FAILED)  # escaped
