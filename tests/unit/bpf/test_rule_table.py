"""The table of rules, which grows when it is crowded."""

from __future__ import annotations

import os
import struct
from pathlib import Path

from iaprof.bpf.rule_table import RuleTable
from iaprof.formats.wire.unwind_rules import Rule, RuleKind, RuleScope

BITS, BUCKET = 13, 64  # of the map


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
        table.write(3, address, scope, rule.pack())
        rules[address | 3 << 48 | (scope > 0) << 47 | (scope == 2) << 63] = rule.pack()
        if table.is_crowded:
            table.grow()
            grown += 1
        assert grown == 2 or not table.evicted
    # then it has grown twice, and contains nothing but these rules, except for a few that were evicted after that
    assert grown == 2
    found = elements(fd, table)
    assert found.items() <= rules.items()
    assert len(rules) - len(found) == table.evicted < len(rules) / 20
    os.close(fd)
    table.close()


def test_a_rule_for_a_full_bucket_waits_until_the_table_has_grown(tmp_path: Path) -> None:
    # given more rules than a bucket has room for
    fd = os.open(tmp_path / "map", os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, BUCKET << BITS)
    table = RuleTable(fd, BITS)
    addresses = [number for number in range(1, 10_000) if hashed(number) >> 64 - table.bits == 7][:6]
    # when
    for address in addresses:
        table.write(0, address, RuleScope.RETURN, 5 * address)
    # then the first ones are not replaced
    first = elements(fd, table)
    assert first == {address: 5 * address for address in addresses[:4]}
    assert table.is_crowded
    before = os.pread(fd, BUCKET << table.bits, BUCKET << table.bits)
    # when the table grows, also if one is written again, over rules of an earlier learner
    os.pwrite(fd, struct.pack("<Q", 1 << 60) * (BUCKET << table.bits + 1 >> 3), BUCKET << table.bits + 1)
    table.write(0, addresses[-1], RuleScope.RETURN, 1)
    table.grow()
    # then
    assert elements(fd, table) == {address: 5 * address for address in addresses[:-1]} | {addresses[-1]: 1}
    assert before in os.pread(fd, BUCKET << BITS, 0)  # walks still use the smaller one
    assert not table.is_crowded
    assert not table.evicted
    table.close()
    os.close(fd)


def hashed(key: int) -> int:
    """As rule_with_key in bpf/c/unwind.c."""
    return (key ^ key >> 13) * 0x9E37_79B9_7F4A_7C15 & (1 << 64) - 1


def test_rules_of_a_space_are_copied_for_some_addresses(tmp_path: Path) -> None:
    # given rules of two spaces, for return addresses, instructions and blocks
    fd = os.open(tmp_path / "map", os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, BUCKET << BITS)
    table = RuleTable(fd, BITS)
    for address in range(0x1000, 0x9000, 0x1000):
        for space in (1, 2):
            for scope in RuleScope:
                table.write(space, address, scope, address << 4 | space)
    before = elements(fd, table)
    # when those of one are copied, for two ranges
    table.copy(1, 5, [(0x6000, 0x7000), (0x2000, 0x4000)])
    # then these are there, and no others
    added = {(0x2000, 5), (0x3000, 5), (0x6000, 5)}
    found = elements(fd, table)
    assert before.items() <= found.items()
    new = [key for key in found if key not in before]
    assert len(new) == 3 * len(RuleScope)
    assert {(key & (1 << 47) - 1, key >> 48 & 0x7FFF) for key in new} == added
    assert {found[key] for key in new} == {address << 4 | 1 for address, _ in added}
    table.close()
    os.close(fd)


def elements(fd: int, table: RuleTable) -> dict[int, int]:
    """The table's rules by key; none in a place where a walk would not look for it."""
    size = BUCKET << table.bits
    words = struct.unpack(f"<{size // 8}Q", os.pread(fd, size, size))
    for at, key in enumerate(words[::2]):
        assert not key or hashed(key) >> 64 - table.bits == at // 4
    return {key: rule for key, rule in zip(words[::2], words[1::2], strict=True) if key}
