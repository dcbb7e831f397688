"""Cubins: the ELF files with a CUDA module's kernels, as ptxas writes them and the driver loads them.

A kernel has a section `.text.NAME`, whose functions are symbols: `$KERNEL$FUNCTION`, or FUNCTION itself. A cubin has no
addresses, and the driver does not tell where it puts the code. So the address of a kernel is the offset of its section
in the file, to which a capture's rows add an address for each process. lines.py reads the lines of programs that were
compiled with -lineinfo, or by Triton.

The file may come from anyone: all that it declares is checked before use. Sources: readelf and nvdisasm on cubins of
CUDA 12 and 13.
"""

from __future__ import annotations

from iaprof.gpu.code import CodeKernel, CodeObject
from iaprof.gpu.elf_code import TEXT_PREFIX, Section, check_size, functions, kernel_sections, read_sections
from iaprof.gpu.nvidia.architectures import EM_CUDA


def cubin_sections(data: bytes) -> list[Section]:
    """The checked section table; CodeObjectError if the file is damaged or no cubin."""
    return read_sections(data, EM_CUDA, "an NVIDIA GPU")


def read_cubin(data: bytes) -> CodeObject:
    """Reads a cubin; CodeObjectError if it is none, or damaged."""
    sections = cubin_sections(data)
    texts = kernel_sections(sections)
    check_size(data, texts)
    of_kernels = functions(data, sections, texts, are_placed=False)
    kernels = []
    for index, section in texts.items():
        name = section.name.removeprefix(TEXT_PREFIX)
        own = [each._replace(name=_own_name(each.name)) for each in of_kernels.get(index, ())]
        at_start = [each.size for each in own if each.name == name and each.offset == 0]
        kernels.append(
            CodeKernel(
                name=name,
                address=section.offset,
                size=next((size for size in at_start if size), section.size),
                code=data[section.offset : section.offset + section.size],
                functions=tuple(sorted((f for f in own if f.name != name), key=lambda f: (f.offset, f.name))),
            )
        )
    return CodeObject(tuple(kernels), has_debug=False, placed=True)


def _own_name(symbol: str) -> str:
    """The name of a function, without that of the kernel that has a copy of it: `$reduce$_Z6summedPKfi`."""
    return symbol.rpartition("$")[2] or symbol if symbol.startswith("$") else symbol
