"""Where each fuzz target starts: sound and bad inputs made from the vectors, and the words that they are made of."""

import gzip
import json
import math
import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

from ..hostile.bad_bundles import bad_bundles
from ..hostile.sound import CASE, WEIGHT, manifest, safetensors, sound

VECTORS = Path(__file__).parents[1] / "vectors"

FLOATS = struct.pack("<4f", 1, -2.5, 0.1, 1e20)
IDS = struct.pack("<4q", 0, 99, 5, 7)


def seeds(target: str) -> Iterator[bytes]:
    """Inputs of a target of runner/cpp/fuzz."""
    made = {
        "archive": _archives,
        "arena": _states_of_workers,
        "expression": _expressions,
        "frames": _frames,
        "http": _requests,
        "manifest": _manifests,
        "state": _states,
    }
    return made.get(target, _safetensors)()


def words(target: str) -> set[bytes]:
    """Tokens that mean something to the target: libFuzzer puts them where a change of bytes would not find them."""
    if target == "expression":
        return {b"n", b"seq_len", b"B", b"//", b"999999999999999", b"(", b")"}
    texts = b"\n".join(seed for seed in seeds(target) if target != "archive")
    found = re.findall(rb'"[^"\x00-\x1f\\]{1,40}"|[A-Za-z-]{3,40}: ', texts)
    return {*found, b"null", b"true", b"1e999", b"PK\6\7"}


def _expressions() -> Iterator[bytes]:
    for case in json.loads((VECTORS / "contract/expressions.json").read_text(encoding="utf-8")):
        yield case["text"].encode()


def _manifests() -> Iterator[bytes]:
    yield json.dumps(manifest(sound())).encode()
    vectors = json.loads((VECTORS / "contract/manifests.json").read_text(encoding="utf-8"))
    for case in vectors["cases"]:
        text = vectors["base"]
        for old, new in case["replace"]:
            text = text.replace(old, new)
        if len(text) < 16384:
            yield text.encode()


def _states() -> Iterator[bytes]:
    registry = VECTORS / "registry"
    for name in ("files.json", "serve_toml.json"):
        for case in json.loads((registry / name).read_text(encoding="utf-8")):
            yield "\n".join(case["text"]).encode()
    changes = json.loads((registry / "changes.json").read_text(encoding="utf-8"))
    for document in (changes["state"], *(case["patch"] for case in changes["cases"])):
        yield json.dumps(document).encode()


def _frames() -> Iterator[bytes]:
    for case in json.loads((VECTORS / "handlers/frames.json").read_text(encoding="utf-8"))["from_handler"]:
        header, body = case["header"].encode(), bytes.fromhex(case["body"])
        yield struct.pack("<IQ", len(header), len(body)) + header + body
    yield struct.pack("<IQ", 2, 5000) + b"{}" + bytes(5000) + struct.pack("<IQ", 2, 0) + b"{}"


def _states_of_workers() -> Iterator[bytes]:
    for phase in (0, 4, 5, 6, 0x7FFFFFFF):
        yield struct.pack("<I4xddddq", phase, 0.5, -1, math.nan, 1e300, 1 << 62) + "out of memory \u00e9\0".encode()
    yield bytes(16)
    yield b"\xff" * 16


def _archives() -> Iterator[bytes]:
    for bad in bad_bundles():
        if len(bad.data) < 16384:
            yield bad.data


def _safetensors() -> Iterator[bytes]:
    for tensors in (WEIGHT, CASE, {}, {"e": ("F64", [0, 3], b""), "s": ("BF16", [], b"ab")}):
        member = safetensors(tensors)
        size = 8 + int.from_bytes(member[:8], "little")
        yield member
        yield member[8:size].rstrip() + b"\0" + member[size:]  # the target frames what begins with `{`


def _requests() -> Iterator[bytes]:
    tensor = {"name": "x", "shape": [2, 2], "datatype": "FP32"}
    flat = {"inputs": [tensor | {"data": [1, -2.5, 0.1, 1e20]}]}
    nested = {"id": "a \u00e9\n", "inputs": [tensor | {"datatype": "FP16", "data": [[1, 2], [3, 4]]}]}
    ids = {"name": "ids", "shape": [2, 2], "datatype": "INT64"}
    mask = {"name": "mask", "shape": [2], "datatype": "BOOL", "data": [True, False]}
    whole = {
        "inputs": [tensor | {"data": [1, 2, 3, 4]}, ids | {"data": [[0, 99], [5, 7]]}, mask],
        "outputs": [{"name": "y", "parameters": {"binary_data": True}}],
        "parameters": {"k": 2, "timeout": 1000, "binary_data_output": False},
    }
    for body in (flat, nested, whole):
        text = json.dumps(body).encode()
        yield _post(text)
        yield _post(gzip.compress(text, mtime=0), "Content-Encoding: gzip")
        yield _post(zlib.compress(text), "Content-Encoding: deflate")
        yield _post(zlib.compress(text)[2:-4], "Content-Encoding: deflate")
        yield _chunked(text)
    binary = {
        "inputs": [
            tensor | {"parameters": {"binary_data_size": 16}},
            ids | {"parameters": {"binary_data_size": 32}},
            mask,
        ]
    }
    text = json.dumps(binary).encode()
    yield _post(text + FLOATS + IDS, f"Inference-Header-Content-Length: {len(text)}")
    yield _post(FLOATS[:8], "Inference-Header-Content-Length: 0")
    yield _post(b"{}", "Expect: 100-continue", "x-mctl-timeout-ms: 5", "x-request-id: q", "Connection: close")
    yield _post(b"", "Content-Length: 0")
    yield b"GET http://host/v2/health/ready HTTP/1.0\r\nConnection: keep-alive\r\nAccept: application/json\r\n\r\n"
    yield b"HEAD /metrics HTTP/1.1\r\nHost: h\r\n\r\nGET / HTTP/1.1\r\n\r\n"


def _post(body: bytes, *fields: str) -> bytes:
    lines = ["POST /v2/models/m/infer HTTP/1.1", "Host: h", "Content-Type: application/json", *fields]
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body


def _chunked(body: bytes) -> bytes:
    head = b"POST /v2/models/m/infer HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
    pieces = [body[at : at + 50] for at in range(0, len(body), 50)]
    chunks = b"".join(b"%x;name=value\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
    return head + chunks + b"0\r\nX-Trailer: 1\r\n\r\n"
