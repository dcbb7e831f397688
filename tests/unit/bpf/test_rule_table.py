"""The table of rules, which grows when it is crowded."""

from __future__ import annotations

import os
import struct
from pathlib import Path

from iaprof.bpf.rule_table import RuleTable
from iaprof.formats.wire.unwind_rules import Rule, RuleKind, RuleScope

BITS, BUCKET = 13, 64


def test_a_crowded_table_grows_and_keeps_its_rules(tmp_path: Path) -> None:
    # given
    fd = os.open(tmp_path / "map", os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, BUCKET << BITS)
    table = RuleTable(fd, BITS)
    rules = {}
    # when it is filled
    grown = 0
    for number in range(12000):
        rule = Rule(RuleKind.BY_RSP, 8 * number)
        scope = RuleScope(number % 3)
        address = 0x7F00_0000_0000 + number * 64
        table.write(3, address, scope, rule)
        rules[address | 3 << 48 | (scope > 0) << 47 | (scope == 2) << 63] = rule.pack()
        if table.is_crowded:
            table.grow()
            grown += 1
    # then it has grown twice, and contains nothing but these rules, except for a few that were evicted
    assert grown == 2
    words = struct.unpack(f"<{(BUCKET << BITS) // 8}Q", os.pread(fd, BUCKET << BITS, 0))
    found = {key: rule for key, rule in zip(words[::2], words[1::2], strict=True) if key}
    assert found.items() <= rules.items()
    assert len(rules) - len(found) == table.evicted < len(rules) / 20
    os.close(fd)
    table.close()
