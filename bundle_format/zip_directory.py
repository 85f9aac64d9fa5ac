"""A zip's headers: read so strictly that each byte of the file has one meaning, written as plainly.

Format: PKWARE APPNOTE 6.3.10. Of it, only stored members are allowed, with nothing before, between or after what the
central directory lists, so that no two zip readers can see different members.
"""

import struct
from typing import NamedTuple

from .errors import BundleError
from .layout import ALIGNMENT, MAX_MEMBERS, MAX_NAME, path_fault

_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR = struct.Struct("<4sIQI")
_EXTRA = struct.Struct("<2H")
_DESCRIPTOR = struct.Struct("<4s3I")
_DESCRIPTOR64 = struct.Struct("<4sI2Q")

_FOUR_GIB = 0xFFFFFFFF  # in a 32-bit field: the real value stands in the zip64 record
_ZIP64_ID = 1
_PADDING_ID = 0x4246  # "FB": the extra field by which torch aligns its members
_ENCRYPTED, _DESCRIBED, _UTF8 = 0x0001, 0x0008, 0x0800
_FILE_TYPE, _REGULAR = 0o170000, 0o100000  # of the mode that stands in the upper half of the attributes
_DATE = 0x21  # 1980-01-01: the same inputs give the same bytes

MAX_DIRECTORY = MAX_MEMBERS * (_CENTRAL.size + MAX_NAME + 64)  # bytes


class Entry(NamedTuple):
    """Where a member's data lies in the file, in bytes, and its CRC-32.

    `described`: a data descriptor follows it. `attributes`: what whoever unpacks it makes of it, such as its mode.
    """

    offset: int
    size: int
    crc: int
    described: bool
    attributes: int


class _Listed(NamedTuple):
    """A member as the central directory has it; `header` is the offset of its local header."""

    name: bytes
    flags: int
    method: int
    crc: int
    stored: int
    size: int
    attributes: int
    header: int


class _Fields(NamedTuple):
    """What the end record says: the number of members, and the central directory's place."""

    members: int
    size: int
    offset: int


def read(view: memoryview) -> tuple[str, dict[str, Entry]]:
    """The top folder and its members by path, in the directory's order. BundleError says what is wrong."""
    fields, end = _read_end(view)
    listed = _read_central(view[fields.offset : end], fields.members)
    if not listed:
        raise BundleError("it has no members")
    entries: dict[str, Entry] = {}
    folders = set()
    for member in listed:
        name = _name(member)
        top, _, path = name.partition("/")
        folders.add(top)
        if not path:
            raise BundleError(f"member `{name}` is in no folder")
        if path in entries:
            raise BundleError(f"member `{path}` is there twice")
        entries[path] = _read_local(view, member, path, fields.offset)
    if len(folders) > 1:
        raise BundleError("it has several top folders: " + ", ".join(f"`{f}`" for f in sorted(folders)[:4]))
    _check_tiling(view, listed, entries, fields.offset)
    return folders.pop(), entries


def names(view: memoryview) -> list[str]:
    """The members' names alone, to tell what a foreign zip is; BundleError only if there is no directory to read."""
    fields, end = _read_end(view)
    return [m.name.decode(errors="replace") for m in _read_central(view[fields.offset : end], fields.members)]


def _starts(view: memoryview, at: int, signature: bytes) -> bool:
    return bytes(view[at : at + 4]) == signature


def _read_end(view: memoryview) -> tuple[_Fields, int]:
    at = len(view) - _END.size
    if at < 0 or not _starts(view, at, b"PK\5\6"):
        raise BundleError("it does not end with a zip directory: it was cut, or something was added to it")
    _, disk, disk_start, here, count, size, offset, comment = _END.unpack_from(view, at)
    if comment or disk or disk_start or here != count:
        raise BundleError("its zip directory has a comment or spans several files")
    fields = _Fields(count, size, offset)
    if at >= _LOCATOR.size and _starts(view, at - _LOCATOR.size, b"PK\6\7"):
        fields, at = _read_end64(view, at - _LOCATOR.size, fields)
    if fields.members > MAX_MEMBERS or fields.size > MAX_DIRECTORY:
        raise BundleError(f"it has {fields.members} members, allowed {MAX_MEMBERS}")
    if fields.offset + fields.size != at:
        raise BundleError(
            "its zip directory is not where its end record says: it was cut, or something was added to it"
        )
    return fields, at


def _read_end64(view: memoryview, locator: int, short: _Fields) -> tuple[_Fields, int]:
    """The zip64 end record, which must stand right before its locator and agree with the short one."""
    at = locator - _END64.size
    _, disk, offset, disks = _LOCATOR.unpack_from(view, locator)
    if at < 0 or not _starts(view, at, b"PK\6\6") or (disk, offset, disks) not in ((0, at, 1), (0, at, 0)):
        raise BundleError("its zip64 end record is not where its locator says")
    _, rest, _, _, disk, disk_start, here, count, size, start = _END64.unpack_from(view, at)
    if rest != _END64.size - 12 or disk or disk_start or here != count:
        raise BundleError("its zip64 end record is not plain")
    for value, short_value, limit in zip((count, size, start), short, (0xFFFF, _FOUR_GIB, _FOUR_GIB), strict=True):
        if short_value not in (value, limit):
            raise BundleError("its two end records disagree")
    return _Fields(count, size, start), at


def _read_central(central: memoryview, count: int) -> list[_Listed]:
    listed, at = [], 0
    for _ in range(count):
        if len(central) - at < _CENTRAL.size or not _starts(central, at, b"PK\1\2"):
            raise BundleError("its zip directory is shorter than it says")
        fields = _CENTRAL.unpack_from(central, at)
        flags, method = fields[3:5]
        crc, stored, size, name_size, extra_size, comment, disk = fields[7:14]
        attributes, header = fields[15:]
        at += _CENTRAL.size
        name, extra = bytes(central[at : at + name_size]), central[at + name_size : at + name_size + extra_size]
        at += name_size + extra_size
        if at > len(central) or comment or disk or name_size > MAX_NAME:
            raise BundleError("its zip directory has an entry that is cut, too long or has a comment")
        size, stored, header = _with_zip64(extra, size, stored, header)
        listed.append(_Listed(name, flags, method, crc, stored, size, attributes, header))
    if at != len(central):
        raise BundleError("its zip directory is longer than its entries")
    return listed


def _with_zip64(extra: memoryview, *fields: int) -> tuple[int, ...]:
    """The fields, with those that are at the 32-bit limit replaced by the zip64 record's, in its fixed order."""
    record, at = None, 0
    while at < len(extra):
        if len(extra) - at < _EXTRA.size:
            raise BundleError("an extra field of its zip directory is cut")
        kind, size = _EXTRA.unpack_from(extra, at)
        at += _EXTRA.size
        if size > len(extra) - at or (kind == _ZIP64_ID and record is not None):
            raise BundleError("an extra field of its zip directory is cut or doubled")
        if kind not in (_ZIP64_ID, _PADDING_ID):  # others hold owners, modes, and what a link points to
            raise BundleError(f"it has an extra field of the kind {kind:#06x}, which is not allowed")
        if kind == _ZIP64_ID:
            record = extra[at : at + size]
        at += size
    wanted = [i for i, field in enumerate(fields) if field == _FOUR_GIB]
    if not wanted and record is None:
        return fields
    if record is None or len(record) != 8 * len(wanted):
        raise BundleError("a zip64 record of its zip directory does not fit its entry")
    values = dict(zip(wanted, struct.unpack(f"<{len(wanted)}Q", record), strict=True))
    return tuple(values.get(i, field) for i, field in enumerate(fields))


def _name(member: _Listed) -> str:
    try:
        name = member.name.decode("utf-8" if member.flags & _UTF8 else "ascii")
    except UnicodeDecodeError:
        raise BundleError(f"member `{member.name.decode(errors='replace')}`: the name is not valid UTF-8") from None
    if fault := path_fault(name):
        raise BundleError(f"member `{name[:128]}`: the name is not allowed: {fault}")
    return name


def _read_local(view: memoryview, member: _Listed, path: str, limit: int) -> Entry:
    """The member's data, which must lie before `limit`; its local header has to agree with the central one."""
    where = f"member `{path}`"
    if member.flags & _ENCRYPTED:
        raise BundleError(f"{where} is encrypted, which is not allowed")
    if member.method:
        raise BundleError(f"{where} is compressed, which is not allowed")
    if member.flags & ~(_DESCRIBED | _UTF8):
        raise BundleError(f"{where} has the zip flags {member.flags:#06x}, which are not allowed")
    if member.attributes >> 16 & _FILE_TYPE not in (0, _REGULAR):
        raise BundleError(f"{where} is a link, a folder or a device, which is not allowed")
    if member.stored != member.size:
        raise BundleError(f"{where} has two sizes, {member.stored} and {member.size}")
    at = member.header
    if at + _LOCAL.size > limit or not _starts(view, at, b"PK\3\4"):
        raise BundleError(f"{where} has no local header")
    _, _, flags, method, _, _, crc, stored, size, name_size, extra_size = _LOCAL.unpack_from(view, at)
    at += _LOCAL.size
    data = at + name_size + extra_size
    if data + member.size > limit:
        raise BundleError(f"{where} reaches beyond the end of the data: {member.size} bytes at {data}, of {limit}")
    sizes = _with_zip64(view[at + name_size : data], size, stored) if not flags & _DESCRIBED else (size, stored)
    same = (bytes(view[at : at + name_size]), flags, method) == (member.name, member.flags, member.method)
    told = (crc, *sizes) == (member.crc, member.size, member.size)
    # a writer that streams leaves them open and puts them in a descriptor after the data
    left_open = flags & _DESCRIBED and (crc, *sizes) in ((0, 0, 0), (0, _FOUR_GIB, _FOUR_GIB))
    if not same or not (told or left_open):
        raise BundleError(f"{where} has a local header that disagrees with the directory")
    return Entry(data, member.size, member.crc, bool(flags & _DESCRIBED), member.attributes)


def _check_tiling(view: memoryview, listed: list[_Listed], entries: dict[str, Entry], end: int) -> None:
    """Members follow one another from the file's first byte to the directory, with at most a descriptor between."""
    at = 0
    members = zip(listed, entries.items(), strict=True)
    for member, (path, entry) in sorted(members, key=lambda pair: pair[0].header):
        if member.header < at:
            raise BundleError(f"member `{path}` overlaps another one")
        if member.header > at:
            raise BundleError(f"there are {member.header - at} bytes before member `{path}` that belong to no member")
        at = entry.offset + entry.size
        if entry.described:
            at += _descriptor_size(view[at:end], member, path)
    if at != end:
        raise BundleError(f"there are {end - at} bytes before the zip directory that belong to no member")


def _descriptor_size(view: memoryview, member: _Listed, path: str) -> int:
    for record in (_DESCRIPTOR, _DESCRIPTOR64):
        if len(view) >= record.size and record.unpack_from(view) == (b"PK\7\10", member.crc, member.size, member.size):
            return record.size
    raise BundleError(f"member `{path}` has no data descriptor that agrees with the directory")


# --- writing -----------------------------------------------------------------------------------------------------


def local_header(name: bytes, size: int, crc: int, at: int) -> bytes:
    """The header of a member at the offset `at`, padded so that its data starts on a boundary of ALIGNMENT bytes."""
    long = size >= _FOUR_GIB
    extra = struct.pack("<2H2Q", _ZIP64_ID, 16, size, size) if long else b""
    unpadded = at + _LOCAL.size + len(name) + len(extra) + _EXTRA.size
    padding = -unpadded % ALIGNMENT
    extra += _EXTRA.pack(_PADDING_ID, padding) + bytes(padding)
    short = _FOUR_GIB if long else size
    version = 45 if long else 20
    return _LOCAL.pack(b"PK\3\4", version, _UTF8, 0, 0, _DATE, crc, short, short, len(name), len(extra)) + name + extra


def central_directory(members: list[tuple[bytes, int, int, int]], at: int) -> bytes:
    """The directory and the end records of members (name, header's offset, size, CRC-32) for the offset `at`."""
    central = b"".join(_central_header(*member) for member in members)
    count, size = len(members), len(central)
    long = count >= 0xFFFF or size >= _FOUR_GIB or at >= _FOUR_GIB
    end64 = b""
    if long:
        end64 = _END64.pack(b"PK\6\6", _END64.size - 12, 45, 45, 0, 0, count, count, size, at)
        end64 += _LOCATOR.pack(b"PK\6\7", 0, at + size, 1)
    short = min(count, 0xFFFF)
    end = _END.pack(b"PK\5\6", 0, 0, short, short, min(size, _FOUR_GIB), min(at, _FOUR_GIB), 0)
    return central + end64 + end


def _central_header(name: bytes, header: int, size: int, crc: int) -> bytes:
    long = [value for value in (*([size, size] if size >= _FOUR_GIB else []), header) if value >= _FOUR_GIB]
    extra = struct.pack(f"<2H{len(long)}Q", _ZIP64_ID, 8 * len(long), *long) if long else b""
    short, version = min(size, _FOUR_GIB), 45 if long else 20
    told = (version, version, _UTF8, 0, 0, _DATE, crc, short, short, len(name), len(extra), 0, 0, 0, 0)
    return _CENTRAL.pack(b"PK\1\2", *told, min(header, _FOUR_GIB)) + name + extra
