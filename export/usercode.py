"""Runs the user's code; what it raises is told with the user's own file and line."""

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from ..bundle_format.errors import ExportError, MctlError

_OURS = (str(Path(__file__).parents[1] / "export"), str(Path(torch.__file__).parent))
_FOREIGN = ("site-packages", "dist-packages", f"{sys.base_prefix}/lib/python", "<frozen", "<string>")


@contextmanager
def user_code(doing: str) -> Iterator[None]:
    """Turns any exception of the user's code into ExportError: "`model.py` raised ValueError: … (model.py:12)"."""
    try:
        yield
    except MctlError:
        raise
    except SyntaxError as error:
        place = f" ({Path(error.filename).name}:{error.lineno})" if error.filename else ""
        raise ExportError(f"{doing}: {error.msg}{place}") from error
    except SystemExit as error:
        raise ExportError(f"{doing}: it calls `sys.exit({error.code!r})`{_at(error)}", _exit_hint) from error
    except ModuleNotFoundError as error:
        hint = f"install it, or put `{error.name}` beside the model file"
        raise ExportError(f"{doing}: no module named `{error.name}`{_at(error)}", hint) from error
    except Exception as error:
        raise ExportError(f"{doing}: {describe(error)}") from error


_exit_hint = 'put what only a script should do under `if __name__ == "__main__":`'


def describe(error: BaseException) -> str:
    """`ValueError: too big (model.py:12)`, on one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}{': ' if text else ''}{text[:600]}{_at(error)}"


def user_line(error: BaseException) -> str | None:
    """`model.py:12`: the innermost line of the user's own code in the traceback; None if there is none."""
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    return innermost(frames)


def innermost(frames: list[tuple[str, int | None]]) -> str | None:
    """The last of (file, line) that is the user's, as `file:line`; else the last that is neither torch's nor ours."""
    mine = [place for place in frames if not place[0].startswith(_OURS)]
    users = [place for place in mine if not any(part in place[0] for part in _FOREIGN)]
    if not (users or mine):
        return None
    file, line = (users or mine)[-1]
    return f"{Path(file).name}:{line}"


def _at(error: BaseException) -> str:
    line = user_line(error)
    return f" ({line})" if line else ""
