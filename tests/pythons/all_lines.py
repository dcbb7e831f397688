# SPDX-License-Identifier: Apache-2.0
"""Writes, for every code object of many files, its location table and the line of each instruction.

    all_lines.py OUTPUT FILE...      whichever Python this runs in says what is right

For each code object: the first line, the length of the table and the number of lines (3 times int32), the table, and
the lines (int32; 0 for none).
"""

from __future__ import annotations

import struct
import sys
import warnings
from array import array
from collections.abc import Iterator
from types import CodeType


def codes_of(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_of(constant)


def by_co_lines(code: CodeType) -> list[int]:
    lines: list[int] = []
    for start, end, line in code.co_lines():
        assert start == 2 * len(lines), (code, start)
        lines += [line or 0] * ((end - start) // 2)
    return lines


def main(output: str, *files: str) -> None:
    warnings.simplefilter("ignore")
    with open(output, "wb") as out:
        for path in files:
            with open(path, "rb") as file:
                source = file.read()
            try:
                whole = compile(source, path, "exec")
            except (SyntaxError, ValueError):  # there are files for tests of errors
                continue
            for code in codes_of(whole):
                lines = [start or 0 for start, _, _, _ in code.co_positions()]
                assert by_co_lines(code) == lines, code
                out.write(struct.pack("<iii", code.co_firstlineno, len(code.co_linetable), len(lines)))
                out.write(code.co_linetable + array("i", lines).tobytes())


main(*sys.argv[1:])
