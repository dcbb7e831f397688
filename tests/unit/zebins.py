"""The real zebins in tests/data/zebin, and what other tools say of them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from iaprof.gpu.intel.instruction_set import Platform
from iaprof.gpu.intel.zebin import read_zebin

FOLDER = Path(__file__).resolve().parents[1] / "data" / "zebin"
SOURCES = "/build/zebin/src"  # where they were compiled
PLATFORMS = {"bmg": Platform.XE2, "lnl": Platform.XE2, "pvc": Platform.XE_HPC, "ptl": Platform.XE3}
MODULES = [(device, module) for device in PLATFORMS for module in ("attention", "matmul")]
KERNELS = {
    "attention": ["attention_scores"],
    "matmul": ["multiply_basic", "multiply_local_access", "multiply_local_access_and_tiling"],
}


def debug_elf(device: str, module: str) -> bytes:
    """As the driver returned it."""
    return (FOLDER / device / f"{module}.debug.elf").read_bytes()


def plain_zebin(device: str, module: str) -> bytes:
    """As the compiler wrote it."""
    return (FOLDER / device / f"{module}.zebin").read_bytes()


def read_zebin_code(device: str, module: str) -> bytes:
    """The code of a module's first kernel."""
    return read_zebin(debug_elf(device, module)).kernels[0].code


def disassembly(device: str, module: str, kernel: str) -> list[tuple[int, str]]:
    """What `iga64 -d -Xprint-pc` says: each instruction's offset and text."""
    asm = (FOLDER / device / f"{module}.{kernel}.asm").read_text()
    found = re.findall(r"^/\* \[([0-9A-F]+)\]  \*/ (.*)$", asm, re.MULTILINE)
    assert len(found) > 70
    return [(int(offset, 16), text.rstrip()) for offset, text in found]


@dataclass(frozen=True)
class Rows:
    """What `readelf -W --debug-dump=decodedline` says."""

    sequences: list[list[tuple[int, str, int | None]]]  # address (48 bits), file, line; None ends a sequence

    def at(self, address: int) -> tuple[str, int]:
        """File and line: of the last row at the address, or of the one before it in its sequence."""
        for sequence in self.sequences:
            if sequence[0][0] <= address < sequence[-1][0]:
                _, file, line = [row for row in sequence if row[0] <= address][-1]
                assert line is not None
                return file, line
        return "", 0


def line_rows(device: str, module: str) -> Rows:
    sequences: list[list[tuple[int, str, int | None]]] = [[]]
    folder = ""
    for text in (FOLDER / device / f"{module}.lines.txt").read_text().splitlines():
        if header := re.fullmatch(r"(?:CU: )?(\S+):(?:\[\+\+\])?", text):
            path = header[1] if header[1].startswith("/") else f"{SOURCES}/{header[1]}"
            folder = path.replace("/./", "/").rpartition("/")[0]
        elif row := re.fullmatch(r"(\S+) +(\d+|-) +0x([0-9a-f]+)(?: +x)? *", text):
            line = None if row[2] == "-" else int(row[2])
            sequences[-1].append((int(row[3], 16) & 0xFFFF_FFFF_FFFF, f"{folder}/{row[1]}", line))
            if line is None:
                sequences.append([])
    sequences.pop()
    assert len(sequences) == len(KERNELS[module])
    return Rows(sequences)
