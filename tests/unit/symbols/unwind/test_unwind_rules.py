"""Unwinding rules for BPF, made of rows of call frame information: they mean the same as the rows, or are HARD."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from iaprof.formats.wire.unwind_rules import END, HARD, SIGNAL, Rule, RuleFlags, RuleKind
from iaprof.symbols.unwind.cfi import CallFrames, RegisterRuleKind, Row
from iaprof.symbols.unwind.dwarf_reader import CfiError
from iaprof.symbols.unwind.rules import rule_of

RA = {16: (RegisterRuleKind.OFFSET, -8)}
DEREF = bytes.fromhex("767006")  # breg6 -16; deref
AT_RBP = bytes.fromhex("7600")  # breg6 0
PLT = bytes.fromhex("77088000 3f1a 3b2a 3324 22".replace(" ", ""))


@pytest.mark.parametrize(
    ("row", "rule"),
    [
        (Row((7, 16), {**RA}), Rule(RuleKind.BY_RSP, 16)),
        (Row((7, 16), {**RA, 6: (RegisterRuleKind.OFFSET, -16)}), Rule(RuleKind.BY_RSP, 16, -16)),
        (Row((6, 16), {**RA, 6: (RegisterRuleKind.OFFSET, -16)}), Rule(RuleKind.BY_RBP, 16, -16)),
        (Row((6, 16), {**RA, 6: (RegisterRuleKind.SAME, 0)}), Rule(RuleKind.BY_RBP, 16)),
        (Row(DEREF, {**RA, 6: (RegisterRuleKind.EXPRESSION, bytes.fromhex("7678"))}), Rule(RuleKind.BY_DEREF, -16, -8)),
        (Row(DEREF, {**RA, 6: (RegisterRuleKind.EXPRESSION, AT_RBP)}), Rule(RuleKind.BY_DEREF, -16)),
        (Row((7, 8), {16: (RegisterRuleKind.UNDEFINED, 0)}), END),
        (Row(bytes.fromhex("77a00106"), {16: (RegisterRuleKind.EXPRESSION, b"\x77\xa8\x01")}, True), SIGNAL),
        # rows that a rule cannot express
        (Row((3, 16), {**RA}), HARD),
        (Row((7, 16), {16: (RegisterRuleKind.OFFSET, -16)}), HARD),
        (Row((7, 16), {}), HARD),
        (Row((7, 16), {**RA, 7: (RegisterRuleKind.OFFSET, -24)}), HARD),
        (Row((7, 16), {**RA, 6: (RegisterRuleKind.REGISTER, 3)}), HARD),
        (Row((7, 16), {**RA, 6: (RegisterRuleKind.OFFSET, -40_000)}), HARD),
        (Row((7, 16), {**RA, 6: (RegisterRuleKind.OFFSET, 0)}), HARD),
        (Row((7, 1 << 31), {**RA}), HARD),
        (Row(DEREF, {**RA}), HARD),
        (Row(b"\x73\x00\x06", {**RA}), HARD),
        (Row((7, 160), {**RA}, True), HARD),
        (Row(None, {**RA}), HARD),
    ],
)  # fmt: skip
def test_the_rule_of_a_row(row: Row, rule: Rule) -> None:
    assert rule_of(row, 0x1234, False) == rule


@pytest.mark.parametrize(("address", "cfa"), [(0x401020, 8), (0x40102A, 8), (0x40102B, 16), (0x40102F, 16)])
def test_a_plt_stub_has_a_rule_for_instructions_only(address: int, cfa: int) -> None:
    assert rule_of(Row(PLT, {**RA}), address, True) == Rule(RuleKind.BY_RSP, cfa)
    assert rule_of(Row(PLT, {**RA}), address, False) == HARD


def test_packed_rules_are_read_back() -> None:
    chance = random.Random(1)
    for _ in range(100):
        rule = Rule(
            chance.choice(list(RuleKind)),
            chance.randrange(-(1 << 31), 1 << 31),
            chance.randrange(-(1 << 15), 1 << 15),
            chance.choice([RuleFlags(0), RuleFlags.GUESS]),
        )
        assert Rule.unpack(rule.pack()) == rule
    with pytest.raises(ValueError, match="RuleKind"):
        Rule.unpack(0xFF << 48)


def test_nearly_all_rows_of_the_c_library_have_a_rule() -> None:
    frames = CallFrames(Path("/lib/x86_64-linux-gnu/libc.so.6").read_bytes())
    chance, kinds = random.Random(1), []
    for _ in range(3000):
        try:
            row = frames.row(chance.randrange(0x26000, 0x170000))
        except CfiError:
            continue
        kinds += [] if row is None else [rule_of(row, 0, False).kind]
    assert len(kinds) > 1000
    assert kinds.count(RuleKind.HARD) < len(kinds) / 100
