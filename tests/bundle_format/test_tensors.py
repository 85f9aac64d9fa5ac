"""safetensors written for the library to read, and read as strictly as it does."""

import json
import struct
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mctl.bundle_format import tensors
from mctl.bundle_format.contract import DTYPES
from mctl.bundle_format.errors import BundleError


def stored(tensor: torch.Tensor) -> tensors.Tensor:
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), flat.numpy().data


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_library_reads_every_dtype(dtype: str) -> None:
    originals = {
        f"t{n}": torch.randint(0, 2, shape).to(getattr(torch, dtype))
        for n, shape in enumerate([(3, 5), (7,), (), (2, 0)])
    }
    data = b"".join(map(bytes, tensors.dump({name: stored(tensor) for name, tensor in originals.items()})))
    loaded = safetensors.torch.load(data)
    assert {name for name in loaded if not name.startswith(".pad/")} == set(originals)
    for name, tensor in originals.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)
    for name, entry in tensors.read_header(data, aligned=True).items():
        assert (entry.dtype, entry.shape) == (dtype, tuple(originals[name].shape))
        assert data[entry.begin : entry.end] == bytes(stored(originals[name])[2])
        assert entry.begin % 64 == 0


def test_we_read_what_the_library_writes() -> None:
    arrays = {"a": np.arange(7, dtype="<i2"), "b": np.ones((2, 3), "<f8"), "z": np.zeros((0,), "<f4")}
    data = safetensors.numpy.save(arrays, metadata={"format": "pt"})
    found = tensors.read_header(data)
    assert {
        name: np.frombuffer(data[e.begin : e.end], arrays[name].dtype).reshape(e.shape).tolist()
        for name, e in found.items()
    } == {name: array.tolist() for name, array in arrays.items()}


def test_save_file_is_whole_or_absent(tmp_path: Path) -> None:
    array = np.arange(5, dtype="<f4")
    tensors.save_file(tmp_path / "t.safetensors", {"x": ("float32", (5,), array.data)})
    with safetensors.safe_open(tmp_path / "t.safetensors", "np") as file:
        assert file.get_tensor("x").tolist() == array.tolist()
    with pytest.raises(ValueError, match="it has 20 bytes"):
        tensors.save_file(tmp_path / "u.safetensors", {"x": ("float32", (6,), array.data)})
    assert [path.name for path in tmp_path.iterdir()] == ["t.safetensors"]


@pytest.mark.parametrize("name", [".pad/0", "__metadata__"])
def test_names_with_a_meaning_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="cannot be called"):
        tensors.dump({name: ("uint8", (1,), b"x")})


def test_equal_tensors_are_stored_once() -> None:
    ones, other = np.ones(4, "<f4"), np.full(4, 2, "<f4")
    given = {
        "a": ("float32", (4,), ones.data),
        "b": ("float32", (4,), ones.copy().data),
        "other shape": ("float32", (2, 2), ones.data),
        "other dtype": ("int32", (4,), ones.data),
        "c": ("float32", (4,), other.data),
    }
    unique, stands_for = tensors.deduplicate(given)
    assert list(unique) == ["a", "other shape", "other dtype", "c"]
    assert stands_for == {name: "a" if name == "b" else name for name in given}


SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)
NAMES = st.text(st.characters(codec="utf-8"), max_size=20).filter(
    lambda n: not n.startswith(".pad/") and n != "__metadata__"
)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(NAMES, st.tuples(st.sampled_from(["uint8", "float32", "int64"]), SHAPES), max_size=6))
def test_any_tensors_come_back(wanted: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    arrays = {
        name: np.random.default_rng(0).integers(0, 99, shape).astype(dtype) for name, (dtype, shape) in wanted.items()
    }
    data = b"".join(map(bytes, tensors.dump({n: (str(a.dtype), a.shape, a.tobytes()) for n, a in arrays.items()})))
    loaded = safetensors.numpy.load(data)
    assert {n: (a.dtype, a.tolist()) for n, a in loaded.items() if not n.startswith(".pad/")} == {
        n: (a.dtype, a.tolist()) for n, a in arrays.items()
    }
    assert set(tensors.read_header(data, aligned=True)) == set(arrays)


def header_of(entries: dict[str, Any], data: bytes) -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + data


ENTRIES = st.dictionaries(
    st.sampled_from(["a", "b", "c"]),
    st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(["F32", "U8", "I64", "F8_E4M3"]),
            "shape": st.lists(st.sampled_from([0, 1, 2, 3, 2**32, 2**63]), max_size=3),
            "data_offsets": st.lists(st.sampled_from([0, 1, 2, 4, 8, 12, 16, 24, 2**63]), min_size=2, max_size=2),
        }
    ),
    max_size=3,
)


@settings(max_examples=300, deadline=None)
@given(ENTRIES, st.sampled_from([0, 1, 4, 8, 12, 16, 24]))
def test_never_more_lenient_than_the_library(entries: dict[str, Any], size: int) -> None:
    data = header_of(entries, bytes(size))
    try:
        found = tensors.read_header(data)
    except BundleError:
        return
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        with safetensors.safe_open(file.name, "np") as library:
            assert {name: list(entry.shape) for name, entry in found.items()} == {
                name: library.get_slice(name).get_shape()
                for name in library.keys()  # noqa: SIM118
            }
