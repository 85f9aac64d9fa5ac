"""A variant's C++ in less time: its files side by side, torch's headers precompiled, torch's part of the code kept.

torch generates two files: the wrapper, and the loops that it calls. The wrapper begins with the C interface of the
library, which is the same code in every variant and takes longer than the rest. It becomes an object file of its own;
`cache.py` keeps that, and the headers as g++ has read them.
"""

import os
import re
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Semaphore

from ..bundle_format.errors import CompileError
from .cache import Cache, key_of

_INCLUDE = re.compile(r"^#include <.+>$", re.MULTILINE)
_INTERFACE_END = '} // extern "C"\n'
_MEMBERS = "template class torch::aot_inductor::AOTInductorModelBase<torch::aot_inductor::AOTInductorModel>;\n"
_SPARE = 1 << 30  # bytes that the disk has to have for precompiled headers, which are large

Run = Callable[[Sequence[str]], None]
Header = Future[Path | None]


@dataclass(frozen=True, slots=True)
class Kept:
    """Where to find what earlier runs made, and a folder for copies of it.

    `makers` says which compiler and which torch: what is kept is named by that, the command and the code.
    """

    cache: Cache
    makers: str
    folder: Path

    def object_of(self, name: str, code: str, command: Sequence[str], compile_it: Callable[[list[str]], None]) -> Path:
        """An object file of the code, as the command would make it, from the cache or made by `compile_it`."""
        made = self.folder / f"{name}.o"
        key = key_of("object", code, _options(command), self.makers)
        if self.cache.get(key, self.folder) is None:
            source = self.folder / f"{name}.cpp"
            source.write_text(code, encoding="utf-8")
            compile_it([command[0], str(source), *_options(command), "-c", "-o", str(made)])
            self.cache.put(key, [made])
        return made

    def header_of(self, code: str, command: Sequence[str], compile_it: Callable[[list[str]], None]) -> Path | None:
        """A header with this code that the compiler has read already; None where that cannot be had."""
        key = key_of("header", code, _options(command), self.makers)
        header = self.folder / f"{key[:16]}.h"
        made = header.with_name(f"{header.name}.gch")
        if shutil.disk_usage(self.folder).free < _SPARE:
            return None
        header.write_text(code, encoding="utf-8")
        if self.cache.get(key, self.folder) is None:
            try:
                compile_it([command[0], "-c", "-x", "c++-header", str(header), *_options(command), "-o", str(made)])
            except CompileError:
                made.unlink(missing_ok=True)
                return None
            self.cache.put(key, [made])
        return header


class Builds:
    """The compiler's runs for one variant. `run` raises CompileError; without `kept` each run is by itself."""

    def __init__(self, kept: Kept | None, run: Run) -> None:
        self._kept = kept
        self._run = run
        self._room = Semaphore(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)
        self._pool = ThreadPoolExecutor(8)
        self._headers: dict[str, Header] = {}
        self._compiling: list[Future[None]] = []
        self._interface: Future[Path] | None = None

    def start(self, command: Sequence[str]) -> None:
        """Begins to compile a C++ file to an object: COMPILER SOURCE … -c -o OBJECT."""
        source = Path(command[1])
        code = source.read_text(encoding="utf-8")
        header = self._header(code, command)
        if self._kept and (parts := split(code)):
            interface, model = parts
            source.write_text(model, encoding="utf-8")
            compile_it = self._with(header)
            self._interface = self._pool.submit(self._kept.object_of, "interface", interface, command, compile_it)
        self._compiling.append(self._pool.submit(self._with(header), command))

    def finish(self) -> list[Path]:
        """Waits for all that was begun; returns the objects that belong to the library besides."""
        self._pool.shutdown()
        for compiled in self._compiling:
            compiled.result()
        return [self._interface.result()] if self._interface else []

    def _header(self, code: str, command: Sequence[str]) -> Header | None:
        """The first header that the code includes, read before; files of clang are of no use at another place."""
        first = _INCLUDE.search(code)
        if self._kept is None or first is None or "clang" in self._kept.makers:
            return None
        place = f"{first[0]} {_options(command)}"
        if place not in self._headers:
            alone = self._with(None)
            self._headers[place] = self._pool.submit(self._kept.header_of, f"{first[0]}\n", command, alone)
        return self._headers[place]

    def _with(self, header: Header | None) -> Run:
        """Runs a command once the header is there, as soon as there is a core for it."""

        def run(command: Sequence[str]) -> None:
            read = header.result() if header else None
            with self._room:
                if read:
                    with suppress(CompileError):  # g++ may not find the place in memory that the header was read to
                        self._run([*command, "-include", str(read)])
                        return
                self._run(command)

        return run


def split(wrapper: str) -> tuple[str, str] | None:
    """The C interface, and the model's own part, which leaves the members of its base class to that; None for code that
    does not begin with the interface.
    """
    interface, end, model = wrapper.partition(_INTERFACE_END)
    if not end or "AOTInductorModelContainerCreateWithDevice(" not in interface or "AOTInductorModel::" in interface:
        return None
    includes = "".join(f"{line}\n" for line in _INCLUDE.findall(interface))
    return f"{interface}{end}{_MEMBERS}", f"{includes}extern {_MEMBERS}{model}"


def _options(command: Sequence[str]) -> list[str]:
    """The command without its compiler, its source and its object."""
    words = list(command[2:])
    at = words.index("-o")
    del words[at : at + 2]
    return [word for word in words if word != "-c"]
