"""Manifests that must be read or refused (the vectors that C++ runs too), and the JSON schema."""

import json
from pathlib import Path
from typing import Any

import pytest

from mctl.bundle_format import manifest as manifests
from mctl.bundle_format.errors import BundleError, NewerError

ROOT = Path(__file__).parents[2]
VECTORS = json.loads((ROOT / "tests/vectors/contract/manifests.json").read_text(encoding="utf-8"))


def changed(case: dict[str, Any]) -> bytes:
    text: str = VECTORS["base"]
    for old, new in case["replace"]:
        assert text.count(old) == 1, f"{old!r} is not there once"
        text = text.replace(old, new)
    return text.encode()


@pytest.mark.parametrize("case", VECTORS["cases"], ids=lambda case: case["name"])
def test_decode(case: dict[str, Any]) -> None:
    if case["accept"]:
        manifests.decode(changed(case))
        return
    with pytest.raises(BundleError) as caught:
        manifests.decode(changed(case))
    assert caught.value.message.startswith(case["error"])
    assert len(caught.value.message) < 1000


def test_invalid_utf8_is_refused() -> None:
    for bad in (b"\xff", b"\xc0\xaf", b"\xed\xa0\x80", b"\xf4\x90\x80\x80"):
        with pytest.raises(BundleError, match="not valid"):
            manifests.decode(VECTORS["base"].encode().replace(b"made for a test", bad))


def test_a_huge_manifest_is_refused_before_it_is_read() -> None:
    with pytest.raises(BundleError, match="allowed 16777216"):
        manifests.decode(b" " * (1 << 24) + b" ")


def test_deep_nesting_ends_quickly() -> None:
    for opening, closing in ((b"[", b"]"), (b'{"a":', b"}")):
        deep = opening * 1_000_000 + b"1" + closing * 1_000_000
        with pytest.raises(BundleError):
            manifests.decode(deep)
        with pytest.raises(BundleError):
            manifests.decode(VECTORS["base"].encode().replace(b'["a", "b"]', deep))


def test_encode_is_read_back_and_does_not_change() -> None:
    manifest = manifests.decode(VECTORS["base"].encode())
    encoded = manifests.encode(manifest)
    assert manifests.decode(encoded) == manifest
    assert manifests.encode(manifests.decode(encoded)) == encoded
    # independently of our types: nothing was lost on the way
    assert json.loads(encoded)["contract"]["dims"] == json.loads(VECTORS["base"])["contract"]["dims"]


def test_a_bundle_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing needed: any reader of `mctl.bundle/1` takes it. A need: only a reader that knows it by name."""
    plain = manifests.decode(VECTORS["base"].encode())
    assert json.loads(manifests.encode(plain)).keys() == json.loads(VECTORS["base"]).keys()
    encoded = manifests.encode(manifests.needing(manifests.needing(plain, "sums"), "graphs"))
    said = json.loads(encoded)
    assert (said["schema"], said["needs"]) == ("mctl.bundle/2", ["graphs", "sums"])
    monkeypatch.setattr(manifests, "NEEDS", ("graphs",))
    with pytest.raises(NewerError, match="needs `sums`, which this mctl does not have") as caught:
        manifests.decode(encoded)
    assert caught.value.hint == "it was made by mctl 0.1.0: use that one or a newer one"
    monkeypatch.setattr(manifests, "NEEDS", ("graphs", "sums"))
    read = manifests.decode(encoded)
    assert (read.needs, read.kind, read.variants) == (("graphs", "sums"), "bundle", plain.variants)


def test_the_schema_file_is_the_types_schema() -> None:
    # written by: python -c 'import json; from mctl.bundle_format.manifest import json_schema as schema;
    # print(json.dumps(schema(), indent=1))' > bundle_format/manifest.schema.json
    stored = json.loads((ROOT / "bundle_format/manifest.schema.json").read_text(encoding="utf-8"))
    assert stored == json.loads(json.dumps(manifests.json_schema()))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("my model", "my_model"),
        ("mlp", "mlp"),
        ("..", "model"),
        ("", "model"),
        ("für", "fur"),
        ("(mlp) +", "mlp"),
        ("模型", "model"),
        ("m" * 200, "m" * 128),
        ("a/b\\c", "a_b_c"),
    ],
)
def test_name_from(text: str, name: str) -> None:
    assert manifests.name_from(text) == name
