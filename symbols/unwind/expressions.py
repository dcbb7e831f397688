"""Evaluates DWARF expressions, as far as call frame information has them (DWARF 5, sections 2.5 and 6.4.2).

An expression is a stranger's: it has no more than MOST_OPERATIONS, its numbers have 64 bits, and what it reads is only
what `read` gives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

MOST_OPERATIONS = 256  # real ones have fewer than 20
_MOST_VALUES = 64
_MASK = (1 << 64) - 1

_CONSTANTS = {  # bytes, and whether they have a sign
    0x08: (1, False), 0x09: (1, True), 0x0A: (2, False), 0x0B: (2, True),
    0x0C: (4, False), 0x0D: (4, True), 0x0E: (8, False), 0x0F: (8, True),
}  # fmt: skip
_BINARY: dict[int, Callable[[int, int], int]] = {
    0x1A: lambda a, b: a & b,
    0x1C: lambda a, b: a - b,
    0x1E: lambda a, b: a * b,
    0x21: lambda a, b: a | b,
    0x22: lambda a, b: a + b,
    0x24: lambda a, b: a << min(b, 64),
    0x25: lambda a, b: a >> min(b, 64),
    0x26: lambda a, b: _signed(a) >> min(b, 64),
    0x27: lambda a, b: a ^ b,
    0x29: lambda a, b: a == b,
    0x2A: lambda a, b: _signed(a) >= _signed(b),
    0x2B: lambda a, b: _signed(a) > _signed(b),
    0x2C: lambda a, b: _signed(a) <= _signed(b),
    0x2D: lambda a, b: _signed(a) < _signed(b),
    0x2E: lambda a, b: a != b,
}


class ExpressionError(Exception):
    """The expression is damaged, has an operation that is not known, or needs what is not known."""


def evaluate(
    expression: bytes,
    registers: Mapping[int, int],
    read: Callable[[int, int], int],
    first: int | None = None,
) -> int:
    """The value of an expression.

    Args:
        expression: its operations.
        registers: those that are known, by their numbers in DWARF.
        read: gives the unsigned number at an address, of so many bytes; may raise LookupError.
        first: what is on the expression's stack at its start.

    Raises:
        ExpressionError: see there; also where `read` or `registers` do not have what it needs.
    """
    try:
        return _Evaluation(expression, registers, read, [] if first is None else [first]).run()
    except (LookupError, ValueError) as error:
        raise ExpressionError(f"an expression cannot be evaluated ({error})") from None


class _Evaluation:
    def __init__(
        self,
        expression: bytes,
        registers: Mapping[int, int],
        read: Callable[[int, int], int],
        values: list[int],
    ) -> None:
        self._code, self._at, self._registers, self._read, self._values = expression, 0, registers, read, values

    def run(self) -> int:
        for _ in range(MOST_OPERATIONS):
            if self._at >= len(self._code):
                return self._values[-1]
            value = self._next()
            if value is not None:
                self._values.append(value & _MASK)
            if len(self._values) > _MOST_VALUES:
                raise ValueError("too many values")
        raise ValueError("too many operations")

    def _next(self) -> int | None:
        """Executes one operation; gives what it puts on the stack."""
        code, values = self._byte(), self._values
        if 0x70 <= code <= 0x8F:  # a register plus an offset
            return self._registers[code - 0x70] + self._leb(signed=True)
        if 0x30 <= code <= 0x4F:
            return code - 0x30
        if code in _CONSTANTS:
            return self._constant(*_CONSTANTS[code])
        if code in _BINARY:
            second, first = values.pop(), values.pop()
            return int(_BINARY[code](first, second))
        match code:
            case 0x06:
                return self._read(values.pop(), 8)
            case 0x94:
                return self._read(values.pop(), self._size())
            case 0x10:
                return self._leb(signed=False)
            case 0x11:
                return self._leb(signed=True)
            case 0x12:
                return values[-1]
            case 0x13:
                values.pop()
            case 0x14:
                return values[-2]
            case 0x15:
                return values[-1 - self._byte()]
            case 0x16:
                values[-2], values[-1] = values[-1], values[-2]
            case 0x1F:
                return -values.pop()
            case 0x20:
                return ~values.pop()
            case 0x23:
                return values.pop() + self._leb(signed=False)
            case 0x28 | 0x2F:
                by = self._constant(2, True)
                if code == 0x2F or values.pop():
                    self._at += by
                    if self._at < 0:
                        raise ValueError("a jump to before its start")
            case 0x92:
                return self._registers[self._leb(signed=False)] + self._leb(signed=True)
            case 0x96:
                pass
            case _:
                raise ValueError(f"operation {code:#x}")
        return None

    def _byte(self) -> int:
        value = self._code[self._at]
        self._at += 1
        return value

    def _size(self) -> int:
        size = self._byte()
        if size not in (1, 2, 4, 8):
            raise ValueError(f"{size} bytes")
        return size

    def _constant(self, size: int, signed: bool) -> int:
        data = self._code[self._at : self._at + size]
        if len(data) != size:
            raise ValueError("it has no end")
        self._at += size
        return int.from_bytes(data, "little", signed=signed)

    def _leb(self, signed: bool) -> int:
        value = 0
        for shift in range(0, 70, 7):
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value - (1 << shift + 7) if signed and byte & 64 else value
        raise ValueError("a number without an end")


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
