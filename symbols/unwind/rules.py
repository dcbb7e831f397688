"""From a row of call frame information to the rule that the BPF programs walk by, where one can say the same."""

from __future__ import annotations

from iaprof.formats.wire.unwind_rules import END, HARD, SIGNAL, Rule, RuleFlags, RuleKind
from iaprof.symbols.unwind.cfi import RBP, RETURN_ADDRESS, RSP, How, Row
from iaprof.symbols.unwind.expressions import ExpressionError, evaluate

_SIGNAL_CFA = bytes.fromhex("77a00106")  # DW_OP_breg7 160, DW_OP_deref: rsp of the ucontext that rsp points to
_BREG_RBP, _DEREF = 0x76, 0x06
_STACK_POINTERS = (0x7FFF_0000_0000, 0x7FFF_1234_5678, 0x1000)  # where an expression must be rsp plus one constant


def rule_of(row: Row, address: int, is_exact: bool) -> Rule:
    """The rule for an address of a process; HARD if there is none that says what the row says.

    Args:
        row: what is in force there.
        address: the instruction's or the return address.
        is_exact: whether it is the instruction's: only then it may be part of the rule.
    """
    if row.is_outermost:
        return END
    if row.is_signal_frame:
        return SIGNAL if row.cfa == _SIGNAL_CFA else HARD
    how, value = row.registers.get(RBP, (How.SAME, 0))
    if row.registers.get(RETURN_ADDRESS) != (How.OFFSET, -8) or RSP in row.registers:
        return HARD
    if isinstance(row.cfa, bytes):
        return _of_expression(row.cfa, how, value, address, is_exact)
    if row.cfa is None or how not in (How.SAME, How.OFFSET) or row.cfa[0] not in (RSP, RBP):
        return HARD
    assert isinstance(value, int)
    return checked(RuleKind.BY_RSP if row.cfa[0] == RSP else RuleKind.BY_RBP, row.cfa[1], value, how is How.OFFSET)


def _of_expression(cfa: bytes, how: How, value: int | bytes, address: int, is_exact: bool) -> Rule:
    if cfa[:1] == bytes([_BREG_RBP]) and cfa[-1:] == bytes([_DEREF]):
        if how is How.EXPRESSION and isinstance(value, bytes) and value[:1] == bytes([_BREG_RBP]):
            try:
                return checked(RuleKind.BY_DEREF, _constant(cfa[:-1]), _constant(value), True)
            except ExpressionError:
                pass
        return HARD
    if not is_exact or how is not How.SAME:
        return HARD
    try:  # a stub of the PLT: rsp, and whether the instruction is behind its push
        offsets = {_signed(_evaluated(cfa, {RSP: rsp, RETURN_ADDRESS: address}) - rsp) for rsp in _STACK_POINTERS}
    except ExpressionError:
        return HARD
    return checked(RuleKind.BY_RSP, offsets.pop(), 0, False) if len(offsets) == 1 else HARD


def _constant(expression: bytes) -> int:
    """What an expression adds to rbp."""
    offsets = {_signed(_evaluated(expression, {RBP: rbp}) - rbp) for rbp in _STACK_POINTERS}
    if len(offsets) != 1:
        raise ExpressionError("it does more than add a constant")
    return offsets.pop()


def _evaluated(expression: bytes, registers: dict[int, int]) -> int:
    return evaluate(expression, registers, _nothing)


def _nothing(address: int, _size: int) -> int:
    raise LookupError(f"memory at {address:#x}")


def checked(kind: RuleKind, cfa: int, rbp: int, is_saved: bool, is_guess: bool = False) -> Rule:
    """A rule, which has so much room for its numbers; else HARD. But for BY_DEREF, 0 says that rbp was not saved."""
    is_too_large = not -(1 << 31) <= cfa < 1 << 31 or not -(1 << 15) <= rbp < 1 << 15
    if is_too_large or (is_saved and not rbp and kind is not RuleKind.BY_DEREF) or kind is RuleKind.HARD:
        return HARD
    return Rule(kind, cfa, rbp if is_saved else 0, RuleFlags.GUESS if is_guess else RuleFlags(0))


def _signed(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value
