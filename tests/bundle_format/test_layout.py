"""The table of paths and limits is the same in both languages; which paths a member may have."""

import re
from pathlib import Path

import pytest

from mctl.bundle_format import layout

HEADER = Path(__file__).parents[2] / "runner/cpp/format/layout.h"


def _cpp_constants() -> dict[str, object]:
    """`kMaxMembers = 1 << 16` as {"MAX_MEMBERS": 65536}, `kNeeds = {"a"}` as {"NEEDS": ("a",)}."""
    found: dict[str, object] = {}
    for name, text, names, number in re.findall(
        r'constexpr [\w:<>, ]+ k(\w+) =\s+(?:"([^"]*)"|(\{[^}]*\})|([0-9 <]+));', HEADER.read_text(encoding="utf-8")
    ):
        key = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).upper()
        value, _, shift = number.partition("<<")
        listed = tuple(re.findall(r'"([^"]*)"', names)) if names else None
        found[key] = listed if listed is not None else text or int(value) << int(shift or 0)
    return found


def test_both_languages_have_the_same_table() -> None:
    ours = {name: value for name, value in vars(layout).items() if re.fullmatch(r"[A-Z][A-Z_]+", name)}
    theirs = _cpp_constants()
    assert set(theirs.pop("NEEDS")) <= set(ours.pop("NEEDS"))  # type: ignore[call-overload]
    assert theirs == ours


@pytest.mark.parametrize("path", ["a", "a/b", ".data/version", "a b/ü…", "x" * 512, "a..b", "...", "-"])
def test_paths_that_a_member_may_have(path: str) -> None:
    assert layout.path_fault(path) is None


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/",
        "/a",
        "a/",
        "a//b",
        ".",
        "..",
        "a/..",
        "../a",
        "a/./b",
        "a\\b",
        "a\0",
        "a\nb",
        "\x7f",
        "x" * 513,
        "ü" * 257,
        "\udc80",
    ],
)
def test_paths_that_it_may_not(path: str) -> None:
    assert layout.path_fault(path)
