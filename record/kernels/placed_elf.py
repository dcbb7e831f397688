"""The debug form of a GPU module, made from what a driver without probes lets one see.

A patched driver hands out a debug ELF: the zebin with the addresses in it at which its kernels lie. Here the same is
made from the zebin as the compiler wrote it and from what was learnt of the kernels that were launched. formats.zebin
reads either. Source for what the driver changes: compute-runtime's
shared/source/device_binary_format/zebin/debug_zebin.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from iaprof.formats import elf
from iaprof.formats.elf_tables import HEADER, RELOCATION, SECTION, SEGMENT, SYMBOL
from iaprof.formats.zebin import (
    TEXT_PREFIX,
    Section,
    StringTable,
    ZebinError,
    ZebinKernel,
    canonical,
    kernel_sections,
    read_sections,
    read_zebin,
)

MOST_KERNELS = 65_000  # of one module; ELF's counts of segments and of sections have 16 bits


_ET_EXEC = 2
_READ_EXECUTE = 5
_ALLOCATED_CODE = 6  # SHF_ALLOC and SHF_EXECINSTR
_RELOCATED = {1: range(8), 2: range(4), 3: range(4, 8)}  # which bytes of the address R_ZE_SYM_ADDR, _32, _32_HI write
_MOST_DEBUG_SECTIONS = 64  # DWARF has a dozen kinds
_OTHER_HALF = 1 << 47  # of the 48 bits that an address has


@dataclass(frozen=True, slots=True)
class PlacedKernel:
    """A kernel that was launched."""

    name: str  # as the zebin has it
    address: int  # 64 bits, as the driver gives it: sign-extended or not
    code: bytes  # as it lies there, perhaps with padding behind it; as much of it as could be had


def compose(binary: bytes | None, kernels: Sequence[PlacedKernel]) -> bytes:
    """The debug ELF of a module, of which formats.zebin.read_zebin says that just these kernels are in it.

    Args:
        binary: the module's zebin as the compiler wrote it, or what is believed to be that; None where it is not known.
        kernels: those that were launched; past MOST_KERNELS they are left out, and those without a name are no kernels.

    Symbols and DWARF get the addresses that the driver would give them. A kernel's section keeps its size: code behind
    it is cut off, and where code is missing the zebin's stays. Kernels that were not launched, and the functions that
    kernels call in a section of their own (CALLED_FUNCTIONS), lie nobody knows where: their sections become SHT_NULL,
    and what DWARF says of them moves to the other half of the address space. Global data stays at address 0, and so
    does, as in the driver's own debug ELF, what DWARF says of a kernel by a symbol without a name: report.gpu_units
    finds out whose it is.

    Kernels that overlap, and empty ones, are kept as they are. Where the zebin is not these kernels' (it is damaged,
    has no kernel of a name, or has other code under it), or where a name comes twice, an ELF of sections and symbols
    for these kernels is the answer. Work and memory are bounded by what is given, and nothing in it raises.
    """
    kernels = kernels[:MOST_KERNELS]
    try:
        return _place(binary or b"", kernels)
    except ZebinError:
        return _bare(kernels)


def _place(binary: bytes, kernels: Sequence[PlacedKernel]) -> bytes:
    """The zebin with addresses; ZebinError where that would say something else than `kernels`."""
    launched = {kernel.name: kernel for kernel in kernels}
    known = read_zebin(binary).kernels
    if len({each.name for each in known}) < len(known):
        raise ZebinError("two of its kernels have one name")
    sections = read_sections(binary)
    out = bytearray(binary)
    header = np.frombuffer(out, HEADER, 1)
    table = np.frombuffer(out, SECTION, len(sections), int(header["sections"][0]))
    elsewhere = next((kernel.address ^ _OTHER_HALF for kernel in kernels), 0)
    added = np.zeros(len(sections) + 1, np.uint64)  # to the symbols of each section; the last: to those of none
    expected, places = [], []
    for (index, section), kernel in zip(kernel_sections(sections).items(), known, strict=True):
        if (placed := launched.get(kernel.name)) is None:
            table["type"][index], added[index] = elf.SHT_NULL, elsewhere
            continue
        code = _loaded(kernel, placed)
        out[section.offset : section.offset + section.size] = code
        table["address"][index] = added[index] = placed.address
        places.append((section.offset, placed.address, section.size))
        expected.append((kernel.name, canonical(placed.address), code))
    _apply(out, sections, _move_symbols(out, sections, added))
    header["type"], header["segments"] = _ET_EXEC, len(out)
    header["segment_size"], header["segment_count"] = SEGMENT.itemsize, len(places)
    result = bytes(out) + _segments(places)
    # Sections may lie over each other, or over the tables, so that writing to one has changed another.
    if [(each.name, each.address, each.code) for each in read_zebin(result).kernels] != expected:
        raise ZebinError("its sections overlap")
    if len(expected) < len(kernels):
        raise ZebinError("it does not have all of these kernels, or two of them have one name")
    return result


def _loaded(kernel: ZebinKernel, placed: PlacedKernel) -> bytes:
    """The whole section as it lies on the GPU; ZebinError where that is other code than the zebin's."""
    size = len(kernel.code)
    code = placed.code[:size] + kernel.code[len(placed.code) :]
    if not size or replace(kernel, code=code).fingerprint != kernel.fingerprint:
        raise ZebinError("it has other code")
    return code


def _move_symbols(out: bytearray, sections: list[Section], added: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Adds to the symbols what is to be added to those of their section; returns the values: uint64[symbols].

    Relocations of DWARF do not go by the kernels' symbols, but by ones in the .debug_ section that they are for, which
    have the names of sections with code.
    """
    listed = next((section for section in sections if section.type == elf.SHT_SYMTAB), None)
    if listed is None:
        return np.empty(0, np.uint64)
    symbols = np.frombuffer(out, SYMBOL, listed.size // SYMBOL.itemsize, listed.offset)
    of = np.minimum(symbols["section"], len(sections))
    by_name = {section.name: added[index] for index, section in kernel_sections(sections).items()}
    names_at = sections[listed.link].offset
    strings = StringTable(bytes(out[names_at : names_at + sections[listed.link].size]))
    in_dwarf = np.array([section.name.startswith(".debug_") for section in sections] + [False])[of]
    names, which = np.unique(symbols["name"][in_dwarf], return_inverse=True)
    base = added[of]
    base[in_dwarf] += np.array([by_name.get(strings.at(name), 0) for name in names.tolist()], np.uint64)[which]
    symbols["value"] += base
    return symbols["value"].copy()


def _apply(out: bytearray, sections: list[Section], values: NDArray[np.uint64]) -> None:
    """Applies the relocations of DWARF, given the symbols' values."""
    relocations = [each for each in sections if each.type == elf.SHT_RELA and each.name.startswith(".rela.debug_")]
    if len(relocations) > _MOST_DEBUG_SECTIONS or sum(each.size for each in relocations) > len(out):
        raise ZebinError("its sections overlap: they hold more relocations than the file has bytes")
    for section in relocations:
        target = sections[section.info] if section.info < len(sections) else None
        if target is None or target.type != elf.SHT_PROGBITS:
            raise ZebinError("it has relocations of nothing")
        places = np.frombuffer(out, np.uint8, target.size, target.offset)
        entries = np.frombuffer(out, RELOCATION, section.size // RELOCATION.itemsize, section.offset)
        entries = entries[entries["symbol"] < len(values)]
        for kind, written in _RELOCATED.items():
            own = entries[(entries["kind"] == kind) & (entries["offset"] < max(target.size - len(written) + 1, 0))]
            value = values[own["symbol"]] + own["addend"]
            for at, byte in enumerate(written):
                places[own["offset"] + np.uint64(at)] = value >> np.uint64(8 * byte) & np.uint64(0xFF)


def _segments(places: Sequence[tuple[int, int, int]]) -> bytes:
    """Program headers for code, given its offset in the file, address and bytes."""
    rows = [(elf.PT_LOAD, _READ_EXECUTE, offset, address, 0, size, size, 1) for offset, address, size in places]
    return np.array(rows, SEGMENT).tobytes()


def _bare(kernels: Sequence[PlacedKernel]) -> bytes:
    """An ELF of these kernels alone: header, segments, sections, and what is in those: names, symbols and code."""
    count = len(kernels)
    texts = [TEXT_PREFIX.encode() + kernel.name.encode("utf-8", "backslashreplace") + b"\0" for kernel in kernels]
    strings = b"".join([b"\0.strtab\0.symtab\0", *texts])
    names = np.array([len(strings) - sum(map(len, texts)), *map(len, texts)], np.uint32).cumsum()[:-1]
    addresses = np.array([kernel.address for kernel in kernels], np.uint64)
    sizes = np.array([len(kernel.code) for kernel in kernels], np.uint64)

    symbols = np.zeros(1 + count, SYMBOL)
    symbols["name"][1:] = names + len(TEXT_PREFIX)
    symbols["info"][1:] = elf.STT_FUNC
    symbols["section"][1:] = np.arange(3, 3 + count)
    symbols["value"][1:] = addresses
    symbols["size"][1:] = sizes

    sections = np.zeros(3 + count, SECTION)
    sections["name"][1:] = [1, 9, *names]
    sections["type"] = [elf.SHT_NULL, elf.SHT_STRTAB, elf.SHT_SYMTAB, *[elf.SHT_PROGBITS] * count]
    sections["flags"][3:] = _ALLOCATED_CODE
    sections["address"][3:] = addresses
    sections["size"][1:] = [len(strings), symbols.nbytes, *sizes]
    start = HEADER.itemsize + count * SEGMENT.itemsize + sections.nbytes
    sections["offset"] = start + sections["size"].cumsum() - sections["size"]
    # Symbols have their names in section 1; the first that is not local would be the one behind them.
    sections["link"][2], sections["info"][2], sections["entry_size"][2] = 1, len(symbols), SYMBOL.itemsize

    header = np.zeros(1, HEADER)
    header["ident"], header["type"], header["machine"], header["version"] = (
        elf.MAGIC + b"\2\1\1",
        _ET_EXEC,
        elf.EM_INTELGT,
        1,
    )
    header["segments"], header["sections"] = HEADER.itemsize, start - sections.nbytes
    header["size"], header["segment_size"], header["section_size"] = (
        each.itemsize for each in (HEADER, SEGMENT, SECTION)
    )
    header["segment_count"], header["section_count"], header["names"] = count, len(sections), 1
    segments = _segments(list(zip(sections["offset"][3:].tolist(), addresses.tolist(), sizes.tolist(), strict=True)))
    tables = [header.tobytes(), segments, sections.tobytes(), strings, symbols.tobytes()]
    return b"".join([*tables, *(kernel.code for kernel in kernels)])
