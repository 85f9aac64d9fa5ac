"""Files that appear whole or not at all."""

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from .errors import BundleError, UsageError


def require_place(path: Path, option: str = "-o") -> None:
    """UsageError, before the work whose result it is, where `path` cannot be written; `option` is what names it."""
    folder = path.resolve().parent
    hint = f"choose another place with `{option}`"
    if not folder.is_dir():
        raise UsageError(f"cannot write `{path}`: there is no folder `{folder}`", f"make it, or {hint}")
    if path.is_dir():
        raise UsageError(f"cannot write `{path}`: it is a folder", hint)
    if not os.access(folder, os.W_OK):
        raise UsageError(f"cannot write `{path}`: its folder is read-only", hint)


@contextmanager
def atomic(path: Path) -> Iterator[BinaryIO]:
    """A new file that takes the place of `path` when the body ends; on any exception nothing is left of it.

    UsageError where `path` cannot be written, BundleError where the disk is full or fails.
    """
    path = Path(os.path.realpath(path))  # a link stays a link
    temporary = path.parent / f".{path.name[:200]}.{secrets.token_hex(6)}.tmp"
    _check_place(path)
    try:
        file = temporary.open("xb")
    except OSError as error:
        raise explained(error, path) from error
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        _sync_folder(path.parent)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        # an error that names a file comes from what the body read, not from writing
        if isinstance(error, OSError) and error.filename in (None, str(temporary)):
            raise explained(error, path) from error
        raise


def _check_place(path: Path) -> None:
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise explained(error, path) from error
    if not stat.S_ISREG(mode):
        raise UsageError(f"cannot write `{path}`: it is {'a folder' if stat.S_ISDIR(mode) else 'no regular file'}")


def explained(error: OSError, path: Path) -> BundleError | UsageError:
    """Why `path` cannot be written, for a person."""
    reason = (error.strerror or str(error)).lower()
    if disk_is_full(error):
        return BundleError(f"cannot write `{path}`: {reason}", "free some space, or choose another place with `-o`")
    return UsageError(f"cannot write `{path}`: {reason}", "choose another place with `-o`")


def disk_is_full(error: OSError) -> bool:
    """Or fails: no fault of the path."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def _sync_folder(folder: Path) -> None:
    """Makes the rename last through a power cut; some file systems cannot, and that is no failure."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
