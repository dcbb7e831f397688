"""Where a symbol that an ELF file exports lies: found by the file's hash table, as the dynamic linker does.

A table of all symbols is tens of megabytes in large libraries, and the file may have no table of sections; the hash
table leads to one symbol at once. System V ABI, chapter 5; DT_GNU_HASH as glibc's and musl's dynamic linkers read it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Protocol

LONGEST_CHAIN = 1 << 10
"""At most so many symbols with one hash are looked at; linkers make chains of a few."""
_MOST_ENTRIES = 1 << 12  # of the dynamic section, which has some thirty
_DT_NULL, _DT_HASH, _DT_STRTAB, _DT_SYMTAB, _DT_GNU_HASH = 0, 4, 5, 6, 0x6FFFFEF5
_ENTRY, _WORD = struct.Struct("<QQ"), struct.Struct("<I")
_SYMBOL = struct.Struct("<IBBHQQ")  # name, kind, visibility, section, address, size
_DATA, _FUNCTION = 1, 2
_UNDEFINED = 0


class Exporting(Protocol):
    """An image of which symbols can be asked."""

    @property
    def dynamic(self) -> tuple[int, int] | None:
        """Address and size of the dynamic section; None if there is none."""

    def at(self, address: int, count: int) -> bytes:
        """So many bytes at an address of the image; fewer where it ends."""


def exported(image: Exporting, name: bytes) -> int | None:
    """The address, in the image, of an exported function or variable; None if the file exports none of that name."""
    dynamic = _dynamic(image)
    symbols, strings = dynamic.get(_DT_SYMTAB), dynamic.get(_DT_STRTAB)
    if symbols is None or strings is None:
        return None
    for number in _candidates(image, dynamic, name):
        entry = image.at(symbols + number * _SYMBOL.size, _SYMBOL.size)
        if len(entry) < _SYMBOL.size:
            return None
        at, kind, _, section, address, _ = _SYMBOL.unpack(entry)
        is_defined = section != _UNDEFINED and kind & 15 in (_DATA, _FUNCTION)
        if is_defined and image.at(strings + at, len(name) + 1) == name + b"\0":
            return int(address)
    return None


def _dynamic(image: Exporting) -> dict[int, int]:
    """The first of each tag of the dynamic section."""
    found: dict[int, int] = {}
    if image.dynamic is not None:
        address, size = image.dynamic
        content = image.at(address, min(size, _MOST_ENTRIES * _ENTRY.size))
        for tag, value in _ENTRY.iter_unpack(content[: len(content) // _ENTRY.size * _ENTRY.size]):
            if tag == _DT_NULL:
                break
            found.setdefault(tag, value)
    return found


def _candidates(image: Exporting, dynamic: dict[int, int], name: bytes) -> Iterator[int]:
    """The numbers of symbols that may have a name."""
    if _DT_GNU_HASH in dynamic:
        return _by_gnu_hash(image, dynamic[_DT_GNU_HASH], name)
    if _DT_HASH in dynamic:
        return _by_hash(image, dynamic[_DT_HASH], name)
    return iter(())


def _by_gnu_hash(image: Exporting, table: int, name: bytes) -> Iterator[int]:
    head = image.at(table, 16)
    if len(head) < 16:
        return
    bucket_count, first_symbol, bloom_words, _ = struct.unpack("<4I", head)
    buckets = table + 16 + 8 * bloom_words
    hashed = 5381
    for byte in name:
        hashed = hashed * 33 + byte & 0xFFFF_FFFF
    number = _word(image, buckets + 4 * (hashed % bucket_count)) if bucket_count else None
    if not number or number < first_symbol:
        return
    chain = image.at(buckets + 4 * bucket_count + 4 * (number - first_symbol), 4 * LONGEST_CHAIN)
    for index, (of_symbol,) in enumerate(_WORD.iter_unpack(chain[: len(chain) & ~3])):
        if of_symbol | 1 == hashed | 1:
            yield number + index
        if of_symbol & 1:
            return


def _by_hash(image: Exporting, table: int, name: bytes) -> Iterator[int]:
    head = image.at(table, 8)
    if len(head) < 8:
        return
    bucket_count, _ = struct.unpack("<II", head)
    hashed = 0
    for byte in name:
        hashed = (hashed << 4) + byte & 0xFFFF_FFFF
        high = hashed & 0xF000_0000
        hashed = (hashed ^ high >> 24) & ~high
    number = _word(image, table + 8 + 4 * (hashed % bucket_count)) if bucket_count else None
    for _ in range(LONGEST_CHAIN):
        if not number:
            return
        yield number
        number = _word(image, table + 8 + 4 * bucket_count + 4 * number)


def _word(image: Exporting, address: int) -> int | None:
    content = image.at(address, 4)
    return _WORD.unpack(content)[0] if len(content) == 4 else None
