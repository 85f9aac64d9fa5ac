"""Where a packed folder ends up: in place of an older one, or as a tar file; whole or not at all."""

import gzip
import hashlib
import io
import os
import secrets
import shutil
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, BinaryIO, Literal

from ...bundle_format.errors import PackError, UsageError
from ...bundle_format.files import atomic, disk_is_full, explained

Form = Literal["folder", ".tar.zst", ".tar.gz"]
SUMS = "SHA256SUMS"
_ARCHIVES = (".tar", ".tgz", ".tzst", ".zip", ".gz", ".zst", ".bz2", ".xz", ".7z")
_PROGRAM = 0o755
_LEVEL = 10  # of zstd: the weights of a model are hard to compress, whatever the level


def form_of(output: Path) -> Form:
    """By the ending of its name. UsageError for other archives, or where a library is missing."""
    if output.name.endswith(".tar.gz"):
        return ".tar.gz"
    if output.name.endswith(".tar.zst"):
        _zstd(io.BytesIO()).close()
        return ".tar.zst"
    if output.suffix in _ARCHIVES:
        raise UsageError(f"cannot write `{output}`", "name a folder, or a file that ends with `.tar.zst` or `.tar.gz`")
    return "folder"


def check_place(output: Path, bundle: Path, force: bool) -> None:
    """UsageError where a folder would take the place of something that pack did not make."""
    place = Path(os.path.realpath(output))
    if not place.parent.is_dir():
        raise UsageError(f"there is no folder `{output.parent}`", "make it, or choose another place with `-o`")
    if not place.exists():
        return
    if not place.is_dir():
        raise UsageError(f"`{output}` is a file", "name another place with `-o`")
    inside = next((path for path in (Path.cwd(), Path.home(), bundle) if path.resolve().is_relative_to(place)), None)
    if inside is not None or place.is_mount():
        what = f"it holds `{inside}`" if inside else "something is mounted there"
        raise UsageError(f"cannot replace the folder `{output}`: {what}", "name another place with `-o`")
    if not force and (strange := _not_ours(place)):
        hint = "name another place with `-o`, or replace the whole folder with `--force`"
        raise UsageError(f"`{output}` is there, and {strange}", hint)


def _not_ours(folder: Path) -> str:
    """What `folder` has that pack did not write so; empty if there is nothing."""
    sums = folder / SUMS
    listed = {}
    if sums.is_file():
        lines = sums.read_text(errors="replace").splitlines()
        listed = {path: digest for digest, _, path in (line.partition("  ") for line in lines)}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path == sums or (path.is_dir() and not path.is_symlink()):
            continue
        if name not in listed:
            return f"`{name}` in it is not of mctl"
        if path.is_symlink() or sha256_of(path) != listed[name]:
            return f"`{name}` in it was changed"
    return ""


@contextmanager
def staged(output: Path) -> Iterator[Path]:
    """A new folder beside `output`, which is gone when the body ends, unless it was placed."""
    place = Path(os.path.realpath(output))
    folder = place.parent / f".{place.name[:200]}.{secrets.token_hex(6)}.tmp"
    try:
        folder.mkdir(mode=0o755)
        folder.chmod(0o755)  # whatever the umask: another user serves it
        yield folder
    except OSError as error:
        names = [str(name) for name in (error.filename, error.filename2) if name]
        if not names or disk_is_full(error) or names[-1].startswith(str(folder)):
            raise explained(error, output) from error
        raise PackError(f"cannot read `{names[0]}`: {(error.strerror or str(error)).lower()}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def place_folder(folder: Path, output: Path) -> None:
    """Renames it to `output`; what is there before comes back if that fails."""
    place = Path(os.path.realpath(output))
    old = folder.with_suffix(".old")
    if place.exists():
        place.rename(old)
    try:
        folder.rename(place)
    except BaseException:
        if old.exists():
            old.rename(place)
        raise
    shutil.rmtree(old, ignore_errors=True)


def place_archive(folder: Path, output: Path, form: Form, moment: int) -> None:
    """A tar file with one folder, of the file's name without its ending: the same bytes for the same content."""
    top = output.name.removesuffix(form)
    with atomic(output) as file, _compressed(file, form) as stream, tarfile.open(fileobj=stream, mode="w|") as tar:
        for path in (folder, *sorted(folder.rglob("*"))):
            entry = tar.gettarinfo(path, str(Path(top) / path.relative_to(folder)))
            entry.uid = entry.gid = 0
            entry.uname = entry.gname = ""
            entry.mtime = moment
            if path.is_file():
                with path.open("rb") as content:
                    tar.addfile(entry, content)
            else:
                tar.addfile(entry)


def write(path: Path, data: bytes, *, program: bool = False) -> None:
    """A file that everybody may read, and run if it is a program."""
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    path.write_bytes(data)
    finish(path, program=program)


def finish(path: Path, *, program: bool = False) -> None:
    """Sets the mode, whatever the umask or the source's was."""
    path.chmod(_PROGRAM if program else 0o644)


def write_sums(folder: Path) -> dict[str, str]:
    """Writes SHA256SUMS for `sha256sum -c`, and gives what stands in it: path -> digest."""
    for path in folder.rglob("*"):
        if path.is_dir():
            path.chmod(0o755)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    sums = {path.relative_to(folder).as_posix(): sha256_of(path) for path in files}
    write(folder / SUMS, "".join(f"{digest}  {path}\n" for path, digest in sums.items()).encode())
    return sums


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _compressed(file: BinaryIO, form: Form) -> "IO[bytes] | gzip.GzipFile":
    if form == ".tar.zst":
        return _zstd(file)
    return gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0)


def _zstd(file: BinaryIO) -> IO[bytes]:
    """A stream that compresses into `file`, which stays open."""
    if sys.version_info >= (3, 14):
        from compression import zstd

        return zstd.ZstdFile(file, "w", level=_LEVEL)
    try:
        import zstandard
    except ImportError:
        hint = "`pip install 'mctl[pack]'`, or write a `.tar.gz`"
        raise UsageError("a `.tar.zst` needs the package `zstandard`, which is not installed", hint) from None
    return zstandard.ZstdCompressor(level=_LEVEL).stream_writer(file, closefd=False)
