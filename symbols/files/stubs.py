"""Names code that no symbol names: entries of procedure linkage tables, and the code to which signal handlers return.

An entry of a procedure linkage table (PLT) gets the name of the function that it calls: `puts@plt`, as in gdb. It jumps
to the address that the dynamic linker puts into a slot, and the relocation of that slot names the function. So this
works for stripped files, and for the tables of all linkers: entries are recognised by their jump or, where Intel's
indirect branch tracking splits them in two, by the index of the relocation that they push.

The code to which signal handlers return is `__restore_rt`, as in the sources of glibc and musl, which give the Linux
kernel this code with each handler; it makes the system call rt_sigreturn. Stripped libraries have no symbol for it, and
in others it begins behind the address that stands for a handler's caller: a stack has the address of its first
instruction as the return address, and the instruction that did the call is looked for one byte before. gdb shows
`<signal handler called>` here.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from iaprof.basics.elf import SHT_DYNSYM, SHT_RELA, SHT_SYMTAB, STT_FUNC, STT_GNU_IFUNC, Section
from iaprof.formats.elf_tables import RELOCATION, SYMBOL
from iaprof.symbols.files.elf import MOST_TABLE_BYTES, Elf, SymbolTable
from iaprof.symbols.unwind.cfi import Bytes, CallFrames, CfiError

_TABLES = (".plt", ".plt.sec", ".plt.got", ".plt.bnd", ".iplt")
_R_64, _R_GLOB_DAT, _R_JUMP_SLOT, _R_IRELATIVE = 1, 6, 7, 37  # psABI for x86-64, table 4.9
_MOST_BYTES = 1 << 22  # of a table; an entry has 8 to 32
_LONGEST_ENTRY = 64
_LONGEST_NAME = 1 << 16
_NO_SLOT = (1 << 64) - 1  # an entry that ends there has none

# endbr64 and, from mold, mov $INDEX, %r11d; then jmp *SLOT(%rip), with or without bnd; or mov SLOT(%rip), %r11 before a
# retpoline. Or endbr64; push $INDEX; jmp: the first half of an entry whose second half, in .plt.sec, has the jump.
_ENTRY = re.compile(
    rb"(?:\xf3\x0f\x1e\xfa)?(?:\x41\xbb.{4})?(?:\xf2?\xff\x25|\x4c\x8b\x1d)(?P<slot>.{4})"
    rb"|\xf3\x0f\x1e\xfa\x68(?P<index>.{4})\xf2?\xe9",
    re.DOTALL,
)

NAME = b"__restore_rt"
MOST_ADDRESSES = 1 << 15  # a fraction of a second
_CODE = b"\x48\xc7\xc0\x0f\x00\x00\x00\x0f\x05"  # mov $15, %rax; syscall
_BEFORE = 1  # byte before the code, which belongs to it


def plt_symbols(elf: Elf, tables: list[SymbolTable]) -> SymbolTable:
    """Returns the entries of a file's procedure linkage tables as functions.

    Args:
        elf: the file, which has the code.
        tables: the file's symbol tables, which name the functions that choose an implementation (IFUNC) when the
            program starts; without a name, the entry has that function's address, as in gdb: `*ABS*+0x401230@plt`.

    Raises:
        ElfError: relocations or the names of their symbols lie outside the file, or take too much memory.
    """
    sections = [elf.sections[index] for name in _TABLES if (index := elf.section(name)) is not None]
    if not sections:
        return SymbolTable()
    relocations = _Relocations(elf, tables)
    entries = [entry for section in sections for entry in _entries(elf, section, relocations)]
    starts, sizes, functions = zip(*entries, strict=True) if entries else ((), (), ())
    names = [name + b"@plt\0" for name in functions]
    symbols = np.zeros(len(entries), SYMBOL)
    symbols["name"] = np.cumsum([1, *map(len, names)])[:-1]
    symbols["info"] = STT_FUNC
    symbols["value"], symbols["size"] = np.array(starts, np.uint64), np.array(sizes, np.uint64)
    return SymbolTable(symbols, symbols["value"], b"".join([b"\0", *names]))


def _entries(elf: Elf, section: Section, relocations: _Relocations) -> Iterator[tuple[int, int, bytes]]:
    """Yields start, size and function of the entries in one section."""
    starts, slots = [], []
    for match in _ENTRY.finditer(elf.read(section.offset, min(section.size, _MOST_BYTES))):
        if match["slot"] is not None:
            slot = section.address + match.end("slot") + int.from_bytes(match["slot"], "little", signed=True)
        else:
            slot = relocations.slot_with_index(int.from_bytes(match["index"], "little"))
        starts.append(match.start())
        slots.append(slot if 0 <= slot < 1 << 64 else _NO_SLOT)
    names = relocations.of_slots(np.array(slots, np.uint64))
    found = [(start, name) for start, name in zip(starts, names, strict=True) if name is not None]
    gaps = [following - start for (start, _), (following, _) in itertools.pairwise([*found, (section.size, b"")])]
    size = section.entry_size if 0 < section.entry_size <= _LONGEST_ENTRY else min(gaps[:-1], default=_LONGEST_ENTRY)
    for (start, name), gap in zip(found, gaps, strict=True):
        yield section.address + start, min(size, gap), name


class _Relocations:
    """The relocations of slots."""

    def __init__(self, elf: Elf, tables: list[SymbolTable]) -> None:
        self._elf, self._tables = elf, tables
        pieces, links = [np.empty(0, RELOCATION)], [np.empty(0, np.int64)]
        for index, section in enumerate(elf.sections):
            if section.type == SHT_RELA and section.entry_size == RELOCATION.itemsize and section.address:
                piece = _table(elf, index, RELOCATION)
                pieces.append(piece[np.isin(piece["kind"], (_R_64, _R_GLOB_DAT, _R_JUMP_SLOT, _R_IRELATIVE))])
                links.append(np.full(len(pieces[-1]), section.link))
        rows, links_of_rows = np.concatenate(pieces), np.concatenate(links)
        order = np.argsort(rows["offset"], kind="stable")
        self._rows, self._links = rows[order], links_of_rows[order]
        self._offsets = self._rows["offset"].copy()  # NumPy would copy a member of rows, or convert it, at each search
        pushed = elf.section(".rela.plt")
        self._pushed = np.empty(0, RELOCATION) if pushed is None else _table(elf, pushed, RELOCATION)
        self._symbols: dict[int, tuple[list[int], bytes]] = {}  # where their names begin, and the names, by section

    def of_slots(self, addresses: NDArray[np.uint64]) -> list[bytes | None]:
        """Returns the function whose address the dynamic linker puts at each of uint64[n]; None where there is none."""
        rows = np.searchsorted(self._offsets, addresses)
        is_slot = np.append(self._offsets, np.uint64(0))[rows] == addresses
        is_slot &= rows < len(self._offsets)
        relocations = self._rows[rows[is_slot]]
        members = (relocations[member].tolist() for member in ("kind", "addend", "symbol"))
        names: list[bytes | None] = [None] * len(addresses)
        places, links = np.flatnonzero(is_slot).tolist(), self._links[rows[is_slot]].tolist()
        for place, link, kind, addend, symbol in zip(places, links, *members, strict=True):
            if kind == _R_IRELATIVE:
                names[place] = self._name_of_resolver(addend) or b"*ABS*+%#x" % addend
            else:
                names[place] = self._name(link, symbol)
        return names

    def slot_with_index(self, index: int) -> int:
        """Returns the slot of a relocation that an entry names by its index; _NO_SLOT if there is none."""
        return int(self._pushed["offset"][index]) if index < len(self._pushed) else _NO_SLOT

    def _name(self, section: int, symbol: int) -> bytes | None:
        if section not in self._symbols:
            symbols, names = _symbols(self._elf, section)
            self._symbols[section] = symbols["name"].tolist(), names
        starts, names = self._symbols[section]
        if not 0 < symbol < len(starts):
            return None
        start = starts[symbol]
        return names[start : max(names.find(b"\0", start, start + _LONGEST_NAME), start)] or None

    def _name_of_resolver(self, address: int) -> bytes | None:
        """Returns the shortest name of a function that chooses an implementation."""
        for table in self._tables:
            chosen = (table.symbols["value"] == address) & ((table.symbols["info"] & 15) == STT_GNU_IFUNC)
            names = [table.names[at : table.names.index(b"\0", at)] for at in table.symbols["name"][chosen].tolist()]
            if names:
                return min(names, key=lambda name: (len(name), name))
        return None


def _symbols(elf: Elf, index: int) -> tuple[NDArray[np.void], bytes]:
    """Returns the symbols of a section, and their names; none if it has no symbols."""
    if not 0 < index < len(elf.sections) or elf.sections[index].type not in (SHT_SYMTAB, SHT_DYNSYM):
        return np.empty(0, SYMBOL), b""
    link = elf.sections[index].link
    names = elf.data(link, MOST_TABLE_BYTES) if link < len(elf.sections) else b""
    return _table(elf, index, SYMBOL), names


def _table(elf: Elf, index: int, entry: np.dtype[np.void]) -> NDArray[np.void]:
    data = elf.data(index, MOST_TABLE_BYTES)
    return np.frombuffer(data[: len(data) // entry.itemsize * entry.itemsize], entry)


def signal_trampolines(elf: Elf, content: Bytes, addresses: NDArray[np.uint64]) -> SymbolTable:
    """Returns, as functions, the code to which signal handlers return, where an address is in it.

    Args:
        elf: the file with the code.
        content: of the same file.
        addresses: uint64[n], virtual addresses in the file; for more than MOST_ADDRESSES, no code is found.
    """
    around = len(_CODE) - 1 + _BEFORE
    starts = set()
    for address in addresses.tolist() if len(addresses) <= MOST_ADDRESSES else ():
        first = max(address - around + _BEFORE, 0)
        at = elf.at(first, address + _BEFORE + len(_CODE) - first).find(_CODE)
        if at >= 0:
            starts.add(first + at)
    symbols = np.zeros(len(starts), SYMBOL)
    for row, start in enumerate(sorted(starts)):
        if _may_end_handlers(content, start):
            symbols[row] = (0, STT_FUNC, 0, 0, start - _BEFORE, _BEFORE + len(_CODE))
    return SymbolTable(symbols[symbols["size"] > 0], symbols["value"][symbols["size"] > 0], NAME)


def _may_end_handlers(content: Bytes, address: int) -> bool:
    """Tells whether call frame information says that a signal handler returns to an address, or does not cover it."""
    try:
        function = CallFrames(content).function(address)
    except CfiError:
        return True
    return function is None or function.cie.is_signal_frame
