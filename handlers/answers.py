"""What a handler returns or raises, as status, headers and bytes."""

from collections.abc import Mapping
from math import isfinite
from typing import Any, NamedTuple

import msgspec
import numpy as np

from .api import Refused

MAX_BODY = 1 << 30  # bytes of a frame's body
_JSON, _TEXT, _BYTES = "application/json", "text/plain; charset=utf-8", "application/octet-stream"


class Response(NamedTuple):
    """An answer whose status and headers the handler chooses; `body` is what a handler may return by itself."""

    status: int = 200
    headers: Mapping[str, str] = {}
    body: Any = b""


class Answer(NamedTuple):
    """What goes to the client."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes | bytearray | memoryview


def answer_from(value: object) -> Answer:
    """The answer that `value` stands for. Refused (422) for NaN in JSON, TypeError for what is no answer."""
    if isinstance(value, Response):
        return _response(value)
    body, kind = _encoded(value)
    return Answer(200, [("content-type", kind)], _checked(body))


def error_answer(path: str, error: Refused) -> Answer:
    """A refusal as the path's clients read it: `{"error": sentence}`, below `/v1/` OpenAI's object."""
    headers = [("content-type", _JSON)]
    if error.status == 503:
        headers.append(("retry-after", "1"))
    said: object = error.message
    if path.startswith("/v1/"):
        kind = "invalid_request_error" if error.status < 500 else "server_error"
        said = {"message": error.message, "type": kind, "param": error.param, "code": error.code}
    return Answer(error.status, headers, msgspec.json.encode({"error": said}))


def json_from(value: object) -> bytes:
    """`value` as JSON, arrays as lists. Refused (422) where it holds NaN or infinity, which JSON cannot say."""
    encoded = msgspec.json.encode(value, enc_hook=_plain)
    if b"null" in encoded and not _is_finite(value):
        raise Refused(422, "the answer holds NaN or infinity, which JSON cannot say")
    return encoded


def _response(response: Response) -> Answer:
    status = response.status
    if not isinstance(status, int) or not 200 <= status <= 599:
        raise TypeError(f"the status of a Response is {status!r}, allowed 200..599")
    body, kind = _encoded(response.body)
    headers = [(str(name).lower(), str(text)) for name, text in dict(response.headers).items()]
    if all(name != "content-type" for name, _ in headers) and body:
        headers.append(("content-type", kind))
    return Answer(status, headers, _checked(body))


def _encoded(value: object) -> tuple[bytes | bytearray | memoryview, str]:
    if isinstance(value, bytes | bytearray):
        return value, _BYTES
    if isinstance(value, memoryview):
        return value.cast("B"), _BYTES
    if isinstance(value, str):
        return value.encode(errors="replace"), _TEXT
    if value is None:
        raise TypeError("the handler returned nothing")
    return json_from(value), _JSON


def _checked(body: bytes | bytearray | memoryview) -> bytes | bytearray | memoryview:
    if len(body) > MAX_BODY:
        raise TypeError(f"the answer has {len(body)} bytes, allowed {MAX_BODY}")
    return body


def _plain(value: object) -> object:
    """What JSON has for values of numpy and torch."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    if hasattr(value, "detach"):
        return value.detach().cpu().tolist()
    raise TypeError(f"the handler returned a {type(value).__name__}, which JSON does not have")


def _is_finite(value: object) -> bool:
    if isinstance(value, float):
        return isfinite(value)
    if isinstance(value, Mapping):
        return all(map(_is_finite, value.values()))
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_finite, value))
    if isinstance(value, np.ndarray | np.generic):
        return value.dtype.kind != "f" or bool(np.isfinite(value).all())
    return not hasattr(value, "detach") or _is_finite(_plain(value))


def sse_from(item: object) -> bytes:
    """One event of a stream, as browsers' EventSource reads it: a string's lines, or JSON."""
    text = item if isinstance(item, str) else json_from(item).decode()
    return ("".join(f"data: {line}\n" for line in text.split("\n")) + "\n").encode()


def part_from(item: object) -> bytes | bytearray | memoryview:
    """One item of a stream: bytes as they are, else an event."""
    return item if isinstance(item, bytes | bytearray | memoryview) else sse_from(item)


def stream_type(item: object) -> str:
    """The content type of a stream that begins with `item`."""
    return _BYTES if isinstance(item, bytes | bytearray | memoryview) else "text/event-stream"
