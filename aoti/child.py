"""The child process that compiles one variant: `python -m mctl.aoti.child`, started by compiler.py.

It reads a Request from standard input and writes messages to the file descriptor that is its only argument. Standard
input stays open as long as the parent lives: when it ends, the child removes its work folder and kills its group.
"""

import gc
import os
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO

import msgspec

from ..bundle_format import tensors
from ..bundle_format.errors import MctlError
from . import torch_private
from .building import Kept
from .cache import Cache
from .constants import make_dense, store
from .inductor import known_settings, settings
from .protocol import LIBRARY, WEIGHTS, Done, Failed, Message, Phase, Request
from .variant import compile_variant, explained

Say = Callable[[Message], None]


def main() -> None:
    """Exit code 0 after Done or Failed was said; anything else is a crash."""
    out = os.fdopen(int(sys.argv[1]), "wb", buffering=0)

    def say(message: Message) -> None:
        out.write(msgspec.json.encode(message) + b"\n")

    request = msgspec.json.decode(sys.stdin.buffer.readline(), type=Request)
    threading.Thread(target=_die_with_parent, args=(sys.stdin.buffer, request.remove), daemon=True).start()
    try:
        say(_compile(request, say))
    except (MctlError, MemoryError) as error:
        cause = explained(error)
        say(Failed(type(cause).__name__, cause.message, cause.hint))
    except Exception:
        say(Failed("bug", traceback.format_exc()))
    sys.stdout.flush()
    os._exit(0)  # torch's own shutdown takes a second and has nothing left to do


def _die_with_parent(stdin: IO[bytes], folders: tuple[str, ...]) -> None:
    while stdin.read(1):
        pass
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def _compile(request: Request, say: Say) -> Done:
    gc.set_threshold(100_000)  # what torch makes lives to the end: to look through it for garbage takes seconds
    say(Phase("start torch"))
    import torch

    from ..export.program import load_program
    from . import ops  # noqa: F401  a program for generation names one of them

    program = load_program(Path(request.program))
    contract = program.manifest.contract
    notes: dict[str, None] = {}
    chosen = settings(request.recipe.options, request.march, request.compiler, stateful=bool(contract.state))
    chosen = known_settings(chosen, notes.setdefault)
    torch_private.pretend_cpu(request.features, notes.setdefault)
    say(Phase("read the program"))
    exported = program.exported
    make_dense(exported.state_dict)
    make_dense(exported.constants)
    say(Phase("lower to C++"))
    starting_cpp = partial(say, Phase("compile C++"))
    kept = _kept(request)
    compiled = compile_variant(exported, contract, request.recipe, chosen, starting_cpp, notes.setdefault, kept)
    say(Phase("write the constants"))
    work = Path(request.work)
    shutil.move(compiled.library, work / LIBRARY)
    unique, references = store(compiled.constants, compiled.state)
    tensors.save_file(work / WEIGHTS, unique)
    versions = str(torch.__version__), torch.version.git_version
    callers, by_name = compiled.callers, compiled.by_name
    return Done(references, _peak_bytes(), *versions, callers, by_name, compiled.layers, notes=tuple(notes))


def _kept(request: Request) -> Kept | None:
    folder = Path(request.work) / "cache"
    return Kept(Cache(Path(request.kept)), request.makers, folder) if request.kept else None


def _peak_bytes() -> int:
    """Of this process or of its largest child, whichever is more."""
    import resource

    usage = [resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return max(usage) * (1 if sys.platform == "darwin" else 1024)


if __name__ == "__main__":
    main()
