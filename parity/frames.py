"""The frames between mctl and the process that runs compiled code for parity.

Both ways: the lengths of a JSON head and of a safetensors body (two little-endian uint64), the head, the body.
A request's head is `Ask`, an answer's `Answer`.
"""

import struct
from collections.abc import Callable
from typing import Literal, NamedTuple

import msgspec
from torch import Tensor

from ..bundle_format.tensors import dump
from ..export.raw import loaded, stored

LENGTHS = struct.Struct("<QQ")
Tensors = dict[str, Tensor]


class Ask(msgspec.Struct, frozen=True):
    """`call` runs the model, `kept` gives the outputs of the last call that asked to `keep` them, as they are now."""

    do: Literal["call", "kept", "reset"]
    keep: bool = False
    seed: int | None = None  # of torch's random numbers, set before the call


class Answer(msgspec.Struct, frozen=True):
    """`error` is the message of what was raised, `kind` its class where it is one of mctl's own."""

    ok: bool
    error: str = ""
    hint: str | None = None
    kind: str = ""
    seconds: float = 0.0
    peak: int = 0  # largest resident size so far, bytes


class Frame(NamedTuple):
    head: bytes
    body: bytes


def pack(head: msgspec.Struct, tensors: Tensors) -> bytes:
    encoded = msgspec.json.encode(head)
    body = b"".join(map(bytes, dump(stored(tensors)))) if tensors else b""
    return LENGTHS.pack(len(encoded), len(body)) + encoded + body


def unpack(read: Callable[[int], bytes]) -> Frame | None:
    """One frame by `read(count)`, which gives fewer bytes only at the end of the stream; None if it ends before."""
    lengths = read(LENGTHS.size)
    if len(lengths) < LENGTHS.size:
        return None
    head, body = LENGTHS.unpack(lengths)
    frame = Frame(read(head), read(body))
    return frame if (len(frame.head), len(frame.body)) == (head, body) else None


def tensors_in(frame: Frame) -> Tensors:
    return loaded(frame.body) if frame.body else {}
