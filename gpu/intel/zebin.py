"""Zebins: the ELF files with a GPU module's kernels, as the compiler writes them and as the driver loads them.

This module names kernels and hands out their code. report/gpu/frames.py reads lines and inlined functions (DWARF),
iga.py decodes instructions. The file may come from anyone: all that it declares is checked before use,
and the work and memory that reading takes are bounded by its length.
basics/elf.py has the layout of ELF files; what is Intel's own is in compute-runtime's
shared/source/device_binary_format/zebin and shared/source/debugger (the debug form).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from iaprof.basics import elf
from iaprof.gpu import elf_code
from iaprof.gpu.code import ADDRESS_MASK, CodeKernel, CodeObject, CodeObjectError, canonical
from iaprof.gpu.elf_code import TEXT_PREFIX, Section, check_size, functions, kernel_sections

CALLED_FUNCTIONS = "Intel_Symbol_Table_Void_Program"  # pseudo-kernel whose section holds functions that kernels call

EM_INTELGT = 205  # the machine of ELF files: Intel Graphics Technology
_RELOCATION_BYTES = {1: 8}  # R_ZE_SYM_ADDR; the other kinds change four
INFO = ".ze_info"  # a section: YAML about each kernel
_MOST_INFO_BYTES = 1 << 24
# A line of .ze_info that begins a part of it, or a kernel in its part, or says how wide that is.
_INFO_LINE = re.compile(rb"^(?:(\w+):|  - name:(.+)|      simd_size: *(\d{1,3})\b)", re.MULTILINE)
SIMD_WIDTHS = (1, 8, 16, 32)
_MOST_RELOCATIONS = 1 << 20  # places in one section; a kernel has a handful


def read_zebin(data: bytes) -> CodeObject:
    """Reads a compiler's zebin or a driver's debug ELF; CodeObjectError if it is neither, or damaged."""
    sections = read_sections(data)
    texts = kernel_sections(sections)
    check_size(data, texts)
    of_kernels = functions(data, sections, texts, are_placed=True)
    relocations, widths = _relocations(data, sections), _widths(data, sections)
    kernels = []
    for index, section in texts.items():
        name = section.name.removeprefix(TEXT_PREFIX)
        own = of_kernels.get(index, [])
        at_start = [function.size for function in own if function.name == name and function.offset == 0]
        kernels.append(
            CodeKernel(
                name=name,
                address=canonical(section.address),
                size=next((size for size in at_start if size), section.size),
                code=data[section.offset : section.offset + section.size],
                functions=tuple(sorted((f for f in own if f.name != name), key=lambda f: (f.offset, f.name))),
                relocations=tuple(relocations.get(index, ())),
                simd=widths.get(name, 0),
                label="[called functions]" if name == CALLED_FUNCTIONS else "",
            )
        )
    return CodeObject(
        kernels=tuple(kernels),
        has_debug=any(section.name in (".debug_info", ".debug_line") and section.size for section in sections),
        placed=any(kernel.address for kernel in kernels),
        # A debug ELF has no code for kernels that were never launched: their address is unknown.
        without_code=frozenset(
            section.name.removeprefix(TEXT_PREFIX)
            for section in sections
            if section.type == elf.SHT_NULL and section.name.startswith(TEXT_PREFIX)
        ),
    )


def read_sections(data: bytes) -> list[Section]:
    """The checked section table; CodeObjectError if the file is damaged or no zebin."""
    return elf_code.read_sections(data, EM_INTELGT, "an Intel GPU")


def placed_ranges(data: bytes | memoryview) -> list[tuple[int, int]]:
    """Where the loadable segments of a debug ELF lie: canonical address and bytes; nothing where it is no such file."""
    if len(data) < elf.HEADER.size:
        return []
    header = elf.Header._make(elf.HEADER.unpack_from(data))
    end = header.segments + header.segment_size * header.segment_count
    if header.segment_size != elf.SEGMENT.size or end > len(data):
        return []
    segments = map(elf.Segment._make, elf.SEGMENT.iter_unpack(data[header.segments : end]))
    return [(canonical(each.address), min(each.memory, ADDRESS_MASK)) for each in segments if each.type == elf.PT_LOAD]


def info(widths: Mapping[str, int]) -> bytes:
    """The content of the section .ze_info for kernels with these names and lanes."""
    lines = (f"  - name: {json.dumps(name)}\n    execution_env:\n      simd_size: {n}\n" for name, n in widths.items())
    return f"---\nkernels:\n{''.join(lines)}...\n".encode()


def _widths(data: bytes, sections: list[Section]) -> dict[str, int]:
    """Lanes by kernel's name, of those of which the file says it once."""
    found: dict[str, int] = {}
    section = next((section for section in sections if section.name == INFO and section.type != elf.SHT_NOBITS), None)
    if section is None or section.size > _MOST_INFO_BYTES:
        return found
    part = name = b""
    for line in _INFO_LINE.finditer(data[section.offset : section.offset + section.size]):
        part, name, width = line[1] or part, line[2] or (b"" if line[1] else name), int(line[3] or 0)
        if part == b"kernels" and name and width:
            plain = _plain(name)
            found[plain] = width if width in SIMD_WIDTHS and plain not in found else 0
    return found


def _plain(scalar: bytes) -> str:
    """The text of a scalar in YAML, which may be in quotation marks."""
    text = scalar.decode("utf-8", "backslashreplace").strip(" ")
    if text[:1] == "'":
        return text[1:-1].replace("''", "'")
    try:
        return str(json.loads(text)) if text[:1] == '"' else text
    except ValueError:
        return text


def _relocations(data: bytes, sections: list[Section]) -> dict[int, list[tuple[int, int]]]:
    """Offset and size, in bytes, of each relocated place, by the index of the relocated section."""
    found: dict[int, dict[int, int]] = {}
    left = len(data)  # sections may overlap: bounds the total
    for section in sections:
        if section.type in (elf.SHT_REL, elf.SHT_RELA) and section.name.startswith(
            (f".rel{TEXT_PREFIX}", f".rela{TEXT_PREFIX}")
        ):
            entry = elf.REL if section.type == elf.SHT_REL else elf.RELA
            left -= section.size
            if left < 0:
                raise CodeObjectError("its sections overlap: they hold more relocations than the file has bytes")
            entries = memoryview(data)[section.offset : section.offset + section.size // entry.size * entry.size]
            places = found.setdefault(section.info, {})
            for offset, kind, *_ in entry.iter_unpack(entries):
                if offset < len(data):
                    places[offset] = max(places.get(offset, 0), _RELOCATION_BYTES.get(kind, 4))
            if len(places) > _MOST_RELOCATIONS:
                raise CodeObjectError(f"a section of it has more than {_MOST_RELOCATIONS} relocations")
    return {index: list(places.items()) for index, places in found.items()}
