"""DWARF expressions of call frame information: their values, and hostile ones."""

from __future__ import annotations

import pytest

from iaprof.symbols.unwind.expressions import MOST_OPERATIONS, ExpressionError, evaluate

REGISTERS = {6: 0x1000, 7: 0x2000, 16: 0x400B}
MEMORY = {0x1010: 0xABCD, 0x2000 + 160: 77}


def read(address: int, size: int) -> int:
    return MEMORY[address] & (1 << 8 * size) - 1


def value(text: str, first: int | None = None) -> int:
    return evaluate(bytes.fromhex(text), REGISTERS, read, first)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("76 10 06", 0xABCD),  # breg6 16; deref
        ("77 a0 01 06", 77),  # breg7 160; deref: of a signal frame
        ("77 08 80 00 3f 1a 3b 2a 33 24 22", 0x2000 + 8 + 8),  # of a PLT stub, 11 bytes into it
        ("77 78", 0x2000 - 8),
        ("08 ff", 255), ("09 ff", (1 << 64) - 1), ("0b 00 80", (1 << 64) - 0x8000), ("0c 01 00 00 00", 1),
        ("10 80 01", 128), ("11 7f", (1 << 64) - 1),
        ("34 12 22", 8), ("34 35 16 1c", 1), ("34 35 14 22", 9), ("34 35 36 15 02 1c", 2),
        ("34 1f", (1 << 64) - 4), ("30 20", (1 << 64) - 1), ("35 23 03", 8),
        ("31 28 01 00 96 34", 4), ("34 2f 01 00 13", 4),
        ("09 ff 09 fe 2b", 1), ("09 ff 31 2d", 1), ("31 08 ff 24", 0), ("09 ff 31 26", (1 << 64) - 1),
        ("76 10 94 01", 0xCD), ("92 07 08", 0x2008), ("96 31", 1),
    ],
)  # fmt: skip
def test_the_values_of_expressions(text: str, expected: int) -> None:
    assert value(text) == expected


def test_an_initial_value_on_the_stack() -> None:
    assert value("23 08", 0x5000) == 0x5008


@pytest.mark.parametrize(
    "text",
    [
        "", "06", "22", "34 22", "70 00", "76 00 06", "0c 01", "10 ff", "2f fd ff", "2f ff 7f 31 9c", "ff", "34 15 05",
        "34 94 03", "2f 80 ff",
    ],
)  # fmt: skip
def test_damaged_and_unknown_operations_are_an_error(text: str) -> None:
    with pytest.raises(ExpressionError):
        value(text)


def test_expressions_are_limited() -> None:
    with pytest.raises(ExpressionError, match="too many operations"):
        value("2f fd ff")
    with pytest.raises(ExpressionError, match="too many"):
        value("31 12" + " 12" * MOST_OPERATIONS)
    assert value("31" + " 12 1e" * 100) == 1
    assert value("09 ff" + " 12 1e" * 100) == 1  # numbers have 64 bits
