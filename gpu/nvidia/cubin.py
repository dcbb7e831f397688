"""Cubins: the ELF files with a CUDA module's kernels, as ptxas writes them and the driver loads them.

A kernel has a section `.text.NAME`, whose functions are symbols: `$KERNEL$FUNCTION` or FUNCTION itself. A cubin has no
addresses: the source of samples gives each section one before it writes the cubin to a capture (`placed`). lines.py
reads lines; they are there if the program was compiled with -lineinfo, or by Triton.

The file may come from anyone: all that it declares is checked before use. Sources: readelf and nvdisasm on cubins of
CUDA 12 and 13.
"""

from __future__ import annotations

from dataclasses import replace

from iaprof.basics import elf
from iaprof.gpu.code import CodeKernel, CodeObject, canonical
from iaprof.gpu.elf_code import TEXT_PREFIX, Section, functions, kernel_sections, read_sections
from iaprof.gpu.nvidia.architectures import EM_CUDA
from iaprof.gpu.nvidia.lines import read_lines

PLACED_EVERY = 1 << 12  # bytes: sections of a cubin begin at multiples of this
_ADDRESS = slice(16, 24)  # sh_addr of a section's header
_SECTIONS = slice(40, 48)  # e_shoff of the file's header


def cubin_sections(data: bytes) -> list[Section]:
    """The checked section table; CodeObjectError if the file is damaged or no cubin."""
    return read_sections(data, EM_CUDA, "an NVIDIA GPU")


def read_cubin(data: bytes) -> CodeObject:
    """Reads a cubin; CodeObjectError if it is none, or damaged."""
    sections = cubin_sections(data)
    texts = kernel_sections(sections)
    of_kernels = functions(data, sections, texts, are_placed=False)
    lines = read_lines(data, sections)
    kernels = []
    for index, section in texts.items():
        name = section.name.removeprefix(TEXT_PREFIX)
        own = [replace(each, name=_own_name(each.name)) for each in of_kernels.get(index, ())]
        at_start = [each.size for each in own if each.name == name and each.offset == 0]
        code = data[section.offset : section.offset + section.size]
        kernels.append(
            CodeKernel(
                name=name,
                address=canonical(section.address),
                size=next((size for size in at_start if size), section.size),
                code=code,
                functions=tuple(sorted((f for f in own if f.name != name), key=lambda f: (f.offset, f.name))),
                lines=lines.get(index, ()),
            )
        )
    return CodeObject(tuple(kernels), has_debug=False, placed=any(kernel.address for kernel in kernels))


def placed(data: bytes, base: int) -> tuple[bytes, dict[int, tuple[str, int]]]:
    """Gives addresses to the kernels of a cubin.

    Args:
        data: the cubin.
        base: the address of the first kernel, a multiple of PLACED_EVERY.

    Returns:
        The cubin with these addresses, and by the number of each section with code its kernel and its address.

    Raises:
        CodeObjectError: the file is damaged or no cubin.
    """
    sections = cubin_sections(data)
    found, table = bytearray(data), int.from_bytes(data[_SECTIONS], "little")
    addresses: dict[int, tuple[str, int]] = {}
    for index, section in kernel_sections(sections).items():
        header = table + index * elf.SECTION.size
        found[header + _ADDRESS.start : header + _ADDRESS.stop] = base.to_bytes(8, "little")
        addresses[index] = (section.name.removeprefix(TEXT_PREFIX), base)
        base += -(-max(section.size, 1) // PLACED_EVERY) * PLACED_EVERY
    return bytes(found), addresses


def _own_name(symbol: str) -> str:
    """The name of a function, without that of the kernel that has a copy of it: `$reduce$_Z6summedPKfi`."""
    return symbol.rpartition("$")[2] or symbol if symbol.startswith("$") else symbol
