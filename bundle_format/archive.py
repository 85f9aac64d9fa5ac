"""Reads and writes programs and bundles: limits first, stored members, 64-byte aligned, atomic."""

import errno
import hashlib
import mmap
import os
import stat
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Literal, Self

import msgspec

from . import kinds, zip_directory
from . import manifest as manifests
from .errors import BundleError, MctlError, NewerError, UsageError, WrongKindError
from .files import atomic
from .layout import (
    ALIGNMENT,
    MANIFEST,
    MAX_MANIFEST,
    MAX_MEMBERS,
    MAX_REPORT,
    path_fault,
)
from .manifest import Manifest, Member
from .zip_directory import Entry

Data = bytes | memoryview | Path | Sequence[bytes | memoryview]

ANY = "a program or a bundle of mctl"

_AGAIN = "copy or make it again"
_CHUNK = 1 << 20
# What makes a zip a PT2 archive: torch 2.13 writes the same four.
_STANDARD = {"archive_format": b"pt2", "archive_version": b"0", "byteorder": b"little", ".data/version": b"6\n"}


class Archive:
    """A program, a bundle, or another archive of stored members, mapped read-only.

    Opening checks the zip's structure against its limits; nothing is hashed before `verify`.
    """

    path: Path
    top: str
    members: dict[str, Entry]

    def __init__(self, path: Path, mapping: mmap.mmap, wanted: str) -> None:
        self.path = path
        self._wanted = wanted
        self._mapping = mapping
        self._view = memoryview(mapping)
        self.top, self.members = zip_directory.read(self._view)

    @classmethod
    def open(cls, path: str | Path, wanted: str = ANY) -> Self:
        """UsageError where there is no file to read, WrongKindError for another kind of file, else BundleError."""
        path = Path(path)
        mapping = _map(path, wanted)
        try:
            return cls(path, mapping, wanted)
        except BundleError as error:
            kind = kinds.identify(path)
            if kind.foreign:
                raise wrong_kind(path, kind, wanted) from error
            raise BundleError(f"`{path}` is damaged: {error.message}", error.hint or _AGAIN) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Unmaps the file, as soon as no view of it is left."""
        with suppress(BufferError):
            self._view.release()
            self._mapping.close()

    def view(self, path: str) -> memoryview:
        """A member's bytes, as a window on the mapped file."""
        entry = self.members.get(path)
        if entry is None:
            raise self.damage(f"it has no member `{path}`")
        return self._view[entry.offset : entry.offset + entry.size]

    def read(self, path: str, limit: int = MAX_REPORT) -> bytes:
        """A copy of a member's bytes; BundleError if there are more than `limit`."""
        view = self.view(path)
        if len(view) > limit:
            raise self.damage(f"member `{path}` has {len(view)} bytes, allowed {limit}")
        return bytes(view)

    @cached_property
    def manifest(self) -> Manifest:
        """What the archive says of itself; its list of members and their sizes is compared with what is there."""
        if MANIFEST not in self.members:
            raise wrong_kind(self.path, kinds.identify(self.path), self._wanted)
        data = self.read(MANIFEST, MAX_MANIFEST)
        try:
            manifest = manifests.decode(data)
        except NewerError as error:
            raise NewerError(f"`{self.path}` {error.message}", error.hint) from error
        except BundleError as error:
            raise BundleError(f"`{self.path}` is damaged: {error.message}", error.hint or _AGAIN) from error
        self._compare(manifest)
        return manifest

    def _compare(self, manifest: Manifest) -> None:
        """The manifest's list of members with the zip's, and the rules that torch's own archives need not keep."""
        for path, entry in self.members.items():
            if path != MANIFEST and path not in manifest.members:
                raise self.damage(f"member `{path}` is not in the manifest's list")
            if entry.offset % ALIGNMENT or entry.described:
                raise self.damage(f"member `{path}` is not on a boundary of {ALIGNMENT} bytes, or is not plain")
            if entry.attributes:
                raise self.damage(f"member `{path}` has a mode or other attributes, which is not allowed")
        for path, member in manifest.members.items():
            size = len(self.view(path))
            if size != member.size:
                raise self.damage(f"member `{path}` has {size} bytes, the manifest says {member.size}")

    @property
    def kind(self) -> Literal["bundle", "program"]:
        """Which of the two the manifest is about."""
        return self.manifest.kind

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) of the manifest's bytes, which name the digest of each member: the archive's identity."""
        return hashlib.sha256(self.view(MANIFEST)).hexdigest()

    def verify(self, *paths: str) -> None:
        """Compares SHA-256 and CRC-32 of these members (default: all); BundleError names the one that fails."""
        listed = self.manifest.members
        for path in paths or listed:
            view = self.view(path)
            crc, digest = _hash(_chunks(view))
            if path in listed and digest != listed[path].sha256:
                raise self.damage(f"member `{path}` does not have the SHA-256 that the manifest says")
            if crc != self.members[path].crc:
                raise self.damage(f"member `{path}` does not have the CRC-32 that the zip directory says")
        if not paths:
            self.verify(MANIFEST)
            if hasattr(mmap, "MADV_DONTNEED"):  # else the whole file counts as this process's memory
                self._mapping.madvise(mmap.MADV_DONTNEED)

    def damage(self, text: str) -> BundleError:
        """An error that names this file."""
        return BundleError(f"`{self.path}` is damaged: {text}", _AGAIN)


def open_bundle(path: str | Path) -> Archive:
    """An archive whose manifest is a bundle's; WrongKindError names what it is instead and what to do."""
    return _open_as(path, "bundle")


def open_program(path: str | Path) -> Archive:
    """An archive whose manifest is a program's; WrongKindError names what it is instead and what to do."""
    return _open_as(path, "program")


def _open_as(path: str | Path, kind: Literal["bundle", "program"]) -> Archive:
    archive = Archive.open(path, f"a {kind}")
    try:
        if archive.kind != kind:
            raise wrong_kind(archive.path, kinds.identify(archive.path), f"a {kind}")
    except BaseException:
        archive.close()
        raise
    return archive


def wrong_kind(path: Path, kind: kinds.Kind, wanted: str) -> WrongKindError:
    """`path` is another kind of file than `wanted`; the hint says what can be done with it."""
    return WrongKindError(f"`{path}` is {kind.what}, not {wanted}", kind.hint(path, wanted))


def _map(path: Path, wanted: str) -> mmap.mmap:
    try:
        # a pipe must not block, and a device has no size
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except (OSError, ValueError) as error:
        raise _unreadable(path, error, wanted) from error
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode) or not status.st_size:
            raise wrong_kind(path, kinds.identify(path), wanted)
        return mmap.mmap(handle, 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise _unreadable(path, error, wanted) from error
    finally:
        os.close(handle)


def _unreadable(path: Path, error: OSError | ValueError, wanted: str) -> MctlError:
    """There is no file at `path`, or it may not be read."""
    number = getattr(error, "errno", None)
    if number == errno.EISDIR:
        return wrong_kind(path, kinds.identify(path), wanted)
    if number in (errno.ENOENT, errno.ENOTDIR):
        return UsageError(f"there is no file `{path}`")
    reason = (getattr(error, "strerror", None) or str(error)).lower()
    return UsageError(f"cannot read `{path}`: {reason}")


# --- writing -----------------------------------------------------------------------------------------------------


def write(path: str | Path, top: str, members: Iterable[tuple[str, Data]], manifest: Manifest) -> Manifest:
    """Writes an archive in one piece or not at all; returns `manifest` with its list of members completed.

    `members` are (path below `top`, data); data is bytes, a file to copy, or several pieces that follow one another.
    Its views must be contiguous. The members that make the zip a PT2 archive are added where they are missing.
    """
    with atomic(Path(path)) as file:
        writer = _Writer(file, top)
        for name, data in members:
            writer.add(name, data)
        for name, content in _STANDARD.items():
            if name not in writer.members:
                writer.add(name, content)
        complete = msgspec.structs.replace(manifest, members=dict(sorted(writer.members.items())))
        encoded = manifests.encode(complete)
        manifests.decode(encoded)  # what no reader would take is not written
        writer.add(MANIFEST, encoded)
        writer.finish()
    return complete


def rewrite(source: Archive, path: str | Path, manifest: Manifest, extra: Mapping[str, Data]) -> Manifest:
    """Writes the members of `source` again, with those of `extra` added or in their place."""
    kept = [(name, source.view(name)) for name in source.members if name not in extra and name != MANIFEST]
    return write(path, source.top, [*kept, *extra.items()], manifest)


class _Writer:
    """Appends members to a file and remembers what the directory and the manifest need."""

    def __init__(self, file: BinaryIO, top: str) -> None:
        self.file = file
        self.top = top
        self.at = 0
        self.members: dict[str, Member] = {}
        self._listed: list[tuple[bytes, int, int, int]] = []

    def add(self, path: str, data: Data) -> None:
        name = f"{self.top}/{path}"
        fault = path_fault(name) or ("it is there twice" if path in self.members or path == "" else None)
        if fault or "/" in self.top or len(self._listed) == MAX_MEMBERS:
            raise BundleError(f"cannot write the member `{name}`: {fault or 'too many members'}")
        size = _size(data)
        encoded = name.encode()
        start = self.at
        header = zip_directory.local_header(encoded, size, 0, start)
        self.file.write(header)
        crc, digest = _hash(self._copied(data))
        written = self.file.tell() - start - len(header)
        if written != size:
            raise BundleError(f"cannot write the member `{name}`: its source changed from {size} to {written} bytes")
        self.at = self.file.tell()
        self.file.seek(start)
        self.file.write(zip_directory.local_header(encoded, size, crc, start))  # now that the CRC is known
        self.file.seek(self.at)
        self.members[path] = Member(size=size, sha256=digest)
        self._listed.append((encoded, start, size, crc))

    def finish(self) -> None:
        self.file.write(zip_directory.central_directory(self._listed, self.at))

    def _copied(self, data: Data) -> Iterator[bytes | memoryview]:
        for chunk in _chunks(data):
            self.file.write(chunk)
            yield chunk


def _size(data: Data) -> int:
    if isinstance(data, Path):
        return data.stat().st_size
    if isinstance(data, bytes | memoryview):
        return memoryview(data).nbytes
    return sum(memoryview(piece).nbytes for piece in data)


def _chunks(data: Data) -> Iterator[bytes | memoryview]:
    if isinstance(data, Path):
        with data.open("rb") as file:
            while chunk := file.read(_CHUNK):
                yield chunk
        return
    for piece in [data] if isinstance(data, bytes | memoryview) else data:
        view = memoryview(piece).cast("B") if memoryview(piece).nbytes else memoryview(b"")
        for at in range(0, len(view), _CHUNK):
            yield view[at : at + _CHUNK]


def _hash(chunks: Iterable[bytes | memoryview]) -> tuple[int, str]:
    """CRC-32 and SHA-256 (hex)."""
    crc, digest = 0, hashlib.sha256()
    for chunk in chunks:
        crc = zlib.crc32(chunk, crc)
        digest.update(chunk)
    return crc, digest.hexdigest()
