"""Stacks of coroutines: they begin where the coroutine does, and are whole, from the first launch to the last.

The truth is the structure of tests/stacks/coroutines.c, and its symbols as nm has them.
"""

from __future__ import annotations

import subprocess
from bisect import bisect_right
from pathlib import Path

import pytest

from iaprof.formats.wire.unwind_rules import Walked
from integration.probed import Call, probed
from stacks.debugger import build
from waiting import until

pytestmark = pytest.mark.bpf
ROUNDS, COROUTINES = 20, 4
ALL = ROUNDS * (COROUTINES + 1)
BY_HAND = COROUTINES  # the last one
OUTSIDE = "outside"


class Functions:
    """Names of the functions of a program that lies where it was linked to."""

    def __init__(self, program: Path) -> None:
        words = ["nm", "--defined-only", "--numeric-sort", str(program)]
        lines = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
        symbols = [(int(start, 16), name) for start, kind, name in map(str.split, lines) if kind in "tTi"]
        self._starts, self._names = [start for start, _ in symbols], [name for _, name in symbols]

    def of(self, address: int) -> str:
        return self._names[bisect_right(self._starts, address) - 1] if address < 1 << 32 else OUTSIDE

    def of_stack(self, call: Call) -> tuple[str, ...]:
        """The innermost first. A stack's start is looked up as it is, as no call led there."""
        *inner, start = call.ips
        return (*(self.of(ip - (place > 0)) for place, ip in enumerate(inner)), self.of(start))


def calls_of(program: Path) -> list[Call]:
    with probed(program) as seen:
        calls: list[Call] = []
        with subprocess.Popen([program], stdin=subprocess.PIPE) as process:  # it ends when it can read no more

            def are_there() -> bool:
                calls.extend(seen.calls())
                return len(calls) >= ALL

            until(are_there, process)
            process.communicate()
        return calls + seen.calls()


def test_every_stack_of_a_coroutine_begins_where_it_does(tmp_path: Path) -> None:
    program = build(tmp_path, "coroutines.c", "-O1", "-fno-optimize-sibling-calls", "-no-pie")
    functions = Functions(program)
    calls = calls_of(program)
    assert len(calls) == ALL
    for call in calls:
        which = call.number // 100
        own = functions.of_stack(call)
        depth = own.count("inner")
        starts = ("by_hand", "made_by_hand") if which == BY_HAND else (OUTSIDE,)
        expected = ("probe_me", *["inner"] * depth, "coroutine", *starts) if which else None
        assert call.walked is Walked.WHOLE, (own, call)
        assert True not in call.guessed
        if expected:
            assert own == expected
            assert 1 <= depth <= 3
        else:
            assert own[:2] == ("probe_me", "main")
    # those of makecontext have the same stacks, whatever their link is, and however deep main was
    assert len({call.ips for call in calls}) == 1 + 3 * 2
