"""Tables of ELF files as NumPy reads and writes them: the entries of formats.elf."""

from __future__ import annotations

import re
import struct
from typing import NamedTuple

import numpy as np

from iaprof.basics import elf


def _table(entry: type[NamedTuple], layout: struct.Struct) -> np.dtype[np.void]:
    kinds = [f"S{kind[:-1]}" if kind[:-1] else f"<{kind}" for kind in re.findall(r"\d*[A-Za-z]", layout.format)]
    return np.dtype(list(zip(entry._fields, kinds, strict=True)))


HEADER = _table(elf.Header, elf.HEADER)
SECTION = _table(elf.Section, elf.SECTION)
SEGMENT = _table(elf.Segment, elf.SEGMENT)
SYMBOL = _table(elf.Symbol, elf.SYMBOL)
RELOCATION = _table(elf.Relocation, elf.RELA)
