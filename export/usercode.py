"""Runs the user's code; what it raises is told with the user's own file and line."""

import ast
import linecache
import logging
import os
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from itertools import islice
from pathlib import Path
from traceback import walk_tb
from types import FrameType
from typing import NamedTuple

import torch

from ..bundle_format.errors import ExportError, MctlError


def _inside(folder: str | Path) -> str:
    """What the paths of all files in a folder begin with: `torch/` is no part of `torchvision/`."""
    return f"{folder}{os.sep}"


_OURS = tuple(_inside(path.parent) for path in Path(__file__).parents[1].glob("*/__init__.py"))
_LIBRARIES = (_inside(sysconfig.get_path("purelib")), _inside(sysconfig.get_path("platlib")))
_STANDARD = _inside(sysconfig.get_path("stdlib"))
_HIDDEN = (*_OURS, _inside(Path(torch.__file__).parent), "<")  # "<": generated code


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
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name:
            hint = f"install it, or put `{error.name}` beside the model file"
            raise kind(f"{doing}: no module named `{error.name}`{at(error)}", hint) from error
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
    texts = " ".join(str(link) for link in _causes(error))
    if "_OpNamespace" in texts:
        return "import the package that registers this operator in the model file, or give its library with `--library`"
    if found := re.search(r"operator (torch\w+)::\w+ does not exist", texts):
        return f"the installed `{found[1]}` was made for another torch: install the one for torch {torch.__version__}"
    return None


_BOILERPLATE = re.compile(
    r"\s*(The error above occurred when calling|Explanation:|Developer debug context:|Please file an issue"
    r"|For the potential source|While executing %|Use tlparse)",
)
_LONGEST = 400


def describe(error: BaseException) -> str:
    """`ValueError: too big (model.py:12), because of KeyError: 'seq'`, on one line, without torch's boilerplate."""
    first, *causes = (f"{type(link).__name__}{_shown(link)}" for link in _causes(error))
    because = f", because of {causes[-1]}" if causes and causes[-1] not in first else ""
    return f"{first}{at(error)}{because}"


def _shown(error: BaseException) -> str:
    text = " ".join(_BOILERPLATE.split(str(error), maxsplit=1)[0].split())
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST].rpartition(' ')[0]} …"
    return f": {text}" if text else ""


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error, and what it was raised from."""
    while error is not None:
        yield error
        error = error.__cause__


def at(error: BaseException) -> str:
    """` (model.py:12)`: where the user's own code was when it was raised; empty if it was nowhere in it."""
    line = user_line((frame.f_code.co_filename, number) for frame, number in walk_tb(error.__traceback__))
    return f" ({line})" if line else ""


class Place(NamedTuple):
    """What of the user's code runs: its line as `model.py:12`, and the call's text where torch is not inside of an
    operator: then the call itself needs a number.
    """

    line: str | None
    call: str


def current_place() -> Place:
    """Where the user's code is when the caller's caller asks."""
    frames = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and not frame.f_code.co_filename.startswith(_OURS):
        frames.append(frame)
        frame = frame.f_back
    line = user_line((frame.f_code.co_filename, frame.f_lineno) for frame in reversed(frames))
    inner = next((at for at, frame in enumerate(frames) if _is_visible(frame.f_code.co_filename)), None)
    if inner is None or any(isinstance(frame.f_locals.get("func"), torch._ops.OpOverload) for frame in frames[:inner]):
        return Place(line, "")
    return Place(line, _source(frames[inner]))


def _source(frame: FrameType) -> str:
    """The text of the expression that a frame is at, on one line; empty where the file is not at hand."""
    first, last, begin, end = next(islice(frame.f_code.co_positions(), frame.f_lasti // 2, None))
    lines = linecache.getlines(frame.f_code.co_filename)
    if first is None or last is None or begin is None or end is None or len(lines) < last:
        return ""
    raw = [line.encode() for line in lines[first - 1 : last]]
    raw[-1] = raw[-1][:end]
    raw[0] = raw[0][begin:]
    return " ".join(b"".join(raw).decode(errors="replace").split())


def called(text: str) -> str:
    """The function that an expression calls: `linspace` for `torch.linspace(0, 1, n)`; empty where it calls none."""
    try:
        expression = ast.parse(text, mode="eval").body
    except SyntaxError:
        return ""
    function = expression.func if isinstance(expression, ast.Call) else None
    return getattr(function, "attr", getattr(function, "id", ""))


def user_line(frames: Iterable[tuple[str, int]]) -> str | None:
    """`model.py:12` for the innermost of (file, line) that is the user's; `model.py:12, in bert.py:7` in a library."""
    visible = [(file, line) for file, line in frames if _is_visible(file)]
    own = [place for place in visible if not place[0].startswith(_LIBRARIES)]
    places = own[-1:] if own and own[-1] == visible[-1] else [*own[-1:], *visible[-1:]]
    return ", in ".join(f"{Path(file).name}:{line}" for file, line in places) or None


def _is_visible(file: str) -> bool:
    """Neither torch's, nor mctl's, nor Python's own."""
    return not file.startswith(_HIDDEN) and (file.startswith(_LIBRARIES) or not file.startswith(_STANDARD))
