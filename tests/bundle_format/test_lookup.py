"""Which variant runs, by the vectors that C++ runs too."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mctl.bundle_format import manifest as manifests
from mctl.bundle_format.lookup import Lookup, padded
from mctl.bundle_format.manifest import Manifest

VECTORS = json.loads((Path(__file__).parents[1] / "vectors/contract/lookup.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def manifest() -> Manifest:
    return manifests.decode(json.dumps(VECTORS["manifest"]).encode())


@pytest.mark.parametrize("case", VECTORS["cases"], ids=lambda case: case["why"])
def test_the_variant(manifest: Manifest, case: dict[str, Any]) -> None:
    found = Lookup(manifest, case["threads"]).variant(case["dims"])
    assert found is not None and found.name == case["variant"]


@pytest.mark.parametrize("case", VECTORS["unpadded"], ids=str)
def test_sizes_that_are_not_padded(manifest: Manifest, case: dict[str, Any]) -> None:
    assert list(Lookup(manifest, case["threads"]).unpadded(case["dim"])) == case["sizes"]


@pytest.mark.parametrize("case", VECTORS["padded"], ids=lambda case: case["why"])
def test_what_a_size_is_padded_to(case: dict[str, Any]) -> None:
    assert padded(case["size"], case["buckets"], case["unpadded"]) == case["padded"]


def test_without_a_choice_the_first_variant_runs(manifest: Manifest) -> None:
    assert manifest.tuning is not None
    for tuning in (None, msgspec.structs.replace(manifest.tuning, choices=())):
        lookup = Lookup(msgspec.structs.replace(manifest, tuning=tuning), 1)
        found = lookup.variant({"batch": 1, "seq": 16})
        assert found is not None and found.name == "dynamic"
        assert lookup.variant({"batch": 9, "seq": 16}) is None
        assert lookup.unpadded("batch") == ()
