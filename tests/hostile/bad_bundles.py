"""Bad bundles: one fault each, with the stage at which a reader has to refuse it. Also used by the C++ tests.

`python -m tests.hostile.bad_bundles FOLDER` writes them with an index.json: [{"file", "stage", "error"}]. The stages
follow one another: `open` (the zip's structure), `manifest`, `digest` (SHA-256 of members), `crc`, `contents` (what
members hold); `good` has no fault. A reader that looks at more may refuse a file earlier, but none takes it.
"""

import json
import struct
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from .rawzip import TOP, Part, end64, pack
from .sound import (
    CASE,
    FLOATS,
    GOLDEN,
    LIBRARY,
    MANIFEST,
    REPORT,
    WEIGHT,
    WEIGHTS,
    changed,
    described,
    find,
    holding,
    manifest,
    safetensors,
    set_fields,
    sound,
    with_header,
)


class Bad(NamedTuple):
    """`error`: a part of the message that a reader gives."""

    name: str
    stage: str
    error: str
    data: bytes


def bad_bundles() -> Iterator[Bad]:
    yield Bad("good", "good", "", pack(sound()))
    yield from _cut_and_grown()
    yield from _ends()
    yield from _headers()
    yield from _modes()
    yield from _names()
    yield from _places()
    yield from _manifests()
    yield from _digests()
    yield from _contents()


def _cut_and_grown() -> Iterator[Bad]:
    whole = pack(sound())
    cut = "was cut, or something was added"
    yield Bad("one byte", "open", "a text file", b"P")
    yield Bad("half", "open", cut, whole[: len(whole) // 2])
    yield Bad("last byte cut", "open", cut, whole[:-1])
    yield Bad("cut in the directory", "open", cut, whole[:-200])
    yield Bad("first header only", "open", cut, whole[:64])
    yield Bad("a byte at the end", "open", cut, whole + b"\0")
    yield Bad("another zip at the end", "open", cut, whole + pack([Part(b"x/y", b"z")]))
    yield Bad("a byte at the beginning", "open", "", b"\0" + whole)
    yield Bad("a byte at the beginning, offsets right", "open", "", pack(sound(), prefix=b"\0"))
    yield Bad("a script before it", "open", "", pack(sound(), prefix=b"#!/bin/sh\nexit 1\n"))
    yield Bad("a comment", "open", cut, pack(sound(), comment=b"hello"))
    yield Bad("no members", "open", "a zip archive of another kind", pack([]))
    yield Bad(
        "bytes between members",
        "open",
        "belong to no member",
        changed(WEIGHTS, lambda p: set_fields(p, before=b"gap!")),
    )
    yield Bad("bytes before the directory", "open", "belong to no member", pack(sound(), gap=b"gap!"))
    yield Bad(
        "a member that is not listed", "open", "belong to no member", pack([*sound(), Part(b"m/x", b"y", listed=False)])
    )


def _ends() -> Iterator[Bad]:
    count = len(sound())
    size, offset = struct.unpack_from("<2I", pack(sound()), len(pack(sound())) - 10)
    at = size + offset
    yield Bad(
        "fewer members than listed", "open", "longer than its entries", pack(sound(), count=count - 1, here=count - 1)
    )
    yield Bad(
        "more members than listed", "open", "shorter than it says", pack(sound(), count=count + 1, here=count + 1)
    )
    for what, cut, error in (("in its name", 10, "cut, too long"), ("in its numbers", 60, "shorter than it says")):
        yield Bad(f"last entry cut {what}", "open", error, pack(sound(), cut=cut))
    for what, field, error in (
        ("without its mark", {"sign": b"PK\1\3"}, "shorter than it says"),
        ("on another disk", {"disk": 1}, "cut, too long or has a comment"),
    ):
        bad = changed(WEIGHTS, lambda p, field=field: set_fields(p, central=dict(field)))
        yield Bad(f"entry {what}", "open", error, bad)
    yield Bad("two counts", "open", "several files", pack(sound(), here=1))
    yield Bad("several disks", "open", "several files", pack(sound(), disk=1))
    yield Bad("directory on another disk", "open", "several files", pack(sound(), first_disk=1))
    yield Bad("a comment that is not there", "open", "has a comment", pack(sound(), comment_size=1))
    yield Bad("65535 members", "open", "", pack(sound(), count=0xFFFF, here=0xFFFF))
    yield Bad("directory size too large", "open", "", pack(sound(), size=size + 1))
    yield Bad("directory size too small", "open", "", pack(sound(), size=size - 1))
    yield Bad("directory beyond the end", "open", "", pack(sound(), offset=0xFFFFFFF0))
    yield Bad("directory at 0", "open", "", pack(sound(), offset=0))
    yield Bad("directory of 4 GiB", "open", "", pack(sound(), size=0xFFFFFFFF))
    right: dict[str, Any] = {"count": count, "size": size, "offset": offset, "at": at}
    yield Bad("zip64 that is right", "good", "", pack(sound(), zip64=end64(**right)))
    for what, changes in {
        "many members": {"count": 2**40},
        "count of all bits": {"count": 2**64 - 1},
        "huge directory": {"size": 2**63},
        "directory at the end of the address space": {"offset": 2**64 - size},
        "another count": {"count": count - 1, "here": count - 1},
        "locator to 0": {"at": 0},
        "locator beyond the end": {"at": 2**63},
        "several disks": {"disks": 2},
        "record on another disk": {"record_disk": 1},
        "two counts": {"here": 1},
        "record without its mark": {"sign": b"PK\0\0"},
        "record with more fields": {"rest": 45},
        "record of another disk": {"disk": 1},
        "directory on another disk": {"first_disk": 1},
    }.items():
        error = (
            "two end records disagree" if changes.keys() & {"count", "size", "offset"} else "zip64 end record is not"
        )
        yield Bad(f"zip64 {what}", "open", error, pack(sound(), zip64=end64(**(right | changes))))
    overflow = end64(2**40, 2**63, 2**63, at)
    yield Bad(
        "zip64 sizes that overflow",
        "open",
        "",
        pack(sound(), zip64=overflow, count=0xFFFF, here=0xFFFF, size=0xFFFFFFFF, offset=0xFFFFFFFF),
    )
    yield Bad("zip64 locator alone", "open", "", pack(sound(), zip64=end64(**right)[56:]))


UNIX = 3 << 8 | 20  # made by: then the upper half of the attributes is a mode


def _modes() -> Iterator[Bad]:
    """What whoever unpacks the file would make of a member that is no plain file."""
    kinds = {"a link": 0o120777, "a folder": 0o040755, "a device": 0o020666, "a FIFO": 0o010644, "a socket": 0o140755}
    for what, mode in kinds.items():
        bad = changed(WEIGHTS, lambda p, mode=mode: set_fields(p, central={"attributes": mode << 16, "made_by": UNIX}))
        yield Bad(f"mode: {what}", "open", "is a link, a folder or a device", bad)
    for what, attributes in {"setuid": 0o104755 << 16, "0644": 0o100644 << 16, "of DOS": 0x01}.items():
        central: dict[str, int | bytes] = {"attributes": attributes, "made_by": UNIX}
        bad = changed(WEIGHTS, lambda p, central=central: set_fields(p, central=central))
        yield Bad(f"mode: {what}", "manifest", "has a mode or other attributes", bad)
    for what, kind in {"a mode of Unix": 0x756E, "an owner": 0x7875, "times": 0x5455}.items():
        extra = struct.pack("<2HI", kind, 4, 0)
        for side in ("local", "central"):
            bad = changed(WEIGHTS, lambda p, side=side, extra=extra: set_fields(p, **{side: {"extra": extra}}))
            yield Bad(f"extra field: {what}, {side}", "open", "extra field of the kind", bad)


def _headers() -> Iterator[Bad]:
    squeezed = zlib.compress(safetensors(WEIGHT))[2:-4]

    def compress(part: Part) -> None:
        sizes: dict[str, int | bytes] = {"size": len(part.data), "crc": zlib.crc32(part.data)}
        set_fields(part, data=squeezed, method=8, local=dict(sizes), central=dict(sizes))

    yield Bad("compressed", "open", "`mctl/weights.safetensors` is compressed", changed(WEIGHTS, compress))
    for what, method in {"deflate": 8, "zstd": 93, "an unknown method": 0xFFFF}.items():
        bad = changed(WEIGHTS, lambda p, method=method: set_fields(p, method=method))
        yield Bad(f"said to be compressed with {what}", "open", "is compressed", bad)
    for what, flags, error in (
        ("encrypted", 0x0801, "is encrypted"),
        ("strongly encrypted", 0x0841, "is encrypted"),
        ("strong encryption alone", 0x0840, "zip flags"),
        ("patch data", 0x0820, "zip flags"),
        ("masked headers", 0x2800, "zip flags"),
        ("all flags but encryption", 0xFFFE, ""),
    ):
        bad = changed(WEIGHTS, lambda p, flags=flags: set_fields(p, flags=flags))
        yield Bad(f"flags: {what}", "open", error, bad)
    disagree = "`mctl/weights.safetensors` has a local header that disagrees"
    other: dict[str, int | bytes]
    for what, other in {
        "name": {"name": LIBRARY},
        "name's case": {"name": WEIGHTS.upper()},
        "method": {"method": 8},
        "flags": {"flags": 0},
        "CRC": {"crc": 1},
        "CRC of 0": {"crc": 0},
        "size": {"size": 64, "stored": 64},
        "size of 0": {"size": 0, "stored": 0, "crc": 0},
        "stored size": {"stored": 64},
    }.items():
        bad = changed(WEIGHTS, lambda p, other=other: set_fields(p, local=other))
        yield Bad(f"local header: other {what}", "open", "" if what in ("flags", "name") else disagree, bad)
    yield Bad(
        "local header: none",
        "open",
        "no local header",
        changed(WEIGHTS, lambda p: set_fields(p, central={"header": 8})),
    )
    yield Bad(
        "data descriptor missing", "open", "data descriptor", changed(WEIGHTS, lambda p: set_fields(p, flags=0x0808))
    )
    for what, crc, stage in (("wrong", 1, "open"), ("right, but a bundle is plain", None, "manifest")):

        def describe(part: Part, crc: int | None = crc) -> None:
            size = len(part.data)
            after = struct.pack("<4s3I", b"PK\7\10", zlib.crc32(part.data) if crc is None else crc, size, size)
            set_fields(part, flags=0x0808, local={"crc": 0, "size": 0, "stored": 0}, after=after)

        error = "data descriptor" if stage == "open" else "not plain"
        yield Bad(f"data descriptor {what}", stage, error, changed(WEIGHTS, describe))
    yield Bad(
        "comment of a member", "open", "comment", changed(WEIGHTS, lambda p: set_fields(p, central={"comment": b"x"}))
    )
    yield Bad("not aligned", "manifest", "not on a boundary", changed(WEIGHTS, lambda p: set_fields(p, aligned=False)))
    for what, extra in {
        "cut": b"\1\0\x10\0" + bytes(8),
        "cut id": b"\1",
        "twice": (b"\1\0\x10\0" + bytes(16)) * 2,
        "without need": b"\1\0\x08\0" + bytes(8),
    }.items():
        error = "does not fit its entry" if what == "without need" else "extra field of its zip directory is cut"
        bad = changed(WEIGHTS, lambda p, extra=extra: set_fields(p, central={"extra": extra}))
        yield Bad(f"zip64 field {what}", "open", error, bad)


def _names() -> Iterator[Bad]:
    for what, name, error in (
        ("absolute", b"/etc/passwd", "absolute"),
        ("above the top", b"../evil", "`..`"),
        ("above the top folder", b"m/../../evil", "`..`"),
        ("to itself", b"m/./evil", "`.`"),
        ("empty part", b"m//evil", "empty part"),
        ("folder", b"m/evil/", "empty part"),
        ("backslash", b"m\\evil", "backslash"),
        ("backslash and dots", b"m/..\\..\\evil", "backslash"),
        ("NUL", b"m/evil\0.txt", "control character"),
        ("line break", b"m/evil\nx", "control character"),
        ("escape", b"m/\x1b[2Jevil", "control character"),
        ("not UTF-8", b"m/ev\xffil", "not valid UTF-8"),
        ("overlong UTF-8", b"m/\xc0\xae\xc0\xae/evil", "not valid UTF-8"),
        ("half a surrogate", b"m/\xed\xa0\x80", "not valid UTF-8"),
        ("too long", b"m/" + b"x" * 511, ""),
        ("far too long", b"m/" + b"x" * 60000, "cut, too long"),
        ("empty", b"", "empty part"),
        ("no folder", b"evil", "in no folder"),
        ("only the folder", b"m", "in no folder"),
        ("another top folder", b"n/evil", "several top folders"),
        ("top folder in another case", b"M/evil", "several top folders"),
        ("taken", WEIGHTS, "there twice"),
    ):
        yield Bad(f"name: {what}", "open", error, pack([*sound(), Part(name, b"evil")]))
    yield Bad(
        "name: other letters without the flag",
        "open",
        "not valid UTF-8",
        pack([*sound(), Part("m/é".encode(), b"", 0)]),
    )
    yield Bad(
        "a member added", "manifest", "`evil` is not in the manifest's list", pack([*sound(), Part(b"m/evil", b"x")])
    )


def _places() -> Iterator[Bad]:
    weights = len(safetensors(WEIGHT))

    def both(size: int) -> dict[str, int | bytes]:
        return {"size": size, "stored": size}

    reaches = "reaches beyond the end"
    yield Bad(
        "two sizes", "open", "two sizes", changed(WEIGHTS, lambda p: set_fields(p, central={"stored": weights - 1}))
    )
    for what, size in {"one byte more": weights + 1, "2 GiB": 2**31, "almost 4 GiB": 0xFFFFFFFE}.items():
        bad = changed(WEIGHTS, lambda p, size=size: set_fields(p, central=both(size), local=both(size)))
        yield Bad(f"size: {what}", "open", "", bad)
    bad = changed(WEIGHTS, lambda p: set_fields(p, central=both(weights - 64), local=both(weights - 64)))
    yield Bad("size: less than there is", "open", "belong to no member", bad)
    for what, size in {"2**40": 2**40, "2**63": 2**63, "all bits": 2**64 - 1}.items():
        extra = struct.pack("<2H2Q", 1, 16, size, size)
        fields: dict[str, int | bytes] = {"size": 0xFFFFFFFF, "stored": 0xFFFFFFFF, "extra": extra}
        bad = changed(WEIGHTS, lambda p, fields=fields: set_fields(p, central=dict(fields), local=dict(fields)))
        yield Bad(f"zip64 size: {what}", "open", reaches, bad)
    for what, header in {"2**40": 2**40, "2**63": 2**63, "all bits": 2**64 - 1}.items():
        extra = struct.pack("<2HQ", 1, 8, header)
        fields = {"header": 0xFFFFFFFF, "extra": extra}
        bad = changed(WEIGHTS, lambda p, fields=fields: set_fields(p, central=dict(fields)))
        yield Bad(f"zip64 place: {what}", "open", "no local header", bad)
    yield Bad(
        "size at the limit without a zip64 field",
        "open",
        "",
        changed(WEIGHTS, lambda p: set_fields(p, central=both(0xFFFFFFFF))),
    )
    parts = sound()
    golden = find(parts, GOLDEN)
    shadow = Part(b"m/shadow", golden.data, present=False)
    at = parts.index(golden)
    yield Bad("two entries, one header", "open", "", pack([*parts[: at + 1], shadow, *parts[at + 1 :]]))
    inner = pack([Part(b"m/inner", b"evil")])
    parts = sound()
    library = find(parts, LIBRARY)
    library.data = inner
    find(parts, MANIFEST).data = json.dumps(manifest(parts)).encode()
    whole = pack(parts)
    place = whole.index(inner)
    overlapping = Part(b"m/inner", b"evil", present=False, central={"header": place})
    yield Bad("a member inside another", "open", "", pack([*parts, overlapping]))
    listed = [*reversed(sound())]
    yield Bad("all at one place", "open", "", pack([Part(p.name, p.data, central={"header": 0}) for p in listed]))


def _manifests() -> Iterator[Bad]:
    parts = [part for part in sound() if part.name != MANIFEST]
    yield Bad("no manifest", "manifest", "an AOTInductor package", pack(parts))
    document = json.loads(find(sound(), MANIFEST).data)

    def raw(text: bytes) -> bytes:
        return changed(MANIFEST, lambda p: set_fields(p, data=text))

    text = json.dumps(document).encode()

    def needing(needs: bytes) -> bytes:
        return text.replace(b'"mctl.bundle/1"', b'"mctl.bundle/2", "needs": ' + needs)

    for what, data, error in (
        ("empty", b"", "not valid"),
        ("no JSON", b"manifest", "not valid"),
        ("cut", text[:-1], "not valid"),
        ("null", b"null", "not valid"),
        ("a list", b"[" + text + b"]", "not valid"),
        ("not UTF-8", text.replace(b"hostile", b"hosti\xffle"), "not valid"),
        ("too large", text + b" " * (1 << 24), "allowed 16777216"),
        ("deep", text.replace(b'"members"', b'"deep": ' + b"[" * 100000 + b"]" * 100000 + b', "members"'), "not valid"),
        ("key twice", text.replace(b'"version": "1"', b'"version": "1", "version": "1"'), "there twice"),
        ("1e999", text.replace(b"0.0001", b"1e999"), "not valid"),
        ("2**70", text.replace(b'"max": 8', b'"max": 1180591620717411303424'), "not valid"),
        ("unknown field", text.replace(b'"version"', b'"evil": 1, "version"'), "unknown field `evil`"),
        ("wrong type", text.replace(b'"seed": 0', b'"seed": "0"'), "not valid"),
        ("of a later version", text.replace(b"mctl.bundle/1", b"mctl.bundle/3"), "unknown manifest schema"),
        ("needs before its time", text.replace(b'"name"', b'"needs": [], "name"', 1), "only `mctl.bundle/2`"),
        ("an unknown need", needing(b'["not_yet"]'), "needs `not_yet`, which this mctl does not have"),
        ("an unknown need, 300 kB", needing(b'["' + b"x" * 300_000 + b'"]'), "which this mctl does not have"),
        ("an unknown need, escapes", needing(b'["\\u001b[2J"]'), "needs `\\x1b[2J`"),
        ("needs of no text", needing(b"[1]"), "not valid"),
        ("needs that are text", needing(b'"not_yet"'), "not valid"),
    ):
        yield Bad(f"manifest: {what}", "manifest", error, raw(data))
    for what, change, error in (
        (
            "member missing",
            lambda d: d["members"].update({"gone": {"size": 1, "sha256": "0" * 64}}),
            "no member `gone`",
        ),
        ("member not listed", lambda d: d["members"].pop("extra/mctl/report.json"), "not in the manifest's list"),
        ("other size", lambda d: d["members"]["mctl/weights.safetensors"].update(size=1), "bytes, the manifest says 1"),
        ("path above the top", lambda d: d["members"].update({"../x": {"size": 1, "sha256": "0" * 64}}), "not allowed"),
        (
            "library elsewhere",
            lambda d: d["variants"][0].update(library="mctl/weights.safetensors"),
            "not a member listed",
        ),
        ("library missing", lambda d: d["variants"][0].update(library="/lib/libc.so.6"), "not a member listed"),
        ("golden case missing", lambda d: d["golden"][0].update(member="mctl/golden/two"), "not a member listed"),
    ):
        yield Bad(f"manifest: {what}", "manifest", error, described(change))


def _digests() -> Iterator[Bad]:
    for name in (LIBRARY, WEIGHTS, GOLDEN, REPORT, TOP + b"archive_version"):
        path = name.removeprefix(TOP).decode()

        def flip(part: Part) -> None:
            part.data = part.data[:-1] + bytes([part.data[-1] ^ 1])

        yield Bad(
            f"bit flipped: {path.rpartition('/')[2]}",
            "digest",
            f"`{path}` does not have the SHA-256",
            changed(name, flip),
        )
    parts = sound()
    a, b = find(parts, WEIGHTS), find(parts, GOLDEN)
    size = max(len(a.data), len(b.data))
    a.data, b.data = a.data.ljust(size, b"\0"), b.data.ljust(size, b"\0")
    find(parts, MANIFEST).data = json.dumps(manifest(parts)).encode()
    a.data, b.data = b.data, a.data
    yield Bad("two members swapped", "digest", "does not have the SHA-256", pack(parts))
    wrong: dict[str, int | bytes] = {"crc": 1}
    for name in (WEIGHTS, MANIFEST):
        path = name.removeprefix(TOP).decode()
        bad = changed(name, lambda p: set_fields(p, local=dict(wrong), central=dict(wrong)))
        yield Bad(f"CRC wrong: {path.rpartition('/')[2]}", "crc", f"`{path}` does not have the CRC-32", bad)


def _contents() -> Iterator[Bad]:
    where = "member `mctl/weights.safetensors`"

    def weights(what: str, data: bytes, error: str = where) -> Bad:
        return Bad(f"weights: {what}", "contents", error, holding(WEIGHTS, data))

    good = safetensors(WEIGHT)
    header = good[8 : 8 + int.from_bytes(good[:8], "little")]
    data = good[8 + len(header) :]
    yield weights("empty", b"")
    yield weights("seven bytes", good[:7])
    yield weights("cut", good[:-1])
    yield weights("longer", good + b"\0")
    yield weights("header beyond the end", with_header(header, data, len(good)))
    yield weights("header of 2**63 bytes", with_header(header, data, 2**63))
    yield weights("header of all bits", with_header(header, data, 2**64 - 1))
    yield weights("header is no JSON", with_header(b"weights", data))
    yield weights("header is a list", with_header(b"[]", data))
    yield weights("header is not UTF-8", with_header(header.replace(b"fc.bias", b"fc.b\xffas"), data))
    yield weights("header is deep", with_header(b'{"x":' * 5000 + b"1" + b"}" * 5000, data))
    for what, change in {
        "unknown dtype": {"dtype": "F128"},
        "other dtype": {"dtype": "F64"},
        "negative size": {"shape": [-2]},
        "float size": {"shape": [2.0]},
        "shape that overflows": {"shape": [2**32, 2**32]},
        "huge rank": {"shape": [1] * 1000 + [2]},
        "huge size": {"shape": [2**70]},
        "offsets of another tensor": {"data_offsets": [0, 8]},
        "offsets beyond the end": {"data_offsets": [64, 2**40]},
        "offsets that overflow": {"data_offsets": [2**64 - 8, 2**64]},
        "offsets backward": {"data_offsets": [72, 64]},
        "negative offsets": {"data_offsets": [-8, 0]},
        "three offsets": {"data_offsets": [64, 70, 72]},
        "unknown field": {"url": "x"},
    }.items():
        yield weights(what, safetensors(WEIGHT, **{"fc.bias": change}))
    twice = header.replace(
        b'"fc.bias"', b'"fc.bias": {"dtype": "I32", "shape": [2], "data_offsets": [64, 72]}, "fc.bias"'
    )
    yield weights("tensor twice", with_header(twice.rstrip(), data))
    loose = (
        {"dtype": "F32", "shape": [8], "data_offsets": [0, 32]},
        {"dtype": "F32", "shape": [2], "data_offsets": [32, 40]},
    )
    unaligned = json.dumps(dict(zip(("fc.weight", "fc.bias"), loose, strict=True))).encode()
    yield weights("not aligned", with_header(unaligned, FLOATS + FLOATS[:8]), "boundary of 64 bytes")
    hole = unaligned.replace(b"[32, 40]", b"[40, 48]")
    yield weights("hole", with_header(hole, FLOATS + FLOATS[:16]))
    yield weights("a constant missing", safetensors({"fc.weight": WEIGHT["fc.weight"]}), "no tensor `fc.bias`")

    def constant(**fields: Any) -> Callable[[dict[str, Any]], Any]:
        return lambda document: document["variants"][0]["constants"]["fc.weight"].update(fields)

    yield Bad("strides beyond the tensor", "contents", "beyond its tensor", described(constant(stride=[4, 2])))
    yield Bad("strides that overflow", "contents", "beyond its tensor", described(constant(stride=[2**62, 2**62])))
    yield Bad("strides of another rank", "contents", "1 strides for 2 axes", described(constant(stride=[1])))
    golden = "member `mctl/golden/one.safetensors`"
    for what, tensors in {
        "input missing": {"output.y": CASE["output.y"]},
        "output missing": {"input.x": CASE["input.x"]},
        "other shape": CASE | {"input.x": ("F32", [2, 2], FLOATS[:16])},
        "other dtype": CASE | {"output.y": ("I32", [1, 2], FLOATS[:8])},
        "larger than the contract allows": CASE | {"input.x": ("F32", [2, 4], FLOATS)},
    }.items():
        yield Bad(f"golden case: {what}", "contents", golden, holding(GOLDEN, safetensors(tensors)))
    yield Bad("report is not UTF-8", "contents", "`extra/mctl/report.json` is not UTF-8", holding(REPORT, b"\xff"))


def build(folder: Path) -> list[dict[str, str]]:
    """Writes every bundle and the index."""
    folder.mkdir(parents=True, exist_ok=True)
    index = []
    for number, bad in enumerate(bad_bundles()):
        file = f"{number:03d}.pt2"
        (folder / file).write_bytes(bad.data)
        index.append({"name": bad.name, "file": file, "stage": bad.stage, "error": bad.error})
    (folder / "index.json").write_text(json.dumps(index, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return index


if __name__ == "__main__":
    print(f"{len(build(Path(sys.argv[1])))} files in {sys.argv[1]}")
