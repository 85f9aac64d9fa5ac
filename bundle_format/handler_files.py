"""A handler's code and files on their way into an archive."""

from collections.abc import Sequence
from dataclasses import dataclass

from .archive import Archive, Data
from .layout import HANDLER
from .manifest import Handler, Manifest, needing


@dataclass(frozen=True, slots=True)
class HandlerFiles:
    """What the manifest says of a handler, and its members (paths below the archive's top folder)."""

    record: Handler
    members: tuple[tuple[str, Data], ...] = ()


def handler_of(archive: Archive) -> HandlerFiles | None:
    """The handler of a program or bundle, its members as windows on the file."""
    record = archive.manifest.handler
    if record is None:
        return None
    names = [name for name in archive.manifest.members if name.startswith(HANDLER)]
    return HandlerFiles(record, tuple((name, archive.view(name)) for name in names))


def with_handler(manifest: Manifest, handler: HandlerFiles | None) -> Manifest:
    """The manifest of a bundle with this handler."""
    from msgspec.structs import replace

    return needing(replace(manifest, handler=handler.record), "handler") if handler else manifest


def stock(name: str, files: Sequence[tuple[str, Data]]) -> HandlerFiles:
    """One of mctl's own handlers, with what it reads."""
    members = tuple((f"{HANDLER}{file}", data) for file, data in files)
    return HandlerFiles(Handler(source=f"stock:{name}", assets=tuple(name for name, _ in members)), members)
