"""A process that may not make some system calls, as in a strict container: seccomp, without root and namespaces."""

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Callable

_X86 = platform.machine() == "x86_64"
MEMFD_CREATE = 319 if _X86 else 279
SECCOMP = 317 if _X86 else 277
CLONE = 56 if _X86 else 220
LANDLOCK_CREATE_RULESET = 444
_OPENAT = 257 if _X86 else 56
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _MODE_FILTER = 22, 38, 2
_LOAD, _EQUAL, _HAS_BITS, _RETURN = 0x20, 0x15, 0x45, 0x06
_CALL, _THIRD_ARGUMENT = 0, 32  # where they lie in seccomp_data
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000


def forbid(*calls: int, error: int = errno.EPERM, writing: bool = False) -> Callable[[], None]:
    """What makes these calls fail from now on; `writing`: opening files to write meets a read-only disk."""
    program = [_step(_LOAD, _CALL)]
    for call in calls:
        program += [_step(_EQUAL, call, 0, 1), _step(_RETURN, _ERRNO | error)]
    if writing:
        program += [_step(_EQUAL, _OPENAT, 0, 3), _step(_LOAD, _THIRD_ARGUMENT)]
        program += [_step(_HAS_BITS, os.O_WRONLY | os.O_RDWR | os.O_CREAT, 0, 1), _step(_RETURN, _ERRNO | errno.EROFS)]
    program.append(_step(_RETURN, _ALLOW))
    steps = ctypes.create_string_buffer(b"".join(program))
    filter = ctypes.create_string_buffer(struct.pack("@HP", len(program), ctypes.addressof(steps)))
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def install() -> None:
        assert steps  # the filter points into it
        if prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or prctl(_PR_SET_SECCOMP, _MODE_FILTER, filter):
            raise OSError(ctypes.get_errno(), "no seccomp")

    return install


def _step(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
    return struct.pack("=HBBI", code, yes, no, value)
