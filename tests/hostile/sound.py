"""A sound bundle made of plain bytes, and ways to change one thing about it."""

import hashlib
import json
import struct
from collections.abc import Callable
from typing import Any

from .rawzip import TOP, Part, pack

MANIFEST = b"m/extra/mctl/manifest.json"
WEIGHTS = b"m/mctl/weights.safetensors"
GOLDEN = b"m/mctl/golden/one.safetensors"
LIBRARY = b"m/data/aotinductor/dynamic/model.so"
REPORT = b"m/extra/mctl/report.json"


def safetensors(tensors: dict[str, tuple[str, list[int], bytes]], **changes: Any) -> bytes:
    """A file whose tensors start on 64-byte boundaries; `changes` by name override fields of the header's entries."""
    header: dict[str, Any] = {}
    data = bytearray()
    for name, (dtype, shape, content) in tensors.items():
        filler = -len(data) % 64
        if filler:
            header[f".pad/{name}"] = {"dtype": "U8", "shape": [filler], "data_offsets": [len(data), len(data) + filler]}
            data += bytes(filler)
        offsets = [len(data), len(data) + len(content)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets} | changes.get(name, {})
        data += content
    return with_header(json.dumps(header).encode(), bytes(data))


def with_header(header: bytes, data: bytes, size: int | None = None) -> bytes:
    header += b" " * (-(8 + len(header)) % 64)
    return struct.pack("<Q", len(header) if size is None else size) + header + data


FLOATS = struct.pack("<8f", *range(8))
WEIGHT = {"fc.weight": ("F32", [2, 4], FLOATS), "fc.bias": ("F32", [2], FLOATS[:8])}
CASE = {"input.x": ("F32", [1, 4], FLOATS[:16]), "output.y": ("F32", [1, 2], FLOATS[:8])}


def manifest(parts: list[Part]) -> dict[str, Any]:
    """A sound manifest of these members."""
    return {
        "schema": "mctl.bundle/1",
        "name": "hostile",
        "version": "1",
        "created": "2026-01-02T03:04:05+00:00",
        "producer": {"mctl": "0.1.0", "torch": "2.13.0"},
        "source": {"file": "model.py", "sha256": "0" * 64, "model": "model", "seed": 0},
        "contract": {
            "dims": [{"name": "batch", "min": 1, "max": 8}],
            "inputs": [{"name": "x", "dtype": "float32", "shape": ["batch", 4]}],
            "outputs": [{"name": "y", "dtype": "float32", "shape": ["batch", 2]}],
            "batch_dim": "batch",
        },
        "golden": [{"name": "one", "member": "mctl/golden/one.safetensors", "dims": {"batch": 1}}],
        "tolerances": {"y": {"rtol": 1e-4, "atol": 1e-5}},
        "members": {
            part.path.decode(): {"size": len(part.data), "sha256": hashlib.sha256(part.data).hexdigest()}
            for part in parts
            if part.name != MANIFEST
        },
        "target": {"os": "linux", "arch": "x86_64", "isa": "x86-64-v2"},
        "variants": [
            {
                "name": "dynamic",
                "library": "data/aotinductor/dynamic/model.so",
                "covers": {"batch": [1, 8]},
                "constants": {"fc.weight": {"tensor": "fc.weight", "stride": [4, 1]}, "fc.bias": {"tensor": "fc.bias"}},
                "imports": [],
            }
        ],
    }


def sound() -> list[Part]:
    """The members of a bundle without a fault; its library is no library."""
    parts = [
        Part(TOP + b"archive_format", b"pt2"),
        Part(TOP + b"archive_version", b"0"),
        Part(TOP + b"byteorder", b"little"),
        Part(TOP + b".data/version", b"6\n"),
        Part(LIBRARY, b"\x7fELF" + bytes(200)),
        Part(WEIGHTS, safetensors(WEIGHT)),
        Part(GOLDEN, safetensors(CASE)),
        Part(REPORT, b"{}\n"),
    ]
    return [*parts, Part(MANIFEST, json.dumps(manifest(parts)).encode())]


def find(parts: list[Part], name: bytes) -> Part:
    return next(part for part in parts if part.name == name)


def changed(name: bytes, change: Callable[[Part], Any], **end: Any) -> bytes:
    """The sound bundle with one member changed after the manifest was made."""
    parts = sound()
    change(find(parts, name))
    return pack(parts, **end)


def described(change: Callable[[dict[str, Any]], Any], replace: dict[bytes, bytes] | None = None) -> bytes:
    """The sound bundle with other members and a manifest that is right about them, but for one change."""
    parts = sound()
    for name, data in (replace or {}).items():
        find(parts, name).data = data
    document = manifest(parts)
    change(document)
    find(parts, MANIFEST).data = json.dumps(document).encode()
    return pack(parts)


def holding(name: bytes, data: bytes) -> bytes:
    return described(lambda document: None, {name: data})


def set_fields(part: Part, **fields: Any) -> None:
    for name, value in fields.items():
        setattr(part, name, value)
