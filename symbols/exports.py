"""Where a symbol that an ELF file exports lies: found by the file's hash table, as the dynamic linker does.

A table of all symbols is tens of megabytes in large libraries, and the file may have no table of sections; the hash
table leads to one symbol at once. System V ABI, chapter 5; DT_GNU_HASH as glibc's and musl's dynamic linkers read it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from iaprof.symbols.elf import PT_DYNAMIC, Elf

LONGEST_CHAIN = 1 << 10
"""At most so many symbols with one hash are looked at; linkers make chains of a few."""
_MOST_SEGMENTS = 1 << 10  # each look-up goes through them
_MOST_ENTRIES = 1 << 12  # of the dynamic section, which has some thirty
_DT_NULL, _DT_HASH, _DT_STRTAB, _DT_SYMTAB, _DT_GNU_HASH = 0, 4, 5, 6, 0x6FFFFEF5
_ENTRY, _WORD = struct.Struct("<QQ"), struct.Struct("<I")
_SYMBOL = struct.Struct("<IBBHQQ")  # name, kind, visibility, section, address, size
_DATA, _FUNCTION = 1, 2
_UNDEFINED = 0


def exported(elf: Elf, name: bytes) -> int | None:
    """The address, in the image, of an exported function or variable; None if the file exports none of that name."""
    if len(elf.loads) > _MOST_SEGMENTS:
        return None
    dynamic = _dynamic(elf)
    symbols, strings = dynamic.get(_DT_SYMTAB), dynamic.get(_DT_STRTAB)
    if symbols is None or strings is None:
        return None
    for number in _candidates(elf, dynamic, name):
        entry = elf.at(symbols + number * _SYMBOL.size, _SYMBOL.size)
        if len(entry) < _SYMBOL.size:
            return None
        at, kind, _, section, address, _ = _SYMBOL.unpack(entry)
        is_defined = section != _UNDEFINED and kind & 15 in (_DATA, _FUNCTION)
        if is_defined and elf.at(strings + at, len(name) + 1) == name + b"\0":
            return int(address)
    return None


def _dynamic(elf: Elf) -> dict[int, int]:
    """The first of each tag of the dynamic section."""
    found: dict[int, int] = {}
    for segment in elf.segments[elf.segments["type"] == PT_DYNAMIC][:1]:
        size = min(int(segment["size"]), _MOST_ENTRIES * _ENTRY.size)
        content = elf.at(int(segment["address"]), size)
        for tag, value in _ENTRY.iter_unpack(content[: len(content) // _ENTRY.size * _ENTRY.size]):
            if tag == _DT_NULL:
                break
            found.setdefault(tag, value)
    return found


def _candidates(elf: Elf, dynamic: dict[int, int], name: bytes) -> Iterator[int]:
    """The numbers of symbols that may have a name."""
    if _DT_GNU_HASH in dynamic:
        return _by_gnu_hash(elf, dynamic[_DT_GNU_HASH], name)
    if _DT_HASH in dynamic:
        return _by_hash(elf, dynamic[_DT_HASH], name)
    return iter(())


def _by_gnu_hash(elf: Elf, table: int, name: bytes) -> Iterator[int]:
    head = elf.at(table, 16)
    if len(head) < 16:
        return
    bucket_count, first_symbol, bloom_words, _ = struct.unpack("<4I", head)
    buckets = table + 16 + 8 * bloom_words
    hashed = 5381
    for byte in name:
        hashed = hashed * 33 + byte & 0xFFFF_FFFF
    number = _word(elf, buckets + 4 * (hashed % bucket_count)) if bucket_count else None
    if not number or number < first_symbol:
        return
    chain = elf.at(buckets + 4 * bucket_count + 4 * (number - first_symbol), 4 * LONGEST_CHAIN)
    for index, (of_symbol,) in enumerate(_WORD.iter_unpack(chain[: len(chain) & ~3])):
        if of_symbol | 1 == hashed | 1:
            yield number + index
        if of_symbol & 1:
            return


def _by_hash(elf: Elf, table: int, name: bytes) -> Iterator[int]:
    head = elf.at(table, 8)
    if len(head) < 8:
        return
    bucket_count, _ = struct.unpack("<II", head)
    hashed = 0
    for byte in name:
        hashed = (hashed << 4) + byte & 0xFFFF_FFFF
        high = hashed & 0xF000_0000
        hashed = (hashed ^ high >> 24) & ~high
    number = _word(elf, table + 8 + 4 * (hashed % bucket_count)) if bucket_count else None
    for _ in range(LONGEST_CHAIN):
        if not number:
            return
        yield number
        number = _word(elf, table + 8 + 4 * bucket_count + 4 * number)


def _word(elf: Elf, address: int) -> int | None:
    content = elf.at(address, 4)
    return _WORD.unpack(content)[0] if len(content) == 4 else None
