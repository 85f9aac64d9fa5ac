"""stdout for data, stderr for talk: tables, progress, JSON, CI annotations."""

import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import msgspec

from ..bundle_format.errors import MctlError, printable

if TYPE_CHECKING:
    from rich.console import Console


@cache
def talk() -> "Console":
    """stderr, with colours where it is a terminal. Imported here: `--help` and `inspect` do without."""
    from rich.console import Console

    return Console(stderr=True, soft_wrap=True, highlight=False)


def write(lines: Iterable[str]) -> None:
    """Lines of data, on stdout."""
    sys.stdout.write("".join(f"{printable(line)}\n" for line in lines))


def emit_json(schema: str, ok: bool, **fields: Any) -> None:
    """One JSON object on stdout: `{"schema": …, "ok": …, …}`."""
    data = msgspec.json.encode({"schema": schema, "ok": ok, **fields}, enc_hook=str)
    sys.stdout.write(msgspec.json.format(data, indent=2).decode() + "\n")


def say(text: str) -> None:
    """One line of talk, on stderr."""
    sys.stderr.write(f"{printable(text)}\n")


def render_error(error: MctlError) -> None:
    """`error: …`, and the way out as `hint: …`."""
    talk().print("[bold red]error:[/] ", end="")
    talk().print(error.message, markup=False)
    if error.hint:
        talk().print("\n[bold cyan]hint:[/] ", end="")
        talk().print(error.hint, markup=False)
    annotate("error", error.message, *_place(error.message))


def _place(message: str) -> tuple[str | None, int | None]:
    """File and line of `… (model.py:12)`; the file as the command names it, if it does."""
    found = re.search(r"\(([^\s():]+\.py):(\d+)", message)
    if not found:
        return None, None
    words = (word.partition(".py")[0] + ".py" for word in sys.argv[1:])
    return next((word for word in words if Path(word).name == found[1]), found[1]), int(found[2])


def width(stream: TextIO) -> int | None:
    """Columns of the terminal; None where the stream is none."""
    return shutil.get_terminal_size().columns if stream.isatty() else None


@contextmanager
def phase(text: str) -> Iterator[None]:
    """A spinner with `text` while the body runs; nothing but the final line where stderr is no terminal."""
    if sys.stderr.isatty():
        with talk().status(text):
            yield
    else:
        yield


def annotate(level: str, message: str, file: str | None = None, line: int | None = None) -> None:
    """An annotation of GitHub Actions ("workflow commands"); nothing elsewhere."""
    if os.environ.get("GITHUB_ACTIONS") != "true":
        return
    where = ",".join(f"{k}={v}" for k, v in (("file", file), ("line", line)) if v is not None)
    text = message.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    sys.stderr.write(f"::{level}{' ' + where if where else ''}::{text}\n")


def step_summary(markdown: str) -> None:
    """Adds to the job's summary page in GitHub Actions; nothing elsewhere."""
    path = os.environ.get("GITHUB_STEP_SUMMARY")
    if path:
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(markdown + "\n")
