"""A zip writer whose every field can lie. It shares no code with the writer of bundles."""

import struct
import zlib
from dataclasses import dataclass, field

TOP = b"m/"


@dataclass
class Part:
    """A member. `local` and `central` override fields of its headers by name; `before` and `after` are raw bytes."""

    name: bytes
    data: bytes
    flags: int = 0x0800
    method: int = 0
    local: dict[str, int | bytes] = field(default_factory=dict)
    central: dict[str, int | bytes] = field(default_factory=dict)
    before: bytes = b""
    after: bytes = b""
    aligned: bool = True
    listed: bool = True
    present: bool = True  # False: only the directory has it, at the last header written

    @property
    def path(self) -> bytes:
        return self.name.removeprefix(TOP)


def pack(parts: list[Part], *, prefix: bytes = b"", gap: bytes = b"", cut: int = 0, **end: int | bytes) -> bytes:
    """The parts as a zip, its directory `cut` bytes too short. `end` overrides fields of the end record: see _end()."""
    out = bytearray(prefix)
    central = bytearray()
    header = 0
    for part in parts:
        if part.present:
            out += part.before
            header = len(out)
            out += _local(part, header) + part.data + part.after
        if part.listed:
            central += _central(part, header)
    out += gap
    at = len(out)
    central = central[: len(central) - cut]
    out += central
    return bytes(out) + _end(sum(p.listed for p in parts), len(central), at, end)


def _fields(part: Part) -> dict[str, int | bytes]:
    size = len(part.data)
    crc = zlib.crc32(part.data)
    return {
        "name": part.name,
        "flags": part.flags,
        "method": part.method,
        "crc": crc,
        "stored": size,
        "size": size,
        "extra": b"",
    }


def _local(part: Part, at: int) -> bytes:
    f = _fields(part) | part.local
    name, extra = bytes(f["name"]), bytes(f["extra"])
    if part.aligned:
        filler = -(at + 30 + len(name) + len(extra) + 4) % 64
        extra += struct.pack("<2H", 0x4246, filler) + bytes(filler)
    numbers = (20, f["flags"], f["method"], 0, 0x21, f["crc"], f["stored"], f["size"], len(name), len(extra))
    return struct.pack("<4s5H3I2H", b"PK\3\4", *numbers) + name + extra


def _central(part: Part, header: int) -> bytes:
    f = _fields(part) | {"sign": b"PK\1\2", "header": header, "comment": b"", "disk": 0}
    f |= {"made_by": 20, "attributes": 0} | part.central
    name, extra, comment = bytes(f["name"]), bytes(f["extra"]), bytes(f["comment"])
    numbers = (f["made_by"], 20, f["flags"], f["method"], 0, 0x21, f["crc"], f["stored"], f["size"])
    sizes = (len(name), len(extra), len(comment), f["disk"], 0, f["attributes"], f["header"])
    return struct.pack("<4s6H3I5H2I", f["sign"], *numbers, *sizes) + name + extra + comment


def _end(count: int, size: int, at: int, changes: dict[str, int | bytes]) -> bytes:
    f: dict[str, int | bytes] = {"disk": 0, "first_disk": 0, "here": count, "count": count, "size": size, "offset": at}
    f |= {"comment": b""} | changes
    comment = bytes(f["comment"])
    numbers = (f["disk"], f["first_disk"], f["here"], f["count"], f["size"], f["offset"])
    record = struct.pack("<4s4H2IH", b"PK\5\6", *numbers, f.get("comment_size", len(comment)))
    return bytes(f.get("zip64", b"")) + record + comment


def end64(count: int, size: int, offset: int, at: int, **changes: int | bytes) -> bytes:
    """A zip64 end record with its locator, which says that the record stands at `at`; `changes` by the names below."""
    f: dict[str, int | bytes] = {"sign": b"PK\6\6", "rest": 44, "disk": 0, "first_disk": 0, "here": count, "disks": 1}
    f |= changes
    numbers = (f["rest"], 45, 45, f["disk"], f["first_disk"], f["here"], count, size, offset)
    record = struct.pack("<4sQ2H2I4Q", f["sign"], *numbers)
    return record + struct.pack("<4sIQI", b"PK\6\7", f.get("record_disk", 0), at, f["disks"])
