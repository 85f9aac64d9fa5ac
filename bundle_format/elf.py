"""What a shared library exports, read from its file: nothing is loaded and nothing else is read than the look-up needs.

Format: https://refspecs.linuxfoundation.org/elf/gabi4+/contents.html and its GNU extensions (`DT_GNU_HASH`,
`DT_VERDEF`), 64-bit little-endian.
"""

import mmap
from collections.abc import Iterable, Iterator
from pathlib import Path
from struct import Struct, error
from typing import Self

_PROGRAM_HEADER = Struct("<IIQQQQQQ")  # type, flags, offset, vaddr, paddr, filesz, memsz, align
_DYNAMIC = Struct("<qQ")  # tag, value
_SYMBOL = Struct("<IBBHQQ")  # name, info, other, section, value, size
_HASH_HEADER = Struct("<IIII")  # buckets, first symbol, bloom words, bloom shift
_VERSION = Struct("<HHHHIII")  # version, flags, index, entries, hash, aux, next
_WORD = Struct("<I")
_LOAD, _DYNAMIC_SEGMENT = 1, 2
_NEEDED, _STRTAB, _SYMTAB, _VERDEF, _GNU_HASH = 1, 5, 6, 0x6FFFFFFC, 0x6FFFFEF5


class Library:
    """A 64-bit little-endian ELF file. ValueError if it is something else, OSError if it cannot be read."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            self._read_headers()
        except error as fault:
            raise ValueError(f"`{path}` is a damaged library") from fault

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._data.close()

    def _read_headers(self) -> None:
        if self._data[:6] != b"\x7fELF\x02\x01":
            raise ValueError("no 64-bit little-endian ELF file")
        table, size, count = Struct("<Q").unpack_from(self._data, 32)[0], *Struct("<HH").unpack_from(self._data, 54)
        headers = [_PROGRAM_HEADER.unpack_from(self._data, table + i * size) for i in range(count)]
        self._segments = [
            (vaddr, offset, length) for kind, _, offset, vaddr, _, length, _, _ in headers if kind == _LOAD
        ]
        self._dynamic: dict[int, int] = {}
        self._needed: list[int] = []
        for kind, _, offset, _, _, length, _, _ in headers:
            if kind == _DYNAMIC_SEGMENT:
                for tag, value in _DYNAMIC.iter_unpack(self._data[offset : offset + length // 16 * 16]):
                    self._dynamic.setdefault(tag, value)
                    if tag == _NEEDED:
                        self._needed.append(value)

    def needed(self) -> list[str]:
        """The names of the libraries that it loads."""
        return [self._text(at) for at in self._needed]

    def missing(self, names: Iterable[str]) -> list[str]:
        """Those of the names that it does not define."""
        return [name for name in names if not self._defines(name)]

    def versions(self) -> list[str]:
        """The symbol versions that it defines: "GLIBCXX_3.4.30"."""
        found = []
        at = self._offset(self._dynamic[_VERDEF]) if _VERDEF in self._dynamic else None
        while at is not None:
            _, _, _, _, _, aux, following = _VERSION.unpack_from(self._data, at)[:7]
            found.append(self._text(_WORD.unpack_from(self._data, at + aux)[0]))
            at = at + following if following else None
        return found

    def _offset(self, address: int) -> int:
        for vaddr, offset, length in self._segments:
            if vaddr <= address < vaddr + length:
                return int(address - vaddr + offset)
        raise ValueError("an address that is in no segment")

    def _text(self, at: int) -> str:
        start = self._offset(self._dynamic[_STRTAB]) + at
        return self._data[start : self._data.find(b"\0", start)].decode(errors="replace")

    def _defines(self, name: str) -> bool:
        wanted = _gnu_hash(name)
        return any(value | 1 == wanted | 1 and self._is(symbol, name) for symbol, value in self._chain(wanted))

    def _chain(self, wanted: int) -> Iterator[tuple[int, int]]:
        """Symbols that share a bucket of the GNU hash table with `wanted`: (index, hash without its last bit)."""
        at = self._offset(self._dynamic[_GNU_HASH])
        buckets, first, bloom, _ = _HASH_HEADER.unpack_from(self._data, at)
        at += _HASH_HEADER.size + 8 * bloom
        symbol = _WORD.unpack_from(self._data, at + 4 * (wanted % buckets))[0] if buckets else 0
        chains = at + 4 * buckets
        while symbol >= first > 0:
            value = _WORD.unpack_from(self._data, chains + 4 * (symbol - first))[0]
            yield symbol, value
            if value & 1:
                return
            symbol += 1

    def _is(self, symbol: int, name: str) -> bool:
        at = self._offset(self._dynamic[_SYMTAB]) + symbol * _SYMBOL.size
        text, _, _, section, _, _ = _SYMBOL.unpack_from(self._data, at)
        return section != 0 and self._text(text) == name


def _gnu_hash(name: str) -> int:
    value = 5381
    for byte in name.encode():
        value = (value * 33 + byte) & 0xFFFFFFFF
    return value
