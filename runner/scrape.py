"""Asks a server for what it tells about itself."""

import http.client
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import msgspec

from ..bundle_format.errors import ServeError, UsageError, printable
from .telemetry import Reading, parse

MOST = 16 << 20  # bytes of an answer


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server answers: `http://127.0.0.1:8000`, maybe with a path before its own."""

    url: str
    secure: bool
    host: str
    port: int | None
    path: str


def address_from(text: str) -> Address:
    """UsageError for what is no URL of a server. The scheme may be left out."""
    url = (text if "://" in text else f"http://{text}").rstrip("/")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or not url.isascii():
        raise UsageError(f"`{text}` is no URL of a server", "write it like `http://127.0.0.1:8000`")
    return Address(url, parts.scheme == "https", parts.hostname, port, parts.path)


def read(address: Address, token: str | None = None, timeout: float = 5.0) -> Reading:
    """One reading. ServeError says why there is none: nobody answers, no mctl server does, or it wants a token."""
    status, body = _get(address, "/metrics", token, timeout)
    at, epoch = time.monotonic(), time.time()
    if status == 401 or status == 403:
        what = "does not accept the bearer token" if token else "wants a bearer token"
        raise ServeError(f"`{address.url}` {what}", "name the file that holds the server's with `--token-file`")
    try:
        samples = parse(body.decode(errors="replace")) if status == 200 else {}
    except ServeError:
        samples = {}
    if "mctl_bundle_info" not in samples and b"# TYPE mctl_" not in body:
        raise ServeError(
            f"`{address.url}` answers, but it is no mctl server: `/metrics` gave {status} without mctl's metrics",
            "name the address that `mctl serve` prints",
        )
    told = _object(_get(address, "/v2/models/stats", token, timeout)[1]).get("model_stats")
    statistics = [one for one in told if isinstance(one, dict)] if isinstance(told, list) else []
    status, body = _get(address, "/v2/health/ready", token, timeout)
    why_not = _object(body).get("error", None if status == 200 else "it does not say why")
    return Reading(at, epoch, samples, statistics, None if why_not is None else printable(str(why_not)))


def _get(address: Address, path: str, token: str | None, timeout: float) -> tuple[int, bytes]:
    kind = http.client.HTTPSConnection if address.secure else http.client.HTTPConnection
    connection = kind(address.host, address.port, timeout=timeout)
    try:
        connection.request("GET", address.path + path, headers={"Authorization": f"Bearer {token}"} if token else {})
        answer = connection.getresponse()
        return answer.status, answer.read(MOST)
    except TimeoutError:
        raise ServeError(f"`{address.url}` does not answer within {timeout:g} s") from None
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise ServeError(
            f"cannot reach `{address.url}`: {why}", "start a server with `mctl serve`, or name another URL"
        ) from None
    except http.client.HTTPException:
        raise ServeError(f"`{address.url}` answers, but does not speak HTTP") from None
    finally:
        connection.close()


def _object(body: bytes) -> dict[str, Any]:
    """Of JSON; empty where it is none, because a server may be on its way out."""
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        found = None
    return found if isinstance(found, dict) else {}
