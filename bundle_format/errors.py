"""Every error that mctl raises on purpose.

MctlError
├── UsageError          wrong options or arguments                       exit 2
├── ExportError         the model cannot be exported                     exit 1
├── CompileError        the program cannot be compiled                   exit 1
├── BundleError         the file is damaged or breaks the format         exit 1
│   ├── NewerError      the file is for another, mostly a newer mctl
│   └── WrongKindError  the file is something else than what was asked for
├── HostError           this machine cannot run the bundle               exit 1
├── ContractError       inputs that the model's contract does not allow  exit 1
├── ModelError          the model failed on inputs that it should take   exit 1
├── ParityError         the compiled model is not the eager model        exit 1
├── PackError           the bundle cannot be packed                      exit 1
├── HandlerError        a handler cannot be loaded, or failed            exit 1
└── ServeError          the server cannot start, or a request was refused by it  exit 1
    ├── QueueFullError      the bounded queue is full
    ├── DeadlineError       the request's deadline passed
    └── ClosedError         the batcher or session is closed

Messages are lower case, put names in backticks and have no full stop; `hint` is the way out. Only cli/main.py turns
them into text and an exit code. Any other exception is a bug and keeps its traceback (exit 3).
"""

import re

_UNSAFE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


class MctlError(Exception):
    """Root of the tree: what went wrong, and the way out."""

    exit_code = 1

    def __init__(self, message: str, hint: str | None = None) -> None:
        message = printable(message)
        super().__init__(message)
        self.message = message
        self.hint = printable(hint) if hint else None


def printable(text: str) -> str:
    """Names come from files: what moves a terminal's cursor or turns its writing around is shown by its number."""
    return _UNSAFE.sub(lambda found: ascii(found[0])[1:-1], text)


class UsageError(MctlError):
    exit_code = 2


class ExportError(MctlError):
    pass


class CompileError(MctlError):
    pass


class BundleError(MctlError):
    pass


class NewerError(BundleError):
    """Its message goes on after the file's name: "needs `x`, which …"."""


class WrongKindError(BundleError):
    pass


class HostError(MctlError):
    pass


class ContractError(MctlError, ValueError):
    pass


class ModelError(MctlError):
    pass


class ParityError(MctlError):
    pass


class PackError(MctlError):
    pass


class HandlerError(MctlError):
    pass


class ServeError(MctlError):
    pass


class QueueFullError(ServeError):
    pass


class DeadlineError(ServeError):
    pass


class ClosedError(ServeError):
    pass
