"""Stacks of coroutines: they begin where the coroutine does, and are whole, from the first launch to the last.

The truth is the structure of tests/stacks/coroutines.c and its symbols as nm has them, and the structure of GREENLETS.
"""

from __future__ import annotations

import subprocess
import sys
from bisect import bisect_right
from pathlib import Path

import pytest

from iaprof.formats.wire.unwind_rules import Walked
from integration.probed import Call, probed
from stacks.debugger import HERE, build
from waiting import until

pytestmark = pytest.mark.bpf
ROUNDS, COROUTINES = 20, 4
ALL = ROUNDS * (COROUTINES + 1)
BY_HAND = COROUTINES  # the last one
OUTSIDE = "outside"

# Greenlets call probe_me at three depths; main switches to them at other depths, also from C. CPython specialises a
# call that it has made before: then another part of its evaluation loop makes it. So this one is made often before.
GREENLETS = """\
import ctypes, sys
from greenlet import getcurrent, greenlet

probe_me, absolute = ctypes.CDLL(sys.argv[1]).probe_me, ctypes.CDLL(None).abs


def call(function, number):
    return function(number)


def deep(calls, what):
    return deep(calls - 1, what) if calls else what()


def run():
    main, calls = getcurrent().parent, 0
    while True:
        deep(calls % 3, lambda: call(probe_me, calls % 3))
        calls += 1
        main.switch()


for _ in range(1000):
    call(absolute, 0)
several = [greenlet(run) for _ in range(4)]
for turn in range(int(sys.argv[2]) // len(several)):
    for each in several:
        deep(turn % 5, each.switch) if turn % 2 else sorted([1], key=lambda _: each.switch())
sys.stdin.read()
"""


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


def calls_of(command: list[str | Path], probed_file: Path, number: int) -> tuple[list[Call], str]:
    """The calls of a program that makes so many, and its mappings when it has made them."""
    with probed(probed_file) as seen:
        calls: list[Call] = []
        with subprocess.Popen(command, stdin=subprocess.PIPE) as process:  # it ends when it can read no more

            def are_there() -> bool:
                calls.extend(seen.calls())
                return len(calls) >= number

            until(are_there, process)
            maps = Path(f"/proc/{process.pid}/maps").read_text()
            process.communicate()
        return calls + seen.calls(), maps


def test_every_stack_of_a_coroutine_begins_where_it_does(tmp_path: Path) -> None:
    program = build(tmp_path, "coroutines.c", "-O1", "-fno-optimize-sibling-calls", "-no-pie")
    functions = Functions(program)
    calls, _ = calls_of([program], program, ALL)
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


def test_every_stack_of_a_greenlet_begins_in_greenlet(tmp_path: Path) -> None:
    library = tmp_path / "libprobe.so"
    subprocess.run(["gcc", "-shared", HERE / "probe.S", "-o", library], check=True)
    calls, maps = calls_of([sys.executable, "-c", GREENLETS, library, str(ALL)], library, ALL)
    assert len(calls) == ALL
    for call in calls:
        assert call.walked is Walked.WHOLE, call
        assert True not in call.guessed
        assert "/_greenlet." in mapping_of(call.ips[-1], maps)
    # however deep main was when it switched, and wherever it was when the greenlet began
    assert len({(call.number, call.ips) for call in calls}) == 3


def mapping_of(address: int, maps: str) -> str:
    for line in maps.splitlines():
        start, end = (int(number, 16) for number in line.split()[0].split("-"))
        if start <= address < end:
            return line
    return ""
