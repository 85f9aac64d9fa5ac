"""Variants that are compiled apart share one weights file, and are found again."""

from pathlib import Path

from mctl.aoti.compiler import Built, merge
from mctl.aoti.protocol import Done, Recipe
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
