"""Runs the user's code; what it raises is told with the user's own file and line."""

import logging
import os
import sys
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from traceback import walk_tb
from types import FrameType

import torch

from ..bundle_format.errors import ExportError, MctlError

_OURS = tuple(str(path.parent) for path in Path(__file__).parents[1].glob("*/__init__.py"))
_LIBRARIES = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
_STANDARD = sysconfig.get_path("stdlib")
_HIDDEN = (*_OURS, str(Path(torch.__file__).parent), "<")  # "<": generated code


@contextmanager
def user_code(doing: str, kind: type[MctlError] = ExportError) -> Iterator[None]:
    """Turns an exception of the user's code into `kind`: "`doing`: ValueError: too big (model.py:12)".

    What the code prints goes to stderr: stdout is for mctl's own data.
    """
    try:
        with redirect_stdout(sys.stderr):
            yield
    except MctlError:
        raise
    except SyntaxError as error:
        place = f" ({Path(error.filename).name}:{error.lineno})" if error.filename else ""
        raise kind(f"{doing}: {error.msg}{place}") from error
    except SystemExit as error:
        hint = 'put what only a script should do under `if __name__ == "__main__":`'
        raise kind(f"{doing}: it calls `sys.exit({error.code!r})`{at(error)}", hint) from error
    except ModuleNotFoundError as error:
        hint = f"install it, or put `{error.name}` beside the model file"
        raise kind(f"{doing}: no module named `{error.name}`{at(error)}", hint) from error
    except Exception as error:
        raise kind(f"{doing}: {describe(error)}", _hint(error)) from error


@contextmanager
def quiet() -> Iterator[None]:
    """torch warns, logs and prints on the way to errors that are told better; the user's prints were seen before."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with (
            Path(os.devnull).open("w") as nowhere,
            redirect_stdout(nowhere),
            redirect_stderr(nowhere),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


def _hint(error: Exception) -> str | None:
    if "_OpNamespace" in str(error):
        return "import the package that registers this custom operator in the model file"
    return None


def describe(error: BaseException) -> str:
    """`ValueError: too big (model.py:12)`, on one line."""
    text = " ".join(str(error).partition("\n\nThe error above occurred when calling")[0].split())
    shown = text if len(text) <= 400 else f"{text[:400]}…"
    return f"{type(error).__name__}{': ' if text else ''}{shown}{at(error)}"


def at(error: BaseException) -> str:
    """` (model.py:12)`: where the user's own code was when it was raised; empty if it was nowhere in it."""
    line = user_line((frame.f_code.co_filename, number) for frame, number in walk_tb(error.__traceback__))
    return f" ({line})" if line else ""


def current_line() -> str | None:
    """The line of the user's code that runs when the caller's caller asks, as `model.py:12`."""
    frames = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and not frame.f_code.co_filename.startswith(_OURS):
        frames.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return user_line(reversed(frames))


def user_line(frames: Iterable[tuple[str, int]]) -> str | None:
    """`model.py:12` for the innermost of (file, line) that is the user's; `model.py:12, in bert.py:7` in a library."""
    visible = [(file, line) for file, line in frames if not file.startswith(_HIDDEN) and not _is_standard(file)]
    own = [place for place in visible if not place[0].startswith(_LIBRARIES)]
    places = own[-1:] if own and own[-1] == visible[-1] else [*own[-1:], *visible[-1:]]
    return ", in ".join(f"{Path(file).name}:{line}" for file, line in places) or None


def _is_standard(file: str) -> bool:
    return file.startswith(_STANDARD) and not file.startswith(_LIBRARIES)
