"""Evaluates the DWARF expressions of call frame information (DWARF 5, sections 2.5 and 6.4.2).

An expression may be hostile: at most MOST_OPERATIONS are executed, numbers are cut to 64 bits, and memory is read only
through `read`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

MOST_OPERATIONS = 256  # real ones have fewer than 20
_MOST_VALUES = 64
_MASK = (1 << 64) - 1

_CONSTANTS = {  # size in bytes, and whether the constant is signed
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
    """The expression is damaged, has an unknown operation, or needs an unknown register or memory."""


def evaluate(
    expression: bytes,
    registers: Mapping[int, int],
    read: Callable[[int, int], int],
    first: int | None = None,
) -> int:
    """Returns the value of an expression.

    Args:
        expression: its operations.
        registers: the known registers, by DWARF number.
        read: reads an unsigned number, given its address and size in bytes; may raise LookupError.
        first: the initial content of the expression's stack; None for an empty stack.

    Raises:
        ExpressionError: the expression cannot be evaluated.
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
        """Executes one operation; returns what it pushes on the stack, None for nothing."""
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
