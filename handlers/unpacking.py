"""Where a handler's code and files are: as given, or taken out of the bundle into the user's cache."""

import hashlib
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from ..bundle_format.archive import Archive, open_bundle
from ..bundle_format.errors import HandlerError
from ..bundle_format.layout import HANDLER
from ..bundle_format.manifest import Handler

OF_BUNDLE = "bundle"


def handler_files(handler: str, bundle: str, assets: str) -> tuple[str, Path]:
    """The handler (`stock:NAME` or a file) and the folder with what it reads. HandlerError, BundleError."""
    if handler != OF_BUNDLE and not handler.startswith("stock:"):
        return handler, Path(assets or Path(handler).resolve().parent)
    if assets and handler != OF_BUNDLE:
        return handler, Path(assets)
    folder, brought = unpack_handler(Path(bundle)) if bundle else (Path.cwd(), None)
    if handler != OF_BUNDLE:
        return handler, folder
    if brought is None:
        raise HandlerError(f"`{bundle}` brings no handler", "name one with `--handler`")
    source = brought.source if brought.is_stock else str(folder / brought.source.removeprefix(HANDLER))
    return source, Path(assets) if assets else folder


def unpack_handler(bundle: Path) -> tuple[Path, Handler | None]:
    """A folder with the files under `mctl/handler/`, each checked by its digest, and what the manifest says of them.

    The folder is named by what is in it, and stays for the next process.
    """
    with open_bundle(bundle) as archive:
        members = [name for name in archive.manifest.members if name.startswith(HANDLER)]
        digests = "".join(f"{name}\0{archive.manifest.members[name].sha256}\n" for name in sorted(members))
        archive.verify(*members) if members else None
        folder = _kept(archive, members, hashlib.sha256(digests.encode()).hexdigest()[:32])
        return folder, archive.manifest.handler


def _kept(archive: Archive, members: list[str], key: str) -> Path:
    with suppress(OSError):
        home = _private_home()
        folder = home / key
        if not _is_whole(archive, members, folder):
            fresh = Path(tempfile.mkdtemp(dir=home, prefix=f".{key}."))
            _write(archive, members, fresh)
            shutil.rmtree(folder, ignore_errors=True)
            try:
                fresh.rename(folder)
            except OSError:  # another process was faster
                shutil.rmtree(fresh, ignore_errors=True)
        if _is_whole(archive, members, folder):
            return folder
    folder = Path(tempfile.mkdtemp(prefix="mctl-handler-"))
    _write(archive, members, folder)
    return folder


def _private_home() -> Path:
    """The user's cache, which nobody else may write to. OSError where there is none."""
    named = os.environ.get("XDG_CACHE_HOME")
    try:
        home = (Path(named) if named else Path("~/.cache").expanduser()) / "mctl" / "handlers"
    except RuntimeError as error:
        raise OSError(str(error)) from error
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    status = home.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(f"others may write to `{home}`")
    return home


def _write(archive: Archive, members: list[str], folder: Path) -> None:
    for name in members:
        path = folder / name.removeprefix(HANDLER)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(archive.view(name))


def _is_whole(archive: Archive, members: list[str], folder: Path) -> bool:
    """Whether the folder holds these files as they are in the bundle."""
    if not folder.is_dir():
        return False
    with suppress(OSError):
        return all((folder / name.removeprefix(HANDLER)).read_bytes() == archive.view(name) for name in members)
    return False
