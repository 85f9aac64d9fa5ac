"""SECURITY.md promises nothing that no test holds."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_each_test_that_security_names_is_there() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "SECURITY.md").read_text())
    assert len(named) > 8
    for file, test in named:
        assert re.search(rf"^def {test}\(", (ROOT / file).read_text(), re.MULTILINE), f"{file}::{test}"


def test_each_promise_has_a_test() -> None:
    tables = (ROOT / "SECURITY.md").read_text().split("| promise | test |\n|---|---|\n")[1:]
    promises = [line for table in tables for line in table.split("\n\n")[0].splitlines()]
    without = [
        line for line in promises if not re.search(r"\| (the same|`tests/\S+`|`runner/cpp/tests/\S+`, `\w+`) \|$", line)
    ]
    assert len(promises) > 20 and not without
