"""The child process that compiles one variant: `python -m mctl.aoti.child`, started by compiler.py.

It reads a Request from standard input and writes messages to the file descriptor that is its only argument. Standard
input stays open as long as the parent lives: when it ends, the child removes its work folder and kills its group.
"""

import os
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgspec

from ..bundle_format import tensors
from ..bundle_format.errors import CompileError, MctlError
from .constants import make_dense, store
from .inductor import settings
from .protocol import LIBRARY, WEIGHTS, Done, Failed, Message, Phase, Request

if TYPE_CHECKING:
    from torch.export import ExportedProgram

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
    except MctlError as error:
        say(Failed(type(error).__name__, error.message, error.hint))
    except MemoryError:
        say(Failed("CompileError", "there is not enough memory to compile the program"))
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
    say(Phase("start torch"))
    import torch

    chosen = settings(request.options, request.march, request.compiler)
    _pretend_cpu(torch, request.features)
    say(Phase("read the program"))
    exported = _load(Path(request.program))
    make_dense(exported.state_dict)
    make_dense(exported.constants)
    say(Phase("lower to C++"))
    library, constants, state = _run_inductor(exported, chosen, say)
    say(Phase("write the constants"))
    work = Path(request.work)
    shutil.move(library, work / LIBRARY)
    unique, references = store(constants, state)
    tensors.save_file(work / WEIGHTS, unique)
    return Done(references, _peak_bytes(), str(torch.__version__), torch.version.git_version)


def _load(path: Path) -> "ExportedProgram":
    from ..export.program import load_program

    return load_program(path).exported


def _pretend_cpu(torch: Any, features: tuple[str, ...]) -> None:
    """inductor asks torch.cpu which vector instructions it may use: answer for the target, not for this machine."""
    answers = {
        "_is_avx2_supported": "avx2",
        "_is_avx512_supported": "avx512f",
        "_is_avx512_bf16_supported": "avx512_bf16",
        "_is_vnni_supported": "avx512_vnni",
        "_is_amx_tile_supported": "amx_tile",
        "_is_amx_fp16_supported": "amx_fp16",
    }
    for name, flag in answers.items():
        setattr(torch.cpu, name, lambda found=flag in features: found)


def _run_inductor(
    exported: "ExportedProgram", chosen: dict[str, Any], say: Say
) -> tuple[str, dict[str, Any], set[str]]:
    """The library's path, its constants by their original names, and the names of those that it writes to."""
    import torch
    from torch._inductor.codecache import AotCodeCompiler

    graphs: list[Any] = []
    compile_cpp = AotCodeCompiler.compile

    def watched(graph: Any, *args: Any, **kwargs: Any) -> Any:
        graphs.append(graph)
        say(Phase("compile C++"))
        return compile_cpp(graph, *args, **kwargs)

    AotCodeCompiler.compile = watched
    args, kwargs = exported.example_inputs
    module = exported.module(check_guards=False)
    files = torch._inductor.aot_compile(module, args, kwargs, options=chosen)
    library = next(file for file in files if isinstance(file, str) and file.endswith(".so"))
    weights: dict[str, Any] = next((file for file in files if not isinstance(file, str)), {})
    constants = {name: tensor for name, (tensor, _) in weights.items()}
    (graph,) = graphs
    return library, constants, _check_constants(graph, constants)


def _check_constants(graph: Any, constants: dict[str, Any]) -> set[str]:
    """Each constant of the library has a tensor of its own name; returns the names of those that it writes to."""
    names = {
        name: graph.allocated_constant_name[name] for name in graph.constants if name not in graph.folded_constants
    }
    if len(names) != len(constants) or set(names.values()) != set(constants):
        lost = sorted(set(names) - set(constants))[:4]
        raise CompileError(
            f"torch lost constants of the compiled library: it has {len(names)} and gave {len(constants)}"
            f" ({', '.join(lost)})",
            "compile without `freezing`",
        )
    return {names[name] for name in graph.mutated_buffers if name in names}


def _peak_bytes() -> int:
    """Of this process or of its largest child, whichever is more."""
    import resource

    usage = [resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return max(usage) * 1024


if __name__ == "__main__":
    main()
