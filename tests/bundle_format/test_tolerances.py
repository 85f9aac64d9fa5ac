"""One table of what floats may differ by: C++ runs the same vector."""

import json
from pathlib import Path

from mctl.bundle_format.tolerances import CLOSENESS

VECTORS = Path(__file__).parents[1] / "vectors/contract/tolerances.json"


def test_both_languages_have_the_same_table() -> None:
    wanted = json.loads(VECTORS.read_text(encoding="utf-8"))
    assert {name: closeness._asdict() for name, closeness in CLOSENESS.items()} == wanted
