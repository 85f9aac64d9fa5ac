"""What was compiled before and is kept: mctl's kernels for a machine, and the variants of tuning, to go on from."""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import msgspec

_ENTRY = "entry.json"
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
        with suppress(OSError, msgspec.MsgspecError):
            entry = msgspec.json.decode((kept / _ENTRY).read_bytes(), type=_Entry)
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
            self._folder.mkdir(parents=True, exist_ok=True)
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


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def key_of(*parts: object) -> str:
    """A name for what depends on all of these."""
    return hashlib.sha256(msgspec.json.encode(parts, order="sorted")).hexdigest()
