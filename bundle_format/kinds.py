"""What a file is, told from its first bytes and its names: nothing is decoded that could run code."""

import codecs
import mmap
import os
import shlex
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from . import zip_directory
from .errors import BundleError
from .layout import MANIFEST, MAX_MANIFEST

Name = Literal[
    "bundle",
    "program",
    "damaged",
    "cut",
    "exported program",
    "aoti package",
    "torchscript",
    "checkpoint",
    "onnx",
    "safetensors",
    "python",
    "lfs pointer",
    "text",
    "zip",
    "library",
    "pickle",
    "empty",
    "folder",
    "device",
    "missing",
    "unreadable",
    "unknown",
]

_EXPORT = "start from the model's source: `mctl export MODEL.py`"
_WEIGHTS = "it holds weights and no model: give it to export, `mctl export MODEL.py --weights {path}`"
_AGAIN = "copy or make it again"

# What a person reads ("`x` is …"), and the way out.
_TABLE: dict[Name, tuple[str, str]] = {
    "bundle": ("a bundle", "it is compiled already: `mctl serve {path}` serves it"),
    "program": ("a program that is not compiled", "compile it first: `mctl compile {path}`"),
    "damaged": ("a damaged program or bundle", _AGAIN),
    "cut": ("the first part of a zip archive", "the copy or download stopped early: " + _AGAIN),
    "exported program": (
        "an exported program that torch wrote by itself",
        "it has no contract, so its inputs could not be checked; " + _EXPORT,
    ),
    "aoti package": (
        "an AOTInductor package that torch wrote by itself",
        "it has no contract, so its inputs could not be checked; start from the model's source: `mctl build MODEL.py`",
    ),
    "torchscript": ("a TorchScript archive", _EXPORT),
    "checkpoint": ("a torch checkpoint", _WEIGHTS),
    "onnx": ("an ONNX model", "mctl compiles PyTorch models; " + _EXPORT),
    "safetensors": ("a safetensors file", _WEIGHTS),
    "python": ("Python source", "export it first: `mctl export {path}`"),
    "lfs pointer": ("a Git LFS pointer", "fetch the file that it stands for: `git lfs pull`"),
    "text": ("a text file", "give the file that `mctl export` or `mctl compile` wrote"),
    "zip": ("a zip archive of another kind", "give the file that `mctl export` or `mctl compile` wrote"),
    "library": ("a compiled library", "give the bundle that `mctl compile` wrote"),
    "pickle": ("a pickle, which mctl does not read", _EXPORT),
    "empty": ("an empty file", "the program that wrote it was stopped, or the disk was full: make it again"),
    "folder": ("a folder", "give the file itself"),
    "device": ("no regular file", "save it as a file first"),
    "missing": ("not there", "look at the path"),
    "unreadable": ("not readable", "look at its permissions"),
    "unknown": ("a file of an unknown kind", "give the file that `mctl export` or `mctl compile` wrote"),
}
_OURS = {"bundle", "program", "damaged", "cut"}


@dataclass(frozen=True, slots=True)
class Kind:
    """`name` for a program, `what` for a person: "`x` is {what}"."""

    name: Name

    @property
    def what(self) -> str:
        return _TABLE[self.name][0]

    @property
    def foreign(self) -> bool:
        """It was never a program or a bundle of mctl."""
        return self.name not in _OURS

    def hint(self, path: Path, wanted: str) -> str:
        """What to do with the file, for somebody who wanted it to be something else ("a program")."""
        if self.name == "bundle" and wanted == "a program":
            return "it is compiled already: give the program that it was made from, or serve it with `mctl serve`"
        return _TABLE[self.name][1].format(path=shlex.quote(str(path)))


def identify(path: str | Path) -> Kind:
    """What kind of file this is. Reads no pickle, runs nothing, never raises."""
    try:
        return Kind(_identify(Path(path)))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return Kind("missing")
    except OSError:
        return Kind("unreadable")


def _identify(path: Path) -> Name:
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        return "folder"
    if not stat.S_ISREG(mode):
        return "device"
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(4096)
        if not head:
            return "empty"
        if head[:4] in (b"PK\3\4", b"PK\5\6"):
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapping, memoryview(mapping) as view:
                return _identify_zip(view)
    return _identify_head(head, size, path.suffix.lower())


def _identify_zip(view: memoryview) -> Name:
    try:
        names = zip_directory.names(view)
    except BundleError:
        return "cut"
    inner = [name.partition("/")[2] for name in names]
    if MANIFEST in inner:
        return _schema(view)
    if any(path.startswith("data/aotinductor/") for path in inner):
        return "aoti package"
    # the second name is that of torch before 2.8
    if any(path.startswith("models/") for path in inner) or "serialized_exported_program.json" in names:
        return "exported program"
    if "data.pkl" in inner:
        return "torchscript" if any(path.startswith("code/") for path in inner) else "checkpoint"
    return "zip"


class _Head(msgspec.Struct):
    schema: str


def _schema(view: memoryview) -> Name:
    with suppress(BundleError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        _, members = zip_directory.read(view)
        entry = members[MANIFEST]
        if entry.size <= MAX_MANIFEST:
            data = view[entry.offset : entry.offset + entry.size]
            schema = msgspec.json.decode(data, type=_Head).schema
            if schema.startswith("mctl.bundle/"):
                return "bundle"
            if schema.startswith("mctl.program/"):
                return "program"
    return "damaged"


def _identify_head(head: bytes, size: int, suffix: str) -> Name:
    if head[:4] == b"\x7fELF":
        return "library"
    if 2 <= int.from_bytes(head[:8], "little") <= size - 8 and head[8:9] == b"{":
        return "safetensors"
    # torch's files before 1.6 are a row of pickles, the first of which is this number
    if head[:14] == b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19":
        return "checkpoint"
    if head[:1] == b"\x80" and 2 <= head[1] <= 5:
        return "pickle"
    # ModelProto begins with its ir_version (field 1, varint) and goes on with a field of bytes
    if suffix == ".onnx" or (head[0] == 8 and 1 <= head[1:2][0] < 32 and head[2:3] in b"\x12\x1a\x22\x2a\x32\x3a\x42"):
        return "onnx"
    return _identify_text(head, size, suffix)


def _identify_text(head: bytes, size: int, suffix: str) -> Name:
    try:
        # the last character of the head may be cut in the middle, but not that of the file
        text = codecs.getincrementaldecoder("utf-8")().decode(head, final=size <= len(head))
    except UnicodeDecodeError:
        return "unknown"
    if "\0" in text:
        return "unknown"
    if text.startswith("version https://git-lfs"):
        return "lfs pointer"
    return "python" if suffix == ".py" else "text"
