"""Stacks that BPF takes for known: programs get to one place by many paths, in sequences that repeat or do not."""

from __future__ import annotations

import random
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest

from iaprof.formats.wire.unwind_rules import Walked
from integration.probed import probed
from stacks.debugger import build

pytestmark = pytest.mark.bpf

LEVELS = 6
PATHS = 1 << LEVELS
CHANCE = random.Random(0)
SEQUENCES = {
    "the same path": [5] * 3000,
    "one after the other": list(range(PATHS)) * 50,
    "two, and two others": ([3, 35, 3, 35, 3, 34] * 20 + [7, 39] * 60) * 10,
    "no order": [CHANCE.randrange(PATHS) for _ in range(3000)],
    "an order that changes": [path for _ in range(60) for path in CHANCE.sample(range(PATHS), 10) * 5],
}


@pytest.mark.parametrize("others", [0, 3])  # threads
@pytest.mark.parametrize("flags", [("-O1",), ("-O2", "-fno-omit-frame-pointer")], ids=" ".join)
def test_each_launch_has_the_path_by_which_it_came(tmp_path: Path, flags: tuple[str, ...], others: int) -> None:
    program = build(tmp_path, "alike.c", *flags)
    for name, paths in SEQUENCES.items():
        numbers = [number << LEVELS | path for number, path in enumerate(paths)]
        with probed(program) as seen:
            text = "\n".join(map(str, numbers))
            subprocess.run([program, str(others)], input=text, check=True, text=True)
            calls = seen.calls()
        assert sorted(call.number for call in calls) == sorted(numbers * (1 + others)), name
        assert {call.walked for call in calls} == {Walked.WHOLE}, name
        # each level's return address tells one value of its bit
        told = defaultdict(set)
        for call in calls:
            for level in range(LEVELS):
                told[level, call.ips[1 + level]].add(call.number >> level & 1)
        assert all(len(bits) == 1 for bits in told.values()), name
        assert all(len({ip for of, ip in told if of == level}) <= 2 for level in range(LEVELS)), name
