"""What was compiled before and is kept: mctl's kernels for a machine, and the variants of tuning, to go on from."""

import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import msgspec

_ENTRY = "entry.json"
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_LIMIT = 8 << 30  # bytes; what was not used for the longest time goes first


class _Entry(msgspec.Struct, frozen=True):
    """What `entry.json` holds: the SHA-256 of each file beside it, and what its maker says of them, as JSON."""

    digests: dict[str, str]
    note: msgspec.Raw


def default_folder() -> Path | None:
    """As https://specifications.freedesktop.org/basedir-spec says; None for a user without a home."""
    home = os.environ.get("XDG_CACHE_HOME")
    with suppress(RuntimeError):
        return (Path(home) if home else Path("~/.cache").expanduser()) / "mctl" / "compiled"
    return None


class Cache:
    """A folder with a folder for each entry, named by all that its files depend on. What cannot be kept is not."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def get(self, key: str, into: Path) -> bytes | None:
        """Puts the entry's files into a folder; returns its note. None if it is not there, or not as it was."""
        if self._folder is None:
            return None
        kept = self._folder / key
        with suppress(OSError, ValueError, msgspec.MsgspecError):
            if not _is_private(self._folder):
                return None
            entry = msgspec.json.decode((kept / _ENTRY).read_bytes(), type=_Entry)
            _check_names(entry.digests)
            for name in entry.digests:
                shutil.copyfile(kept / name, into / name)
            if all(_digest(into / name) == digest for name, digest in entry.digests.items()):
                os.utime(kept)
                return bytes(entry.note)
        shutil.rmtree(kept, ignore_errors=True)
        return None

    def put(self, key: str, files: Iterable[Path], note: bytes = b"null") -> None:
        """Keeps these files, by their names, and a note in JSON."""
        if self._folder is None:
            return
        with suppress(OSError):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not _is_private(self._folder):
                return
            place = Path(tempfile.mkdtemp(dir=self._folder, prefix=".new-"))
            try:
                copies = [Path(shutil.copyfile(file, place / file.name)) for file in files]
                entry = _Entry({copy.name: _digest(copy) for copy in copies}, msgspec.Raw(note))
                (place / _ENTRY).write_bytes(msgspec.json.encode(entry))
                with suppress(OSError):  # another process was faster
                    place.rename(self._folder / key)
            finally:
                shutil.rmtree(place, ignore_errors=True)
            self._prune()

    def _prune(self) -> None:
        assert self._folder is not None
        kept = sorted(self._folder.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
        total = 0
        for path in kept:
            total += sum(file.stat().st_size for file in path.iterdir())
            if total > _LIMIT:
                shutil.rmtree(path, ignore_errors=True)


def _is_private(folder: Path) -> bool:
    """Whether this user alone can write to the folder.

    One of this user's that others could write to is emptied first: what lies there may be theirs, and is code.
    """
    found = folder.stat()
    if found.st_uid != os.geteuid():
        return False
    if found.st_mode & _OTHERS_WRITE:
        folder.chmod(0o700)
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
    return True


def _check_names(names: Iterable[str]) -> None:
    """ValueError for a name that is not of a file right in the entry's folder."""
    for name in names:
        if "/" in name or name in ("", ".", ".."):
            raise ValueError(name)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def key_of(*parts: object) -> str:
    """A name for what depends on all of these."""
    return hashlib.sha256(msgspec.json.encode(parts, order="sorted")).hexdigest()
