"""Cubins for tests: those of tests/data, and others made by hand."""

from __future__ import annotations

import struct
from pathlib import Path

from unit import elfwriter as elf

DATA = Path(__file__).resolve().parents[3] / "data" / "cubins"
PLAIN = (DATA / "kernels.sm_90.cubin").read_bytes()
WITH_LINES = (DATA / "kernels-lineinfo.sm_90.cubin").read_bytes()
NVIDIA_GPU = 190
SCALE = "_ZN4math5scaleIfEEvPT_PKS1_i"


def cubin(sections: list[elf.Section], symbols: list[elf.Symbol] | None = None, **lies: int) -> bytes:
    """A cubin with these sections."""
    return elf.zebin(sections, symbols, machine=NVIDIA_GPU, **lies)


def with_lines(program: bytes, strings: bytes = b"", relocations: int = 1, size: int = 4096) -> bytes:
    """A cubin with the kernel `k`, in section 1, and this line program, whose files are a.cu and /b/c.h.

    Args:
        program: opcodes; the first is to be `AT_START`, which the relocation applies to.
        strings: .debug_str.
        relocations: that there are.
        size: of the kernel, bytes.
    """
    header, table = line_table(program)
    entry = struct.pack("<QIIq", len(header) + 3, 2, 1, 0)
    return cubin(
        [
            elf.kernel("k", bytes(size)),
            elf.Section(".debug_line", table),
            elf.Section(".debug_str", strings),
            elf.Section(".rela.debug_line", entry * relocations, type=elf.RELA, info=2, entry_size=24),
        ],
        [elf.Symbol("k", 0, 0, size)],
    )


AT_START = b"\0\x09\x02" + bytes(8)
END = b"\0\x01\x01"


def line_table(program: bytes) -> tuple[bytes, bytes]:
    """The bytes before a program, and a unit's whole table."""
    lengths = bytes([0, 1, 1, 1, 1, 0, 0, 0, 1])
    tables = b"/b\0\0" + b"a.cu\0\0\0\0" + b"c.h\0\x01\0\0" + b"\0"
    rest = struct.pack("<BBbBB", 1, 1, -5, 14, 10) + lengths + tables
    head = struct.pack("<HI", 2, len(rest)) + rest
    return bytes(4) + head, struct.pack("<I", len(head) + len(program)) + head + program


def inlined(call: int, function: int) -> bytes:
    """NVIDIA's opcode before the rows of an inlined function."""
    operands = elf.uleb(call) + elf.uleb(function)
    return b"\0" + elf.uleb(1 + len(operands)) + b"\x90" + operands


def row(advance: int, lines: int, file: int = 0) -> bytes:
    """Opcodes of a row so many bytes and lines behind the one before."""
    chosen = b"\x04" + elf.uleb(file) if file else b""
    return chosen + b"\x02" + elf.uleb(advance) + b"\x03" + elf.uleb(lines) + b"\x01"
