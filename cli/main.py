"""The Typer app; the only place that turns an MctlError into text and an exit code.

Exit codes: 0 done; 1 the answer is no; 2 wrong usage; 3 an error of mctl itself; 130 interrupted, 143 terminated.
"""

import io
import signal
import sys
import traceback

import typer

from .. import __version__
from ..bundle_format.errors import MctlError
from . import console
from .admin import admin
from .bench import bench
from .build import build
from .compile import compile
from .config import Configured
from .doctor import doctor
from .export import export
from .generate import generate
from .handler import handler
from .import_ import import_
from .inspect import inspect
from .pack import pack
from .parity import parity
from .run import run
from .serve import serve
from .simulate import simulate
from .top import top
from .verify import verify

app = typer.Typer(
    name="mctl",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Take a PyTorch model from its source file to a file that can be trusted and a server that can be run.",
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"mctl {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    pass


VERBS = (
    export,
    compile,
    parity,
    build,
    bench,
    inspect,
    verify,
    run,
    generate,
    simulate,
    serve,
    admin,
    pack,
    top,
    handler,
    doctor,
)
app.command("import", cls=Configured)(import_)  # a word of Python
for verb in VERBS:
    app.command(cls=Configured)(verb)


def _terminate(number: int, _: object) -> None:
    """As Ctrl-C does, SIGTERM unwinds what is going on: nothing half-written is left, no child goes on."""
    sys.exit(128 + number)


def main() -> None:
    """The `mctl` command."""
    code = 0
    signal.signal(signal.SIGTERM, _terminate)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # for a name that the terminal's encoding lacks
    try:
        app()  # ends with SystemExit: 0, 2 for wrong usage, 130 for Ctrl-C
    except MctlError as error:
        if "--json" in sys.argv:
            console.emit_json("mctl.error/1", False, error=error.message, hint=error.hint)
        console.render_error(error)
        code = error.exit_code
    except Exception:
        traceback.print_exc()
        console.say("\nthis is an error of mctl itself, not of your model or options: please report it")
        code = 3
    sys.stdout.flush()
    sys.exit(code)


if __name__ == "__main__":
    main()
