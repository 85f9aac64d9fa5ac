"""`mctl top`: what a running server does, live."""

import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from ..bundle_format.errors import ServeError, UsageError, printable
from . import console

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ..runner.scrape import Address
    from ..runner.telemetry import Overview, Reading, Snapshot


def top(
    url: Annotated[str, typer.Argument(help="Of `mctl serve`.")] = "http://127.0.0.1:8000",
    model: Annotated[
        str | None, typer.Option(help="Only this one, in full [a line for each, if there are several].")
    ] = None,
    version: Annotated[str | None, typer.Option(help="Of `--model` [its highest].")] = None,
    interval: Annotated[float, typer.Option(help="Seconds between two readings.", min=0.1, max=3600)] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print what happens in one interval, and end.")] = False,
    token_file: Annotated[Path | None, typer.Option(help="Holds the bearer token that the server wants.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout; implies --once.")] = False,
) -> None:
    """Show what a server does: rate, latency, queue, batches, padding, workers. Ctrl-C ends it."""
    from ..runner.scrape import address_from

    if version is not None and model is None:
        raise UsageError("`--version` is one of `--model`", "name the model too")
    address, token, chosen = address_from(url), read_token(token_file), _Chosen(model, version)
    if not once and not json:
        with contextlib.suppress(KeyboardInterrupt):  # how a person leaves
            _watch(address, token, interval, chosen)
        return
    found = _over(address, token, interval, chosen)
    if json:
        schema = "mctl.top/1" if hasattr(found, "model") else "mctl.top.models/1"
        console.emit_json(schema, True, url=address.url, **msgspec.to_builtins(found))
    else:
        _print(found, address.url)


@dataclass(frozen=True, slots=True)
class _Chosen:
    """What is shown: one version, or, if there are several and none is named, a line for each."""

    model: str | None
    version: str | None

    def found(self, before: "Reading | None", after: "Reading") -> "Snapshot | Overview":
        """UsageError if it is not there."""
        from ..runner.telemetry import overview, snapshot

        versions = after.versions()
        if self.model is None:
            if len(versions) != 1:
                return overview(before, after)
            which = versions[0]
        else:
            which = self._among(versions)
        return snapshot(before.only(*which) if before else None, after.only(*which))

    def _among(self, versions: "list[tuple[str, str]]") -> "tuple[str, str]":
        matching = [which for which in versions if which[0] == self.model and self.version in (None, which[1])]
        if matching:
            return matching[-1]
        names = ", ".join(f"{printable(name)} {printable(number)}" for name, number in versions) or "none"
        wanted = f"{self.model} {self.version or ''}".rstrip()
        raise UsageError(f"the server has no model `{wanted}` in memory", f"it has: {names}")


def _over(address: "Address", token: str | None, interval: float, chosen: _Chosen) -> "Snapshot | Overview":
    from ..runner.scrape import read

    before = read(address, token)
    time.sleep(interval)
    return chosen.found(before, read(address, token))


def _watch(address: "Address", token: str | None, interval: float, chosen: _Chosen) -> None:
    """On a terminal one picture that changes, elsewhere one after the other."""
    from rich.console import Console
    from rich.live import Live

    from ..runner.scrape import read

    first, screen = read(address, token), Console(highlight=False)
    pictures = _pictures(address, token, interval, first, chosen)
    if not screen.is_terminal:
        for picture in pictures:
            screen.print(picture, "")
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the screen is given back
    with Live(console=screen, screen=True, auto_refresh=False) as live:
        for picture in pictures:
            live.update(picture, refresh=True)


def _pictures(
    address: "Address", token: str | None, interval: float, before: "Reading", chosen: _Chosen
) -> "Iterator[RenderableType]":
    """A picture each interval. A server that went away may come back."""
    from ..runner.scrape import read
    from .top_view import away, view

    found = chosen.found(None, before)
    yield view(found, address.url)
    while True:
        time.sleep(interval)
        try:
            after = read(address, token)
        except ServeError as error:
            yield away(error, found, address.url)
            continue
        found, before = chosen.found(before, after), after
        yield view(found, address.url)


def _print(found: "Snapshot | Overview", url: str) -> None:
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
