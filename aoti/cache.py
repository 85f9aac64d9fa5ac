"""Variants that were compiled before, so that tuning can go on where it was stopped."""

import hashlib
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

import msgspec

from .protocol import LIBRARY, WEIGHTS, Done

_DONE = "done.json"
_LIMIT = 8 << 30  # bytes; what was not used for the longest time goes first


class _Entry(msgspec.Struct, frozen=True):
    """What `done.json` holds: the answer of the compiling process, and the digests of its two files."""

    done: Done
    digests: dict[str, str]


def default_folder() -> Path:
    """As https://specifications.freedesktop.org/basedir-spec says."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path("~/.cache").expanduser()) / "mctl" / "variants"


class Cache:
    """A folder with a folder for each variant, named by all that its code depends on. What cannot be kept is not."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get(self, key: str, work: Path) -> Done | None:
        """Puts the variant's files into `work`; None if it is not there, or not as it was."""
        kept = self._folder / key
        try:
            entry = msgspec.json.decode((kept / _DONE).read_bytes(), type=_Entry)
            for name in (LIBRARY, WEIGHTS):
                shutil.copyfile(kept / name, work / name)
                if _digest(work / name) != entry.digests[name]:
                    return None
            os.utime(kept)
        except (OSError, msgspec.MsgspecError, KeyError):
            return None
        return entry.done

    def put(self, key: str, work: Path, done: Done) -> None:
        """Keeps the variant that lies in `work`."""
        with suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            place = Path(tempfile.mkdtemp(dir=self._folder, prefix=".new-"))
            try:
                for name in (LIBRARY, WEIGHTS):
                    shutil.copyfile(work / name, place / name)
                digests = {name: _digest(place / name) for name in (LIBRARY, WEIGHTS)}
                (place / _DONE).write_bytes(msgspec.json.encode(_Entry(done, digests)))
                with suppress(OSError):  # another process was faster
                    place.rename(self._folder / key)
            finally:
                shutil.rmtree(place, ignore_errors=True)
            self._prune()

    def _prune(self) -> None:
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
