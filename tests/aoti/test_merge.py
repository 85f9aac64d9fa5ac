"""Variants that are compiled apart share one weights file, and are found again."""

from pathlib import Path

import pytest

from mctl.aoti.cache import Cache, key_of
from mctl.aoti.compiler import Built, merge
from mctl.aoti.protocol import LIBRARY, WEIGHTS, Done, Recipe
from mctl.aoti.symbols import Imports
from mctl.bundle_format import tensors
from mctl.bundle_format.manifest import ConstantRef

ONE, TWO = b"\x00\x00\x80\x3f" * 4, b"\x00\x00\x00\x40" * 4


def built(folder: Path, name: str, constants: dict[str, bytes]) -> Built:
    weights = folder / f"{name}.safetensors"
    tensors.save_file(weights, {tensor: ("float32", (4,), data) for tensor, data in constants.items()})
    done = Done({f"model.{tensor}": ConstantRef(tensor=tensor, stride=(1,)) for tensor in constants}, 0, "", "")
    return Built(Recipe(name), folder / "none.so", weights, done, {}, Imports((), (), "", ""))


def test_equal_tensors_are_stored_once_and_others_apart(tmp_path: Path) -> None:
    first = built(tmp_path, "dynamic", {"w": ONE, "b": TWO})
    second = built(tmp_path, "static", {"w": TWO, "b": TWO, "extra": ONE})
    third = built(tmp_path, "other", {"w": ONE * 1, "c": b"\x01" * 16})
    stored, references = merge([first, second, third])
    values = {name: bytes(data) for name, (_, _, data) in stored.items()}
    assert sorted(values.values()) == sorted([ONE, TWO, b"\x01" * 16])
    for variant, constants in zip((first, second, third), references, strict=True):
        own = tensors.read_header(variant.weights.read_bytes())
        for name, ref in constants.items():
            entry = own[name.removeprefix("model.")]
            assert values[ref.tensor] == variant.weights.read_bytes()[entry.begin : entry.end]
            assert ref.stride == (1,)


def test_a_variant_is_found_again(tmp_path: Path) -> None:
    work, again = tmp_path / "work", tmp_path / "again"
    for folder in (work, again):
        folder.mkdir()
    (work / LIBRARY).write_bytes(b"code")
    (work / WEIGHTS).write_bytes(b"weights")
    done = Done({"w": ConstantRef(tensor="w")}, 7, "2.13", "abc")
    cache, key = Cache(tmp_path / "cache"), key_of("program", Recipe(""))
    assert cache.get(key, again) is None
    cache.put(key, work, done)
    assert cache.get(key, again) == done
    assert (again / LIBRARY).read_bytes() == b"code" and (again / WEIGHTS).read_bytes() == b"weights"
    assert cache.get(key_of("program", Recipe("", packed=True)), again) is None


@pytest.mark.parametrize("name", [LIBRARY, WEIGHTS, "done.json"])
def test_what_is_not_as_it_was_kept_is_compiled_again(tmp_path: Path, name: str) -> None:
    work = tmp_path / "work"
    work.mkdir()
    for file in (LIBRARY, WEIGHTS):
        (work / file).write_bytes(b"as it was")
    cache = Cache(tmp_path / "cache")
    cache.put("key", work, Done({}, 0, "", ""))
    (tmp_path / "cache/key" / name).write_bytes(b"changed!!")
    assert cache.get("key", work) is None


def test_a_cache_that_cannot_be_written_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = Cache(tmp_path / "file" / "cache")
    cache.put("key", tmp_path, Done({}, 0, "", ""))
    assert cache.get("key", tmp_path) is None
