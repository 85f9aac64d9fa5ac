"""`mctl top`: what a running server does, live."""

import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from ..bundle_format.errors import ServeError, UsageError
from . import console

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ..runner.scrape import Address
    from ..runner.telemetry import Reading, Snapshot


def top(
    url: Annotated[str, typer.Argument(help="Of `mctl serve`.")] = "http://127.0.0.1:8000",
    interval: Annotated[float, typer.Option(help="Seconds between two readings.", min=0.1, max=3600)] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print what happens in one interval, and end.")] = False,
    token_file: Annotated[Path | None, typer.Option(help="Holds the bearer token that the server wants.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout; implies --once.")] = False,
) -> None:
    """Show what a server does: rate, latency, queue, batches, padding, workers. Ctrl-C ends it."""
    from ..runner.scrape import address_from

    address, token = address_from(url), read_token(token_file)
    if not once and not json:
        with contextlib.suppress(KeyboardInterrupt):  # how a person leaves
            _watch(address, token, interval)
        return
    found = _over(address, token, interval)
    if json:
        console.emit_json("mctl.top/1", True, url=address.url, **msgspec.to_builtins(found))
    else:
        _print(found, address.url)


def _over(address: "Address", token: str | None, interval: float) -> "Snapshot":
    from ..runner.scrape import read
    from ..runner.telemetry import snapshot

    before = read(address, token)
    time.sleep(interval)
    return snapshot(before, read(address, token))


def _watch(address: "Address", token: str | None, interval: float) -> None:
    """On a terminal one picture that changes, elsewhere one after the other."""
    from rich.console import Console
    from rich.live import Live

    from ..runner.scrape import read

    first, screen = read(address, token), Console(highlight=False)
    pictures = _pictures(address, token, interval, first)
    if not screen.is_terminal:
        for picture in pictures:
            screen.print(picture, "")
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the screen is given back
    with Live(console=screen, screen=True, auto_refresh=False) as live:
        for picture in pictures:
            live.update(picture, refresh=True)


def _pictures(address: "Address", token: str | None, interval: float, before: "Reading") -> "Iterator[RenderableType]":
    """A picture each interval. A server that went away may come back."""
    from ..runner.scrape import read
    from ..runner.telemetry import snapshot
    from .top_view import away, view

    found = snapshot(None, before)
    yield view(found, address.url)
    while True:
        time.sleep(interval)
        try:
            after = read(address, token)
        except ServeError as error:
            yield away(error, found, address.url)
            continue
        found, before = snapshot(before, after), after
        yield view(found, address.url)


def _print(found: "Snapshot", url: str) -> None:
    from rich.console import Console

    from .top_view import view

    Console(highlight=False).print(view(found, url))


def read_token(path: Path | None) -> str | None:
    """The first line, as `mctl serve --token-file` reads it."""
    if path is None:
        return None
    try:
        token = path.read_text(encoding="ascii").partition("\n")[0].rstrip(" \r")
    except OSError as error:
        raise UsageError(f"cannot read `{path}`: {(error.strerror or str(error)).lower()}") from None
    except UnicodeDecodeError:
        token = ""
    if not token.isprintable() or not token or " " in token:
        raise UsageError(f"`{path}` has no bearer token in its first line", "it is printable ASCII without spaces")
    return token
