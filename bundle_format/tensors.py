"""safetensors in and out, with each tensor on a 64-byte boundary; equal tensors are stored once.

Format: https://github.com/huggingface/safetensors#format. It allows no holes between tensors, so the bytes up to a
boundary are tensors of their own (uint8), called `.pad/<n>`.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from .contract import DTYPES
from .errors import BundleError
from .files import atomic
from .layout import ALIGNMENT, MAX_TENSORS, MAX_TENSORS_HEADER
from .strict_json import refuse_ambiguity

FILLER = ".pad/"

Buffer = bytes | memoryview
Tensor = tuple[str, tuple[int, ...], Buffer]  # dtype as "float32", shape, row-major little-endian bytes

_NAMES = {info.safetensors: name for name, info in DTYPES.items()}
_MAX_BYTES = 2**62
_MAX_RANK = 64


class TensorEntry(NamedTuple):
    """Where a tensor lies: bytes `begin` to `end` of the member. `dtype` as torch calls it: "float32"."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class _Stored(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def read_header(view: Buffer, *, aligned: bool = False) -> dict[str, TensorEntry]:
    """The tensors of a safetensors member in the order of their bytes, without fillers. BundleError says what is wrong.

    `aligned`: also refuse a tensor that does not start on a 64-byte boundary of the member.
    """
    view = memoryview(view)
    size = int.from_bytes(view[:8], "little")
    if len(view) < 8 or size > len(view) - 8 or size > MAX_TENSORS_HEADER:
        raise BundleError(f"the safetensors header is cut or too large: {size} bytes of {len(view)}")
    header = bytes(view[8 : 8 + size])
    if header.count(b":") > 8 * MAX_TENSORS:  # a tensor has four, and some in its name: small objects cost most memory
        raise BundleError(f"the safetensors header names more than {MAX_TENSORS} tensors")
    try:
        raw = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        metadata = raw.pop("__metadata__", None)
        if metadata is not None:
            msgspec.json.decode(metadata, type=dict[str, str])
        if len(raw) > MAX_TENSORS:
            raise BundleError(f"the safetensors header names {len(raw)} tensors, allowed {MAX_TENSORS}")
        stored = {name: msgspec.json.decode(value, type=_Stored) for name, value in raw.items()}
        refuse_ambiguity(header)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BundleError(f"the safetensors header is not valid: {str(error)[:512]}") from error
    entries = _placed(stored, 8 + size, len(view))
    for name, entry in entries.items():
        if aligned and entry.begin % ALIGNMENT:
            raise BundleError(f"tensor `{name}` does not start on a boundary of {ALIGNMENT} bytes")
    return entries


def _placed(stored: Mapping[str, _Stored], start: int, end: int) -> dict[str, TensorEntry]:
    """Tensors follow one another from `start` to `end`, without holes."""
    entries, at = {}, start
    for name, tensor in sorted(stored.items(), key=lambda item: item[1].data_offsets):
        first, last = tensor.data_offsets
        if tensor.dtype not in _NAMES:
            raise BundleError(f"tensor `{name}` has the dtype `{tensor.dtype[:32]}`, which is not known")
        dtype = _NAMES[tensor.dtype]
        size = _nbytes(name, dtype, tensor.shape)
        if start + first != at or last - first != size or at + size > end:
            raise BundleError(f"tensor `{name}` of {size} bytes has the offsets {first} to {last}, which do not fit")
        if not name.startswith(FILLER):
            entries[name] = TensorEntry(dtype, tensor.shape, at, at + size)
        at += size
    if at != end:
        raise BundleError(f"{end - at} bytes at the end belong to no tensor")
    return entries


def _nbytes(name: str, dtype: str, shape: tuple[int, ...]) -> int:
    size = DTYPES[dtype].size
    if len(shape) > _MAX_RANK or any(axis < 0 for axis in shape):
        raise BundleError(f"tensor `{name}` has a shape that is not allowed")
    for axis in shape:  # in their order, as other readers multiply them: a zero at the end does not undo an overflow
        size *= axis
        if size > _MAX_BYTES:
            raise BundleError(f"tensor `{name}` is larger than {_MAX_BYTES} bytes")
    return size


# --- writing -----------------------------------------------------------------------------------------------------


def plan(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[bytes, dict[str, TensorEntry]]:
    """The start of a safetensors file with tensors of these dtypes and shapes, and where in the file each of them lies.

    What follows the start is zeros, but for the tensors.
    """
    header: dict[str, dict[str, object]] = {}
    ends: dict[str, tuple[int, int]] = {}
    at = 0
    for name, (dtype, shape) in tensors.items():
        if name.startswith(FILLER) or name == "__metadata__":
            raise ValueError(f"a tensor cannot be called {name!r}")
        if filler := -at % ALIGNMENT:
            header[f"{FILLER}{len(header)}"] = {"dtype": "U8", "shape": [filler], "data_offsets": [at, at + filler]}
            at += filler
        ends[name] = (at, at + _nbytes(name, dtype, shape))
        header[name] = {"dtype": DTYPES[dtype].safetensors, "shape": list(shape), "data_offsets": list(ends[name])}
        at = ends[name][1]
    text = msgspec.json.encode(header)
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    start = len(text).to_bytes(8, "little") + text
    places = {
        name: TensorEntry(*tensors[name], len(start) + first, len(start) + end) for name, (first, end) in ends.items()
    }
    return start, places


def dump(tensors: Mapping[str, Tensor]) -> list[Buffer]:
    """The pieces of a safetensors file, to be written one after another: archive.write takes them as a member.

    Buffers are not copied; they must be contiguous and hold row-major elements. A numpy array's is `array.data`.
    """
    start, places = plan({name: (dtype, shape) for name, (dtype, shape, _) in tensors.items()})
    pieces: list[Buffer] = [start]
    at = len(start)
    for name, (dtype, shape, buffer) in tensors.items():
        place = places[name]
        if memoryview(buffer).nbytes != place.end - place.begin:
            raise ValueError(f"{name!r} is no {dtype}{list(shape)}: it has {memoryview(buffer).nbytes} bytes")
        if place.begin > at:
            pieces.append(bytes(place.begin - at))
        pieces.append(buffer)
        at = place.end
    return pieces


def save_file(path: str | Path, tensors: Mapping[str, Tensor]) -> None:
    """A safetensors file on disk, whole or not at all."""
    with atomic(Path(path)) as file:
        for piece in dump(tensors):
            file.write(piece)


def deduplicate(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Those tensors that differ in dtype, shape or bytes, and for each name the name that stands for it."""
    unique: dict[str, Tensor] = {}
    stands_for: dict[str, str] = {}
    first: dict[tuple[str, tuple[int, ...], bytes], str] = {}
    for name, tensor in tensors.items():
        dtype, shape, buffer = tensor
        key = (dtype, tuple(shape), hashlib.sha256(buffer).digest())
        if key not in first:
            first[key] = name
            unique[name] = tensor
        stands_for[name] = first[key]
    return unique, stands_for
