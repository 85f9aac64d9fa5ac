"""Forms as browsers and `curl -F` send them: RFC 7578 (multipart/form-data), and urlencoded ones."""

import re
from email.message import Message
from typing import NamedTuple
from urllib.parse import parse_qsl

MAX_PARTS = 1000


class Part(NamedTuple):
    """One field: its bytes, and the type and file name that the client gave."""

    value: bytes
    content_type: str = ""
    file_name: str = ""


def media_type(content_type: str) -> str:
    """`text/plain` of `Text/Plain; charset=utf-8`."""
    return content_type.partition(";")[0].strip().lower()


def parse_form(content_type: str, body: bytes) -> dict[str, Part]:
    """Parts by name; of several with one name the last. ValueError says what is wrong."""
    kind = media_type(content_type)
    if kind == "application/x-www-form-urlencoded":
        return {name: Part(value.encode()) for name, value in parse_qsl(body.decode(errors="replace"), True)}
    if kind != "multipart/form-data":
        raise ValueError(f"the body is no form: its content type is `{kind[:80] or 'not given'}`")
    boundary = _parameter(f"content-type: {content_type}", "boundary")
    if not boundary:
        raise ValueError("the form's content type has no boundary")
    return dict(_parts(body, b"--" + boundary.encode()))


def _parts(body: bytes, mark: bytes) -> list[tuple[str, Part]]:
    pieces = (b"\r\n" + body).split(b"\r\n" + mark)
    if len(pieces) < 2 or not pieces[-1].startswith(b"--"):
        raise ValueError("the form ends before its last boundary")
    if len(pieces) > MAX_PARTS + 2:
        raise ValueError(f"the form has more than {MAX_PARTS} parts")
    return [_part(piece) for piece in pieces[1:-1]]


def _part(piece: bytes) -> tuple[str, Part]:
    head, blank, value = piece.partition(b"\r\n\r\n")
    if not blank:
        raise ValueError("a part of the form has no empty line after its headers")
    headers = {
        name.strip().lower(): f"{name}:{text}"
        for name, _, text in (line.partition(":") for line in head.decode(errors="replace").split("\r\n"))
    }
    disposition = headers.get("content-disposition", "")
    name = _parameter(disposition, "name")
    if name is None:
        raise ValueError("a part of the form has no name")
    kind = headers.get("content-type", "").partition(":")[2].strip()
    return name, Part(value, kind, _parameter(disposition, "filename") or "")


def _parameter(header: str, name: str) -> str | None:
    """A parameter of one header line, unquoted."""
    message = Message()
    field, _, text = header.partition(":")
    message[field or "x"] = re.sub(r"[\r\n]", " ", text)
    found = message.get_param(name, header=field or "x")
    return found if isinstance(found, str) else None
