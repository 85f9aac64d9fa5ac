"""The command itself: its verbs and their flags, exit codes, errors as text and as JSON."""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mctl.cli.reference import reference

Run = Callable[..., subprocess.CompletedProcess[str]]
FILE = Path(__file__).with_name("flags.json")
PAGE = Path(__file__).parents[2] / "docs" / "commands.md"
FLAGS: dict[str, list[str]] = json.loads(FILE.read_text())


def verbs_in(help_text: str) -> list[str]:
    return sorted(re.findall(r"^  ([a-z]+)", help_text.split("Commands:")[1], re.MULTILINE))


def flags_in(help_text: str) -> list[str]:
    lines = [line.strip() for line in help_text.split("Options:")[1].splitlines() if line.startswith("  -")]
    declared = " ".join(re.split(r"\s{2,}", line)[0] for line in lines)
    return sorted(set(re.findall(r"(?<![\w-])(?:--[a-z][a-z0-9-]*|-[a-z]\b)", declared)))


def test_the_verbs(run_mctl: Run) -> None:
    assert verbs_in(run_mctl("--help").stdout) == sorted(FLAGS)


@pytest.mark.parametrize("verb", FLAGS)
def test_flags_are_a_contract(verb: str, run_mctl: Run) -> None:
    """A flag that comes or goes needs a line in CHANGELOG.md; `python tests/cli/test_main.py` writes flags.json."""
    done = run_mctl(verb, "--help")
    assert done.returncode == 0
    assert flags_in(done.stdout) == FLAGS[verb]


def test_the_page_of_commands_is_what_they_say() -> None:
    """After a change of a command's flags or help, `python tests/cli/test_main.py` writes it."""
    assert PAGE.read_text() == reference()


def test_every_verb_prints_json_on_request() -> None:
    assert all("--json" in flags for verb, flags in FLAGS.items() if verb != "serve")


def test_wrong_usage_is_2(run_mctl: Run) -> None:
    for arguments in (["bogus"], ["inspect"], ["compile", "--no-such-flag"], ["export", "m.py", "--seed", "x"]):
        done = run_mctl(*arguments)
        assert done.returncode == 2, arguments
        assert done.stdout == ""
        assert "Traceback" not in done.stderr


def test_a_no_is_1_and_says_the_way_out(run_mctl: Run, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("hello\n")
    done = run_mctl("verify", path)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert "\n\nhint: " in done.stderr
    assert "text" in done.stderr


def test_errors_as_json(run_mctl: Run, tmp_path: Path) -> None:
    path = tmp_path / "empty.pt2"
    path.write_bytes(b"")
    done = run_mctl("verify", path, "--json")
    assert done.returncode == 1
    answer = json.loads(done.stdout)
    assert answer["ok"] is False
    assert "empty" in answer["error"]


def test_a_bug_keeps_its_traceback_and_is_3() -> None:
    code = (
        "import mctl.cli.main as m; m.app.command('boom')(lambda: 1 / 0); import sys; sys.argv[1:] = ['boom']; m.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 3
    assert "ZeroDivisionError" in done.stderr


def test_the_reader_may_go_away() -> None:
    """`mctl --help | head -1` ends in silence."""
    done = subprocess.run(
        ["bash", "-c", f"{shlex.quote(sys.executable)} -m mctl.cli.main --help | head -1"],
        capture_output=True,
        text=True,
    )
    assert done.stderr == ""


if __name__ == "__main__":

    def help_of(*verb: str) -> str:
        command = [sys.executable, "-m", "mctl.cli.main", *verb, "--help"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    FILE.write_text(json.dumps({verb: flags_in(help_of(verb)) for verb in verbs_in(help_of())}, indent=1) + "\n")
    PAGE.write_text(reference())
