"""Programs whose call frame information does harm: it costs their own stacks, and nobody else's."""

from __future__ import annotations

import struct
import subprocess
import time
from pathlib import Path

import pytest
from elftools.dwarf.callframe import FDE
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import Section

import elf_sections
from iaprof.formats.wire.launches import MAX_DEPTH, Counter
from iaprof.formats.wire.unwind_rules import Walked
from integration.probed import Call, Probed, probed
from integration.walking import LONGEST_S
from limits import Within
from stacks.debugger import HERE, build

pytestmark = pytest.mark.bpf
ENDS = {
    (1, Walked.MEMORY),
    (2, Walked.MEMORY),
    (4, Walked.STUCK),
    (5, Walked.DEEP),
    (6, Walked.DAMAGED),
    (8, Walked.DAMAGED),
    (9, Walked.DAMAGED),
}
"""How the stacks of the functions of hostile.S end, by their numbers, but for two."""
DOWN, LIE = 3, 10
"""The caller's frame is said to be below, perhaps in a page that is not copied; for a lie it is chance."""
KINDS = len(ENDS) + 2
ROUNDS = 500
MOST_COPIES, WAY_S = 64, 1.0  # as unwind.c has them
RANGE_AT = 12  # of an FDE, behind its length, its CIE's place and its start


def hostile(folder: Path) -> Path:
    """The program, whose function `liar` says that it is 256 MiB long."""
    program = build(folder, "hostile.c", "-O2", HERE / "hostile.S")
    with program.open("r+b") as file:
        elf = ELFFile(file)
        liar = elf_sections.symbol(elf, "liar", ".symtab")
        entries = [each for each in elf.get_dwarf_info().EH_CFI_entries() if isinstance(each, FDE)]
        (entry,) = [each for each in entries if each["initial_location"] == liar["st_value"]]
        file.seek(elf_sections.section(elf, ".eh_frame", Section)["sh_offset"] + entry.offset + RANGE_AT)
        file.write(struct.pack("<I", 1 << 28))
    return program


def test_others_stacks_are_whole(tmp_path: Path, within: Within) -> None:
    # given
    (tmp_path / "good").mkdir()
    bad, good = hostile(tmp_path), build(tmp_path / "good", "stacks.cpp", "-O2")
    with probed(bad, good) as seen, within(LONGEST_S):
        # when
        with subprocess.Popen([bad, str(1 << 30)], stdin=subprocess.DEVNULL) as attacker:
            calls = calls_of(seen, 51)
            subprocess.run([good, "4"], check=True)
            calls += seen.calls() + calls_of(seen, 50)
            attacker.kill()
        # then all calls are there, and the others' stacks are whole
        of_attacker = [call for call in calls if call.pid == attacker.pid]
        others = [call for call in calls if call.pid != attacker.pid]
        assert len(of_attacker) > 100
        assert len(others) > 200
        lost = seen.counted(Counter.COPIES_LOST)
        unfinished = sum(call.walked is not Walked.WHOLE and not call.kept for call in others)
        assert unfinished <= lost
        # and who finishes them is still the first one
        assert seen.walking.learner._starts == 1


def test_stacks_that_nobody_can_finish_are_copied_only_so_often(tmp_path: Path, within: Within) -> None:
    bad = hostile(tmp_path)
    with (
        probed(bad) as seen,
        within(LONGEST_S),
        subprocess.Popen([bad, str(ROUNDS)], stdin=subprocess.PIPE) as attacker,
    ):
        # given what can be learnt of it is
        calls = calls_of(seen, KINDS)
        before, began = seen.counted(Counter.STACKS_MISSED), time.monotonic()
        # when no two stacks are alike
        assert attacker.stdin is not None
        attacker.stdin.write(b"\n")
        attacker.stdin.flush()
        calls += calls_of(seen, (ROUNDS - 1) * KINDS)
        copied, seconds = seen.counted(Counter.STACKS_MISSED) - before, time.monotonic() - began
        attacker.stdin.close()
    # then there is not a copy for each
    assert 0 < copied <= MOST_COPIES * KINDS * (int(seconds / WAY_S) + 1)
    # and each stack ends, in the way that says why
    known = [call for call in calls if call.number != LIE and not call.presumed and not call.kept]
    known = [call for call in known if call.walked is not Walked.MISSED]  # of which nothing was copied
    assert {(call.number, call.walked) for call in known if call.number != DOWN} == ENDS
    assert {call.walked for call in known if call.number == DOWN} in ({Walked.STUCK}, {Walked.MEMORY})
    assert max(len(call.ips) for call in calls) == MAX_DEPTH


def calls_of(seen: Probed, count: int) -> list[Call]:
    """The next so many calls."""
    calls: list[Call] = []
    while len(calls) < count:
        calls += seen.calls()
    return calls
