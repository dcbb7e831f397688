"""Turns rows of call frame information into the simpler unwinding rules of the BPF programs, where that is possible."""

from __future__ import annotations

from iaprof.formats.wire.unwind_rules import END, HARD, SIGNAL, Rule, RuleFlags, RuleKind
from iaprof.symbols.unwind.cfi import RBP, RETURN_ADDRESS, RSP, RegisterRuleKind, Row
from iaprof.symbols.unwind.expressions import ExpressionError, evaluate

_SIGNAL_CFA = bytes.fromhex("77a00106")  # DW_OP_breg7 160, DW_OP_deref: rsp of the ucontext that rsp points to
_BREG_RBP, _DEREF = 0x76, 0x06
_STACK_POINTERS = (0x7FFF_0000_0000, 0x7FFF_1234_5678, 0x1000)  # for these an expression must add the same constant


def rule_of(row: Row, address: int, is_exact: bool) -> Rule:
    """Returns the unwinding rule for an address; HARD if no rule means the same as the row.

    Args:
        row: of call frame information, for the address.
        address: of an instruction, or a return address.
        is_exact: whether it is an instruction's address: only then a rule may depend on its value.
    """
    if row.is_outermost:
        return END
    if row.is_signal_frame:
        return SIGNAL if row.cfa == _SIGNAL_CFA else HARD
    kind, operand = row.registers.get(RBP, (RegisterRuleKind.SAME, 0))
    if row.registers.get(RETURN_ADDRESS) != (RegisterRuleKind.OFFSET, -8) or RSP in row.registers:
        return HARD
    if isinstance(row.cfa, bytes):
        return _of_expression(row.cfa, kind, operand, address, is_exact)
    if row.cfa is None or kind not in (RegisterRuleKind.SAME, RegisterRuleKind.OFFSET) or row.cfa[0] not in (RSP, RBP):
        return HARD
    assert isinstance(operand, int)
    by = RuleKind.BY_RSP if row.cfa[0] == RSP else RuleKind.BY_RBP
    return checked(by, row.cfa[1], operand, kind is RegisterRuleKind.OFFSET)


def _of_expression(cfa: bytes, kind: RegisterRuleKind, operand: int | bytes, address: int, is_exact: bool) -> Rule:
    """Returns the rule for a CFA that an expression gives.

    Args:
        cfa: the expression.
        kind: of the rule for rbp.
        operand: of the rule for rbp.
        address: see rule_of.
        is_exact: see rule_of.
    """
    if cfa[:1] == bytes([_BREG_RBP]) and cfa[-1:] == bytes([_DEREF]):
        if kind is RegisterRuleKind.EXPRESSION and isinstance(operand, bytes) and operand[:1] == bytes([_BREG_RBP]):
            try:
                return checked(RuleKind.BY_DEREF, _constant(cfa[:-1]), _constant(operand), True)
            except ExpressionError:
                pass
        return HARD
    if not is_exact or kind is not RegisterRuleKind.SAME:
        return HARD
    try:  # a PLT stub: the offset from rsp depends on whether the instruction comes after the push
        offsets = {_signed(_evaluated(cfa, {RSP: rsp, RETURN_ADDRESS: address}) - rsp) for rsp in _STACK_POINTERS}
    except ExpressionError:
        return HARD
    return checked(RuleKind.BY_RSP, offsets.pop(), 0, False) if len(offsets) == 1 else HARD


def _constant(expression: bytes) -> int:
    """Returns the constant that an expression adds to rbp."""
    offsets = {_signed(_evaluated(expression, {RBP: rbp}) - rbp) for rbp in _STACK_POINTERS}
    if len(offsets) != 1:
        raise ExpressionError("it does more than add a constant")
    return offsets.pop()


def _evaluated(expression: bytes, registers: dict[int, int]) -> int:
    return evaluate(expression, registers, _read_nothing)


def _read_nothing(address: int, _size: int) -> int:
    raise LookupError(f"memory at {address:#x}")


def checked(kind: RuleKind, cfa: int, rbp: int, is_saved: bool, is_guess: bool = False) -> Rule:
    """Makes a rule; returns HARD if its numbers do not fit. Except for BY_DEREF, rbp 0 means that rbp is not saved.

    Args:
        kind: of the rule.
        cfa: the offset of the CFA.
        rbp: the offset at which rbp is saved.
        is_saved: whether rbp is saved.
        is_guess: whether the rule is a guess.
    """
    is_too_large = not -(1 << 31) <= cfa < 1 << 31 or not -(1 << 15) <= rbp < 1 << 15
    if is_too_large or (is_saved and not rbp and kind is not RuleKind.BY_DEREF) or kind is RuleKind.HARD:
        return HARD
    return Rule(kind, cfa, rbp if is_saved else 0, RuleFlags.GUESS if is_guess else RuleFlags(0))


def _signed(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value
